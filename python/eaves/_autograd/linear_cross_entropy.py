"""The gradients of linear_cross_entropy. Fake implementations and batching rules are in
_torch/linear_cross_entropy_rules.py, the operators over ranks in _parallel/linear_cross_entropy.py.

There are two ways to the gradients, two torch.autograd.Functions here. `Recompute` keeps the arguments and two numbers
for each row, and computes the logits again in the backward. `Speed` computes gradients in the forward, for an upstream
gradient of 1, and multiplies them in the backward by the one that came; "memory" is that in smaller chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from eaves._parallel import linear_cross_entropy as ranks
from eaves._parallel.shard import ShardArguments
from eaves._torch.checks import given
from eaves._torch.head import as_multiplied, refuse_zero3
from eaves._torch.linear_cross_entropy_rules import (
    GRADIENTS,
    OF_BIAS,
    OF_INPUT,
    OF_WEIGHT,
    WIDE_WEIGHT,
    ForwardTensors,
    Options,
    by_name,
    in_places,
)
from eaves._torch.operator import apply, binds_quickly, call, dispatch, gradients_of
from eaves._torch.outputs import NONE, for_backward, in_order, keep_outputs, kept_for_backward, upstream_of
from eaves._torch.registration import give_derivative, refuse_lost_derivatives
from eaves._torch.transforms import is_batched

forward = torch.ops.eaves.linear_cross_entropy_forward.default
_forward_backward = torch.ops.eaves.linear_cross_entropy_forward_backward.default
_backward = torch.ops.eaves.linear_cross_entropy_backward.default
_backward_accumulate = torch.ops.eaves.linear_cross_entropy_backward_accumulate.default
_rescale = torch.ops.eaves.linear_cross_entropy_rescale.default
_rescale_rows = torch.ops.eaves.cross_entropy_rescale.default

OP = "linear_cross_entropy"


# ------------------------------------------------------------------------------------------------------------ autograd

# The arguments of both Functions: the tensors, the options, and behind them grad_weight_out, the outputs that are
# computed, those that the caller gets, those of them that may have a gradient, the gradients that the forward computes,
# the number tensor, the ShardArguments, and the name of the function that the user called.
_TENSORS = slice(len(ForwardTensors._fields))
_OPTIONS = slice(_TENSORS.stop, _TENSORS.stop + len(Options._fields))
_REST = slice(_OPTIONS.stop, _OPTIONS.stop + 8)
_REDUCTION = Options._fields.index("reduction")  # a small call has no time to make Options of the arguments
_NO_SECOND = f"{OP}: there is no second derivative; use torch.nn.functional.linear and cross_entropy for one"
_NOTHING = (None,) * (_REST.stop - len(GRADIENTS))  # behind the gradients of input, linear_weight and linear_bias


def _save(
    ctx: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], rest: tuple[Any, ...], output: Sequence[Tensor]
) -> None:
    """Keeps the tensors and options from which a backward computes the logits again."""
    ctx.options = options
    ctx.grad_weight_out, computed, _, followed, gradients, number_tensor, ctx.shard, ctx.op = rest
    ctx.wide, ctx.weight_dtype = gradients & WIDE_WEIGHT, tensors[1].dtype
    ctx.is_compiled = torch.compiler.is_compiling()
    ctx.is_of_zero3 = not ctx.is_compiled and hasattr(tensors[1], "ds_id")
    place = None if ctx.shard is None else output[-1]
    ctx.save_for_backward(*tensors, *keep_outputs(ctx, output, computed, followed), number_tensor, place)


def _compute_again(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients from the tensors that `_save` kept."""
    *tensors, lse, entropy, target_mass, divisor, number_tensor, place = ctx.saved_tensors
    refuse_zero3(ctx.op, head=tensors[1], bias=tensors[2])
    *inputs, _ = as_multiplied(tuple(tensors))
    input, linear_weight, linear_bias = inputs[:3]
    saved: Sequence[Tensor | None] = (lse, entropy, target_mass, divisor)
    upstream, saved = for_backward(upstream, saved, Options(*ctx.options).reduction)
    bits = sum(bit for bit, needs in zip(GRADIENTS, ctx.needs_input_grad) if needs)
    arguments = (*upstream, *inputs, *saved, *ctx.options)
    if ctx.grad_weight_out is not None and bits & OF_WEIGHT:
        return _accumulate(ctx, arguments, bits & ~OF_WEIGHT, place)
    differentiable = given(*upstream, input, linear_weight, linear_bias)
    if place is None:
        computed = dispatch(
            ctx.op, differentiable, _Gradients, _backward, *arguments, bits | ctx.wide, number_tensor=number_tensor
        )
    else:
        arguments = (*arguments, bits | ctx.wide, place, *ctx.shard)
        computed = gradients_of(
            lambda: call(ctx.op, ranks.backward, *arguments, number_tensor=number_tensor), _NO_SECOND, differentiable
        )
    return _handed_out(ctx, [each if bits & bit else None for each, bit in zip(computed, GRADIENTS)])


def _handed_out(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients in their places, as autograd wants them."""
    grad_input, grad_weight, grad_bias = grads
    if grad_weight is not None:
        grad_weight = grad_weight.to(ctx.weight_dtype)
    return grad_input, grad_weight, grad_bias, *_NOTHING


def _run_forward(
    tensors: tuple[Any, ...], options: tuple[Any, ...], rest: tuple[Any, ...], gradients: int
) -> list[Tensor]:
    """The loss and its outputs, the gradients that the bits name, and of a shard its Place."""
    _, computed, _, _, _, number_tensor, shard, op = rest
    arguments = (*as_multiplied(tensors), *options, computed)
    results: list[Tensor]
    if shard is not None:
        results = call(op, ranks.forward, *arguments, gradients, *shard, number_tensor=number_tensor)
    elif gradients:
        results = call(op, _forward_backward, *arguments, gradients, number_tensor=number_tensor)
    else:
        results = call(op, forward, *arguments, number_tensor=number_tensor)
    return results


def _split(results: list[Tensor], bits: int, shard: ShardArguments | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The outputs and the gradients among the results of _run_forward."""
    end = len(results) if shard is None else len(results) - 1
    count = end - bits.bit_count()
    return tuple(results[:count]), results[count:end]


def _accumulate(ctx: Any, arguments: tuple[Any, ...], bits: int, place: Tensor | None) -> tuple[Tensor | None, ...]:
    """The other gradients; that of the weight is added to grad_weight_out."""
    out = ctx.grad_weight_out
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{ctx.op}: with grad_weight_out the gradient has no derivative (create_graph=True); leave it out"
        )
    if place is None:
        grad_input, grad_bias = call(ctx.op, _backward_accumulate, out, *arguments, bits)
    else:
        grad_input, grad_bias = call(ctx.op, ranks.backward_accumulate, out, *arguments, bits, place, *ctx.shard)
    torch.autograd.graph.increment_version(out)
    return (grad_input if bits & OF_INPUT else None, None, grad_bias if bits & OF_BIAS else None, *_NOTHING)


@binds_quickly
class Recompute(torch.autograd.Function):
    """input, linear_weight, linear_bias -> the loss, and the outputs that the bits `computed` name, of which those
    of `followed` may have a gradient. The backward computes the logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_run_forward(arguments[_TENSORS], arguments[_OPTIONS], arguments[_REST], 0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs[_TENSORS], inputs[_OPTIONS], inputs[_REST], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, None, None, *_NOTHING
        return _compute_again(ctx, upstream)


@binds_quickly
class _Gradients(torch.autograd.Function):
    """The gradients, which have no derivative themselves."""

    generate_vmap_rule = True

    # One by one, because torch.compile tells by the number of parameters whether the first is ctx.
    @staticmethod
    def forward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        lse: Tensor,
        entropy: Tensor | None,
        target_mass: Tensor | None,
        divisor: Tensor | None,
        ignore_index: int,
        reduction: int,
        numbers: Sequence[float],
        skip_ignored: bool,
        workspace_limit: int,
        gradients: int,
        number_tensor: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return tuple(
            call(
                OP, _backward, grad_loss, grad_lse, grad_entropy, input, linear_weight, linear_bias, target, weight,
                row_weight, lse, entropy, target_mass, divisor, ignore_index, reduction, numbers, skip_ignored,
                workspace_limit, gradients, number_tensor=number_tensor,
            )
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_SECOND)


class Speed(torch.autograd.Function):
    """The same, with the gradients that the bits `gradients` name computed in the forward, for an upstream gradient of
    1. The first backward hands them out; a later one, and one that needs more than a factor, computes again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, options, rest = arguments[_TENSORS], arguments[_OPTIONS], arguments[_REST]
        _, _, wanted, _, gradients, _, shard, _ = rest
        results = _run_forward(tensors, options, rest, gradients)
        ctx.bits = gradients & ~WIDE_WEIGHT
        outputs, computed_gradients = _split(results, ctx.bits, shard)
        _save(ctx, tensors, options, rest, results)
        if ctx.is_compiled:
            # Nothing is computed again, and compiled autograd follows saved tensors alone.
            ctx.save_for_backward(*computed_gradients)
        else:
            # Saved tensors live as long as the graph, and autograd may write over the gradients that it gets.
            ctx.gradients = computed_gradients
        # Small calls show what it costs to hand out a tensor that is saved too.
        return outputs if wanted else outputs[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, None, None, *_NOTHING
        grad_loss, grad_lse, grad_entropy = upstream
        if torch.compiler.is_compiling():
            if not ctx.is_compiled:  # compiled autograd of a call that was not compiled
                return _compute_again(ctx, upstream)
            # A graph may run twice, and its saved tensors cannot be written over.
            assert grad_loss is not None
            factor = grad_loss.unsqueeze(-1) if ctx.options[_REDUCTION] == NONE else grad_loss
            # As the operators below do: zeros stay, whatever the factor is.
            scaled = [
                torch.where(each == 0, 0, each.to(factor.dtype) * factor).to(each.dtype) for each in ctx.saved_tensors
            ]
            return _handed_out(ctx, in_places(scaled, ctx.bits))
        is_factor = grad_lse is None and grad_entropy is None and not torch.is_grad_enabled()
        if grad_loss is None or not is_factor or is_batched(grad_loss):
            return _compute_again(ctx, upstream)
        if ctx.is_of_zero3 and (ctx.gradients is None or ctx.bits & OF_WEIGHT):
            refuse_zero3(ctx.op, head=ctx.saved_tensors[1])
        computed, ctx.gradients = ctx.gradients, None
        if computed is None:  # a later backward; without the outputs other kernels would run, and last places differ
            rest = (None, ctx.computed, 0, 0, 0, None, ctx.shard, ctx.op)
            results = _run_forward(ctx.saved_tensors[_TENSORS], ctx.options, rest, ctx.bits | ctx.wide)
            _, computed = _split(results, ctx.bits, ctx.shard)
        gradients = in_places(computed, ctx.bits)
        # Neither reads or writes anything if grad_loss is 1.
        if ctx.options[_REDUCTION] == NONE:
            # .data: a selective checkpoint that keeps this tensor raises if its version changes.
            assert gradients[0] is not None
            call(ctx.op, _rescale_rows, gradients[0].data, grad_loss, -1)
        else:
            call(ctx.op, _rescale, *gradients, grad_loss)
        if ctx.grad_weight_out is not None and gradients[1] is not None:
            ctx.grad_weight_out.add_(gradients[1])
            gradients[1] = None
        return _handed_out(ctx, gradients)


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """linear_cross_entropy_forward by an autograd.Function."""
    tensors, options, (wanted,) = by_name(ForwardTensors, arguments)
    needs_target_mass = tensors.targets.is_floating_point() or tensors.class_weight is not None
    computed = kept_for_backward(wanted, options.reduction, needs_target_mass)
    outputs = apply(OP, Recompute, *tensors, *options, None, computed, wanted, wanted, 0, number_tensor, None, OP)
    return in_order(outputs, computed, wanted)


give_derivative(OP, forward, _differentiable, "hidden", "head", "bias")
refuse_lost_derivatives(OP, _forward_backward, _backward, _backward_accumulate, _rescale)
