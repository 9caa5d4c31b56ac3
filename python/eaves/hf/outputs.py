"""The output of a patched model: without logits, and with the metrics of its loss.

`logits` stays None, because trainers test it (`if output.logits is not None`). Reading it warns.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eaves.hf.deferred_logits import DeferredLogits
from eaves.hf.loss import METRICS


def finished(output: Any, head: Any, metrics: Mapping[str, Tensor | None], are_items: bool) -> Any:
    """The output of a patched model. An output of transformers gets the metrics. With a `head`, its logits are left
    out, even if they were computed after all; without one (None), logits are numbers."""
    if not (dataclasses.is_dataclass(output) and isinstance(output, dict)):
        return _of_another_class(output, head)
    held = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    changed = _changed(held, head)
    if not changed and not metrics:
        return output
    lacks_logits = head is not None and "logits" in held
    kind = _output_class(type(output)) if metrics or lacks_logits else type(output)
    made = kind(**{**held, **changed})
    for name, metric in metrics.items():
        if metric is not None and are_items:
            made[name] = metric
        elif metric is not None:
            vars(made)[name] = metric
    if lacks_logits:
        del made.logits
    return made


def _changed(held: Mapping[str, Any], head: Any) -> dict[str, Any]:
    deferred = {name: each for name, each in held.items() if isinstance(each, DeferredLogits)}
    if head is None:
        return {name: each.tensor("the result of the model") for name, each in deferred.items()}
    return dict.fromkeys([*deferred, *(name for name in held if name == "logits")])


def _of_another_class(output: Any, head: Any) -> Any:
    """The output of a class other than transformers'. A tuple has no place for left-out logits (return_dict=False)."""
    if isinstance(output, DeferredLogits):
        return output.tensor("the result of the model")
    if isinstance(output, tuple) and head is None:
        return tuple(each.tensor("the result") if isinstance(each, DeferredLogits) else each for each in output)
    if isinstance(output, tuple):
        classes = head.weight.shape[0]
        is_logits = [
            isinstance(each, DeferredLogits)
            or (isinstance(each, Tensor) and each.dim() > 1 and each.shape[-1] == classes)
            for each in output
        ]
        return tuple(each for each, is_left_out in zip(output, is_logits) if not is_left_out)
    if isinstance(output, Mapping):
        return {**output, **changed} if (changed := _changed(output, head)) else output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, **_changed(vars(output), head))
    return output


class _MissingLogits:
    """The class attribute `logits`. An instance with logits, or None, of its own hides it."""

    def __get__(self, output: Any, kind: type) -> None:
        if output is not None and not torch.compiler.is_compiling():
            warnings.warn(
                "this output has no logits, because eaves.hf computed the loss without them; pass skip_logits=False to "
                "eaves.hf.patch, or to this call of the model",
                stacklevel=2,
            )


@functools.cache
def _make_output_class(original: Any) -> Any:
    """A subclass with fields for the metrics, and a warning for readers of missing logits. Metrics that are items
    survive code that rebuilds the output from its items (mixed precision of accelerate, DataParallel, tree_map)."""

    def reduce(self: Any) -> Any:
        # Pickle looks classes up by name. The state has the metrics that are no items. Nothing reads the logits.
        rest = OrderedDict.__reduce__(self)[2:]
        return (
            _output_unpickled,
            (original, tuple(vars(self).get(name) for name in original.__dataclass_fields__)),
            *rest,
        )

    namespace = {"__module__": __name__, "__doc__": original.__doc__, "__reduce__": reduce, "_eaves_class": original}
    if "logits" in original.__dataclass_fields__:
        namespace["logits"] = _MissingLogits()
    return dataclasses.make_dataclass(
        f"{original.__name__}OfEaves",
        [(name, "Tensor | None", None) for name in METRICS],
        bases=(original,),
        namespace=namespace,
    )


def _output_class(original: Any) -> Any:
    return _make_output_class(original)


# The mark of torch.compiler.assume_constant_result, which would load torch._dynamo. A graph cannot make a class.
_output_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _output_unpickled(original: type, arguments: tuple[Any, ...]) -> Any:
    return _output_class(original)(*arguments)
