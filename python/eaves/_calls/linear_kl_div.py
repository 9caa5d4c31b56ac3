"""A call of linear_kl_div: its arguments, their checks, and the choice of its implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from eaves._arguments import KL_DIV_OUTPUTS, named_outputs, output_names, reduction_of
from eaves._calls.kl_div_arguments import (
    STUDENT,
    TEACHER,
    KlDivCall,
    check_values,
    rows_of,
    teacher_of,
    without_padding_of,
)
from eaves._calls.linear_cross_entropy import with_tensors_of_linear
from eaves._chunked.distributions import RESTS, DivergenceSettings
from eaves._chunked.divergence import DIVERGENCES, has_kernels
from eaves._chunked.head import OverRanks, chunk_size
from eaves._chunked.kl_div import OP, Settings, outputs_of
from eaves._parallel.agreement import agreed_place, digest, dtypes
from eaves._parallel.collectives import AllRows
from eaves._parallel.dtensor import over_ranks
from eaves._parallel.fully_shard import needs_whole_head, with_whole_head
from eaves._parallel.shard import ShardArguments, check_reduce_dtype, shape_of_rows, shard_of
from eaves._torch.checks import accumulator_dtype, check_bool, explain, number_of
from eaves._torch.head import Product, check_grad_weight_out, check_overlap, checked_head, workspace_of
from eaves._torch.options import RANGES, normalizer_of
from eaves._torch.outputs import MEAN, NONE, KlDivOutput
from eaves._torch.rows import divisor_of
from eaves._torch.transforms import is_exporting, is_transforming, needs_autograd, uncompiled


def divergence_of(call: KlDivCall) -> Tensor | KlDivOutput:
    for names in (STUDENT, TEACHER):
        if isinstance(getattr(call, names[1]), torch.nn.Linear):
            call = with_tensors_of_linear(OP, call, *names[1:])
    group, *_ = shard = shard_of(call.group)
    if needs_whole_head(call.teacher_head, group, shard.sequence_parallel):
        return with_whole_head(OP, divergence_of, call, TEACHER)
    if is_exporting() or is_transforming():
        raise NotImplementedError(
            f"{OP}: this operator does not work inside of torch.export, torch.vmap and torch.func"
        )
    try:
        found: Tensor | KlDivOutput = over_ranks(call, lambda *of_rank: uncompiled(OP, _computed)(*of_rank))
        return found
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        explain(OP, error, head=call.head, teacher_head=call.teacher_head)
        raise


def _computed(call: KlDivCall, shard: ShardArguments | None) -> Tensor | KlDivOutput:
    names = output_names(OP, call.outputs, KL_DIV_OUTPUTS)
    if call.classes is not None and shard is None:
        call = without_padding_of(call, call.classes)
    hidden, head, bias = checked_head(
        OP, call.hidden, call.head, call.bias, dense=("hidden", call.hidden), may_be_empty=shard is not None
    )
    rows = tuple(hidden.shape[:-1]) if shard is None else shape_of_rows(shard, hidden)
    student = Product(hidden.reshape(-1, hidden.shape[-1]), head, bias)
    kind, teacher = teacher_of(call, head.shape[0], rows, shard)
    dtype = accumulator_dtype(hidden.dtype)
    mode = reduction_of(OP, call.reduction)
    normalizer = call.normalizer
    if normalizer is not None:
        normalizer = normalizer_of(OP, normalizer, mode, dtype, hidden.device)
        # The core's check, which this loss does not call. The host does not know the value of a normalizer on a GPU.
        if normalizer.device.type == "cpu" and normalizer.item() < 0:
            raise ValueError(f"{OP}: normalizer is {normalizer.item()}, expected a number that is not negative")
    settings = _settings(call, names, kind, mode)
    counts, of_rows = rows_of(call, hidden, rows, dtype)
    if settings.grad_weight_out is not None:
        check_grad_weight_out(OP, settings.grad_weight_out, hidden.dtype, head, None, dtype, False)
        check_overlap(OP, settings.grad_weight_out, call._replace(grad_weight_out=None)._asdict())
    classes = most = head.shape[0]
    if shard is not None:
        check_reduce_dtype(OP, shard, hidden.dtype)
        facts = _facts(call, settings, student, teacher, rows)
        place = agreed_place(shard, head.shape[0], facts)
        if shard.sequence_parallel:
            student = student._replace(hidden=_all_rows(student.hidden, shard))
            if kind == "head":
                teacher = (_all_rows(cast("Tensor", teacher[0]), shard), *teacher[1:])
        student, teacher, out = _columns_of(place.columns, student, teacher, settings)
        ranks = OverRanks(shard._replace(sequence_parallel=False), place)
        settings = settings._replace(
            of_rows=settings.of_rows._replace(over_ranks=ranks), grad_weight_out=out,
        )  # fmt: skip
        classes, most = place.classes, max(1, place.most)
    check_values(call, settings, of_rows, classes)
    settings = _with_sizes(settings, call, student, teacher, most)
    found = outputs_of(settings, student, teacher, of_rows)
    loss = found.loss
    if mode == MEAN:
        weights = counts if of_rows.weight is None else of_rows.weight.squeeze(1)
        loss = _mean(loss, normalizer, weights, rows)
    elif mode == NONE:
        loss = loss.view(rows)
    if not names:
        return loss
    outputs = [getattr(found, name).view(rows) for name in names]
    return named_outputs("KlDivOutput", ("loss", *names), (loss, *outputs))  # type: ignore[no-any-return]


def _columns_of(
    columns: int, student: Product, teacher: tuple[Tensor | None, ...], settings: Settings
) -> tuple[Product, tuple[Tensor | None, ...], Tensor | None]:
    """The tensors without the padding of this rank's piece."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:columns]

    out = cut(settings.grad_weight_out)
    student = Product(student.hidden, student.head[:columns], cut(student.bias))
    if settings.teacher == "head":
        teacher = (teacher[0], *map(cut, teacher[1:]))
    elif settings.teacher != "top_k":
        teacher = (cast("Tensor", teacher[0])[..., :columns],)
    return student, teacher, out


def _all_rows(own: Tensor, shard: ShardArguments) -> Tensor:
    return cast("Tensor", AllRows.apply(own, shard))  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------- settings and ranks


def _settings(call: KlDivCall, names: Sequence[str], kind: str, mode: int) -> Settings:
    divergence, rest = call.divergence, call.teacher_rest
    for name, value, known in (("divergence", divergence, DIVERGENCES), ("teacher_rest", rest, RESTS)):
        if not isinstance(value, str) or value not in known:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{OP}: {name} is {value!r}, expected one of {', '.join(known)}")
    beta = number_of(OP, "beta", call.beta, 0, 1, "a number between 0 and 1")
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse" if beta else "forward"
    if kind == "top_k" and rest == "zero" and divergence == "reverse":
        raise ValueError(
            f'{OP}: divergence is "reverse", which is infinite if the teacher is 0 outside of its top K; expected '
            'teacher_rest="class" or "renormalize"'
        )
    if kind == "top_k" and "teacher_lse" in names:
        raise ValueError(f'{OP}: outputs has "teacher_lse", which a top K does not determine; leave it out')

    def number(name: str) -> float | None:
        value = getattr(call, name)
        return None if value is None else number_of(OP, name, value, *RANGES[name.removeprefix("teacher_")])

    temperature, hard_weight = call.temperature, call.hard_weight
    if not isinstance(temperature, Tensor):
        temperature = 1.0 if temperature is None else number_of(OP, "temperature", temperature, *RANGES["scale"])
    if hard_weight is not None:
        largest = torch.finfo(torch.float32).max
        hard_weight = number_of(OP, "hard_weight", hard_weight, 0, largest, "a number that is not negative, or None")
    has_hard_loss = hard_weight is not None or "hard_loss" in names
    if has_hard_loss and call.targets is None:
        asks = 'outputs has "hard_loss"' if hard_weight is None else "hard_weight is given"
        raise ValueError(f"{OP}: {asks}, but no targets; pass a class for each row")
    check_bool(OP, "skip_ignored", call.skip_ignored)
    return Settings(
        DivergenceSettings(divergence, beta, "entropy" in names, has_hard_loss), kind, rest,
        (number("scale") or 1.0, number("teacher_scale") or 1.0), (number("softcap"), number("teacher_softcap")),
        temperature if isinstance(temperature, float) else 1.0, hard_weight, mode, 1, 1, call.grad_weight_out,
    )  # fmt: skip


def _facts(
    call: KlDivCall, settings: Settings, student: Product, teacher: tuple[Tensor | None, ...], rows: Sequence[int]
) -> dict[str, object]:
    """The facts that have to be the same on all ranks."""
    temperature = call.temperature if isinstance(call.temperature, Tensor) else None
    normalizer = call.normalizer if isinstance(call.normalizer, Tensor) else None
    is_top_k = settings.teacher == "top_k"
    return {
        "which tensors require a gradient": [each is not None and needs_autograd(each) for each in student],
        "the shape of hidden": list(rows),
        "the kind of teacher": settings.teacher,
        "teacher_tokens": digest(call.teacher_tokens),
        "teacher_log_probs": digest(call.teacher_log_probs) if is_top_k else None,
        "targets": digest(call.targets),
        "row_weight": digest(call.row_weight),
        "temperature": digest(temperature) or settings.temperature,
        "normalizer": digest(normalizer) or str(call.normalizer),
        **dtypes(OP, hidden=student.hidden, bias=student.bias, teacher=teacher[0], row_weight=call.row_weight),
        "divergence, beta and teacher_rest": [*settings.of_rows[:2], settings.teacher_rest],
        "scales and softcaps": [*settings.scales, *settings.softcaps],
        "hard_weight": settings.hard_weight,
        "ignore_index": call.ignore_index,
        "reduction": call.reduction,
        "workspace_bytes": call.workspace_bytes,
        "skip_ignored": call.skip_ignored,
        "which outputs are computed": settings.of_rows[2:4],
    }


def _with_sizes(
    settings: Settings, call: KlDivCall, student: Product, teacher: tuple[Tensor | None, ...], classes: int
) -> Settings:
    """The settings with chunks as large as the workspace allows. `classes` is the most that a rank has."""
    hidden, kind = student.hidden, settings.teacher
    sums, bits = accumulator_dtype(hidden.dtype).itemsize, hidden.dtype.itemsize
    # The tensors of a chunk: both logits if they are computed here, both log-probabilities, one further tensor (three
    # for "jsd"), one for a bias behind a soft cap, and a mark.
    tensors = {"head": 5, "top_k": 3}.get(kind, 4)
    if settings.of_rows.divergence == "jsd" and kind != "top_k":
        tensors += 2
    if student.bias is not None and settings.softcaps[0] is not None:
        tensors += 1
    of_class = tensors * sums + 1
    is_double = teacher[0] is not None and teacher[0].dtype == torch.float64
    if has_kernels(hidden, settings.of_rows, kind == "top_k") and not is_double:
        of_class = (2 if kind == "head" else 1) * sums
    of_row = 0 if kind != "top_k" or teacher[0] is None else 20 * sums * teacher[0].shape[1]
    limit, head = workspace_of(OP, call.workspace_bytes, hidden.device), student.head
    # Chunks have one size with a gradient and without, so the loss has the same bits.
    is_rounded = bits < sums
    if is_rounded and hidden.is_cuda and call.workspace_bytes is None:
        limit = max(limit, classes * head.shape[1] * bits)  # in the end the rounded gradient of the head takes as much
    # On a GPU the gradient in 16 bits waits for two chunks more: the product that adds it to the gradient of the head
    # reads and writes that as a whole.
    chunks = 3 if is_rounded and hidden.is_cuda else 1
    bytes_of_class = of_class + chunks * bits if is_rounded else of_class
    chunk = chunk_size(hidden.shape[0], max(1, of_row + classes * bytes_of_class), limit)
    if hidden.is_cuda and chunk > _TILE:
        chunk = chunk // _TILE * _TILE
    return settings._replace(chunk=chunk, group=chunks * chunk)


_TILE = 128  # rows of a product's tile


def _mean(total: Tensor, normalizer: Tensor | None, weights: Tensor | None, rows: Sequence[int]) -> Tensor:
    """The sum over the rows divided by the normalizer or the weights. A sum divided by 0 is infinite, but 0 / 0 is 0,
    as in the other losses, and the gradient is 0."""
    if normalizer is None and weights is None:
        return total * (1 / max(1, math.prod(rows)))
    if normalizer is not None:
        divisor = normalizer.reshape(()).to(total.dtype)
    else:
        assert weights is not None
        divisor = divisor_of(weights, None, total.dtype)
    is_zero = divisor == 0
    mean = torch.where(is_zero, 0, total * (1 / divisor.masked_fill(is_zero, 1)))
    return torch.where(is_zero & (total.detach() != 0), math.inf, mean)
