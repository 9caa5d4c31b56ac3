"""A call of linear_log_prob_loss: the chunks of rows, and the gradients of each behind its loss."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._algorithm import kept_row_bytes_of
from eaves._calls.linear_cross_entropy import with_tensors_of_linear
from eaves._calls.log_prob import LogProbCall, log_probs_of, tempered
from eaves._torch.checks import accumulator_dtype, check_bool, check_tensor, is_distributed, name_of
from eaves._torch.head import checked_head, keep_bytes_of, wide_head
from eaves._torch.library import EXTENSION
from eaves._torch.operator import call as call_operator
from eaves._torch.options import shape_of
from eaves._torch.transforms import is_exporting, is_transforming, uncompiled

OP = "linear_log_prob_loss"
_rescale = torch.ops.eaves.linear_cross_entropy_rescale.default
_row_bytes = kept_row_bytes_of(ctypes.CDLL(str(EXTENSION)))

# The bytes that a chunk keeps if the caller sets no limit: 2048 rows of 151,936 classes.
_KEEP_BYTES = 600 << 20
_ROWS = 128  # the rows of a chunk are a multiple of this: whole tiles of the products

LossFunction = Callable[[Tensor, "Tensor | None", slice], Tensor]


class LogProbLossCall(NamedTuple):
    """The arguments of eaves.linear_log_prob_loss, as they were passed. `of_rows` has the arguments of
    linear_log_prob."""

    of_rows: LogProbCall
    fn: LossFunction
    entropy: bool
    boundaries: Sequence[int] | Tensor | None


def loss_of_log_probs(call: LogProbLossCall) -> Tensor:
    if is_exporting() or is_transforming():
        raise NotImplementedError(
            f"{OP}: this operator does not work inside of torch.export, torch.vmap and torch.func"
        )
    return uncompiled(OP, _computed)(call)  # type: ignore[no-any-return]


def _computed(call: LogProbLossCall) -> Tensor:
    of_rows = call.of_rows
    check_bool(OP, "entropy", call.entropy)
    if not callable(call.fn):
        raise TypeError(f"{OP}: fn is {call.fn!r}, expected a function of log_prob, entropy and rows")
    if isinstance(of_rows.temperature, Tensor):
        raise TypeError(f"{OP}: temperature is a tensor, expected a number")
    if isinstance(of_rows.head, torch.nn.Linear):
        of_rows = with_tensors_of_linear(OP, of_rows, "head", "bias")
    hidden, head, tokens = of_rows.hidden, of_rows.head, of_rows.tokens
    if is_distributed(head):
        raise NotImplementedError(
            f"{OP}: head is a DTensor; gather it (head.full_tensor()), or take eaves.linear_log_prob"
        )
    multiplied, _, _ = checked_head(OP, hidden, head, of_rows.bias)  # the dtypes under torch.autocast
    check_tensor(OP, "tokens", tokens)
    if hidden.dim() < 2 or tokens.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{OP}: hidden has shape {shape_of(hidden)} and tokens {shape_of(tokens)}, expected [N, ..., D] and "
            "[N, ...]"
        )
    dtype = multiplied.dtype
    if dtype == torch.float16:
        raise NotImplementedError(
            f"{OP}: in float16 gradients would underflow before a loss scale multiplies them; take bfloat16, or "
            "eaves.linear_log_prob"
        )
    keep_bytes = keep_bytes_of(OP, "keep", _KEEP_BYTES if of_rows.keep_bytes is None else of_rows.keep_bytes, False)
    of_rows = of_rows._replace(outputs=("entropy",) if call.entropy else (), algorithm="keep", keep_bytes=keep_bytes)
    chunks = list(_chunks(of_rows, dtype, call.boundaries))
    tensors = (hidden, head, of_rows.bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        loss: Tensor = _Loss.apply(call.fn, of_rows, chunks, *tensors)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad():
        return _sum([_loss_of(call.fn, _at(of_rows, rows), rows) for rows in chunks], hidden)


def _chunks(of_rows: LogProbCall, dtype: torch.dtype, boundaries: Sequence[int] | Tensor | None) -> Iterator[slice]:
    """Slices of the first axis: as many rows as `keep_bytes` has room for, or one group that has more."""
    hidden, head, keep_bytes = of_rows.hidden, of_rows.head, of_rows.keep_bytes
    classes, features = head.shape
    _, softcap = tempered(OP, of_rows.temperature, of_rows.scale, of_rows.softcap)
    facts = (hidden.get_device(), features, classes, 0.0 if softcap is None else softcap, of_rows.outputs != ())
    row_bytes = _row_bytes(name_of(dtype).encode(), *facts)
    assert keep_bytes is not None
    rows = keep_bytes // max(row_bytes, 1) // _ROWS * _ROWS
    at_once = max(max(rows, _ROWS) // max(math.prod(hidden.shape[1:-1]), 1), 1)
    count = hidden.shape[0]
    ends = range(1, count + 1) if boundaries is None else _ends(boundaries, count)
    first, last = 0, 0
    for end in ends:
        if end - first > at_once and last > first:
            yield slice(first, last)
            first = last
        last = end
    if last > first:
        yield slice(first, last)


def _ends(boundaries: Sequence[int] | Tensor, count: int) -> list[int]:
    expected = f"expected cu_seqlens, integers from 0 to {count} that do not decrease"
    given = boundaries.tolist() if isinstance(boundaries, Tensor) else boundaries
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, int) for each in given):
        raise TypeError(f"{OP}: boundaries is of type {type(boundaries).__name__}, {expected}")
    if len(given) < 2 or given[0] != 0 or given[-1] != count or any(a > b for a, b in itertools.pairwise(given)):
        raise ValueError(f"{OP}: boundaries begins with {list(given[:4])} and ends with {list(given[-1:])}, {expected}")
    return list(given[1:])


def _loss_of(fn: LossFunction, of_chunk: LogProbCall, rows: slice) -> Tensor:
    """The loss that `fn` returns for a chunk's log-probabilities."""
    output: Any = log_probs_of(of_chunk)
    log_prob, entropy = (output, None) if isinstance(output, Tensor) else output
    try:
        loss = fn(log_prob, entropy, rows)
    except (TypeError, AttributeError) as error:
        if entropy is None and "NoneType" in str(error):
            raise TypeError(f"{OP}: fn raised: {error}; entropy is None unless the call has entropy=True") from error
        raise
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        found = f"{name_of(loss.dtype)} of shape {shape_of(loss)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"{OP}: fn returned {found}, expected a tensor of shape [] of a floating-point dtype: the sum of its rows' "
            "losses"
        )
    return loss


def _at(of_rows: LogProbCall, rows: slice) -> LogProbCall:
    return of_rows._replace(hidden=of_rows.hidden[rows], tokens=of_rows.tokens[rows])


def _sum(losses: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return torch.stack(list(losses)).sum() if losses else hidden.new_zeros((), dtype=accumulator_dtype(hidden.dtype))


class _Loss(torch.autograd.Function):
    """The loss, with the gradients of hidden, head and bias, which the forward computes chunk by chunk for an upstream
    gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any, fn: LossFunction, of_rows: LogProbCall, chunks: list[slice], *tensors: Tensor | None
    ) -> Tensor:
        hidden, head, bias = (
            None if each is None else each.detach().requires_grad_(each.requires_grad) for each in tensors
        )
        assert hidden is not None and head is not None
        of_rows, wide = of_rows._replace(head=head, bias=bias), accumulator_dtype(hidden.dtype)
        sums = of_rows.grad_weight_dtype
        grad_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and bias.requires_grad else None
        grad_head: Tensor | None = None  # the gradient of the first chunk; the later ones are added to it
        if head.requires_grad and sums not in (None, head.dtype):
            wide_head(OP, hidden.dtype, head.dtype, sums)  # a check
            grad_head = torch.zeros_like(head, dtype=sums, memory_format=torch.contiguous_format)
        losses = []
        for rows in chunks:
            dtype_of_sums = sums if grad_head is None else None
            of_chunk = _at(of_rows, rows)._replace(grad_weight_out=grad_head, grad_weight_dtype=dtype_of_sums)
            hidden_of_chunk = of_chunk.hidden.detach().requires_grad_(hidden.requires_grad)
            with torch.enable_grad():
                loss = _loss_of(fn, of_chunk._replace(hidden=hidden_of_chunk), rows)
            losses.append(loss.detach())
            if not loss.requires_grad:  # the loss does not depend on these rows
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
            raise NotImplementedError(
                f"{OP}: there is no second derivative; use torch.nn.functional.linear and torch.log_softmax for one"
            )
        if ctx.gradients is None:
            raise RuntimeError(f"{OP}: the first backward has used up the gradients; call the operator again")
        gradients, ctx.gradients = ctx.gradients, None
        call_operator(OP, _rescale, *gradients, grad_loss.to(ctx.dtype))
        return (
            None,
            None,
            None,
            *(None if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes)),
        )
