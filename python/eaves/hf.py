"""Hugging Face models that train with eaves.linear_cross_entropy as their head and loss.

    eaves.hf.patch(model)         for a causal language model of transformers, or a PEFT model around one
    eaves.hf.unpatch(model)       as it was
    with eaves.hf.patched(model): both

No architecture is named here. In a call that wants the loss and no logits, the head gives `DeferredLogits`: the hidden
states, and what the model's own forward then does to the logits. A loss that is reached with nothing but factors and a
soft cap is linear_cross_entropy with these. Whatever else is done to them is done to a tensor, which is computed then:
that costs memory, and says so, but nothing is dropped.

Model and head get another class, and nothing in the instance of the model wraps a function around itself: copies,
pickles and replicas of a patched model call their own parameters, and unpatching gives the class back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

import eaves
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall, check_constant_options, computed, loss_of_head
from eaves._deferred_logits import DeferredLogits
from eaves._parallel.collectives import named_group
from eaves._parallel.dtensor import local_shard
from eaves._parallel.fully_shard import is_hook_of_fully_shard
from eaves._parallel.shard import Shard, ShardArguments
from eaves._torch.checks import check_bool, is_distributed, is_foreign
from eaves._torch.head import refuse_zero3

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["patch", "patched", "unpatch"]

_Model = TypeVar("_Model", bound=torch.nn.Module)
_LINEAR: Any = torch.nn.Linear  # what a head is; of any type, because the class of one is exchanged

_METRICS = ("accuracy", "entropy")
_OUTPUT_OF_METRIC = {"accuracy": "argmax", "entropy": "entropy"}


def patch(
    model: _Model,
    *,
    skip_logits: bool | None = None,
    skip_ignored: bool = True,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_dtype: torch.dtype | None = None,
    metrics: Collection[str] = (),
    group: ProcessGroup | str | None = None,
    sequence_parallel: bool = False,
) -> _Model:
    """Lets a causal language model of transformers compute its loss with eaves, in place.

    Its forward has one more keyword, `skip_logits`. True: with labels, the loss is eaves.linear_cross_entropy of hidden
    states and head, and `logits` of the output is None. False: logits are returned, and with labels the loss is
    eaves.cross_entropy of them. None, the default: as `skip_logits` of patch says. Without labels nothing changes, so
    generation does not either.

    The loss is that of transformers (ForCausalLMLoss): labels are shifted, or `shift_labels` taken; those that are -100
    do not count; `num_items_in_batch`, a number or a tensor that nothing waits for, divides the sum. What differs is
    that it is computed from the product's float32 sums, in float32 (of a float64 model, all in float64), and that it is
    0, not NaN, where no label counts.

    With `metrics`, outputs of calls with labels have numbers of this call's labels that count: `accuracy`, the share of
    those whose class is the largest logit's (the first of equal ones), and `entropy`, the mean of the softmax's, in
    nats. They are float32 tensors of shape [] without a gradient, 0 where no label counts, computed with the loss from
    the same product, and nothing waits for them. In evaluation mode with logits they are attributes of the output and
    no items of it, because Trainer takes every item for logits. An output that is no ModelOutput of transformers (a
    tuple, with return_dict=False) has none; where the loss is not the one of eaves, they are None.

    Of a model over several ranks: a head that tensor parallelism has cut (a DTensor, as of transformers' tp_plan, or
    `group`) stays in pieces. A head that fully_shard has in a group of its own stays whole until the backward
    (set_reshard_after_forward(False)), so that it is gathered once. DeepSpeed's ZeRO-3 hooks into the head, which then
    computes logits.

    A call whose logits the model, or a hook of the head, uses for more than factors, a soft cap and the loss computes
    them after all, with a warning; they are not in the output either.

    Args:
        model: a transformers.PreTrainedModel, or a PEFT model, whose base model is patched. A patched model takes new
            options.
        skip_logits: for calls with labels that do not say: True or False; None: True where the model is in training
            mode. A trainer that reads the logits of a training step needs False.
        skip_ignored: on a GPU, whether to leave out ignored labels before anything is multiplied; the call then waits
            once for the device, for their number. On the CPU they are left out always.
        algorithm, workspace_bytes: as in eaves.linear_cross_entropy.
        grad_weight_dtype: as in eaves.linear_cross_entropy, but that None, the default, is float32 for a head of 16
            bits too: its gradient is summed in float32 and rounded once. That takes a float32 tensor of the head's
            shape during the backward, with the speed way from the forward on; the head's dtype (torch.bfloat16, say)
            does without.
        metrics: any of "accuracy" and "entropy".
        group: None, or the ranks that have the head in pieces where it is no DTensor, or the name of their group: the
            head's rows are this rank's classes, in the order of ranks, with padding behind the vocabulary's. Logits
            cannot be had of such a model.
        sequence_parallel: as in eaves.linear_cross_entropy: hidden states are this rank's part of the rows, and labels
            all of them.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: the model is none of transformers; an option is none of eaves.linear_cross_entropy, or no
            metric.
        NotImplementedError: the loss is not ForCausalLMLoss; the head is not a torch.nn.Linear (quantised, with LoRA,
            in modules_to_save of PEFT); the forward takes no labels; that of model or head was replaced on the
            instance (but by tensor parallelism of transformers).
    """
    base: Any = _base_of(model, "patch")
    head = base.get_output_embeddings()
    is_patched = _is_patched(base)
    if not is_patched:
        _check_model(base)
    if not isinstance(head, _DefersLogits):
        _check_head(base, head)
    options: dict[str, Any] = {
        "skip_ignored": skip_ignored,
        "algorithm": algorithm,
        "workspace_bytes": workspace_bytes,
        "grad_weight_dtype": grad_weight_dtype,
    }
    check_constant_options(head.weight, **options)
    check_bool("patch", "sequence_parallel", sequence_parallel)
    if group is not None or sequence_parallel:
        # The name: a ProcessGroup can neither be copied nor pickled.
        if group is not None and not isinstance(group, str):
            _found_groups[group.group_name] = group.size()
            group = group.group_name
        options |= {"group": group, "sequence_parallel": sequence_parallel}
    if skip_logits is not None:
        check_bool("patch", "skip_logits", skip_logits)
    metrics = _checked_metrics(metrics)

    if is_patched:
        _release_head(base, head)
    else:
        original: Any = type(base)
        _change_class(base, _patched_class(original))
    if not isinstance(head, _DefersLogits):
        _defer_logits(head)
    head._eaves_is_in_pieces = group is not None
    _users.setdefault(head, weakref.WeakSet()).add(base)
    base._eaves_head = (head,)  # in a tuple: a module would become one of the model's
    base._eaves_skip_logits = skip_logits
    base._eaves_metrics = metrics
    base._eaves_options = options
    return model


def unpatch(model: _Model) -> _Model:
    """Makes a patched model what it was before, and returns it.

    Raises:
        TypeError: the model is none of transformers.
        ValueError: the model is not patched, or its class has been changed since (torch's fully_shard does).
    """
    base: Any = _base_of(model, "unpatch")
    original = getattr(type(base), "_eaves_class", None)
    if original is None:
        raise ValueError(f"unpatch: this {type(base).__name__} is not patched")
    if type(base) is not _patched_class(original):
        raise ValueError(
            f"unpatch: the model's class was changed to {type(base).__name__} after patch: undo that first"
        )
    _release_head(base)
    del base._eaves_head, base._eaves_skip_logits, base._eaves_metrics, base._eaves_options
    _change_class(base, original)
    return model


@contextlib.contextmanager
def patched(model: _Model, **options: Any) -> Iterator[_Model]:
    """The model, patched until the end of the block, and then as it was before: not patched, or with other options.
    The options are those of `patch`."""
    base: Any = _base_of(model, "patch")
    before = None
    if _is_patched(base):
        before = {"skip_logits": base._eaves_skip_logits, "metrics": base._eaves_metrics, **base._eaves_options}
    patch(model, **options)
    try:
        yield model
    except BaseException:
        with contextlib.suppress(Exception):  # what happened in the block is what is told
            _restore(model, before)
        raise
    _restore(model, before)


def _restore(model: Any, before: dict[str, Any] | None) -> None:
    if before is not None:
        patch(model, **before)
    elif _is_patched(_base_of(model, "unpatch")):  # the block may have unpatched it
        unpatch(model)


# What may be patched


def _base_of(model: Any, operation: str) -> torch.nn.Module:
    """The model of transformers, for PEFT's wrappers what they wrap."""
    try:
        transformers = import_module("transformers.modeling_utils")
    except ImportError as error:
        raise ImportError(f"eaves.hf needs transformers (pip install eaves[hf]): {error}") from error
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, transformers.PreTrainedModel):
        raise TypeError(
            f"{operation}: model is a {type(model).__name__}, expected a transformers.PreTrainedModel or a PEFT model "
            "around one; patch it before torch.compile or a wrapper of torch.distributed takes it"
        )
    return base  # type: ignore[no-any-return]


def _transformers_loss() -> Any:
    return import_module("transformers.loss.loss_utils").ForCausalLMLoss


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if model.loss_function is not _transformers_loss() or not isinstance(type(model).loss_function, property):
        found = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        raise NotImplementedError(f"patch: the loss of this {name} is {found}, expected ForCausalLMLoss")
    if model.get_output_embeddings() is None:
        raise NotImplementedError(f"patch: this {name} has no head (get_output_embeddings() is None)")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise NotImplementedError(f"patch: the forward of this {name} takes no labels")
    if "forward" in vars(model) and not _has_hook_of_accelerate(model):
        raise NotImplementedError(
            f"patch: the forward of this {name} was replaced on the instance (accelerate does, for mixed precision): "
            "patch the model before that"
        )


def _check_head(model: Any, head: Any) -> None:
    name = type(model).__name__
    if hasattr(head, "modules_to_save"):
        raise NotImplementedError(
            f"patch: the head of this {name} is a {type(head).__name__} of PEFT (modules_to_save), which chooses in "
            "each call between the original and the copies that adapters train, expected a torch.nn.Linear; leave the "
            "head out of modules_to_save, or merge the adapter"
        )
    if type(head) is not _LINEAR and not (_is_fully_sharded(head) and isinstance(head, _LINEAR)):
        raise NotImplementedError(
            f"patch: the head of this {name} is a {type(head).__module__}.{type(head).__qualname__}, expected a "
            "torch.nn.Linear: one that is quantised or has an adapter computes more than a product"
        )
    is_hooked = _has_hook_of_accelerate(head)
    if "forward" in vars(head) and not is_hooked and not _is_tensor_parallel(head):
        raise NotImplementedError(
            f"patch: the forward of this {name}'s head was replaced on the instance: patch the model before that"
        )
    if is_hooked and head.weight.is_meta:
        raise NotImplementedError(f"patch: {_OFFLOADED}")
    if is_foreign(head.weight):
        rows = torch.zeros(1, head.weight.shape[1], dtype=head.weight.dtype, device=head.weight.device)
        try:
            with torch.no_grad():
                eaves.linear_cross_entropy(rows, head.weight, torch.zeros_like(rows[:, 0], dtype=torch.int64))
        except NotImplementedError as error:
            kind = type(head.weight)
            raise NotImplementedError(
                f"patch: the weight of this {name}'s head is a {kind.__module__}.{kind.__qualname__}, which eaves does "
                "not read; leave the head out of the quantisation"
            ) from error


_OFFLOADED = (
    "the weight of the head is on meta, because accelerate offloads it, and is there within the head's forward alone; "
    "keep it on a device (with a device_map that gives the head one, and the embedding that it is tied to), or train "
    "the model without eaves.hf"
)


def _checked_metrics(metrics: Any) -> tuple[str, ...]:
    """In the order of _METRICS."""
    names = " and ".join(f'"{name}"' for name in _METRICS)
    if isinstance(metrics, str) or not isinstance(metrics, Collection):
        raise TypeError(f"patch: metrics is {metrics!r}, expected a tuple of any of {names}")
    for name in metrics:
        if name not in _METRICS:
            raise ValueError(f"patch: metrics has {name!r}, expected any of {names}")
    return tuple(name for name in _METRICS if name in metrics)


# The patched model

# Of heads that are patched, the patched models that have them. Not kept in the head: a copy of one of the models has a
# head for itself.
_users: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]] = weakref.WeakKeyDictionary()


def _is_patched(model: torch.nn.Module) -> bool:
    return hasattr(type(model), "_eaves_class")


def _change_class(module: Any, changed: Any) -> None:
    calls_own = _calls_own_forward(module)
    module.__class__ = changed
    if calls_own:
        vars(module)["_old_forward"] = types.MethodType(changed.forward, module)


def _calls_own_forward(module: Any) -> bool:
    """Does a hook of accelerate, which replaces the forward on the instance, call that of the class?"""
    return getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward


def _has_hook_of_accelerate(module: Any) -> bool:
    return "_hf_hook" in vars(module) and _calls_own_forward(module)


def _release_head(model: Any, successor: Any = None) -> None:
    """Makes the head that the model had at patch what it was, unless another patched model has it."""
    (head,) = model._eaves_head
    if head is successor:
        return
    users = _users.get(head, weakref.WeakSet())
    users.discard(model)
    if not users and type(head) is _head_class(getattr(head, "_eaves_class", _LINEAR)):
        _change_class(head, head._eaves_class)
        vars(head).pop("_eaves_is_in_pieces", None)
        if vars(head).pop("_eaves_reshards", False):
            head.set_reshard_after_forward(True, recurse=False)
        if "_eaves_forward" in vars(head):
            vars(head)["forward"] = vars(head).pop("_eaves_forward")


@functools.cache
def _patched_class(original: Any) -> Any:
    """A subclass with the name of the original: transformers writes that into configurations and keeps tables by it."""
    forward, original_loss = original.forward, original.loss_function.fget
    transformers_loss = _transformers_loss()
    # Not inspect.signature.bind in each call: torch.compile traces this.
    place = list(inspect.signature(forward).parameters).index("labels") - 1

    @functools.wraps(forward)  # Trainer asks for the signature, which stays as it was: skip_logits is no column of data
    def patched_forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        if not _is_patched(self):  # a reference to this function was kept beyond unpatch
            return forward(self, *args, **kwargs)
        has_labels = (args[place] if len(args) > place else kwargs.get("labels")) is not None
        if skip_logits is None:
            chosen = self._eaves_skip_logits
            skip_logits = has_labels and (self.training if chosen is None else chosen)
        if skip_logits and not has_labels:
            raise ValueError("skip_logits is True, but there are no labels: nothing would be computed")
        head = self.get_output_embeddings() if skip_logits else None
        if skip_logits and not isinstance(head, _DefersLogits):
            raise RuntimeError(
                f"eaves.hf: the head of this {type(self).__name__} is another than at patch (resize_token_embeddings, "
                "adapters and sharding change it): call patch again, which takes it or says why not"
            )
        # None until the loss is computed.
        metrics: dict[str, Tensor | None] = dict.fromkeys(self._eaves_metrics if has_labels else ())
        outer = _call.head, _call.metrics
        _call.head, _call.metrics = head, metrics
        try:
            output = forward(self, *args, **kwargs)
        finally:
            _call.head, _call.metrics = outer
            if skip_logits and not torch.is_grad_enabled() and "_eaves_reshards" in vars(head):
                whole: Any = head
                whole.reshard()
        if skip_logits:
            output = _without_logits(output, head)
        return _with_metrics(output, metrics, bool(skip_logits or self.training)) if metrics else output

    def loss_function(self: Any) -> Any:
        chosen = original_loss(self)
        if chosen is not transformers_loss:
            return chosen  # set after patch
        return functools.partial(_causal_lm_loss, self._eaves_options)

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle looks classes up by name, and would find the original.
        return _unpickled, (original,), original.__reduce_ex__(self, protocol)[2]

    patched_class = type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce,
            "_eaves_class": original,
            "forward": patched_forward,
            "loss_function": original.loss_function.getter(loss_function),  # with the original's setter
        },
    )
    return patched_class


def _unpickled(original: type) -> Any:
    patched_class = _patched_class(original)
    return patched_class.__new__(patched_class)


class _Call(threading.local):
    """Of the innermost call of a patched model in this thread, the head whose logits are skipped (None: they are not),
    and the metrics that its loss is to fill in.

    Thread-local, because models are evaluated in one thread while another trains them; no contextvar, because
    torch.compile traces none.
    """

    def __init__(self) -> None:  # in each thread; a default of the class is one more guard of torch.compile, and fails
        self.head: torch.nn.Module | None = None
        self.metrics: dict[str, Tensor | None] = {}


_call = _Call()


class _DefersLogits(torch.nn.Module):
    """What a patched head has beside its class: it multiplies, but in calls that skip its logits."""

    weight: Tensor
    bias: Tensor | None
    _eaves_is_in_pieces = False

    def forward(self, input: Tensor) -> Any:
        if _call.head is not self:
            return self.product(input)
        refuse_zero3("patch", **{"the head": self.weight})
        if _is_fully_sharded(self):
            _keep_whole(self)
        logits = DeferredLogits(self, input)
        return logits.tensor("a hook of the head") if _has_hooks_of_results(self) else logits

    def product(self, input: Tensor) -> Any:
        if self._eaves_is_in_pieces:
            raise NotImplementedError(
                "eaves.hf: the head is in pieces over a group (patch(group=...)), and logits are asked for, which no "
                "rank has whole; calls with labels and skip_logits=True go"
            )
        of_tensor_parallel = vars(self).get("_eaves_forward")
        if of_tensor_parallel is not None:
            return of_tensor_parallel(input)
        return torch.nn.functional.linear(input, self.weight, self.bias)


def _keep_whole(head: Any) -> None:
    """Until the backward, or the end of a call without one: fully_shard would gather its weight again for the loss."""
    parameters = head._get_fsdp_state()._fsdp_param_group
    if parameters is not None and getattr(parameters, "_reshard_after_forward", True):
        head.set_reshard_after_forward(False, recurse=False)
        vars(head)["_eaves_reshards"] = True


class _Head(_DefersLogits, torch.nn.Linear):  # type: ignore[misc]  # both have a weight
    _eaves_class = torch.nn.Linear


@functools.cache
def _head_class(original: Any) -> Any:
    if original is _LINEAR:
        return _Head
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "_eaves_class": original}
    return type(original.__name__, (_DefersLogits, original), names)


def _defer_logits(head: Any) -> None:
    if "forward" in vars(head) and not _has_hook_of_accelerate(head):
        # Of tensor parallelism; the class's has to be found first.
        vars(head)["_eaves_forward"] = vars(head).pop("forward")
    original: Any = type(head)
    _change_class(head, _head_class(original))


def _is_tensor_parallel(head: Any) -> bool:
    """Has transformers cut the head over ranks, and given it a forward that gathers the logits?"""
    of_transformers = vars(head)["forward"].__module__ == "transformers.distributed.tensor_parallel"
    return of_transformers and is_distributed(head.weight)


def _is_fully_sharded(module: object) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _has_hooks_of_results(module: torch.nn.Module) -> bool:
    """Whether a hook gets to see what the forward returns, or its gradient. Such a hook may leave alone whatever is not
    a tensor. (Hooks before the forward have come and gone. Those of fully_shard leave it alone.)"""
    every = torch.nn.modules.module
    of_module = [hook for hook in module._forward_hooks.values() if not is_hook_of_fully_shard(hook)]
    return bool(
        of_module
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


def _without_logits(output: Any, head: Any) -> Any:
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
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        held = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        left_out = _no_logits(held)
        return dataclasses.replace(output, **left_out) if left_out else output
    if isinstance(output, Mapping):
        left_out = _no_logits(output)
        return {**output, **left_out} if left_out else output
    return output


def _no_logits(held: Mapping[str, Any]) -> dict[str, None]:
    return {name: None for name, each in held.items() if name == "logits" or isinstance(each, DeferredLogits)}


def _with_metrics(output: Any, metrics: Mapping[str, Tensor | None], are_items: bool) -> Any:
    """An output of transformers as one that has metrics too."""
    if not (dataclasses.is_dataclass(output) and isinstance(output, dict)):
        return output
    made = _class_with_metrics(type(output))(
        **{field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    )
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
        return _output_unpickled, (original, arguments[: -len(_METRICS)]), *rest

    return dataclasses.make_dataclass(
        f"{original.__name__}WithMetrics",
        [(name, "Tensor | None", None) for name in _METRICS],
        bases=(original,),
        namespace={"__module__": __name__, "__doc__": original.__doc__, "__reduce__": reduce},
    )


def _class_with_metrics(original: Any) -> Any:
    return _make_class_with_metrics(original)


# As torch.compiler.assume_constant_result does, which would load torch._dynamo: a class is not made in a graph.
_class_with_metrics._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _output_unpickled(original: type, arguments: tuple[Any, ...]) -> Any:
    return _class_with_metrics(original)(*arguments)


def _causal_lm_loss(
    options: dict[str, Any],
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: object,
) -> Tensor:
    """ForCausalLMLoss of transformers, which ignores other keywords too."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    metrics = _call.metrics
    shared: dict[str, Any] = {
        "ignore_index": ignore_index,
        "normalizer": num_items_in_batch,
        "outputs": tuple(_OUTPUT_OF_METRIC[name] for name in metrics),
    }
    if isinstance(logits, DeferredLogits):
        name: Any = options.get("group")
        is_in_pieces = name is not None
        if logits.is_deferred and (is_in_pieces or logits.shape[-1] == vocab_size):
            weight, bias = logits.head.weight, logits.head.bias
            if weight.is_meta and not logits.hidden.is_meta:
                raise NotImplementedError(f"eaves.hf: {_OFFLOADED}")
            if options.get("grad_weight_dtype") is None and weight.dtype in (torch.bfloat16, torch.float16):
                options = {**options, "grad_weight_dtype": torch.float32}
            of_head = {key: value for key, value in options.items() if key not in ("group", "sequence_parallel")}
            is_parallel = options.get("sequence_parallel", False)
            if is_parallel:  # gathered, hidden states are [ranks, batch, positions of a rank]
                ranks = _ranks_of(weight) if not is_in_pieces else _found_groups[name]
                batch, positions = logits.hidden.shape[:2]
                if target.numel() == batch * ranks * positions:  # or it is refused, on all ranks
                    target = target.view(batch, ranks, positions).movedim(1, 0).reshape(-1)
            call = LinearCrossEntropyCall(
                logits.hidden.flatten(0, -2), weight, target, bias, scale=logits.scale, softcap=logits.softcap,
                has_constant_outputs=True, **shared, **of_head,
            )  # fmt: skip
            if is_in_pieces or is_parallel:
                return _measured(_loss_of_pieces(call, name, vocab_size, is_parallel), metrics, target, ignore_index)
            out: Any = loss_of_head(call)
            return _measured(out, metrics, target, ignore_index)
        logits = logits.tensor("a vocabulary of another size" if logits.is_deferred else "the loss")
    out = eaves.cross_entropy(logits.reshape(-1, vocab_size), target, **shared)
    return _measured(out, metrics, target, ignore_index)


_found_groups: dict[str, int] = {}  # the ranks of each


def _loss_of_pieces(call: LinearCrossEntropyCall, name: str | None, vocab_size: int, sequence_parallel: bool) -> Any:
    """The loss of a head in pieces, over the group of this name or the mesh of a DTensor. torch.compile does not trace
    named_group(); what it needs is known from a call before, or from patch()."""
    if name is None:
        return loss_of_head(call._replace(group=Shard(sequence_parallel=sequence_parallel)))
    if torch.compiler.is_compiling() and name in _found_groups:
        return computed(call, ShardArguments(name, _found_groups[name], -1, vocab_size, sequence_parallel))
    group = named_group(name)
    _found_groups[name] = group.size()
    shard = Shard(group, sequence_parallel=sequence_parallel)
    return loss_of_head(call._replace(group=shard, classes=vocab_size))


def _ranks_of(weight: Any) -> int:
    """That have a DTensor's classes in pieces."""
    return local_shard("eaves.hf", "the head", weight, 0).group.size() if is_distributed(weight) else 1


def _measured(out: Any, metrics: dict[str, Tensor | None], target: Tensor, ignore_index: int) -> Tensor:
    """The loss; metrics are filled in."""
    if isinstance(out, Tensor):
        return out
    counts = target.to(torch.int64) != ignore_index  # int32 would be compared with the last 32 bits
    number = counts.sum().clamp(min=1)
    if "accuracy" in metrics:
        metrics["accuracy"] = ((out.argmax == target) & counts).sum().to(torch.float32) / number
    if "entropy" in metrics:
        # Of logits, ignored rows have an entropy too.
        metrics["entropy"] = (out.entropy.detach().where(counts, 0).sum() / number).to(torch.float32)
    loss: Tensor = out.loss
    return loss
