"""Log-probabilities of chosen tokens, of logits and of a model's head: the losses of cross_entropy and
linear_cross_entropy for each row, with the other sign, as post-training asks for them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, cast, overload

import torch
from torch import Tensor

from eaves._cross_entropy import cross_entropy, refuse_in_place
from eaves._fully_shard import needs_whole_head, with_whole_head
from eaves._head_chunks import check_dense, check_floating, checked_head
from eaves._linear_cross_entropy import (
    check_algorithm,
    check_grad_weight_out,
    check_overlap,
    linear_cross_entropy,
    wide_weight,
)
from eaves._log_prob_chunks import HeadOptions, OverRanks, Settings, has_values, losses_of, rows_of
from eaves._loss import (
    ARGMAX,
    CLASS_DTYPES,
    ENTROPY,
    LSE,
    MEAN_LOGIT,
    RANGES,
    SPLIT_LSE,
    SUM_SQ,
    CrossEntropyOutput,
    pick,
    refuse_unknown,
    shape_of,
)
from eaves._operator import (
    accumulator_dtype,
    check_bool,
    check_dtype_of,
    check_shape,
    check_tensor,
    explain,
    index_of,
    is_exporting,
    is_transforming,
    name_of,
    needs_autograd,
    number_of,
    refuse_gradient,
    uncompiled,
)
from eaves._ranks import (
    Local,
    Shard,
    agree_on_placements,
    agreed_place,
    all_gather,
    check_reduce_dtype,
    digest,
    dtypes,
    group_of,
    is_distributed,
    local_classes,
    local_rows,
    local_shard,
    refuse_in_place_of_dtensor,
    refuse_without_group,
    shard_of,
    told,
    with_agreement,
    without_padding,
)
from eaves._ranks import rows_of as rows_of_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypedDict, Unpack

    from eaves._loss import GroupKeywords, HeadGroupKeywords

    class _OfBoth(TypedDict, total=False):
        temperature: Tensor | float | None
        softcap: float | None
        scale: float | None
        ignore_index: int

    class _Keywords(_OfBoth, GroupKeywords, total=False):
        inplace_backward: bool

    class _LinearKeywords(_OfBoth, HeadGroupKeywords, total=False):
        bias: Tensor | None
        algorithm: str
        workspace_bytes: int | None
        skip_ignored: bool
        grad_weight_dtype: torch.dtype | None
        grad_weight_out: Tensor | None


class LogProbOutput(NamedTuple):
    """What eaves.log_prob and eaves.linear_log_prob give with any of their return_* arguments; None for what was not
    asked for."""

    log_prob: Tensor
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    sum_sq: Tensor | None = None
    mean_logit: Tensor | None = None


@overload
def log_prob(
    logits: Tensor,
    tokens: Tensor,
    *,
    return_entropy: Literal[False] = False,
    return_top1: Literal[False] = False,
    return_sum_sq: Literal[False] = False,
    return_mean_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def log_prob(
    logits: Tensor,
    tokens: Tensor,
    *,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    **keywords: Unpack[_Keywords],
) -> LogProbOutput: ...


def log_prob(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    inplace_backward: bool = False,
    group: ProcessGroup | None = None,
    first_class: int | None = None,
    classes: int | None = None,
    **unknown: object,
) -> Tensor | LogProbOutput:
    """The log-probability of one token in each row of logits, or of K, with its gradient.

    For a row z over V tokens of which t is a chosen one:

        z'       = softcap * tanh(scale * z / softcap) / temperature      (no softcap: scale * z / temperature)
        log_prob = z'_t - log sum_v exp(z'_v)

    It is -eaves.cross_entropy(logits, tokens, reduction="none"), computed in float32 whatever the dtype of logits, and
    never above 0. With K tokens for each row, or a temperature for each, it is the same, one by one, from one pass over
    the logits; a token that a row has twice counts twice in the gradient:

        dL/dz'_v = sum_k g_k [v == t_k] - p_v * sum_k g_k

    Args:
        logits: [..., V], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        tokens: int32 or int64: of each row one, the shape of logits without V, or K of each, [rows..., K].
        temperature: None, or a positive number that the logits are divided by, behind the softcap. Or a tensor with one
            for each row, the shape of logits without V, or of shape [] with one for all rows, in any floating-point
            dtype; it gets no gradient, and a GPU is not waited for. Its values are checked on the CPU alone, where they
            are there: on a GPU a row with temperature 0 is NaN or infinite, and one below 0 divides like any other. Of
            ignored rows they may be anything.
        softcap: None, or a positive number that the logits are bounded by, before the temperature.
        scale: None, or a positive number that the logits are multiplied by, before the softcap.
        ignore_index: rows with this token have gradient 0, and so are all outputs. With K tokens it takes out its
            place alone, and the row where it is in all places.
        return_entropy: whether to return the entropy of each row's softmax in nats, [rows...], float32; it is
            differentiable.
        return_top1: whether to return whether each token is the one with its row's largest logit, the first of equal
            ones; the shape of tokens, bool; False where it is ignored.
        return_sum_sq: whether to return sum_v p_v^2 of each row's softmax, [rows...], float32; not differentiable.
        return_mean_logit: whether to return the mean of each row's z', [rows...], float32; not differentiable.
        inplace_backward: whether the gradient of logits may be written over logits, as in eaves.cross_entropy: then
            the entropy has no gradient. With K tokens, or a temperature for each row, the backward writes it.
        group, first_class, classes: as in eaves.cross_entropy: a vocabulary that is cut over ranks.

    Returns:
        The log-probabilities, in the shape of tokens: float32, or float64 for float64 logits. With any return_*:
        LogProbOutput(log_prob, entropy, is_top1, sum_sq, mean_logit), None for what was not asked for.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError, torch.OutOfMemoryError: as eaves.cross_entropy. With K
            tokens, or a temperature for each row, NotImplementedError too for torch.vmap, torch.func, torch.export and
            a batch of upstream gradients; torch.compile leaves such a call as it is (a graph break).

    Example:
        >>> import torch, eaves
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
        >>> eaves.log_prob(logits, torch.tensor([0, 2]), return_top1=True).is_top1
        tensor([ True, False])
        >>> eaves.log_prob(logits, torch.tensor([[0, 1], [2, -100]]), temperature=torch.tensor([1.0, 2.0]))
        tensor([[-0.1698, -2.1698],
                [-1.2944,  0.0000]])
    """
    if unknown:
        _refuse_unknown("log_prob", group, unknown, log_prob)
    returns = (return_entropy, return_top1, return_sum_sq, return_mean_logit)
    if _has_several(logits, tokens, temperature):
        return _of_several(
            _NAMES, logits, None, None, tokens, temperature, softcap, scale, ignore_index, returns,
            inplace_backward=inplace_backward, of_group=(group, first_class, classes),
        )  # fmt: skip
    return _of_loss(
        cross_entropy, _NAMES, (logits,), tokens, temperature, softcap, scale, ignore_index, returns,
        inplace_backward=inplace_backward, class_dim=-1, group=group, first_class=first_class, classes=classes,
    )  # fmt: skip


@overload
def linear_log_prob(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    *,
    return_entropy: Literal[False] = False,
    return_top1: Literal[False] = False,
    return_sum_sq: Literal[False] = False,
    return_mean_logit: Literal[False] = False,
    **keywords: Unpack[_LinearKeywords],
) -> Tensor: ...


@overload
def linear_log_prob(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    *,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    **keywords: Unpack[_LinearKeywords],
) -> LogProbOutput: ...


def linear_log_prob(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    skip_ignored: bool = False,
    grad_weight_dtype: torch.dtype | None = None,
    grad_weight_out: Tensor | None = None,
    group: ProcessGroup | None = None,
    first_class: int | None = None,
    classes: int | None = None,
    sequence_parallel: bool = False,
    reduce_input_grad: bool = True,
    reduce_dtype: torch.dtype | None = None,
    **unknown: object,
) -> Tensor | LogProbOutput:
    """The log-probability of one token in each row of a model's head, or of K, with its gradients, without ever holding
    all the logits: eaves.log_prob(hidden @ head.T + bias, tokens).

    It is -eaves.linear_cross_entropy(hidden, head, tokens, reduction="none"): logits are float32 sums of the product,
    and no log-probability is above 0. Without gradients it is one matrix product, with them four, with a frozen head
    two: see `algorithm`. With K tokens for each row, or a temperature for each, it is computed in chunks of rows, and
    nothing is kept but numbers of the rows: four products too, with a frozen head three.

    Args:
        hidden: [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        head: [V, D], in the dtype of hidden.
        tokens: int32 or int64: of each row one, the shape of hidden without D, or K of each, [rows..., K].
        bias: [V], in the dtype of hidden or float32.
        temperature, softcap, scale, ignore_index, return_entropy, return_top1, return_sum_sq, return_mean_logit: as
            in eaves.log_prob.
        algorithm: how gradients are computed, as in eaves.linear_cross_entropy. Where head and bias have none,
            "speed" computes that of hidden in the forward: two products instead of three. "auto" does so but for calls
            with return_entropy, because a gradient of the entropy would need the logits again. With K tokens, or a
            temperature for each row, there is "recompute" alone: "auto" and "memory" are that, and "speed" is refused.
        workspace_bytes, skip_ignored, grad_weight_dtype, grad_weight_out: as in eaves.linear_cross_entropy. With K
            tokens, or a temperature for each row, chunks are cut for workspace_bytes; None: 512 MiB on a GPU, 32 MiB on
            the CPU.
        group, first_class, classes, sequence_parallel, reduce_input_grad, reduce_dtype: as in
            eaves.linear_cross_entropy: a head that is cut over ranks.

    Returns:
        As eaves.log_prob.

    Raises:
        ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError: as eaves.linear_cross_entropy, and as
            eaves.log_prob.

    Example:
        >>> import torch, eaves
        >>> hidden, head = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
        >>> eaves.linear_log_prob(hidden, head, torch.tensor([0, 2]), temperature=0.5)
        tensor([-0.0206, -2.2395])
    """
    if unknown:
        _refuse_unknown("linear_log_prob", group, unknown, linear_log_prob)
    returns = (return_entropy, return_top1, return_sum_sq, return_mean_logit)
    if _has_several(hidden, tokens, temperature):
        if not isinstance(head, Tensor):  # None would mean that hidden are logits
            _check_head_told(head, group)
        return _of_several(
            _LINEAR_NAMES, hidden, head, bias, tokens, temperature, softcap, scale, ignore_index, returns,
            algorithm=algorithm, workspace_bytes=workspace_bytes, skip_ignored=skip_ignored,
            grad_weight_dtype=grad_weight_dtype, grad_weight_out=grad_weight_out,
            of_group=(group, first_class, classes, sequence_parallel, reduce_input_grad, reduce_dtype),
        )  # fmt: skip
    return _of_loss(
        linear_cross_entropy, _LINEAR_NAMES, (hidden, head), tokens, temperature, softcap, scale, ignore_index,
        returns, linear_bias=bias, algorithm=algorithm, workspace_bytes=workspace_bytes, skip_ignored=skip_ignored,
        grad_weight_dtype=grad_weight_dtype, grad_weight_out=grad_weight_out, group=group, first_class=first_class,
        classes=classes, sequence_parallel=sequence_parallel, reduce_input_grad=reduce_input_grad,
        reduce_dtype=reduce_dtype,
    )  # fmt: skip


# What the losses call what these functions call otherwise, for messages: first the function, then arguments.
_NAMES = {"cross_entropy": "log_prob", "input": "logits", "target": "tokens"}
_LINEAR_NAMES = {
    "linear_cross_entropy": "linear_log_prob", "input": "hidden", "linear_weight": "head", "linear_bias": "bias",
    "target": "tokens",
}  # fmt: skip


def _refuse_unknown(op: str, group: ProcessGroup | None, unknown: Mapping[str, object], function: Any) -> NoReturn:
    if group is not None:
        with_agreement(op, group, lambda _: refuse_unknown(op, unknown, function))
    refuse_unknown(op, unknown, function)


def _of_loss(
    loss: Callable[..., Any],
    names: Mapping[str, str],
    inputs: tuple[Tensor, ...],
    tokens: Tensor,
    temperature: object,
    softcap: float | None,
    scale: float | None,
    ignore_index: int,
    returns: tuple[bool, ...],
    **options: Any,
) -> Tensor | LogProbOutput:
    op = next(iter(names.values()))

    def run(_: object = None) -> Any:
        for name, is_wanted in zip(LogProbOutput._fields[1:], returns):
            check_bool(op, f"return_{name.removeprefix('is_')}", is_wanted)
        return_entropy, return_top1, return_sum_sq, return_mean_logit = returns
        check_tensor(op, "tokens", tokens)
        if tokens.dtype not in CLASS_DTYPES:  # probabilities are right for a loss
            raise ValueError(f"{op}: tokens has dtype {name_of(tokens.dtype)}, expected int64 or int32")
        of_logits, cap = tempered(op, temperature, scale, softcap)
        try:
            return loss(
                *inputs, tokens, reduction="none", softcap=cap, scale=of_logits,
                ignore_index=index_of(op, "ignore_index", ignore_index), return_entropy=return_entropy,
                return_argmax=return_top1, return_sum_sq=return_sum_sq, return_mean_logit=return_mean_logit, **options,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise _renamed(error, names) from None

    group = options["group"]
    # linear_cross_entropy gathers a head that fully_shard has cut.
    is_whole = len(inputs) == 2 and needs_whole_head(inputs[1], group, options["sequence_parallel"])
    if group is None and not is_whole and is_distributed(inputs[-1]):  # the head, or logits
        axis = 0 if len(inputs) == 2 else -1
        name = names[_CUT[len(inputs) - 1]]
        group = told(op, inputs[-1], lambda: local_shard(op, name, inputs[-1], axis)).group
    output = run() if group is None else with_agreement(op, group, run)
    if not isinstance(output, CrossEntropyOutput):
        return 0 - output  # type: ignore[no-any-return]  # of ignored rows 0, where -output would be -0
    wide = tokens.to(torch.int64)  # int32 tokens would be compared with the last 32 bits of ignore_index
    is_ignored = wide == ignore_index
    # cross_entropy gives these of ignored rows too.
    entropy, sum_sq, mean_logit = (
        None if each is None else each.masked_fill(is_ignored, 0)
        for each in (output.entropy, output.sum_sq, output.mean_logit)
    )
    is_top1 = None if output.argmax is None else (output.argmax == wide) & ~is_ignored
    return LogProbOutput(0 - output.loss, entropy, is_top1, sum_sq, mean_logit)


def tempered(
    op: str, temperature: object, scale: float | None, softcap: float | None
) -> tuple[float | None, float | None]:
    """scale and softcap of z', which the temperature divides: softcap / T * tanh((scale / T) * z / (softcap / T))."""
    if temperature is None:
        return scale, softcap
    divisor = number_of(op, "temperature", temperature, *RANGES["scale"])

    def divided(name: str, number: float) -> float:
        quotient = number_of(op, name, number, *RANGES[name]) / divisor
        return number_of(op, f"{name} / temperature", quotient, *RANGES[name])

    return divided("scale", 1.0 if scale is None else scale), None if softcap is None else divided("softcap", softcap)


_CUT = ("input", "linear_weight")  # what has the classes: logits, or a head


def _renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """An error of the loss, in the names of the function that called it."""
    message = str(error)
    if not message.startswith(f"{next(iter(names))}: "):
        return error
    of_the_loss = rf"(?<!['\"])\b({'|'.join(names)})\b(?!['\"])"  # but for values of the caller's, which are quoted
    return type(error)(re.sub(of_the_loss, lambda found: names[found[0]], message))


# ------------------------------------------------ several tokens or a temperature for each row: see _log_prob_chunks.py


def _has_several(x: object, tokens: object, temperature: object) -> bool:
    if isinstance(temperature, Tensor):
        return True
    return isinstance(tokens, Tensor) and isinstance(x, Tensor) and tokens.dim() == x.dim() != 0


def _check_head_told(head: Any, group: ProcessGroup | None) -> None:
    op = "linear_log_prob"
    if group is None:
        check_tensor(op, "head", head)
    else:
        with_agreement(op, group, lambda _: check_tensor(op, "head", head))


_OF_SEVERAL = "with several tokens or a temperature for each row "


def _of_several(names: Mapping[str, str], *arguments: Any, **options: Any) -> Tensor | LogProbOutput:
    op = next(iter(names.values()))
    if is_exporting() or is_transforming():
        raise NotImplementedError(
            f"{op}: {_OF_SEVERAL}it does not work inside of torch.export, torch.vmap and torch.func"
        )
    group, *of_group = options.pop("of_group")
    x, weight, bias, *rest = arguments
    name, cut = ("logits", x) if weight is None else ("head", weight)
    if weight is not None and needs_whole_head(weight, group, of_group[2]):
        return with_whole_head(
            op,
            lambda x, weight, bias: _of_several(names, x, weight, bias, *rest, of_group=(None, *of_group), **options),
            {"hidden": x},
            {"head": weight, "bias": bias},
        )
    try:
        local: Local | None = None
        if group is None and is_distributed(cut):
            local = told(op, cut, lambda: local_shard(op, name, cut, -1 if weight is None else 0))

        def run(group: ProcessGroup | None) -> Tensor | LogProbOutput:
            if local is None and is_distributed(cut):
                raise ValueError(f"{op}: {name} is a DTensor, which knows its group; leave group out")
            is_summed = len(of_group) > 3 and of_group[3] is False  # reduce_input_grad
            tensors = (x, weight, bias, *rest)
            if local is not None and group is not None:
                refuse_in_place_of_dtensor(op, name, x, options.get("inplace_backward"))
                hidden = None if weight is None else x
                agree_on_placements(op, group, hidden=hidden, tokens=rest[0], temperature=rest[1])
                tensors = _local_tensors(op, local, is_summed, *tensors)
            found: Tensor | LogProbOutput
            found = uncompiled(op, _computed, _OF_SEVERAL)(op, *tensors, of_group=(group, *of_group), **options)
            return found

        if group is None and local is None:
            return run(None)
        return with_agreement(op, group if local is None else local.group, run)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        explain(op, error, **{name: cut, ("hidden" if name == "head" else name): x})
        raise _renamed(error, names) from None


def _local_tensors(
    op: str, cut: Local, is_summed: bool, x: Any, weight: Any, bias: Any, tokens: Any, temperature: Any, *rest: Any
) -> tuple[Any, ...]:
    """The arguments as this rank has them, where logits or a head are cut as a DTensor."""
    if weight is None:
        x = cut.tensor
    else:
        x, bias = local_rows(op, "hidden", x, cut, is_summed), local_classes(op, "bias", bias)
        weight = cut.tensor
    tokens, temperature = local_rows(op, "tokens", tokens, cut), local_rows(op, "temperature", temperature, cut)
    return x, weight, bias, tokens, temperature, *rest


class _AllRows(torch.autograd.Function):
    """This rank's rows -> those of all ranks. Their gradient is a sum over the ranks already: a rank takes its rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: Shard) -> Tensor:
        group = group_of(shard)
        ctx.rows = slice(group.rank() * own.shape[0], (group.rank() + 1) * own.shape[0])
        return all_gather(own, group).wait().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rows].clone(), None


def _computed(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: Tensor | float | None,
    softcap: float | None,
    scale: float | None,
    ignore_index: int,
    returns: tuple[bool, ...],
    *,
    inplace_backward: bool = False,
    of_group: tuple[Any, ...],
    **options: Any,
) -> Tensor | LogProbOutput:
    """log_prob of logits x, or where there is a weight linear_log_prob of hidden states x."""
    outputs = LSE | SPLIT_LSE
    for output, bit, is_wanted in zip(LogProbOutput._fields[1:], (ENTROPY, ARGMAX, SUM_SQ, MEAN_LOGIT), returns):
        check_bool(op, f"return_{output.removeprefix('is_')}", is_wanted)
        outputs |= bit if is_wanted else 0
    check_bool(op, "inplace_backward", inplace_backward)
    ignore_index = index_of(op, "ignore_index", ignore_index)
    passed, name = x, "logits" if weight is None else "hidden"
    check_tensor(op, name, x)
    of_head = HeadOptions()
    group, first_class, given_classes, *of_sum = of_group
    shard = None
    if group is not None:
        shard = shard_of(op, group, first_class, given_classes, *of_sum)
    elif first_class is not None or tuple(of_sum) not in ((), (False, True, None)):
        refuse_without_group(op)
    if weight is None:
        _check_logits(op, x, shard is not None)
        classes = x.shape[-1]
        if inplace_backward and needs_autograd(x):
            refuse_in_place(x)
    else:
        given = {"hidden": x, "head": weight, "bias": bias, "tokens": tokens, "temperature": temperature}
        x, weight, bias = checked_head(
            op, ("hidden", "head", "bias"), x, weight, bias, "hidden", x, may_be_empty=shard is not None
        )
        classes = weight.shape[0]
        of_head = _head_options(op, x, weight, given, **options)
    rows = passed.shape[:-1] if shard is None else rows_of_all(op, shard, passed, name)
    _check_tokens(op, tokens, name, passed, rows)
    if isinstance(temperature, Tensor):
        check_floating(op, "temperature", temperature, name, x)
        temperature = temperature.expand(rows) if temperature.dim() == 0 else temperature
        check_shape(op, "temperature", temperature, rows, f"one per row of {name} {shape_of(passed)}")
        refuse_gradient(op, "temperature", temperature)
    divisor = None if isinstance(temperature, Tensor) else temperature
    scale, softcap = tempered(op, 1.0 if divisor is None else divisor, scale, softcap)
    assert scale is not None

    over_ranks, given_head = None, weight is not None
    if shard is not None:
        check_reduce_dtype(op, shard, x)
        of_rows = temperature if isinstance(temperature, Tensor) else None
        facts = {
            "which tensors require a gradient": [
                each is not None and needs_autograd(each) for each in (x, weight, bias)
            ],
            f"the shape of {name}": list(passed.shape if given_head else passed.shape[:-1]),
            "the shape of tokens": list(tokens.shape),
            "tokens": digest(tokens),
            "temperature": digest(of_rows),
            **dtypes(**{name: x}, head=weight, bias=bias, temperature=of_rows),
            "scale and softcap": [scale, softcap],
            "ignore_index": ignore_index,
            "workspace_bytes": of_head.workspace_bytes,
            "skip_ignored": of_head.skip_ignored,
            "which outputs are computed": outputs,
        }
        over_ranks = OverRanks(shard._replace(sequence_parallel=False), agreed_place(op, shard, classes, facts))
        if shard.sequence_parallel:
            x = cast("Tensor", _AllRows.apply(x, shard))  # type: ignore[no-untyped-call]
        given_classes = over_ranks.place.columns
    elif given_classes is not None:
        without_padding(op, given_classes, x.movedim(-1, 0) if weight is None else weight)
    if given_classes is not None:
        if weight is None:
            x = x[..., :given_classes]
        else:
            weight, bias = weight[:given_classes], None if bias is None else bias[:given_classes]
        if of_head.grad_weight_out is not None:
            of_head = of_head._replace(grad_weight_out=of_head.grad_weight_out[:given_classes])
        classes = given_classes if over_ranks is None else over_ranks.place.classes

    chosen = tokens.to(torch.int64).reshape(math.prod(rows), 1 if tokens.dim() == len(rows) else tokens.shape[-1])
    is_absent = chosen == ignore_index
    is_ignored = is_absent.all(1)
    _check_classes(op, tokens, is_absent, classes, ignore_index)
    divisors = None
    if isinstance(temperature, Tensor):
        # Of ignored rows it may be anything.
        divisors = temperature.detach().reshape(-1).to(accumulator_dtype(x.dtype)).masked_fill(is_ignored, 1)
        _check_divisors(op, temperature, divisors)
    settings = Settings(op, scale, softcap, ignore_index, outputs, inplace_backward, of_head, over_ranks)
    with torch.autocast(x.device.type, enabled=False):
        found = losses_of(settings, rows_of(chosen, is_absent, divisors), x, weight, bias)
        # 0 of ignored places, where a minus would make -0.
        log_prob = 0 - found[0][:, : chosen.shape[1]].masked_fill(is_absent, 0).view(tokens.shape)
        if not any(returns):
            return log_prob
        entropy, sum_sq, mean_logit = (
            None if each is None else each.masked_fill(is_ignored, 0).view(rows)
            for each in (pick(found, outputs, bit) for bit in (ENTROPY, SUM_SQ, MEAN_LOGIT))
        )
        argmax = pick(found, outputs, ARGMAX)
        is_top1 = None if argmax is None else ((argmax.unsqueeze(1) == chosen) & ~is_absent).view(tokens.shape)
    return LogProbOutput(log_prob, entropy, is_top1, sum_sq, mean_logit)


def _check_logits(op: str, logits: Tensor, may_be_empty: bool) -> None:
    check_floating(op, "logits", logits, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits has no axes, expected at least one, of the classes")
    if logits.shape[-1] == 0 and not may_be_empty:
        raise ValueError(f"{op}: logits has shape {shape_of(logits)}, expected at least one class")


def _head_options(
    op: str,
    hidden: Tensor,
    head: Tensor,
    given: Mapping[str, object],
    *,
    algorithm: str,
    workspace_bytes: int | None,
    skip_ignored: bool,
    grad_weight_dtype: torch.dtype | None,
    grad_weight_out: Tensor | None,
) -> HeadOptions:
    """Those that linear_log_prob has and log_prob has not; the tensors of the call are `given`, as they were passed."""
    check_algorithm(algorithm, workspace_bytes)
    if algorithm == "speed":
        raise NotImplementedError(
            f'{op}: algorithm is "speed", which takes one token for each row and a number as temperature; expected '
            '"auto", "memory" or "recompute"'
        )
    check_bool(op, "skip_ignored", skip_ignored)
    sums = accumulator_dtype(hidden.dtype)
    if grad_weight_out is not None:
        check_grad_weight_out(grad_weight_out, hidden.dtype, head, grad_weight_dtype, sums, False)
        check_overlap(grad_weight_out, given)
        sums = grad_weight_out.dtype
    elif not wide_weight(hidden.dtype, head.dtype, grad_weight_dtype):
        sums = hidden.dtype
    return HeadOptions(workspace_bytes, skip_ignored, sums, grad_weight_out)


def _check_tokens(op: str, tokens: Tensor, name: str, x: Tensor, rows: tuple[int, ...]) -> None:
    check_dense(op, "tokens", tokens, name, x)
    check_dtype_of(op, "tokens", tokens, CLASS_DTYPES, "classes")
    if tokens.shape != rows and (tokens.dim() != x.dim() or tokens.shape[:-1] != rows):
        several = ", ".join([*map(str, rows), "K"])
        raise ValueError(
            f"{op}: tokens has shape {shape_of(tokens)}, expected {list(rows)} or [{several}] (one or K per row of "
            f"{name} {shape_of(x)})"
        )


def _check_classes(op: str, tokens: Tensor, is_absent: Tensor, classes: int, ignore_index: int) -> None:
    """As the core does: on the CPU, and on a GPU where the environment says so."""
    if not has_values(tokens) and not (tokens.is_cuda and os.environ.get("EAVES_CHECK_TARGETS", "") not in ("", "0")):
        return
    is_wrong = ((tokens < 0) | (tokens >= classes)) & ~is_absent.view(tokens.shape)
    if is_wrong.any():
        index = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: tokens{index or ''} is {tokens[tuple(index)].item()}, expected 0 to {classes - 1}, or ignore_index "
            f"{ignore_index}"
        )


def _check_divisors(op: str, temperature: Tensor, divisors: Tensor) -> None:
    if not has_values(temperature):
        return
    is_wrong = ~((divisors > 0) & divisors.isfinite())
    if is_wrong.any():
        index = is_wrong.view(temperature.shape).nonzero()[0].tolist()
        value = temperature[tuple(index)].item()
        raise ValueError(f"{op}: temperature{index or ''} is {value}, expected {RANGES['scale'][2]}")
