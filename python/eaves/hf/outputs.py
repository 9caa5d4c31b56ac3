"""The output of a patched model: without logits, and with the metrics of its loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eaves.hf.deferred_logits import DeferredLogits
from eaves.hf.loss import METRICS


def without_logits(output: Any, head: Any) -> Any:
    """What a forward returned, with None for the logits, also where they were computed after all; in a tuple, what is
    None has no place (return_dict=False of transformers). Anything else is returned as it is."""
    if isinstance(output, DeferredLogits):
        return output.tensor("the result of the model")
    if isinstance(output, tuple):
        classes = head.weight.shape[0]
        is_logits = [
            isinstance(each, DeferredLogits)
            or (isinstance(each, Tensor) and each.dim() > 1 and each.shape[-1] == classes)
            for each in output
        ]
        return tuple(each for each, is_left_out in zip(output, is_logits) if not is_left_out)
    # Outputs of transformers are mappings too, without what is None.
    is_record = dataclasses.is_dataclass(output) and not isinstance(output, type)
    if not is_record and not isinstance(output, Mapping):
        return output
    held = _fields(output) if is_record else output
    left_out = {name: None for name, each in held.items() if name == "logits" or isinstance(each, DeferredLogits)}
    if not left_out:
        return output
    return dataclasses.replace(output, **left_out) if is_record else {**output, **left_out}


def _fields(output: Any) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def with_metrics(output: Any, metrics: Mapping[str, Tensor | None], are_items: bool) -> Any:
    """An output of transformers as one that has metrics too."""
    if not (dataclasses.is_dataclass(output) and isinstance(output, dict)):
        return output
    made = _class_with_metrics(type(output))(**_fields(output))
    for name, metric in metrics.items():
        if metric is not None and are_items:
            made[name] = metric
        elif metric is not None:
            vars(made)[name] = metric
    return made


@functools.cache
def _make_class_with_metrics(original: Any) -> Any:
    """A subclass with fields for the metrics: what makes an output anew of its items (mixed precision of accelerate,
    DataParallel, tree_map) keeps those that are items."""

    def reduce(self: Any) -> Any:
        # Pickle looks classes up by name. Metrics that are no items come with the state.
        _, arguments, *rest = original.__reduce__(self)
        return _output_unpickled, (original, arguments[: -len(METRICS)]), *rest

    return dataclasses.make_dataclass(
        f"{original.__name__}WithMetrics",
        [(name, "Tensor | None", None) for name in METRICS],
        bases=(original,),
        namespace={"__module__": __name__, "__doc__": original.__doc__, "__reduce__": reduce},
    )


def _class_with_metrics(original: Any) -> Any:
    return _make_class_with_metrics(original)


# As torch.compiler.assume_constant_result does, which would load torch._dynamo: a class is not made in a graph.
_class_with_metrics._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _output_unpickled(original: type, arguments: tuple[Any, ...]) -> Any:
    return _class_with_metrics(original)(*arguments)
