"""The head of a patched model, which returns DeferredLogits in calls that skip its logits."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eaves._parallel.fully_shard import is_hook_of_fully_shard
from eaves._torch.checks import is_distributed, is_foreign
from eaves._torch.head import refuse_zero3
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.hf.adapters import Products, check_adapter, inner_linear, products_of
from eaves.hf.deferred_logits import DeferredLogits

_LINEAR: Any = torch.nn.Linear  # the class of a head; typed Any, because patch exchanges a head's class


# The patched models of each patched head. The head does not store them, because a copy of a model has a head of its
# own.
users: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]] = weakref.WeakKeyDictionary()


def calls_own_forward(module: Any) -> bool:
    """True if a hook of accelerate replaces the forward on the instance, and calls the forward of the class."""
    return getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward


def change_class(module: Any, changed: Any) -> None:
    calls_own = calls_own_forward(module)
    module.__class__ = changed
    if calls_own:
        vars(module)["_old_forward"] = types.MethodType(changed.forward, module)


def has_hook_of_accelerate(module: Any) -> bool:
    return "_hf_hook" in vars(module) and calls_own_forward(module)


def check_head(model: Any, head: Any, is_in_pieces: bool = False) -> None:
    name, linear = type(model).__name__, inner_linear(head)
    if "forward" in vars(head) and not has_hook_of_accelerate(head) and not _is_tensor_parallel(head):
        raise NotImplementedError(
            f"patch: the forward of this {name}'s head was replaced on the instance; patch the model before the "
            "replacement"
        )
    if linear is not head:
        check_adapter(name, head, is_in_pieces)
    if not isinstance(linear, DefersLogits):
        _check_linear(name, linear)


def _check_linear(name: str, head: Any) -> None:
    if type(head) is not _LINEAR and not (_is_fully_sharded(head) and isinstance(head, _LINEAR)):
        raise NotImplementedError(
            f"patch: the head of this {name} is a {type(head).__module__}.{type(head).__qualname__}, expected a "
            "torch.nn.Linear, alone or in LoRA, modules_to_save or trainable tokens of PEFT; leave the head out "
            "of quantisation and of other adapters"
        )
    if has_hook_of_accelerate(head) and head.weight.is_meta:
        raise NotImplementedError(f"patch: {OFFLOADED}")
    if is_foreign(head.weight):
        rows = torch.zeros(1, head.weight.shape[1], dtype=head.weight.dtype, device=head.weight.device)
        try:
            with torch.no_grad():
                linear_cross_entropy(rows, head.weight, torch.zeros_like(rows[:, 0], dtype=torch.int64))
        except NotImplementedError as error:
            kind = type(head.weight)
            raise NotImplementedError(
                f"patch: the weight of this {name}'s head is a {kind.__module__}.{kind.__qualname__}, which eaves does "
                "not read; leave the head out of the quantisation"
            ) from error


OFFLOADED = (
    "accelerate offloads the weight of the head, so eaves cannot read it (its device is meta); pass a device_map that "
    "keeps the head, and the embedding that it is tied to, on a device, or train the model without eaves.hf"
)


def release_head(model: Any, successor: Any = None) -> None:
    """Restores the head that the model had at patch, unless another patched model has it."""
    (head,) = model._eaves_head
    if head is successor:
        return
    if head in users:
        users[head].discard(model)
    release_copies(head)


def release_copies(module: Any) -> None:
    """Restores a module and the modules in an adapter, except for heads of patched models. Adapters may hold copies of
    a patched head."""
    for head in module.modules():
        if users.get(head) or type(head) is not _head_class(getattr(type(head), "_eaves_class", _LINEAR)):
            continue
        change_class(head, head._eaves_class)
        vars(head).pop("_eaves_is_in_pieces", None)
        if vars(head).pop("_eaves_reshards", False):
            head.set_reshard_after_forward(True, recurse=False)
        if "_eaves_forward" in vars(head):
            vars(head)["forward"] = vars(head).pop("_eaves_forward")


class _Call(threading.local):
    """The innermost call of a patched model in this thread: the head that returns DeferredLogits (None: no head),
    whether these keep their numbers for the output, the loss of a model that computes its own, the metrics for the loss
    to fill in, and whether eaves has computed the loss.

    Thread-local, because models are evaluated in one thread while another trains them. It is no contextvar, because
    torch.compile does not trace contextvars.
    """

    def __init__(self) -> None:  # runs in each thread; for a class default torch.compile adds a guard, which fails
        self.head: torch.nn.Module | None = None
        self.is_kept = False
        self.cross_entropy: Callable[..., Tensor | None] | None = None
        self.metrics: dict[str, Tensor | None] = {}
        self.has_loss = False


current_call = _Call()


_HOOK = "a hook of the head"


def _apply_call(logits: DeferredLogits) -> None:
    """Gives the logits the loss of the innermost call, and computes them if its output has logits."""
    logits.cross_entropy = current_call.cross_entropy
    if current_call.is_kept:
        logits.keep()


class DefersLogits(torch.nn.Module):
    """The mixin of a patched head: it multiplies, except in calls that skip its logits."""

    weight: Tensor
    bias: Tensor | None
    _eaves_is_in_pieces = False

    def forward(self, input: Tensor) -> Any:
        if current_call.head is not self:
            return self.product(input)
        refuse_zero3("patch", **{"the head": self.weight})
        if _is_fully_sharded(self):
            _keep_whole(self)
        logits = DeferredLogits(self, input)
        _apply_call(logits)
        return logits.tensor(_HOOK) if has_hooks_of_results(self) else logits

    def product(self, input: Tensor) -> Any:
        if self._eaves_is_in_pieces:
            raise NotImplementedError(
                "eaves.hf: the head is in pieces over a group (patch(group=...)), so no rank has whole logits; call "
                "the model with labels and skip_logits=True"
            )
        of_tensor_parallel = vars(self).get("_eaves_forward")
        if of_tensor_parallel is not None:
            return of_tensor_parallel(input)
        return torch.nn.functional.linear(input, self.weight, self.bias)


def _keep_whole(head: Any) -> None:
    """Keeps the head whole until the backward, or the end of a call without one: fully_shard would gather it twice."""
    parameters = head._get_fsdp_state()._fsdp_param_group
    if parameters is not None and getattr(parameters, "_reshard_after_forward", True):
        head.set_reshard_after_forward(False, recurse=False)
        vars(head)["_eaves_reshards"] = True


class _Head(DefersLogits, torch.nn.Linear):  # type: ignore[misc]  # both have a weight
    _eaves_class = torch.nn.Linear


class _AdaptedHead(DefersLogits):
    """An adapter of PEFT around a head. Its own forward decides which products are added, and which copy is active."""

    _eaves_class: Any

    def forward(self, *arguments: Any, **options: Any) -> Any:
        forward = functools.partial(self._eaves_class.forward, self)
        if current_call.head is not self:
            return forward(*arguments, **options)
        check_adapter("model", self, False)  # adapters may have been added or removed
        if _is_fully_sharded(self):
            _keep_whole(self)
        logits = logits_of_adapter(self, forward, *arguments, **options)
        if isinstance(logits, DeferredLogits):
            _apply_call(logits)
        return logits


def logits_of_adapter(head: Any, forward: Callable[..., Any], hidden: Tensor, **options: Any) -> Any:
    """The logits of an adapter around a head: DeferredLogits, or a tensor if a hook, an option or the adapter needs
    one."""
    reason = _HOOK if has_hooks_of_results(head) else next(iter(options), None)
    if reason is None:
        products = products_of(head, forward, hidden)
        if isinstance(products, Products):
            return DeferredLogits(products.joined_head(), products.joined_hidden())
        reason, forward = "an adapter", lambda _: products
    whole = types.SimpleNamespace(weight=inner_linear(head).weight, product=functools.partial(forward, **options))
    return DeferredLogits(whole, hidden).tensor(reason)


@functools.cache
def _head_class(original: Any) -> Any:
    if original is _LINEAR:
        return _Head

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle looks classes up by name, which finds the original.
        return _unpickled, (original,), original.__reduce_ex__(self, protocol)[2]

    base = DefersLogits if issubclass(original, _LINEAR) else _AdaptedHead
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "_eaves_class": original}
    return type(original.__name__, (base, original), {**names, "__reduce_ex__": reduce})


def _unpickled(original: type) -> Any:
    return _head_class(original).__new__(_head_class(original))


def defer_logits(head: Any) -> None:
    if "forward" in vars(head) and not has_hook_of_accelerate(head):
        # The forward of tensor parallelism. It moves, so that lookup finds the class's forward first.
        vars(head)["_eaves_forward"] = vars(head).pop("forward")
    original: Any = type(head)
    change_class(head, _head_class(original))


def _is_tensor_parallel(head: Any) -> bool:
    """True if transformers has cut the head over ranks and given it a forward that gathers the logits."""
    of_transformers = vars(head)["forward"].__module__ == "transformers.distributed.tensor_parallel"
    return of_transformers and is_distributed(head.weight)


def _is_fully_sharded(module: object) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _fully_sharded_classes() -> tuple[type, ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)


def has_hooks_of_results(head: torch.nn.Module) -> bool:
    """True if a hook sees the result of a forward of the head or of a module in it, or its gradient. Such a hook may
    ignore anything but tensors. (Hooks before the forward have run already. fully_shard's hooks ignore the result, but
    free the weights of a module in the head.)"""
    every, modules = torch.nn.modules.module, list(head.modules())
    return bool(
        any(_has_hooks_of_results(each) for each in modules)
        or any(isinstance(each, _fully_sharded_classes()) for each in modules[1:])
        or every._global_forward_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


def _has_hooks_of_results(module: torch.nn.Module) -> bool:
    of_module = [hook for hook in module._forward_hooks.values() if not is_hook_of_fully_shard(hook)]
    return bool(of_module or module._backward_hooks or module._backward_pre_hooks)
