"""Outputs of the losses: the bits that ask for an output, and the named tuples that return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eaves._arguments import MEAN as MEAN
from eaves._arguments import NONE as NONE
from eaves._arguments import REDUCTIONS as REDUCTIONS
from eaves._arguments import SUM as SUM
from eaves._arguments import CrossEntropyOutputs, KlDivOutputs, LogProbOutputs, named_outputs
from eaves._torch.checks import accumulator_dtype

REDUCTION_NAMES = {mode: name for name, mode in REDUCTIONS.items()}

# The outputs that a call asks for beside the loss, as the bits of python/csrc/loss_arguments.h. The extension returns
# the outputs in this order.
LSE, DIVISOR, ARGMAX, ENTROPY, Z_LOSS, TARGET_MASS, SUM_SQ, MEAN_LOGIT = OUTPUTS = (1, 2, 4, 8, 16, 32, 64, 128)
OF_IGNORED_ROWS = 256  # an option, not an output: ignored rows have outputs too
# An option, not an output: lse is two numbers, [rows..., 2], which a backward needs (docs/numerics.md).
SPLIT_LSE = 512
# The names that `outputs` takes, in the losses and in the log-probabilities.
LOSS_OUTPUTS = {
    "lse": LSE, "argmax": ARGMAX, "entropy": ENTROPY, "z_loss": Z_LOSS, "sum_sq": SUM_SQ, "mean_logit": MEAN_LOGIT,
}  # fmt: skip
LOG_PROB_OUTPUTS = {"entropy": ENTROPY, "is_top1": ARGMAX, "sum_sq": SUM_SQ, "mean_logit": MEAN_LOGIT}
RETURNED = tuple(LOSS_OUTPUTS.values())


class CrossEntropyOutput(CrossEntropyOutputs[Tensor], Protocol):
    """The named tuple that a loss returns with `outputs`: the loss, then these outputs in the order of their names. A
    type for annotations; isinstance() refuses it, because a result has only the outputs that were asked for."""


class LogProbOutput(LogProbOutputs[Tensor], Protocol):
    """The named tuple that eaves.log_prob and eaves.linear_log_prob return with `outputs`: the log-probabilities, then
    these outputs in the order of their names. For annotations, as CrossEntropyOutput."""


class KlDivOutput(KlDivOutputs[Tensor], Protocol):
    """The named tuple that eaves.linear_kl_div returns with `outputs`: the loss, then these outputs in the order of
    their names. For annotations, as CrossEntropyOutput."""


def kept_for_backward(wanted: int, mode: int, needs_target_mass: bool) -> int:
    """The bits of the outputs that are wanted and of the outputs that a backward reads."""
    computed = wanted | LSE | SPLIT_LSE
    if mode == MEAN:
        computed |= DIVISOR
    return computed | TARGET_MASS if needs_target_mass else computed


def wanted_outputs(op: str, names: Sequence[str], has_factors: bool) -> int:
    """The bits of the outputs with these names. With `has_factors` the classes have factors in the loss, and the core
    computes no mean of z'."""
    wanted = 0
    for name in names:
        wanted |= LOSS_OUTPUTS[name]
    if wanted & MEAN_LOGIT and has_factors:
        raise ValueError(
            f'{op}: outputs has "mean_logit", which does not exist for probabilities as targets, nor for '
            "weight beside label_smoothing; leave it out"
        )
    return wanted


# For each set of bits, the position of each output among the results of a call. An absent output has 0, the position of
# the loss. This is a table, because counting bits in each call costs the host as much as an allocation.
POSITIONS = [
    {
        bit: 1 + sum(1 for other in OUTPUTS if other < bit and computed & other) if computed & bit else 0
        for bit in OUTPUTS
    }
    for computed in range(OF_IGNORED_ROWS)
] * (2 * SPLIT_LSE // OF_IGNORED_ROWS)  # the bits of options change no position

_SAVED_POSITIONS = [(positions[ENTROPY], positions[TARGET_MASS], positions[DIVISOR]) for positions in POSITIONS]


def pick(outputs: Sequence[Any], computed: int, bit: int) -> Any:
    """The output of `bit` among the results of a call (the loss, and the outputs of the bits `computed`), or None."""
    position = POSITIONS[computed][bit]
    return outputs[position] if position else None


def in_order(outputs: Sequence[Tensor], computed: int, wanted: int) -> list[Tensor]:
    """The outputs of an operator for the bits `wanted`, from outputs that were computed for more bits."""
    found = [outputs[0], *(pick(outputs, computed, bit) for bit in OUTPUTS if wanted & bit)]
    if wanted & LSE and not wanted & SPLIT_LSE:
        found[1] = found[1].select(-1, 0).contiguous()
    return found


def output_of(outputs: Sequence[Tensor], computed: int, names: Sequence[str]) -> CrossEntropyOutput:
    """The loss and the outputs of these names, from the results of a call."""
    returned = [pick(outputs, computed, LOSS_OUTPUTS[name]) for name in names]
    if computed & SPLIT_LSE and "lse" in names:
        index = names.index("lse")
        returned[index] = returned[index].select(-1, 0).contiguous()
    found: CrossEntropyOutput = named_outputs("CrossEntropyOutput", ("loss", *names), (outputs[0], *returned))
    return found


def keep_outputs(
    ctx: Any, outputs: Sequence[Tensor], computed: int, followed: int, is_loss_alone: bool = False
) -> tuple[Tensor | None, ...]:
    """For a setup_context: marks the outputs without a derivative, and returns the outputs to save, in the order of the
    extension's backward. The loss has a derivative; lse and entropy have one if `followed` has their bits. With
    `is_loss_alone` the Function returns no other output."""
    ctx.set_materialize_grads(False)  # or each backward would fill a tensor of zeros for each output
    if is_loss_alone:
        pass
    elif followed & (LSE | ENTROPY):
        positions, differentiable = POSITIONS[computed], (followed & LSE) | ENTROPY
        constant = [outputs[positions[bit]] for bit in OUTPUTS if computed & bit and not differentiable & bit]
        ctx.mark_non_differentiable(*constant)
    else:
        ctx.mark_non_differentiable(*outputs[1:])
    entropy, target_mass, divisor = _SAVED_POSITIONS[computed]
    return (
        outputs[1],  # lse
        outputs[entropy] if entropy else None,
        outputs[target_mass] if target_mass else None,
        outputs[divisor] if divisor else None,
    )


def upstream_of(grads: Sequence[Tensor | None], computed: int, followed: int) -> tuple[Tensor | None, ...]:
    """The upstream gradients of the loss, lse and entropy, None for an absent one; an empty tuple if all are absent.
    `computed` has the bits of the outputs that the Function computes, `followed` the bits of the outputs that may have
    a gradient."""
    grad_loss, grad_lse = grads[0], grads[1] if followed & LSE else None
    grad_entropy = pick(grads, computed, ENTROPY)
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return ()
    if grad_lse is not None and computed & SPLIT_LSE:
        grad_lse = grad_lse.select(-1, 0)
    return grad_loss, grad_lse, grad_entropy


def for_backward(upstream: Sequence[Any], saved: Sequence[Any], mode: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The upstream gradients and the saved outputs as the extension takes them."""
    grad_loss, grad_lse, grad_entropy = upstream
    lse, entropy, target_mass, divisor = saved
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape[:-1] if mode == NONE else ())
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    if grad_entropy is None:
        return (grad_loss, grad_lse, None), (lse.detach() if lse.requires_grad else lse, None, target_mass, divisor)
    return (grad_loss, grad_lse, grad_entropy.contiguous()), (lse.detach(), entropy.detach(), target_mass, divisor)


def log_prob_of(loss: Tensor) -> Tensor:
    """The log-probabilities from the loss of each row; 0 for ignored rows, for which -loss would be -0."""
    return torch.rsub(loss, 0)


def empty_outputs(like: Tensor, rows: Sequence[int], mode: int, outputs: int) -> list[Tensor]:
    """The loss and the outputs that the bits name, without values."""
    dtype = accumulator_dtype(like.dtype)
    loss_shape = rows if mode == NONE else ()
    shapes = dict.fromkeys(OUTPUTS, rows) | {DIVISOR: (), Z_LOSS: loss_shape}
    tensors = [like.new_empty(loss_shape, dtype=dtype)]
    for bit, shape in shapes.items():
        if outputs & bit:
            of_output = (*shape, 2) if bit == LSE and outputs & SPLIT_LSE else shape
            tensors.append(like.new_empty(of_output, dtype=torch.int64 if bit == ARGMAX else dtype))
    return tensors
