"""The arguments of linear_kl_div, and the checks of the teacher and of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from eaves._arguments import check_teacher_options, check_temperature_of_top_k
from eaves._chunked.head import skips_ignored
from eaves._chunked.kl_div import OP, Rows, Settings
from eaves._parallel.agreement import agree_on_placements
from eaves._parallel.dtensor import Local, local_classes, local_rows, local_targets
from eaves._parallel.shard import Shard, ShardArguments, shard_of, without_padding
from eaves._torch.checks import (
    check_beside,
    check_dtype_of,
    check_shape,
    index_of,
    number_of,
    refuse_gradient,
)
from eaves._torch.head import (
    check_dense,
    check_floating,
    checked_head,
)
from eaves._torch.options import CLASS_DTYPES, RANGES, row_weight_of, shape_of
from eaves._torch.rows import are_checked, check_classes, counts_of
from eaves._torch.temperature import divisors_of, temperature_of_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STUDENT = ("hidden", "head", "bias")
TEACHER = ("teacher_hidden", "teacher_head", "teacher_bias")


class KlDivCall(NamedTuple):
    """The arguments of eaves.linear_kl_div, as they were passed."""

    hidden: Tensor
    head: Any  # a Tensor or a torch.nn.Linear
    teacher_hidden: Tensor | None
    teacher_head: Any
    teacher_logits: Tensor | None
    teacher_log_probs: Tensor | None
    teacher_probs: Tensor | None
    teacher_tokens: Tensor | None
    teacher_rest: str
    targets: Tensor | None
    bias: Tensor | None
    teacher_bias: Tensor | None
    scale: float | None
    softcap: float | None
    teacher_scale: float | None
    teacher_softcap: float | None
    temperature: Tensor | float | None
    row_weight: Tensor | None
    skip_ignored: bool
    ignore_index: int
    reduction: str
    normalizer: Tensor | float | None
    divergence: str
    beta: float
    hard_weight: float | None
    outputs: str | Sequence[str]
    group: ProcessGroup | Shard | None
    classes: int | None
    grad_weight_out: Tensor | None
    workspace_bytes: int | None

    @property
    def op(self) -> str:
        return OP

    @property
    def with_classes(self) -> tuple[str, Any]:
        return "head", self.head

    def class_axis(self) -> int:
        return 0

    def of_rank(self, cut: Local) -> KlDivCall:
        is_summed = shard_of(self.group).reduce_input_grad is False
        of_rows = {
            name: getattr(self, name)
            for name in ("hidden", "teacher_hidden", "targets", "temperature", "row_weight", "teacher_tokens")
        }
        of_classes = {name: getattr(self, name) for name in ("teacher_logits", "teacher_log_probs", "teacher_probs")}
        if self.teacher_tokens is not None:
            of_rows["teacher_log_probs"] = of_classes.pop("teacher_log_probs")
        agree_on_placements(OP, cut.group, **of_rows, **of_classes)
        return self._replace(
            head=cut.tensor,
            **{name: local_rows(OP, name, each, cut, is_summed and name == "hidden") for name, each in of_rows.items()},
            **{name: local_targets(OP, each, cut, name=name) for name, each in of_classes.items()},
            **{name: local_classes(OP, name, getattr(self, name)) for name in ("bias", "teacher_head", "teacher_bias")},
        )


# ---------------------------------------------------------------------------------------------------------- the teacher


def teacher_of(
    call: KlDivCall, classes: int, rows: Sequence[int], shard: ShardArguments | None
) -> tuple[str, tuple[Tensor | None, ...]]:
    """The kind of the teacher, and its tensors as kl_div.outputs_of takes them."""
    named = {"head": call.teacher_hidden, "logits": call.teacher_logits, "log_probs": call.teacher_log_probs}
    named["probs"] = call.teacher_probs
    kinds = [kind for kind, tensor in named.items() if tensor is not None]
    if len(kinds) != 1 or (kinds[0] == "head") != (call.teacher_head is not None):
        raise ValueError(
            f"{OP}: the teacher is given by {_and(kinds)}, expected one of teacher_hidden with teacher_head, "
            "teacher_logits, teacher_log_probs and teacher_probs"
        )
    kind = kinds[0]
    name, given = "teacher_hidden" if kind == "head" else f"teacher_{kind}", named[kind]
    of_teacher = {"teacher_scale": call.teacher_scale, "teacher_softcap": call.teacher_softcap}
    check_teacher_options(OP, name, teacher_bias=call.teacher_bias, **of_teacher)
    if kind == "head":
        return kind, _product_of_teacher(call, classes, rows, shard)
    assert given is not None
    check_floating(OP, name, given, "hidden", call.hidden)
    refuse_gradient(OP, name, given)
    tokens = call.teacher_tokens
    if tokens is None:
        why = f"rows as hidden {shape_of(call.hidden)}, classes as head {shape_of(call.head)}"
        check_shape(OP, name, given, [*rows, classes], why + _PADDING)
        given = given.detach()
        try:
            return kind, (given.view(math.prod(rows), classes),)
        except RuntimeError:  # the strides allow no view: each chunk gathers its rows
            return kind, (given,)
    if kind != "log_probs":
        raise ValueError(f"{OP}: teacher_tokens is given beside {name}, expected teacher_log_probs")
    check_dense(OP, "teacher_tokens", tokens, "hidden", call.hidden)
    check_dtype_of(OP, "teacher_tokens", tokens, CLASS_DTYPES, "classes")
    if tokens.dim() != len(rows) + 1 or tokens.shape[:-1] != tuple(rows) or tokens.shape[-1] == 0:
        several = ", ".join([*map(str, rows), "K"])
        raise ValueError(
            f"{OP}: teacher_tokens has shape {shape_of(tokens)}, expected [{several}], K tokens for each row of hidden "
            f"{shape_of(call.hidden)}"
        )
    check_shape(OP, name, given, tokens.shape, "as teacher_tokens")
    is_one = call.temperature is None or (
        not isinstance(call.temperature, Tensor)
        and number_of(OP, "temperature", call.temperature, *RANGES["scale"]) == 1
    )
    check_temperature_of_top_k(OP, call.teacher_rest, is_one)
    shape = (math.prod(rows), tokens.shape[-1])
    return "top_k", (tokens.to(torch.int64).reshape(shape), given.detach().reshape(shape))


_PADDING = "; if one vocabulary is the other one plus padding, pass classes=, the number of classes that both have"


def _product_of_teacher(
    call: KlDivCall, classes: int, rows: Sequence[int], shard: ShardArguments | None
) -> tuple[Tensor | None, ...]:
    hidden, head, bias = checked_head(
        OP, cast("Tensor", call.teacher_hidden), call.teacher_head, call.teacher_bias, TEACHER,
        ("hidden", call.hidden), shard is not None,
    )  # fmt: skip
    own = call.hidden.shape[:-1]
    why = f"rows as hidden {shape_of(call.hidden)}"
    check_shape(OP, "teacher_hidden", hidden, [*own, hidden.shape[-1]], why)
    if head.shape[0] != classes:
        raise ValueError(
            f"{OP}: teacher_head has shape {shape_of(head)}, expected [{classes}, {hidden.shape[-1]}] (classes as head "
            f"{shape_of(call.head)}){_PADDING}"
        )
    refuse_gradient(OP, "teacher_hidden", hidden)
    tensors = (hidden.reshape(-1, hidden.shape[-1]), head, bias)
    return tuple(None if each is None else each.detach() for each in tensors)


def _and(names: Sequence[str]) -> str:
    named = [f"teacher_{'hidden' if name == 'head' else name}" for name in names]
    return " and ".join(named) or "nothing"


def without_padding_of(call: KlDivCall, classes: int) -> KlDivCall:
    of_values = ("teacher_logits", "teacher_probs", *(["teacher_log_probs"] if call.teacher_tokens is None else []))
    first = ("head", "bias", "teacher_head", "teacher_bias", "grad_weight_out")
    named = {name: getattr(call, name) for name in first}
    for name in of_values:
        values = getattr(call, name)
        has_axes = isinstance(values, Tensor) and values.dim() != 0
        named[name] = values.movedim(-1, 0) if has_axes else values
    cut = dict(zip(named, without_padding(OP, classes, *named.values())))
    for name in of_values:
        if isinstance(cut[name], Tensor):
            cut[name] = cut[name].movedim(0, -1)
    return call._replace(**cut)


# ------------------------------------------------------------------------------------------------------------- the rows


def rows_of(call: KlDivCall, hidden: Tensor, rows: Sequence[int], dtype: torch.dtype) -> tuple[Tensor | None, Rows]:
    """Which rows count, [rows], and the arguments of each row."""
    ignore_index = index_of(OP, "ignore_index", call.ignore_index)
    counts = targets = weight = temperature = kept = None
    if call.targets is not None:
        check_beside(OP, "targets", call.targets, "hidden", hidden)
        check_dtype_of(OP, "targets", call.targets, CLASS_DTYPES, "classes")
        check_shape(OP, "targets", call.targets, rows, f"one per row of hidden {shape_of(call.hidden)}")
        counts = counts_of(call.targets, ignore_index).flatten()
    if call.row_weight is not None:
        weight = row_weight_of(OP, call.row_weight, call.hidden, rows, dtype).flatten()
        counts = weight != 0 if counts is None else counts & (weight != 0)
        weight = weight.masked_fill(~counts, 0).unsqueeze(1)
    if call.targets is not None and counts is not None:
        targets = call.targets.flatten().to(torch.int64).masked_fill(~counts, 0)
    if isinstance(call.temperature, Tensor):
        in_rows = temperature_of_rows(OP, call.temperature, rows, "hidden", call.hidden)
        is_ignored = torch.zeros_like(in_rows, dtype=torch.bool) if counts is None else ~counts
        temperature = divisors_of(OP, in_rows, call.temperature, is_ignored.flatten(), dtype).unsqueeze(1)
    if counts is not None and skips_ignored(hidden, call.skip_ignored):
        kept = counts.nonzero().squeeze(1)
        if kept.shape[0] == counts.shape[0]:
            kept = None
    mask = counts.unsqueeze(1) if counts is not None and kept is None else None
    return counts, Rows(mask, kept, temperature, weight, targets)


def check_values(call: KlDivCall, settings: Settings, of_rows: Rows, classes: int) -> None:
    """Checks the classes that the host can read: the targets of the hard loss, and the tokens of a top K in rows that
    count."""
    if settings.of_rows.has_hard_loss and call.targets is not None and are_checked(call.targets):
        check_classes(OP, "targets", call.targets, classes, call.ignore_index)
    tokens = call.teacher_tokens
    if tokens is not None and are_checked(tokens) and call.teacher_log_probs is not None:
        is_padding = (tokens < 0) | (call.teacher_log_probs == -math.inf)
        if of_rows.counts is not None:
            is_padding |= ~of_rows.counts.view(*tokens.shape[:-1], 1)
        elif of_rows.kept is not None:
            is_ignored = torch.ones_like(tokens[..., 0], dtype=torch.bool).flatten().index_fill(0, of_rows.kept, False)
            is_padding |= is_ignored.view(*tokens.shape[:-1], 1)
        listed = tokens.to(torch.int64).masked_fill(is_padding, -1)
        check_classes(OP, "teacher_tokens", listed, classes, -1)
        ordered = listed.sort(-1).values
        is_twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if is_twice.any():
            *row, place = is_twice.nonzero()[0].tolist()
            token = ordered[(*row, place)].item()
            raise ValueError(f"{OP}: teacher_tokens{row or ''} has the token {token} twice, expected each once")
