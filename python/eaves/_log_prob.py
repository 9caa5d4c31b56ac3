"""Log-probabilities of chosen tokens, of logits and of a model's head: the losses of cross_entropy and
linear_cross_entropy for each row, with the other sign, as post-training asks for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from eaves._cross_entropy import cross_entropy
from eaves._linear_cross_entropy import linear_cross_entropy
from eaves._loss import CLASS_DTYPES, RANGES, CrossEntropyOutput, refuse_unknown
from eaves._operator import check_bool, check_tensor, index_of, name_of, number_of

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _OfBoth(TypedDict, total=False):
        temperature: float | None
        softcap: float | None
        scale: float | None
        ignore_index: int

    class _Keywords(_OfBoth, total=False):
        inplace_backward: bool

    class _LinearKeywords(_OfBoth, total=False):
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
    temperature: float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    inplace_backward: bool = False,
    **unknown: object,
) -> Tensor | LogProbOutput:
    """The log-probability of one token in each row of logits, with its gradient.

    For a row z over V tokens of which t is the chosen one:

        z'       = softcap * tanh(scale * z / softcap) / temperature      (no softcap: scale * z / temperature)
        log_prob = z'_t - log sum_v exp(z'_v)

    It is -eaves.cross_entropy(logits, tokens, reduction="none"), computed in float32 whatever the dtype of logits, and
    never above 0.

    Args:
        logits: [..., V], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        tokens: of each row one, int32 or int64: the shape of logits without V.
        temperature: None, or a positive number that the logits are divided by, behind the softcap.
        softcap: None, or a positive number that the logits are bounded by, before the temperature.
        scale: None, or a positive number that the logits are multiplied by, before the softcap.
        ignore_index: rows with this token have gradient 0, and so are all outputs.
        return_entropy: whether to return the entropy of each row's softmax in nats, [rows...], float32; it is
            differentiable.
        return_top1: whether to return whether each row's token is the one with the largest logit, the first of equal
            ones; [rows...], bool; False in ignored rows.
        return_sum_sq: whether to return sum_v p_v^2 of each row's softmax, [rows...], float32; not differentiable.
        return_mean_logit: whether to return the mean of each row's z', [rows...], float32; not differentiable.
        inplace_backward: whether the gradient of logits may be written over logits, as in eaves.cross_entropy: then
            the entropy has no gradient.

    Returns:
        The log-probabilities, [rows...]: float32, or float64 for float64 logits. With any return_*:
        LogProbOutput(log_prob, entropy, is_top1, sum_sq, mean_logit), None for what was not asked for.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError, torch.OutOfMemoryError: as eaves.cross_entropy.

    Example:
        >>> import torch, eaves
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
        >>> eaves.log_prob(logits, torch.tensor([0, 2]), return_top1=True).is_top1
        tensor([ True, False])
    """
    if unknown:
        refuse_unknown("log_prob", unknown, log_prob)
    return _of_loss(
        cross_entropy, _NAMES, (logits,), tokens, temperature, softcap, scale, ignore_index,
        (return_entropy, return_top1, return_sum_sq, return_mean_logit), inplace_backward=inplace_backward,
        class_dim=-1,
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
    temperature: float | None = None,
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
    **unknown: object,
) -> Tensor | LogProbOutput:
    """The log-probability of one token in each row of a model's head, with its gradients, without ever holding all the
    logits: eaves.log_prob(hidden @ head.T + bias, tokens).

    It is -eaves.linear_cross_entropy(hidden, head, tokens, reduction="none"): logits are float32 sums of the product,
    and no log-probability is above 0. Without gradients it is one matrix product, with them four, with a frozen head
    two: see `algorithm`.

    Args:
        hidden: [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        head: [V, D], in the dtype of hidden.
        tokens: of each row one, int32 or int64: the shape of hidden without D.
        bias: [V], in the dtype of hidden or float32.
        temperature, softcap, scale, ignore_index, return_entropy, return_top1, return_sum_sq, return_mean_logit: as
            in eaves.log_prob.
        algorithm: how gradients are computed, as in eaves.linear_cross_entropy. Where head and bias have none,
            "speed" computes that of hidden in the forward: two products instead of three. "auto" does so but for calls
            with return_entropy, because a gradient of the entropy would need the logits again.
        workspace_bytes, skip_ignored, grad_weight_dtype, grad_weight_out: as in eaves.linear_cross_entropy.

    Returns:
        As eaves.log_prob.

    Raises:
        ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError: as eaves.linear_cross_entropy.

    Example:
        >>> import torch, eaves
        >>> hidden, head = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
        >>> eaves.linear_log_prob(hidden, head, torch.tensor([0, 2]), temperature=0.5)
        tensor([-0.0206, -2.2395])
    """
    if unknown:
        refuse_unknown("linear_log_prob", unknown, linear_log_prob)
    return _of_loss(
        linear_cross_entropy, _LINEAR_NAMES, (hidden, head), tokens, temperature, softcap, scale, ignore_index,
        (return_entropy, return_top1, return_sum_sq, return_mean_logit), linear_bias=bias, algorithm=algorithm,
        workspace_bytes=workspace_bytes, skip_ignored=skip_ignored, grad_weight_dtype=grad_weight_dtype,
        grad_weight_out=grad_weight_out,
    )  # fmt: skip


# What the losses call what these functions call otherwise, for messages: first the function, then arguments.
_NAMES = {"cross_entropy": "log_prob", "input": "logits", "target": "tokens"}
_LINEAR_NAMES = {
    "linear_cross_entropy": "linear_log_prob", "input": "hidden", "linear_weight": "head", "linear_bias": "bias",
    "target": "tokens",
}  # fmt: skip


def _of_loss(
    loss: Callable[..., Any],
    names: Mapping[str, str],
    inputs: tuple[Tensor, ...],
    tokens: Tensor,
    temperature: float | None,
    softcap: float | None,
    scale: float | None,
    ignore_index: int,
    returns: tuple[bool, ...],
    **options: Any,
) -> Tensor | LogProbOutput:
    op = next(iter(names.values()))
    for name, is_wanted in zip(LogProbOutput._fields[1:], returns):
        check_bool(op, f"return_{name.removeprefix('is_')}", is_wanted)
    return_entropy, return_top1, return_sum_sq, return_mean_logit = returns
    check_tensor(op, "tokens", tokens)
    if tokens.dtype not in CLASS_DTYPES:  # probabilities are right for a loss
        raise ValueError(f"{op}: tokens has dtype {name_of(tokens.dtype)}, expected int64 or int32")
    ignore_index = index_of(op, "ignore_index", ignore_index)
    scale, softcap = tempered(op, temperature, scale, softcap)
    try:
        output = loss(
            *inputs, tokens, reduction="none", softcap=softcap, scale=scale, ignore_index=ignore_index,
            return_entropy=return_entropy, return_argmax=return_top1, return_sum_sq=return_sum_sq,
            return_mean_logit=return_mean_logit, **options,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _renamed(error, names) from None
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


def _renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """An error of the loss, in the names of the function that called it."""
    message = str(error)
    if not message.startswith(f"{next(iter(names))}: "):
        return error
    of_the_loss = rf"(?<!['\"])\b({'|'.join(names)})\b(?!['\"])"  # but for values of the caller's, which are quoted
    return type(error)(re.sub(of_the_loss, lambda found: names[found[0]], message))
