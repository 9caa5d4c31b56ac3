"""The gradients of linear_cross_entropy. _torch/linear_cross_entropy_rules.py has the fake implementations and batching
rules, _parallel/linear_cross_entropy.py the operators over ranks.

Three torch.autograd.Functions compute the gradients in three ways. `Recompute` keeps the arguments and two numbers for
each row, and computes the logits again in the backward. `Keep` also keeps a number for each logit of the rows that
`keep_bytes` has room for, in a saved tensor. `Speed` computes gradients in the forward, for an upstream gradient of 1,
and its backward multiplies them by the real one. "memory" is `Speed` with smaller chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eaves._parallel import linear_cross_entropy as ranks
from eaves._parallel.shard import ShardArguments
from eaves._torch.checks import given
from eaves._torch.head import refuse_zero3
from eaves._torch.linear_cross_entropy_rules import (
    GRADIENTS,
    OF_BIAS,
    OF_HEAD,
    OF_HIDDEN,
    OPTIONS,
    TENSORS,
    WIDE_HEAD,
    Forward,
    in_places,
)
from eaves._torch.operator import (
    Refused,
    apply,
    apply_plainly,
    call,
    dispatch,
    gradient_function,
    gradients_of,
    is_one,
    run_plainly,
    takes,
)
from eaves._torch.outputs import (
    MEAN,
    NONE,
    for_backward,
    in_order,
    keep_outputs,
    kept_for_backward,
    log_prob_of,
    upstream_of,
)
from eaves._torch.registration import give_derivative, has_tangent, refuse_lost_derivatives
from eaves._torch.transforms import is_batched

_forward = torch.ops.eaves.linear_cross_entropy_forward.default
_forward_keep = torch.ops.eaves.linear_cross_entropy_forward_keep.default
_backward_kept = torch.ops.eaves.linear_cross_entropy_backward_kept.default
_forward_backward = torch.ops.eaves.linear_cross_entropy_forward_backward.default
_backward = torch.ops.eaves.linear_cross_entropy_backward.default
_backward_accumulate = torch.ops.eaves.linear_cross_entropy_backward_accumulate.default
_rescale = torch.ops.eaves.linear_cross_entropy_rescale.default
_rescale_rows = torch.ops.eaves.cross_entropy_rescale.default

OP = "linear_cross_entropy"

_Gradients = gradient_function(_backward)

# All Functions take the extension's arguments, whose `outputs` are the computed ones. These follow: the gradients that
# the forward computes, the number tensor, the ShardArguments, the name of the function that the user called, the bytes
# to keep (only for Keep; -1 is room for all rows), grad_weight_out, the outputs that the caller gets, and the outputs
# among them that may have a gradient.
_BEHIND = ("gradients", "number_tensor", "shard", "op", "keep_bytes", "grad_weight_out", "wanted", "followed")
_FORWARD = slice(TENSORS.stop, -3)  # the arguments of run_forward
_REDUCTION = Forward._fields.index("reduction") - OPTIONS.start  # making a record costs small calls too much time
_NOTHING = (None,) * (len(Forward._fields) + len(_BEHIND) - len(GRADIENTS))  # results of a backward behind these


def run_forward(tensors: tuple[Any, ...], arguments: Sequence[Any]) -> list[Tensor]:
    """The loss and its outputs, the gradients that the bits name, and last the Place of a shard or the kept numbers.
    `arguments` are the extension's options and outputs, the gradients, the number tensor, the ShardArguments, the name
    of the function and the bytes to keep."""
    *of_extension, gradients, number_tensor, shard, op, keep_bytes = arguments
    hidden, head, *others = tensors
    if head.dtype != hidden.dtype:  # under torch.autocast
        head = head.to(hidden.dtype)
    overload: Any = _forward
    behind: tuple[Any, ...] = ()
    if not gradients & ~WIDE_HEAD:
        gradients = 0
    if shard is not None:
        overload, behind = ranks.forward, (gradients, *shard)
    elif keep_bytes is not None:
        overload, behind = _forward_keep, (keep_bytes,)
    elif gradients:
        overload, behind = _forward_backward, (gradients,)
    results: list[Tensor] = call(
        op, overload, hidden, head, *others, *of_extension, *behind, number_tensor=number_tensor
    )
    return results


def _split(results: list[Tensor], bits: int, shard: ShardArguments | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The outputs and the gradients among the results of run_forward."""
    end = len(results) if shard is None else len(results) - 1
    count = end - bits.bit_count()
    return tuple(results[:count]), results[count:end]


class Record(NamedTuple):
    """The facts of a call that its backward needs beside the tensors."""

    op: str  # the function that the user called
    options: tuple[Any, ...]  # the extension's options
    computed: int  # the outputs that the forward computes
    followed: int  # the outputs among them that may have a gradient
    gradients: int  # the gradients that the forward computes, and WIDE_HEAD
    head_dtype: torch.dtype
    is_of_zero3: bool = False
    is_compiled: bool = False
    shard: ShardArguments | None = None
    grad_weight_out: Tensor | None = None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor], is_loss_alone: bool = False) -> None:
    """Saves the record and the tensors that a backward needs."""
    tensors = inputs[TENSORS]
    computed, gradients, number_tensor, shard, op, keep_bytes, out, _, followed = inputs[OPTIONS.stop :]
    is_compiled = torch.compiler.is_compiling()
    is_of_zero3 = not is_compiled and hasattr(tensors[1], "ds_id")
    ctx.record = Record(
        op, inputs[OPTIONS], computed, followed, gradients, tensors[1].dtype, is_of_zero3, is_compiled, shard, out
    )
    ctx.has_kept = keep_bytes is not None
    last = output[-1] if ctx.has_kept or shard is not None else None
    ctx.save_for_backward(*tensors, *keep_outputs(ctx, output, computed, followed, is_loss_alone), number_tensor, last)


def _compute_again(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The three gradients, from the tensors that `_save` kept."""
    record: Record = ctx.record
    op, wide = record.op, record.gradients & WIDE_HEAD
    hidden, head, bias, *others, _, lse, entropy, target_mass, divisor, number_tensor, last = ctx.saved_tensors
    place, kept = (None, last) if record.shard is None else (last, None)
    if kept is not None:
        is_one_call = not torch.compiler.is_compiling() and not any(map(is_batched, given(*upstream)))
        is_usable = ctx.has_kept and is_one_call and ctx.is_captured == _is_captured(hidden)
        kept = kept.data if is_usable else None  # .data: the kernel writes over it, which is no error of the caller
        ctx.has_kept = ctx.has_kept and upstream[2] is None
    refuse_zero3(op, head=head, bias=bias)
    if head.dtype != hidden.dtype:
        head = head.to(hidden.dtype)
    saved: Sequence[Tensor | None] = (lse, entropy, target_mass, divisor)
    upstream, saved = for_backward(upstream, saved, record.options[_REDUCTION])
    of_hidden, of_head, of_bias = ctx.needs_input_grad[: len(GRADIENTS)]
    bits = of_hidden * OF_HIDDEN | of_head * OF_HEAD | of_bias * OF_BIAS
    arguments = (*upstream, hidden, head, bias, *others, *saved, *record.options)
    if record.grad_weight_out is not None and bits & OF_HEAD:
        return _accumulate(record, arguments, bits & ~OF_HEAD, place, kept)
    differentiable = given(*upstream, hidden, head, bias)
    if kept is not None:
        computed = gradients_of(
            op,
            lambda: call(op, _backward_kept, kept, *arguments, bits | wide, number_tensor=number_tensor),
            *differentiable,
        )
    elif place is None:
        computed = dispatch(
            op, differentiable, _Gradients, _backward, *arguments, bits | wide, number_tensor=number_tensor
        )
    else:
        arguments = (*arguments, bits | wide, place, *cast("ShardArguments", record.shard))
        computed = gradients_of(
            op, lambda: call(op, ranks.backward, *arguments, number_tensor=number_tensor), *differentiable
        )
    return _handed_out(record, [each if bits & bit else None for each, bit in zip(computed, GRADIENTS)])


def _handed_out(record: Record, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients in the dtypes that autograd wants."""
    grad_hidden, grad_head, grad_bias = gradients
    if grad_head is not None and grad_head.dtype != record.head_dtype:
        grad_head = grad_head.to(record.head_dtype)
    return grad_hidden, grad_head, grad_bias


def _accumulate(
    record: Record, arguments: tuple[Any, ...], bits: int, place: Tensor | None, kept: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the hidden states and the bias. The gradient of the head is added to grad_weight_out."""
    op, out = record.op, cast("Tensor", record.grad_weight_out)
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: with grad_weight_out the gradient has no derivative (create_graph=True); leave it out"
        )
    if place is None:
        grad_hidden, grad_bias = call(op, _backward_accumulate, out, *arguments, bits, *given(kept))
    else:
        shard = cast("ShardArguments", record.shard)
        grad_hidden, grad_bias = call(op, ranks.backward_accumulate, out, *arguments, bits, place, *shard)
    torch.autograd.graph.increment_version(out)
    return grad_hidden if bits & OF_HIDDEN else None, None, grad_bias if bits & OF_BIAS else None


@takes(*Forward._fields, *_BEHIND)
class Recompute(torch.autograd.Function):
    """hidden, head, bias -> the loss and all computed outputs. The outputs of `followed` may have a gradient. The
    backward computes the logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(run_forward(arguments[TENSORS], arguments[_FORWARD]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(grads, ctx.record.computed, ctx.record.followed)
        if not upstream:
            return None, None, None, *_NOTHING
        return *_compute_again(ctx, upstream), *_NOTHING


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured. A capture leaves no row out, so its rows are numbered differently."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Keep(torch.autograd.Function):
    """Recompute that keeps the numbers by which the backward multiplies. The backward of an entropy writes over these
    numbers, and a later backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.is_captured = _is_captured(arguments[0])
        results = run_forward(arguments[TENSORS], arguments[_FORWARD])
        _save(ctx, arguments, results)
        return tuple(results[:-1])

    backward = Recompute.backward


class Speed(torch.autograd.Function):
    """Recompute whose forward computes the gradients that the bits `gradients` name, for an upstream gradient of 1. The
    first backward hands them out. A later backward computes them again, and so does a backward that needs more than a
    factor."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        results = run_forward(arguments[TENSORS], arguments[_FORWARD])
        _, gradients, _, shard, _, _, _, wanted, _ = arguments[OPTIONS.stop :]
        outputs, computed_gradients = _split(results, gradients & ~WIDE_HEAD, shard)
        _save(ctx, arguments, results, not wanted)
        if ctx.record.is_compiled:
            # A compiled graph computes nothing again, and compiled autograd follows only saved tensors.
            ctx.save_for_backward(*computed_gradients)
        else:
            # Saved tensors would live as long as the graph, and autograd may write over the gradients that it gets.
            ctx.gradients = computed_gradients
        # Returning a tensor that is saved too would cost small calls time.
        return outputs if wanted else outputs[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(grads, ctx.record.computed, ctx.record.followed)
        if not upstream:
            return None, None, None, *_NOTHING
        return *_multiplied(ctx, upstream), *_NOTHING


def _multiplied(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The three gradients. If the upstream gradient is only a factor, it multiplies the gradients that the forward
    computed; else they are computed again."""
    record: Record = ctx.record
    op, bits, mode = record.op, record.gradients & ~WIDE_HEAD, record.options[_REDUCTION]
    grad_loss, grad_lse, grad_entropy = upstream
    if torch.compiler.is_compiling():
        if not record.is_compiled:  # compiled autograd of a call that was not compiled
            return _compute_again(ctx, upstream)
        # A graph may run twice, and its saved tensors cannot be written over.
        assert grad_loss is not None
        factor = grad_loss.unsqueeze(-1) if mode == NONE else grad_loss
        # As in the operators below, zeros stay zeros, whatever the factor is.
        scaled = [
            torch.where(each == 0, 0, each.to(factor.dtype) * factor).to(each.dtype) for each in ctx.saved_tensors
        ]
        return _handed_out(record, in_places(scaled, bits))
    is_factor = grad_lse is None and grad_entropy is None and not torch.is_grad_enabled()
    if grad_loss is None or not is_factor or is_batched(grad_loss) or has_tangent(grad_loss):
        return _compute_again(ctx, upstream)
    if record.is_of_zero3 and (ctx.gradients is None or bits & OF_HEAD):
        refuse_zero3(op, head=ctx.saved_tensors[1])
    computed, ctx.gradients = ctx.gradients, None
    if computed is None:  # a later backward; without the outputs other kernels would change last places
        again = (*record.options, record.computed, record.gradients, None, record.shard, op, None)
        _, computed = _split(run_forward(ctx.saved_tensors[TENSORS], again), bits, record.shard)
    gradients = in_places(computed, bits)
    # Neither operator reads or writes anything if grad_loss is 1.
    if mode == NONE:
        # .data: a selective checkpoint that keeps this tensor raises if its version changes.
        assert gradients[0] is not None
        call(op, _rescale_rows, gradients[0].data, grad_loss, -1)
    elif not is_one(grad_loss):
        call(op, _rescale, *gradients, grad_loss)
    if record.grad_weight_out is not None and gradients[1] is not None:
        record.grad_weight_out.add_(gradients[1])
        gradients[1] = None
    return _handed_out(record, gradients)


class _Plain(torch.autograd.Function):
    """Recompute for a plain call, or Speed if the record names gradients. The result is the loss, or for
    linear_log_prob its negative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, record = arguments  # hidden, head, bias, targets
        overload, gradients = (_forward_backward, (record.gradients,)) if record.gradients else (_forward, ())
        result: Tensor
        result, lse, *behind = run_plainly(
            overload, *tensors, None, None, None, *record.options, record.computed, *gradients
        )
        divisor = behind.pop(0) if record.options[_REDUCTION] == MEAN else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, None, None, None, lse, None, None, divisor, None, None)  # in `_save`'s order
        ctx.record, ctx.has_kept, ctx.gradients = record, False, behind
        return result if record.op == OP else log_prob_of(result)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None, None
        record: Record = ctx.record
        grad_loss = upstream if record.op == OP else -upstream
        gradients = _multiplied if record.gradients else _compute_again
        return *gradients(ctx, (grad_loss, None, None)), None, None


class PlainSpeed(_Plain):
    """_Plain under the name that profilers and graphs show if the forward computes gradients."""


class PlainRecompute(_Plain):
    pass


_plain_speed, _plain_recompute = apply_plainly(PlainSpeed), apply_plainly(PlainRecompute)


@lru_cache(maxsize=256)
def _record_of(op: str, options: tuple[Any, ...], gradients: int, dtype: torch.dtype, is_of_zero3: bool) -> Record:
    """The record of a plain call."""
    computed = kept_for_backward(0, options[_REDUCTION], False)
    return Record(op, options, computed, 0, gradients, dtype, is_of_zero3)


def result_of_plain_call(
    op: str,
    options: tuple[Any, ...],
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    gradients: int | None,
) -> Tensor | None:
    """The loss of a plain call, or its log-probabilities if `op` is linear_log_prob; None if the call needs the checks.
    `options` are the extension's. `gradients` has the bits of the gradients that the forward computes; it is None if no
    gradient is wanted."""
    try:
        result: Tensor
        if gradients is None:
            result = run_plainly(_forward, hidden, head, bias, targets, None, None, None, *options, 0)[0]
            return result if op == OP else log_prob_of(result)
        record = _record_of(op, options, gradients, head.dtype, hasattr(head, "ds_id"))
        function = _plain_speed if gradients else _plain_recompute
        result = function(hidden, head, bias, targets, record)
        return result
    except Refused:
        return None


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """linear_cross_entropy_forward through an autograd.Function."""
    call = Forward(*arguments)
    needs_target_mass = call.targets.is_floating_point() or call.class_weight is not None
    computed = kept_for_backward(call.outputs, call.reduction, needs_target_mass)
    behind = (computed, 0, number_tensor, None, OP, None, None, call.outputs, call.outputs)
    outputs = apply(OP, Recompute, *call[TENSORS], *call[OPTIONS], *behind)
    return in_order(outputs, computed, call.outputs)


give_derivative(OP, _forward, _differentiable, "hidden", "head", "bias")
refuse_lost_derivatives(OP, _forward_keep, _forward_backward, _backward, _backward_kept, _backward_accumulate, _rescale)
