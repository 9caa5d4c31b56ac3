"""A call of linear_log_prob_loss: the chunks of rows, and the gradients of each behind its loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._calls.linear_cross_entropy import with_tensors_of_linear
from eaves._calls.log_prob import LogProbCall, log_probs_of
from eaves._torch.checks import accumulator_dtype, check_tensor
from eaves._torch.operator import call as call_operator
from eaves._torch.transforms import is_exporting, is_transforming, uncompiled

OP = "linear_log_prob_loss"
_rescale = torch.ops.eaves.linear_cross_entropy_rescale.default

# What a chunk keeps where the caller sets no limit: 2048 rows of 151,936 classes.
_KEEP_BYTES = 600 << 20
_ROWS = 128  # a chunk has a multiple of so many rows: whole tiles of the products

LossFunction = Callable[[Tensor, "Tensor | None", slice], Tensor]


class LogProbLossCall(NamedTuple):
    """The arguments of eaves.linear_log_prob_loss, as they were passed; those of linear_log_prob are `of_rows`."""

    of_rows: LogProbCall
    fn: LossFunction
    boundaries: Sequence[int] | Tensor | None
    grad_weight_dtype: torch.dtype | None


def loss_of_log_probs(call: LogProbLossCall) -> Tensor:
    if is_exporting() or is_transforming():
        raise NotImplementedError(f"{OP}: it does not work inside of torch.export, torch.vmap and torch.func")
    return uncompiled(OP, _computed)(call)  # type: ignore[no-any-return]


def _computed(call: LogProbLossCall) -> Tensor:
    of_rows = call.of_rows
    if isinstance(of_rows.head, torch.nn.Linear):
        of_rows = with_tensors_of_linear(OP, of_rows, "head", "bias")
    hidden, head, tokens = of_rows.hidden, of_rows.head, of_rows.tokens
    for name, tensor in (("hidden", hidden), ("head", head), ("tokens", tokens)):
        check_tensor(OP, name, tensor)
    if hidden.dim() < 2 or tokens.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{OP}: hidden has shape {list(hidden.shape)} and tokens {list(tokens.shape)}, expected [N, ..., D] and "
            "[N, ...]"
        )
    if not callable(call.fn):
        raise TypeError(f"{OP}: fn is {call.fn!r}, expected a function of log_prob, entropy and rows")
    call = call._replace(of_rows=of_rows)
    chunks = list(_chunks(call))
    tensors = (hidden, head, of_rows.bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        loss: Tensor = _Loss.apply(call, chunks, *tensors)  # type: ignore[no-untyped-call]
        return loss
    return _sum([_loss_of(call, _at(of_rows, rows), rows) for rows in chunks], hidden)


def _chunks(call: LogProbLossCall) -> Iterator[slice]:
    """Slices of the first axis: as many rows as `keep_bytes` are for, or one group that has more."""
    hidden, head, keep_bytes = call.of_rows.hidden, call.of_rows.head, call.of_rows.keep_bytes
    count, classes = hidden.shape[0], max(head.shape[0], 1)
    rows = (_KEEP_BYTES if keep_bytes is None else keep_bytes) // (2 * classes) // _ROWS * _ROWS
    at_once = max(max(rows, _ROWS) // max(math.prod(hidden.shape[1:-1]), 1), 1)
    ends = range(1, count + 1) if call.boundaries is None else _ends(call.boundaries, count)
    first, last = 0, 0
    for end in ends:
        if end - first > at_once and last > first:
            yield slice(first, last)
            first = last
        last = end
    if last > first:
        yield slice(first, last)


def _ends(boundaries: Sequence[int] | Tensor, count: int) -> list[int]:
    given: list[int] = boundaries.tolist() if isinstance(boundaries, Tensor) else list(boundaries)
    if not given or given[0] != 0 or given[-1] != count or any(a > b for a, b in itertools.pairwise(given)):
        raise ValueError(f"{OP}: boundaries is {given}, expected numbers from 0 to {count} that do not decrease")
    return given[1:]


def _loss_of(call: LogProbLossCall, of_chunk: LogProbCall, rows: slice) -> Tensor:
    """fn of a chunk's log-probabilities."""
    output: Any = log_probs_of(of_chunk)
    log_prob, entropy = (output, None) if isinstance(output, Tensor) else output
    loss = call.fn(log_prob, entropy, rows)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"{OP}: fn returned {found}, expected the loss of its rows, a floating-point number")
    return loss


def _at(of_rows: LogProbCall, rows: slice) -> LogProbCall:
    return of_rows._replace(hidden=of_rows.hidden[rows], tokens=of_rows.tokens[rows])


def _sum(losses: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return torch.stack(list(losses)).sum() if losses else hidden.new_zeros((), dtype=accumulator_dtype(hidden.dtype))


class _Loss(torch.autograd.Function):
    """The loss, with the gradients of hidden, head and bias, which the forward computes chunk by chunk for an upstream
    gradient of 1."""

    @staticmethod
    def forward(ctx: Any, call: LogProbLossCall, chunks: list[slice], *tensors: Tensor | None) -> Tensor:
        hidden, head, bias = (
            None if each is None else each.detach().requires_grad_(each.requires_grad) for each in tensors
        )
        assert hidden is not None and head is not None
        of_rows, wide = call.of_rows._replace(head=head, bias=bias), accumulator_dtype(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and bias.requires_grad else None
        grad_head: Tensor | None = None  # that of the first chunk, to which the others are added
        if head.requires_grad and call.grad_weight_dtype not in (None, head.dtype):
            grad_head = torch.zeros_like(head, dtype=call.grad_weight_dtype)
        losses = []
        for rows in chunks:
            of_chunk = _at(of_rows, rows)._replace(grad_weight_out=grad_head)
            hidden_of_chunk = of_chunk.hidden.detach().requires_grad_(hidden.requires_grad)
            with torch.enable_grad():
                loss = _loss_of(call, of_chunk._replace(hidden=hidden_of_chunk), rows)
            losses.append(loss.detach())
            if not loss.requires_grad:  # it does not depend on these rows
                continue
            wanted = [each for each in (hidden_of_chunk, head, bias) if each is not None and each.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(loss, wanted, allow_unused=True)))
            if grad_hidden is not None and (gradient := found[id(hidden_of_chunk)]) is not None:
                grad_hidden[rows] = gradient
            if head.requires_grad and (gradient := found[id(head)]) is not None:
                grad_head = gradient
            if grad_bias is not None and (gradient := found[id(bias)]) is not None:
                grad_bias += gradient
        if head.requires_grad and grad_head is None:
            grad_head = torch.zeros_like(head)
        ctx.gradients, ctx.dtype = (grad_hidden, grad_head, grad_bias), wide
        ctx.dtypes = [None if each is None else each.dtype for each in tensors]
        return _sum(losses, hidden)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{OP}: there is no second derivative")
        if ctx.gradients is None:
            raise RuntimeError(f"{OP}: the gradients were handed out by the first backward; call it again")
        gradients, ctx.gradients = ctx.gradients, None
        call_operator(OP, _rescale, *gradients, grad_loss.to(ctx.dtype))
        return None, None, *(None if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes))
