"""Calls of log_prob and linear_log_prob: their arguments, their checks, and the choice between two implementations. One
is the loss of cross_entropy or linear_cross_entropy for each row, with the other sign; the other is the chunks of
_chunked/log_prob.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from eaves._arguments import named_outputs, output_names
from eaves._autograd.cross_entropy import log_probs_of_plain_call
from eaves._autograd.in_place import refuse_in_place
from eaves._calls.cross_entropy import CrossEntropyCall, loss_of_logits
from eaves._calls.linear_cross_entropy import (
    LinearCrossEntropyCall,
    loss_of_head,
    result_plainly,
    with_tensors_of_linear,
)
from eaves._chunked.head import OverRanks
from eaves._chunked.log_prob import HeadOptions, Rows, Settings, losses_of
from eaves._parallel.agreement import agree_on_placements, agreed_place, digest, dtypes
from eaves._parallel.collectives import AllRows
from eaves._parallel.dtensor import (
    Local,
    local_classes,
    local_rows,
    over_ranks,
    refuse_in_place_of_dtensor,
    told_to_ranks,
)
from eaves._parallel.shard import Shard, ShardArguments, check_reduce_dtype, shape_of_rows, shard_of, without_padding
from eaves._torch.checks import (
    accumulator_dtype,
    check_bool,
    check_dtype_of,
    check_tensor,
    explain,
    index_of,
    name_of,
    number_of,
)
from eaves._torch.head import (
    check_algorithm,
    check_dense,
    check_floating,
    check_grad_weight_out,
    check_overlap,
    checked_head,
    wide_head,
)
from eaves._torch.operator import are_defaults, is_eager
from eaves._torch.options import CLASS_DTYPES, RANGES, shape_of
from eaves._torch.outputs import LOG_PROB_OUTPUTS, LSE, SPLIT_LSE, LogProbOutput, log_prob_of, pick
from eaves._torch.rows import are_checked, check_classes, counts_of
from eaves._torch.temperature import divisors_of, temperature_of_rows
from eaves._torch.transforms import is_exporting, is_transforming, needs_autograd, uncompiled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogProbCall(NamedTuple):
    """The arguments of eaves.log_prob or of eaves.linear_log_prob, as they were passed."""

    op: str
    logits: Any  # None for linear_log_prob
    hidden: Any  # None for log_prob, and so are head and bias
    head: Any  # a Tensor or a torch.nn.Linear
    bias: Tensor | None
    tokens: Tensor
    temperature: Tensor | float | None = None
    softcap: float | None = None
    scale: float | None = None
    ignore_index: int = -100
    outputs: str | Sequence[str] = ()
    group: ProcessGroup | Shard | None = None
    classes: int | None = None
    inplace_backward: bool = False
    algorithm: str = "auto"
    workspace_bytes: int | None = None
    skip_ignored: bool = False
    grad_weight_dtype: torch.dtype | None = None
    grad_weight_out: Tensor | None = None
    keep_bytes: int | None = None

    @property
    def with_rows(self) -> tuple[str, Any]:
        """The tensor that has the rows: its name and the tensor."""
        return ("logits", self.logits) if self.op == "log_prob" else ("hidden", self.hidden)

    @property
    def with_classes(self) -> tuple[str, Any]:
        return ("logits", self.logits) if self.op == "log_prob" else ("head", self.head)

    def class_axis(self) -> int:
        return -1 if self.op == "log_prob" else 0

    def of_rank(self, cut: Local) -> LogProbCall:
        op, (name, _) = self.op, self.with_classes
        if name == "logits":
            refuse_in_place_of_dtensor(op, self.logits, self.inplace_backward)
        agree_on_placements(op, cut.group, hidden=self.hidden, tokens=self.tokens, temperature=self.temperature)
        call = self._replace(
            tokens=local_rows(op, "tokens", self.tokens, cut),
            temperature=local_rows(op, "temperature", self.temperature, cut),
        )
        if name == "logits":
            return call._replace(logits=cut.tensor)
        is_summed = shard_of(self.group).reduce_input_grad is False
        hidden, bias = local_rows(op, "hidden", self.hidden, cut, is_summed), local_classes(op, "bias", self.bias)
        return call._replace(hidden=hidden, head=cut.tensor, bias=bias)


def log_probs_of(call: LogProbCall) -> Tensor | LogProbOutput:
    if isinstance(call.head, torch.nn.Linear):
        call = with_tensors_of_linear(call.op, call, "head", "bias")
    (_, x), tokens = call.with_rows, call.tokens
    has_tokens = isinstance(tokens, Tensor) and isinstance(x, Tensor) and tokens.dim() == x.dim() != 0
    if has_tokens or isinstance(call.temperature, Tensor):
        return _of_several(call)
    if not torch.compiler.is_compiling() and are_defaults(call[6:], _PLAIN):
        found = _log_probs_plainly(call)
        if found is not None:
            return found
    return _of_loss(call)


_PLAIN = tuple(LogProbCall._field_defaults.values())  # the options of a plain call


def _log_probs_plainly(call: LogProbCall) -> Tensor | None:
    """The log-probabilities; None if the call is not a plain one (see _torch/operator.py)."""
    logits, tokens = call.logits, call.tokens
    if call.op != "log_prob":
        return result_plainly(call.op, call.hidden, call.head, tokens, call.bias)
    if not is_eager(logits, tokens) or tokens.is_floating_point():
        return None
    return log_probs_of_plain_call(logits, tokens)


def _of_loss(call: LogProbCall) -> Tensor | LogProbOutput:
    """The log-probabilities for one token in each row and one temperature: the loss of each row with the other sign."""
    op, (_, with_classes) = call.op, call.with_classes

    def checked() -> tuple[tuple[str, ...], dict[str, Any]]:
        names, tokens = output_names(op, call.outputs, LOG_PROB_OUTPUTS), call.tokens
        check_tensor(op, "tokens", tokens)
        if tokens.dtype not in CLASS_DTYPES:  # a loss would take probabilities
            raise ValueError(f"{op}: tokens has dtype {name_of(tokens.dtype)}, expected int64 or int32")
        scale, softcap = tempered(op, call.temperature, call.scale, call.softcap)
        return names, {
            "targets": tokens, "reduction": "none", "softcap": softcap, "scale": scale,
            "ignore_index": index_of(op, "ignore_index", call.ignore_index),
            "outputs": tuple("argmax" if name == "is_top1" else name for name in names), "group": call.group,
            "classes": call.classes, "op": op,
        }  # fmt: skip

    names, of_both = told_to_ranks(op, call.group, with_classes, checked)
    output: Any
    if op == "log_prob":
        output = loss_of_logits(
            CrossEntropyCall(logits=call.logits, inplace_backward=call.inplace_backward, class_dim=-1, **of_both)
        )
    else:
        output = loss_of_head(
            LinearCrossEntropyCall(
                hidden=call.hidden, head=call.head, bias=call.bias, algorithm=call.algorithm,
                workspace_bytes=call.workspace_bytes, skip_ignored=call.skip_ignored,
                grad_weight_dtype=call.grad_weight_dtype, grad_weight_out=call.grad_weight_out,
                keep_bytes=call.keep_bytes, **of_both,
            )
        )  # fmt: skip
    if not names:
        return log_prob_of(output)
    is_ignored = ~counts_of(call.tokens, call.ignore_index)
    loss, *others = output
    # cross_entropy returns these outputs for ignored rows too.
    found = [
        (each == call.tokens) & ~is_ignored if name == "is_top1" else each.masked_fill(is_ignored, 0)
        for name, each in zip(names, others)
    ]
    return named_outputs("LogProbOutput", ("log_prob", *names), (log_prob_of(loss), *found))  # type: ignore[no-any-return]


def tempered(
    op: str, temperature: object, scale: float | None, softcap: float | None
) -> tuple[float | None, float | None]:
    """scale and softcap of z' divided by the temperature: softcap / T * tanh((scale / T) * z / (softcap / T))."""
    if temperature is None:
        return scale, softcap
    divisor = number_of(op, "temperature", temperature, *RANGES["scale"])

    def divided(name: str, number: float) -> float:
        quotient = number_of(op, name, number, *RANGES[name]) / divisor
        return number_of(op, f"{name} / temperature", quotient, *RANGES[name])

    return divided("scale", 1.0 if scale is None else scale), None if softcap is None else divided("softcap", softcap)


# ------------------------------------------- several tokens or a temperature for each row: see _chunked/log_prob.py


_OF_SEVERAL = "with several tokens or a temperature for each row "


def _of_several(call: LogProbCall) -> Tensor | LogProbOutput:
    op, with_rows, with_classes = call.op, call.with_rows, call.with_classes
    if not isinstance(with_classes[1], Tensor):
        told_to_ranks(op, call.group, None, lambda: check_tensor(op, *with_classes))
    if is_exporting() or is_transforming():
        raise NotImplementedError(
            f"{op}: {_OF_SEVERAL}this operator does not work inside of torch.export, torch.vmap and torch.func"
        )
    try:
        found: Tensor | LogProbOutput
        found = over_ranks(call, lambda *of_rank: uncompiled(op, _computed, _OF_SEVERAL)(*of_rank))
        return found
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        explain(op, error, **dict([with_classes, with_rows]))
        raise


def _computed(call: LogProbCall, shard: ShardArguments | None) -> Tensor | LogProbOutput:
    op, (name, x), head, bias, tokens, temperature = call.op, call.with_rows, *call[3:7]
    names, outputs = output_names(op, call.outputs, LOG_PROB_OUTPUTS), LSE | SPLIT_LSE
    for each in names:
        outputs |= LOG_PROB_OUTPUTS[each]
    check_bool(op, "inplace_backward", call.inplace_backward)
    ignore_index = index_of(op, "ignore_index", call.ignore_index)
    check_tensor(op, name, x)
    passed, of_head = x, HeadOptions()
    if head is None:
        _check_logits(op, x, shard is not None)
        classes = x.shape[-1]
        if call.inplace_backward and needs_autograd(x):
            refuse_in_place(op, x)
    else:
        x, head, bias = checked_head(op, x, head, bias, dense=("hidden", x), may_be_empty=shard is not None)
        x = x.reshape(-1, x.shape[-1])
        classes = head.shape[0]
        of_head = _head_options(call, x, head)
    rows = passed.shape[:-1] if shard is None else shape_of_rows(shard, passed)
    _check_tokens(op, tokens, name, passed, rows)
    if isinstance(temperature, Tensor):
        temperature = temperature_of_rows(op, temperature, rows, name, passed)
    divisor = None if isinstance(temperature, Tensor) else temperature
    scale, softcap = tempered(op, 1.0 if divisor is None else divisor, call.scale, call.softcap)
    assert scale is not None

    ranks, given_classes = None, call.classes
    if shard is not None:
        check_reduce_dtype(op, shard, x.dtype)
        of_rows = temperature if isinstance(temperature, Tensor) else None
        facts = {
            "which tensors require a gradient": [each is not None and needs_autograd(each) for each in (x, head, bias)],
            f"the shape of {name}": list(passed.shape[:-1] if head is None else passed.shape),
            "the shape of tokens": list(tokens.shape),
            "tokens": digest(tokens),
            "temperature": digest(of_rows),
            **dtypes(op, **{name: x}, head=head, bias=bias, temperature=of_rows),
            "scale and softcap": [scale, softcap],
            "ignore_index": ignore_index,
            "workspace_bytes": of_head.workspace_bytes,
            "skip_ignored": of_head.skip_ignored,
            "which outputs are computed": outputs,
        }
        ranks = OverRanks(shard._replace(sequence_parallel=False), agreed_place(shard, classes, facts))
        if shard.sequence_parallel:
            x = cast("Tensor", AllRows.apply(x, shard))  # type: ignore[no-untyped-call]
        given_classes = ranks.place.columns
    elif given_classes is not None:
        without_padding(op, given_classes, x.movedim(-1, 0) if head is None else head)
    if given_classes is not None:
        if head is None:
            x = x[..., :given_classes]
        else:
            head, bias = head[:given_classes], None if bias is None else bias[:given_classes]
        if of_head.grad_weight_out is not None:
            of_head = of_head._replace(grad_weight_out=of_head.grad_weight_out[:given_classes])
        classes = given_classes if ranks is None else ranks.place.classes

    chosen = tokens.to(torch.int64).reshape(math.prod(rows), 1 if tokens.dim() == len(rows) else tokens.shape[-1])
    is_absent = chosen == ignore_index
    is_ignored = is_absent.all(1)
    if are_checked(tokens):
        check_classes(op, "tokens", tokens, classes, ignore_index)
    divisors = None
    if isinstance(temperature, Tensor):
        passed_temperature = cast("Tensor", call.temperature)
        divisors = divisors_of(op, temperature, passed_temperature, is_ignored, accumulator_dtype(x.dtype))
    settings = Settings(op, scale, softcap, ignore_index, outputs, call.inplace_backward, of_head, ranks)
    with torch.autocast(x.device.type, enabled=False):
        found = losses_of(settings, Rows.of(chosen, is_absent, divisors), x, head, bias)
        # Ignored places get 0; a minus would make it -0.
        log_prob = 0 - found[0][:, : chosen.shape[1]].masked_fill(is_absent, 0).view(tokens.shape)
        if not names:
            return log_prob
        found_outputs = []
        for name in names:
            each = pick(found, outputs, LOG_PROB_OUTPUTS[name])
            if name == "is_top1":
                found_outputs.append(((each.unsqueeze(1) == chosen) & ~is_absent).view(tokens.shape))
            else:
                found_outputs.append(each.masked_fill(is_ignored, 0).view(rows))
    return named_outputs("LogProbOutput", ("log_prob", *names), (log_prob, *found_outputs))  # type: ignore[no-any-return]


def _check_logits(op: str, logits: Tensor, may_be_empty: bool) -> None:
    check_floating(op, "logits", logits, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits has no axes, expected at least the axis of the classes")
    if logits.shape[-1] == 0 and not may_be_empty:
        raise ValueError(f"{op}: logits has shape {shape_of(logits)}, expected at least one class")


def _head_options(call: LogProbCall, hidden: Tensor, head: Tensor) -> HeadOptions:
    """The options that only linear_log_prob has."""
    op = call.op
    check_algorithm(op, call.algorithm, call.workspace_bytes, call.keep_bytes)
    if call.algorithm in ("speed", "keep"):
        raise NotImplementedError(
            f'{op}: algorithm is "{call.algorithm}", which needs one token for each row and a number as temperature; '
            'expected "auto", "memory" or "recompute"'
        )
    if call.keep_bytes is not None:
        raise NotImplementedError(
            f"{op}: keep_bytes is given, which needs one token for each row and a number as temperature; leave it out"
        )
    check_bool(op, "skip_ignored", call.skip_ignored)
    sums, out = accumulator_dtype(hidden.dtype), call.grad_weight_out
    if out is not None:
        check_grad_weight_out(op, out, hidden.dtype, head, call.grad_weight_dtype, sums, False)
        check_overlap(op, out, call._replace(grad_weight_out=None)._asdict())
        sums = out.dtype
    elif not wide_head(op, hidden.dtype, head.dtype, call.grad_weight_dtype):
        sums = hidden.dtype
    return HeadOptions(call.workspace_bytes, call.skip_ignored, sums, out)


def _check_tokens(op: str, tokens: Tensor, name: str, x: Tensor, rows: tuple[int, ...]) -> None:
    check_dense(op, "tokens", tokens, name, x)
    check_dtype_of(op, "tokens", tokens, CLASS_DTYPES, "classes")
    if tokens.shape != rows and (tokens.dim() != x.dim() or tokens.shape[:-1] != rows):
        several = ", ".join([*map(str, rows), "K"])
        raise ValueError(
            f"{op}: tokens has shape {shape_of(tokens)}, expected {list(rows)} or [{several}] (one or K per row of "
            f"{name} {shape_of(x)})"
        )
