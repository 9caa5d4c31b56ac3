"""The gradient of cross_entropy in the memory of its logits (inplace_backward)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._autograd.cross_entropy import OP, run_forward
from eaves._parallel import cross_entropy as ranks
from eaves._torch.checks import said
from eaves._torch.operator import Refused, apply, call, is_one, run_plainly
from eaves._torch.options import shape_of
from eaves._torch.outputs import DIVISOR, LSE, MEAN, RETURNED, TARGET_MASS, pick
from eaves._torch.registration import has_tangent, refuse_lost_derivatives
from eaves._torch.transforms import is_batched, is_transforming

_forward_backward = torch.ops.eaves.cross_entropy_forward_backward.default
_rescale = torch.ops.eaves.cross_entropy_rescale.default
_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default

RETURNED_IN_PLACE = sum(RETURNED)  # unwanted outputs have a position there too


def refuse_in_place(op: str, input: Tensor) -> None:
    """Refuses logits that autograd does not allow to be written over, and transforms that it cannot follow."""
    if is_transforming():
        raise NotImplementedError(
            said(
                op, "inplace_backward does not work inside of torch.vmap and torch.func, which may use `logits` again; "
            )
            + "leave it out"
        )
    # The core makes this check for memory that it writes, but with float16 it writes only in the backward.
    if torch._debug_has_internal_overlap(input) == 1:
        raise ValueError(
            said(op, f"`logits` has shape {shape_of(input)} and strides {list(input.stride())}, in which elements ")
            + "share memory; expected an address for each element, because inplace_backward writes the tensor"
        )
    if not torch.compiler.is_compiling() and input.is_neg():
        hint = "and inplace_backward writes it; pass `logits`.resolve_neg()"
        raise ValueError(said(op, f"`logits` is negated lazily, {hint}"))
    base = input._base if input._is_view() else None
    if input.requires_grad and (input.is_leaf or (base is not None and base.is_leaf and base.requires_grad)):
        raise RuntimeError(
            said(op, "`logits` is a leaf that requires a gradient, or a view of one, and inplace_backward would write ")
            + "over it; leave inplace_backward out, or pass a tensor that was computed from it"
        )


class _InPlaceInForward(torch.autograd.Function):
    """Forward and backward in one pass, which writes the gradient, for an upstream gradient of 1, over the logits.

    The extension computes `outputs` before this Function runs, so that its errors leave the logits and their graph
    alone. The Function does not return the logits that it writes over. The backward of an operator that read them
    before therefore fails by the version counter, and does not differentiate through this Function. The backward
    appends the gradients that it hands out to `handed_out`.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, outputs: tuple[Tensor, ...], axis: int, handed_out: list[Any], op: str
    ) -> tuple[Tensor, ...]:
        torch.autograd.graph.increment_version(input)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)
        ctx.axis, ctx.handed_out, ctx.op, ctx.is_used = axis, handed_out, op, False
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None, None
        (grad_input,) = _of_only_backward(ctx, grad_loss)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or not is_one(grad_loss):
            call(ctx.op, _rescale, grad_input, grad_loss, ctx.axis)
        if not is_compiling:
            ctx.handed_out.append(_contents_of(grad_input))
        return grad_input, None, None, None, None


class _WrittenOver(torch.autograd.Function):
    """Marks the point in the graph at which the logits are written over: earlier uses of the logits lie before it,
    later uses and the loss after it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_place_of_plain_call(logits: Tensor, targets: Tensor) -> Tensor | None:
    """The loss of a plain call, with the gradient written over its logits; None if the call needs the checks."""
    try:
        refuse_in_place(OP, logits)
        loss, *_ = run_plainly(_forward_backward, logits, targets, None, None, None, -1, -100, MEAN, (), 0)
    except (Refused, RuntimeError, ValueError):  # the checks report the targets first
        return None
    return _written_over(OP, logits, (loss,), -1)[0]


def in_place_in_forward(op: str, input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The loss, and the outputs RETURNED_IN_PLACE if some are wanted. Writes the gradient over the logits."""
    outputs = call(op, _forward_backward, input, *arguments)
    axis, *_, wanted = arguments[4:]
    # An output that the caller does not get would cost small calls time.
    return _written_over(op, input, tuple(outputs if wanted else outputs[:1]), axis)


def _written_over(op: str, input: Tensor, outputs: tuple[Tensor, ...], axis: int) -> tuple[Tensor, ...]:
    """The outputs as results of `_InPlaceInForward`. If the logits are a whole tensor, or all of one in another shape,
    a hook refuses gradients of later uses of the logits: only the loss may have one. Other views get no hook, because
    it would copy their gradient."""
    whole = input._base if input._is_view() else input
    handed_out: list[tuple[int, int]] = []
    if whole is None or not whole.requires_grad or (whole is not input and not _is_all_of(input, whole)):
        found: tuple[Tensor, ...] = apply(op, _InPlaceInForward, input, outputs, axis, handed_out, op)
        return found
    apply(op, _WrittenOver, whole)
    logits = input if whole is input else whole.view(input.shape)  # a new view, whose backward is a view
    found = apply(op, _InPlaceInForward, logits, outputs, axis, handed_out, op)

    def check(grad: Tensor) -> None:
        if not torch.compiler.is_compiling() and _contents_of(grad) not in handed_out:
            raise RuntimeError(
                said(op, "a tensor with a gradient was computed from `logits` after a call with inplace_backward, ")
                + "which had written its gradient over `logits`; leave inplace_backward out"
            )

    # This hook is the tensor's first, so that later hooks may change the gradient.
    whole.register_hook(check)  # type: ignore[no-untyped-call]
    return found


def _is_all_of(view: Tensor, base: Tensor) -> bool:
    is_as_large = view.dtype == base.dtype and view.numel() == base.numel() and view.is_contiguous()
    return is_as_large and base.is_contiguous() and view.storage_offset() == base.storage_offset()


def _contents_of(tensor: Tensor) -> tuple[int, int]:
    """The storage of a tensor, and the number of changes to it."""
    return tensor.untyped_storage()._cdata, tensor._version


class InPlaceInBackward(torch.autograd.Function):
    """Writes the gradient over the logits in the backward, which knows the upstream gradient. In float16 most elements
    of a mean's gradient would be 0 before a loss scale multiplies them."""

    @staticmethod
    def forward(ctx: Any, *arguments_and_shard: Any) -> tuple[Tensor, ...]:
        *arguments, shard, ctx.op = arguments_and_shard
        outputs = run_forward(ctx.op, tuple(arguments), shard)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.options, computed, ctx.is_used = arguments[5:9], arguments[9], False
        kept = [pick(outputs, computed, bit) for bit in (LSE, TARGET_MASS, DIVISOR)]
        ctx.save_for_backward(*arguments[:4], *kept, None if shard is None else outputs[-1])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 11
        if grad_loss is None:
            return None, *nothing
        grad_input, target, weight, row_weight, lse, *kept, place = _of_only_backward(ctx, grad_loss)
        upstream = (grad_loss, None, None)
        arguments = (*upstream, grad_input, target, weight, row_weight, lse, None, *kept, *ctx.options)
        if place is None:
            call(ctx.op, _backward_in_place, *arguments)
        else:
            call(ctx.op, ranks.backward_in_place, *arguments, place)
        torch.autograd.graph.increment_version(grad_input)
        return grad_input, *nothing


def _of_only_backward(ctx: Any, grad_loss: Tensor) -> list[Any]:
    """The saved tensors. Refuses a second backward."""
    if is_batched(grad_loss):
        raise NotImplementedError(
            f"{ctx.op}: inplace_backward does not support a batch of gradients (is_grads_batched=True); leave it out"
        )
    if torch.is_grad_enabled() or has_tangent(grad_loss):
        raise NotImplementedError(
            f"{ctx.op}: with inplace_backward the gradient has no derivative (create_graph=True); leave it out"
        )
    if ctx.is_used:
        raise RuntimeError(
            f"{ctx.op}: with inplace_backward there is one backward, and this is the second; leave inplace_backward out"
        )
    saved = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
    ctx.is_used = True
    return saved


refuse_lost_derivatives(OP, _forward_backward, _rescale, _backward_in_place)
