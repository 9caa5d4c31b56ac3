"""The gradient of cross_entropy. in_place.py has the gradient in place, _torch/cross_entropy_rules.py the fake
implementations and batching rules, _parallel/cross_entropy.py the operators over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._parallel import cross_entropy as ranks
from eaves._parallel.shard import ShardArguments
from eaves._torch.checks import given
from eaves._torch.cross_entropy_rules import Forward
from eaves._torch.operator import (
    Refused,
    apply,
    apply_plainly,
    call,
    dispatch,
    gradient_function,
    gradients_of,
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
from eaves._torch.registration import give_derivative, refuse_lost_derivatives

forward = torch.ops.eaves.cross_entropy_forward.default
_backward = torch.ops.eaves.cross_entropy_backward.default

OP = "cross_entropy"

_Gradient = gradient_function(_backward)


# ------------------------------------------------------------------------------------------------------------ autograd


def run_forward(
    op: str, arguments: tuple[Any, ...], shard: ShardArguments | None, number_tensor: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The loss and its outputs; with a shard, its Place is the last. `op` is the function that the user called."""
    if shard is None:
        return tuple(call(op, forward, *arguments, number_tensor=number_tensor))
    return tuple(call(op, ranks.forward, *arguments, *shard, number_tensor=number_tensor))


@takes(*Forward._fields, "wanted", "number_tensor", "shard", "op")
class CrossEntropy(torch.autograd.Function):
    """logits -> the loss and all computed outputs. The user gets the outputs of the bits `wanted`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *of_extension, _, number_tensor, shard, op = arguments
        return run_forward(op, tuple(of_extension), shard, number_tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[5:9]
        computed, wanted, number_tensor, shard, ctx.op = inputs[9:]
        ctx.computed, ctx.wanted = computed, wanted
        place = None if shard is None else output[-1]
        ctx.save_for_backward(*inputs[:4], *keep_outputs(ctx, output, computed, wanted), number_tensor, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 13
        upstream = upstream_of(grads, ctx.computed, ctx.wanted)
        if not upstream:
            return None, *nothing
        *inputs, lse, entropy, target_mass, divisor, number_tensor, place = ctx.saved_tensors
        upstream, saved = for_backward(upstream, (lse, entropy, target_mass, divisor), ctx.options[2])
        arguments = (*upstream, *inputs, *saved, *ctx.options)
        differentiable = given(inputs[0], *upstream)
        if place is None:
            of_logits = dispatch(ctx.op, differentiable, _Gradient, _backward, *arguments, number_tensor=number_tensor)
            return of_logits, *nothing
        (of_logits,) = gradients_of(
            ctx.op, lambda: (call(ctx.op, ranks.backward, *arguments, place, number_tensor=number_tensor),),
            *differentiable,
        )  # fmt: skip
        return of_logits, *nothing


# Class axis, ignore_index, reduction and numbers of a call without options.
_OF_MEAN, _OF_ROWS = (-1, -100, MEAN, ()), (-1, -100, NONE, ())
_KEPT_OF_MEAN, _KEPT_OF_ROWS = kept_for_backward(0, MEAN, False), kept_for_backward(0, NONE, False)


class PlainMean(torch.autograd.Function):
    """CrossEntropy for a plain call. It runs less code, so small calls take less time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        loss, lse, divisor = run_plainly(forward, logits, targets, None, None, None, *_OF_MEAN, _KEPT_OF_MEAN)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, lse, divisor)
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_loss is None:
            return None, None
        logits, targets, lse, divisor = ctx.saved_tensors
        tensors = (grad_loss, None, None, logits, targets, None, None, lse, None, None, divisor)
        return dispatch(OP, (logits, grad_loss), _Gradient, _backward, *tensors, *_OF_MEAN), None


class PlainLogProb(torch.autograd.Function):
    """PlainMean for the log-probability of each row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, lse = run_plainly(forward, logits, targets, None, None, None, *_OF_ROWS, _KEPT_OF_ROWS)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, lse)
        return log_prob_of(losses)

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_log_prob is None:
            return None, None
        (logits, targets, lse), grad_losses = ctx.saved_tensors, -grad_log_prob
        tensors = (grad_losses, None, None, logits, targets, None, None, lse, None, None, None)
        return dispatch("log_prob", (logits, grad_losses), _Gradient, _backward, *tensors, *_OF_ROWS), None


_plain_mean, _plain_log_prob = apply_plainly(PlainMean), apply_plainly(PlainLogProb)


def mean_of_plain_call(logits: Tensor, targets: Tensor) -> Tensor | None:
    """The mean of a plain call; None if the call needs the checks."""
    try:
        mean: Tensor
        if not torch.is_grad_enabled() or not (logits.requires_grad or targets.requires_grad):
            mean = run_plainly(forward, logits, targets)[0]  # the operator's options are the mean's
        elif targets.is_floating_point():  # a backward for probabilities needs the target mass too
            return None
        else:
            mean = _plain_mean(logits, targets)
        return mean
    except Refused:
        return None


def log_probs_of_plain_call(logits: Tensor, targets: Tensor) -> Tensor | None:
    """The log-probabilities of a plain call, whose targets are classes; None if the call needs the checks."""
    try:
        if torch.is_grad_enabled() and logits.requires_grad:
            found: Tensor = _plain_log_prob(logits, targets)
            return found
        return log_prob_of(run_plainly(forward, logits, targets, None, None, None, *_OF_ROWS)[0])
    except Refused:
        return None


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """cross_entropy_forward through its autograd.Function."""
    call = Forward(*arguments)
    needs_target_mass = call.targets.is_floating_point() or call.class_weight is not None
    computed = kept_for_backward(call.outputs, call.reduction, needs_target_mass)
    outputs = apply(OP, CrossEntropy, *call[:-1], computed, call.outputs, number_tensor, None, OP)
    return in_order(outputs, computed, call.outputs)


give_derivative(OP, forward, _differentiable, "logits")
refuse_lost_derivatives(OP, _backward)
