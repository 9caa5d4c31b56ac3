"""log_prob and linear_log_prob with several tokens or a temperature for each row: the numbers and autograd.

The kernels of cross_entropy compute a row's statistics with one of its tokens as the target. The logits of the other
tokens are gathered separately, and the gradient is written again, exactly, at their places. A head is multiplied in
chunks of rows (head.py). Without a head, the kernels read the logits in place. If each row has its temperature, they
read a copy of each chunk instead, because a kernel takes one number for all rows.

If classes are cut over ranks, logits and head are this rank's part. For each chunk, the logits of the tokens are summed
over the ranks, and the rows' statistics are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._chunked.head import (
    OverRanks,
    Tempering,
    add_gradients,
    chunk_size,
    chunks_of,
    counted,
    logits_of,
    matrices,
    skips_ignored,
    sum_over_ranks,
)
from eaves._parallel.collectives import all_gather, all_reduce, group_of
from eaves._parallel.statistics import gather_statistics, merge, no_statistics, statistics_of
from eaves._torch.checks import accumulator_dtype, given
from eaves._torch.head import Product, refuse_zero3, workspace_of
from eaves._torch.operator import apply, call, gradients_of
from eaves._torch.options import numbers_of
from eaves._torch.outputs import ARGMAX, ENTROPY, LSE, MEAN_LOGIT, NONE, POSITIONS, empty_outputs, pick
from eaves._torch.transforms import is_batched, needs_autograd

_forward = torch.ops.eaves.cross_entropy_forward.default
_of_shard = torch.ops.eaves.cross_entropy_shard_forward.default
_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default


class Rows(NamedTuple):
    """The tokens and temperatures of all rows, or of a chunk."""

    tokens: Tensor  # [rows, K], K > 0, int64; an ignored one is replaced by another of its row, or by 0
    is_ignored: Tensor  # [rows]: all tokens of the row are ignored
    temperature: Tensor | None  # [rows, 1], in the dtype of sums; None: one number for all rows

    def part(self, chunk: slice | Tensor) -> Rows:
        return Rows(*[None if each is None else each[chunk] for each in self])  # type: ignore[arg-type]

    @staticmethod
    def of(tokens: Tensor, is_absent: Tensor, temperature: Tensor | None) -> Rows:
        """The record of the tokens as they were passed, [rows, K]; `is_absent` marks the ignored ones."""
        is_ignored = is_absent.all(1)
        if temperature is not None:
            temperature = temperature.unsqueeze(1)
        if tokens.shape[1] == 0:  # as one token that is ignored
            return Rows(tokens.new_zeros(tokens.shape[0], 1), is_ignored, temperature)
        first = (~is_absent).to(torch.int32).argmax(1, keepdim=True)
        others = torch.where(is_absent, tokens.gather(1, first), tokens)
        return Rows(others.masked_fill_(is_ignored.unsqueeze(1), 0), is_ignored, temperature)


class HeadOptions(NamedTuple):
    """The options of a call with a head."""

    workspace_bytes: int | None = None
    skip_ignored: bool = False
    sums_of_head: torch.dtype | None = None  # the dtype that sums the head's gradient
    grad_weight_out: Tensor | None = None


class Settings(NamedTuple):
    op: str
    scale: float  # like softcap divided by the temperature, if that is one number
    softcap: float | None
    ignore_index: int
    outputs: int  # the further outputs of the kernel, as bits
    is_in_place: bool
    of_head: HeadOptions
    over_ranks: OverRanks | None = None


def losses_of(
    settings: Settings, rows: Rows, x: Tensor, head: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """-log_prob of each token, [rows, K], followed by the outputs that the settings name, [rows]. Without a head, x has
    logits, [..., V]; with a head, hidden states, [rows, D]."""
    if head is None or not skips_ignored(x, settings.of_head.skip_ignored):
        return _apply(settings, rows, x, head, bias)
    counts = (~rows.is_ignored).nonzero().squeeze(1)
    if counts.shape[0] == x.shape[0]:
        return _apply(settings, rows, x, head, bias)
    found = _apply(settings, rows.part(counts), x[counts], head, bias)
    return tuple(each.new_zeros(x.shape[0], *each.shape[1:]).index_copy(0, counts, each) for each in found)


def _apply(settings: Settings, rows: Rows, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    if needs_autograd(*given(*tensors)):
        found: tuple[Tensor, ...] = apply(settings.op, _Losses, settings, *rows, *tensors)
        return found[:-1]
    return _losses(settings, rows, *tensors)[:-1]


# ---------------------------------------------------------------------------------------------------------- the forward


def _parts_of(settings: Settings, rows: Rows, x: Tensor, head: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of the rows of x, and their places."""
    sums, (count, places) = accumulator_dtype(x.dtype).itemsize, rows.tokens.shape
    # _sums_of_equal compares each token of a row with each other token; the rest is some numbers of each.
    of_row, classes = places * (8 * places + 64), x.shape[-1]
    if settings.over_ranks is not None:  # all ranks have the same number of chunks
        classes = settings.over_ranks.place.most
    of_class = 0 if rows.temperature is None else sums  # logits are read in place, or copied
    if head is not None:
        of_class = sums
        if settings.over_ranks is None:
            classes = head.shape[0]
        of_row += 3 * sums * x.shape[1]  # hidden states without ignored rows, their gradient, the product's part
        if x.dtype.itemsize == 2:  # the 16-bit gradient that is a factor of the products
            of_class += x.dtype.itemsize
    if rows.temperature is not None and settings.softcap is not None:
        of_class += sums  # the derivative of the cap
    limit = workspace_of(settings.op, settings.of_head.workspace_bytes, x.device)
    return chunks_of(matrices(x), chunk_size(count, of_row + max(1, classes) * of_class, limit))


def _numbers_for_kernel(settings: Settings, rows: Rows) -> tuple[float, ...]:
    if rows.temperature is not None:
        return ()
    return numbers_of(settings.op, scale=settings.scale, softcap=settings.softcap)[0]


def _tempering(settings: Settings, rows: Rows) -> Tempering:
    return Tempering.of(settings.scale, settings.softcap, rows.temperature)


def _chosen(z: Tensor, rows: Rows, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the tokens in the dtype of sums, their columns in z, and whether z has each token. A missing token
    gets another column; if no rank has it, its logit is NaN."""
    sums, over_ranks = accumulator_dtype(z.dtype), settings.over_ranks
    tokens = rows.tokens if over_ranks is None else rows.tokens - over_ranks.place.first_class
    places = tokens.clamp(0, max(0, z.shape[1] - 1))
    is_there = (places == tokens) & (tokens < z.shape[1])
    logits = z.gather(1, places).to(sums) if z.shape[1] else z.new_zeros(places.shape, dtype=sums)
    if over_ranks is None:
        return torch.where(is_there, logits, math.nan), places, is_there
    # One rank has the token, so the sum is exact.
    summed = all_reduce(torch.where(is_there, logits, 0), group_of(over_ranks.shard)).wait()
    is_class = (rows.tokens >= 0) & (rows.tokens < over_ranks.place.classes)
    return torch.where(is_class, summed, math.nan), places, is_there


def _losses(settings: Settings, all_rows: Rows, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The results of losses_of, followed by the likeliest token of each row, which is the kernel's target. With this
    target nothing cancels in

        -log_prob_k = (z'_target - z'_k) + (lse - z'_target)
    """
    x, head, bias = tensors
    assert x is not None
    sums, tokens = accumulator_dtype(x.dtype), all_rows.tokens
    nll, targets = x.new_empty(tokens.shape, dtype=sums), tokens.new_empty(tokens.shape[0])
    outputs = empty_outputs(x, tokens.shape[:1], NONE, settings.outputs)
    product = None if head is None else Product(x, head, bias).as_multiplied()
    numbers = _numbers_for_kernel(settings, all_rows)
    with torch.no_grad():
        for chunk, part in _parts_of(settings, all_rows, x, head):
            rows = all_rows.part(chunk)
            z = _logits_of(part, product, rows)
            chosen, _, _ = _chosen(z, rows, settings)
            argmax = None
            if rows.temperature is not None:
                if settings.outputs & ARGMAX:
                    argmax = _best_class(z, settings.over_ranks)  # before rounding makes two logits equal
                z = _tempering(settings, rows).apply_(z)
            chosen = _tempering(settings, rows).apply_(chosen)
            best = chosen.argmax(1, keepdim=True)
            target = rows.tokens.gather(1, best).squeeze(1).masked_fill_(rows.is_ignored, settings.ignore_index)
            loss, *found = _statistics(z, target, settings, numbers)
            of_best = chosen.gather(1, best)
            behind = torch.where(chosen == of_best, 0, of_best - chosen)  # also if both are -inf
            nll[chunk] = (behind + loss.unsqueeze(1)).masked_fill_(rows.is_ignored.unsqueeze(1), 0)
            targets[chunk] = target
            for output, of_chunk in zip(outputs[1:], found):
                output[chunk] = of_chunk
            if argmax is not None:
                outputs[POSITIONS[settings.outputs][ARGMAX]][chunk] = argmax
            del z  # before the next chunk
    return nll, *outputs[1:], targets


def _best_class(z: Tensor, over_ranks: OverRanks | None) -> Tensor:
    """The class of each row's largest logit, the first of equal ones."""
    if over_ranks is None:
        return z.argmax(1)
    own = z.new_full((z.shape[0], 2), -math.inf, dtype=torch.float64)  # the logit and its class
    if z.shape[1]:
        places = z.argmax(1, keepdim=True)
        own = torch.cat([z.gather(1, places).double(), places.double() + over_ranks.place.first_class], 1)
    logits, classes = all_gather(own, group_of(over_ranks.shard)).wait().unbind(-1)
    is_best = (logits == logits.amax(0)) | logits.isnan()
    return torch.where(is_best, classes, math.inf).amin(0).to(torch.int64)


def _statistics(z: Tensor, target: Tensor, settings: Settings, numbers: tuple[float, ...]) -> list[Tensor]:
    """The losses of the rows of a chunk, and the outputs that the settings name."""
    options, over_ranks, outputs = (settings.ignore_index, NONE, numbers), settings.over_ranks, settings.outputs
    if over_ranks is None:
        found: list[Tensor] = call(settings.op, _forward, z, target, None, None, None, -1, *options, outputs)
        return found
    shard, place = over_ranks
    own = no_statistics(z.shape[0], z)
    if place.columns:
        has_mean = bool(outputs & MEAN_LOGIT)
        of_shard = (place.first_class, place.classes, has_mean)
        own = call(settings.op, _of_shard, z, target, None, -1, *options, *of_shard)
    statistics = statistics_of(gather_statistics(shard, own, target).wait())
    results: list[Tensor] = call(
        settings.op, merge, statistics, target, None, None, *options, place.classes, False, outputs
    )
    return results


def _logits_of(part: Tensor, product: Product | None, rows: Rows) -> Tensor:
    """The logits of a chunk. If each row has its temperature, the caller may write over them."""
    if product is not None and product.head.shape[0] == 0:
        return part.new_empty((part.shape[0], 0), dtype=accumulator_dtype(part.dtype))
    if product is not None:
        return logits_of(product._replace(hidden=counted(part, (~rows.is_ignored).unsqueeze(1))))
    return part if rows.temperature is None else part.to(accumulator_dtype(part.dtype), copy=True)


# -------------------------------------------------------------------------------------------------------- the gradients


class _Losses(torch.autograd.Function):
    """(settings, tokens and temperatures of the rows, logits or hidden states, head, bias) -> the results of
    _losses."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *arguments: Any) -> tuple[Tensor, ...]:
        rows, tensors = Rows(*arguments[:3]), arguments[3:]
        found = _losses(settings, rows, *tensors)
        entropy = pick(found, settings.outputs, ENTROPY)
        ctx.settings, ctx.is_used = settings, False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[each for each in found[1:] if settings.is_in_place or each is not entropy])
        ctx.save_for_backward(*arguments, found[0], found[-1], pick(found, settings.outputs, LSE), entropy)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        upstream = (grads[0], pick(grads, settings.outputs, ENTROPY))
        if not given(*upstream):
            return (None,) * 7
        _check_backward(settings, given(*upstream), ctx.is_used)
        *rows, x, head, bias, nll, targets, lse, entropy = ctx.saved_tensors
        refuse_zero3(settings.op, head=head, bias=bias)
        ctx.is_used, wanted = True, ctx.needs_input_grad[4:]

        def compute() -> tuple[Tensor | None, ...]:
            tensors = [None if each is None else each.detach() for each in (x, head, bias)]
            saved = (nll.detach(), targets, lse, None if entropy is None else entropy.detach())
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                return _gradients(settings, Rows(*rows), tensors, saved, upstream, wanted)

        return None, None, None, None, *gradients_of(settings.op, compute, *given(*upstream, x, head, bias))


def _check_backward(settings: Settings, upstream: list[Tensor], is_used: bool) -> None:
    op = settings.op
    if any(map(is_batched, upstream)):
        raise NotImplementedError(
            f"{op}: several tokens or a temperature for each row do not support a batch of gradients "
            "(is_grads_batched=True)"
        )
    option = "inplace_backward" if settings.is_in_place else "grad_weight_out"
    if torch.is_grad_enabled() and (settings.is_in_place or settings.of_head.grad_weight_out is not None):
        raise NotImplementedError(
            f"{op}: with {option} the gradient has no derivative (create_graph=True); leave it out"
        )
    if settings.is_in_place and is_used:
        raise RuntimeError(
            f"{op}: with inplace_backward there is one backward, and this is the second; leave inplace_backward out"
        )


def _gradients(
    settings: Settings,
    all_rows: Rows,
    tensors: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The wanted gradients of logits, or of hidden states, head and bias."""
    x, head, bias = tensors
    assert x is not None
    parts = _parts_of(settings, all_rows, x, head)
    if head is None:
        grad_x = x if settings.is_in_place else x.new_empty(x.shape)
        places = None if settings.is_in_place else grad_x.view(all_rows.tokens.shape[0], x.shape[-1])
        for chunk, part in parts:
            rows, place = all_rows.part(chunk), part if places is None else places[chunk]
            if rows.temperature is None:
                z = place if settings.is_in_place else place.copy_(part)
            else:
                z = _logits_of(part, None, rows)
            _gradient_(z, rows, settings, [_of(chunk, each) for each in (*saved, *upstream)])
            if rows.temperature is not None:
                place.copy_(z)
            del z  # before the next chunk
        return grad_x, None, None

    product, sums = Product(x, head, bias).as_multiplied(), accumulator_dtype(x.dtype)
    grad_hidden = torch.empty_like(x) if wanted[0] else None
    grad_bias = torch.zeros_like(bias, dtype=sums) if bias is not None and wanted[2] else None
    grad_head, out = None, settings.of_head.grad_weight_out
    if wanted[1]:
        grad_head = torch.zeros_like(head, dtype=settings.of_head.sums_of_head) if out is None else out
    for chunk, part in parts:
        rows = all_rows.part(chunk)
        z = _logits_of(part, product, rows)
        _gradient_(z, rows, settings, [_of(chunk, each) for each in (*saved, *upstream)])
        of_chunk = product._replace(hidden=counted(part, ~rows.is_ignored.unsqueeze(1)))
        grad_part = None if grad_hidden is None else torch.zeros_like(part, dtype=sums)
        add_gradients(z, of_chunk, (grad_part, grad_head, grad_bias))
        if grad_hidden is not None and grad_part is not None:
            grad_hidden[chunk] = sum_over_ranks(grad_part, x.dtype, settings.over_ranks)
        del z  # before the next chunk
    return (
        grad_hidden,
        None if grad_head is None or out is not None else grad_head.to(head.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _of(chunk: slice, of_rows: Tensor | None) -> Tensor | None:
    return None if of_rows is None else of_rows[chunk]


def _gradient_(z: Tensor, rows: Rows, settings: Settings, saved_and_upstream: Sequence[Tensor | None]) -> None:
    """Writes the gradient of the logits z over them. With g = dL/d(-log_prob) of each token, and p of all classes:

        dL/dz'_v = p_v * sum_k g_k - sum_k g_k [v == token k]

    The kernel computes the first term, as the gradient of lse, and the gradient of the entropy. At the tokens the two
    terms cancel, so the sum is written again there from -log_prob, which is exact.
    """
    nll, target, lse, entropy, grad_nll, grad_entropy = saved_and_upstream
    assert nll is not None and target is not None and lse is not None
    grads = torch.zeros_like(nll) if grad_nll is None else grad_nll
    total = grads.sum(1, keepdim=True)
    chosen, places, is_there = _chosen(z, rows, settings)
    tempering = _tempering(settings, rows)
    slope_of_chosen, slope = tempering.slope(chosen), None
    if rows.temperature is not None:
        slope = tempering.slope(z)
        tempering.apply_(z)
    of_shard = () if settings.over_ranks is None else settings.over_ranks.place[:2]
    if z.shape[1]:
        call(
            settings.op, _backward_in_place, lse.new_zeros(()).expand(lse.shape[:-1]), total.squeeze(1),
            None if grad_entropy is None else grad_entropy.contiguous(), z, target, None, None, lse,
            None if grad_entropy is None else entropy, None, None, -1, settings.ignore_index, NONE,
            _numbers_for_kernel(settings, rows), *of_shard,
        )  # fmt: skip
    if slope is not None:
        z.mul_(slope).masked_fill_(rows.is_ignored.unsqueeze(1), 0)  # NaN has the slope NaN
    of_token, p = _sums_of_equal(rows.tokens, grads), (-nll).exp()
    exact = torch.expm1(-nll).mul_(of_token).add_(p * (total - of_token))
    if grad_entropy is not None and entropy is not None:
        of_entropy = grad_entropy.unsqueeze(1) * p * (nll - entropy.unsqueeze(1))
        exact += of_entropy.masked_fill_(p == 0, 0)
    exact = exact.mul_(slope_of_chosen).masked_fill_(rows.is_ignored.unsqueeze(1), 0).to(z.dtype)
    if settings.over_ranks is not None and z.shape[1]:
        # A token of another rank repeats the write of the row's first token here, or writes the old value.
        first = is_there.to(torch.int8).argmax(1, keepdim=True)
        places = torch.where(is_there, places, places.gather(1, first))
        written = torch.where(is_there.gather(1, first), exact.gather(1, first), z.gather(1, places.gather(1, first)))
        exact = torch.where(is_there, exact, written)
    if z.shape[1]:
        z.scatter_(1, places, exact)


def _sums_of_equal(tokens: Tensor, numbers: Tensor) -> Tensor:
    """For each place, the sum over all places of its row with the same token, always in the same order."""
    if tokens.shape[1] == 1:
        return numbers
    return torch.where(tokens.unsqueeze(2) == tokens.unsqueeze(1), numbers.unsqueeze(1), 0).sum(2)
