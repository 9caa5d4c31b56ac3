"""Liger's cross entropies and linear JSD computed by eaves; its other kernels (RoPE, RMSNorm, SwiGLU ...) stay.

    eaves.liger.install()          in every process that trains
    eaves.liger.uninstall()        as it was
    with eaves.liger.install():    both

Five of Liger's functions are replaced, in every module that has imported one: the linear cross entropy, which is behind
use_liger_kernel of transformers, the cross entropy, the scaled cross entropy, and the linear JSD of `ops` and of
`chunked_loss`. `eaves.liger.is_active()` says whether all are, and whether Liger calls them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaves._arguments import answers_unknown
from eaves._replacement import Installed, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.cross_entropy import cross_entropy
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.functional.linear_kl_div import linear_kl_div
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("liger")


@answers_unknown
def install(*, algorithm: str = "auto", workspace_bytes: int | None = None, keep_bytes: int | None = None) -> Installed:
    """Lets everything that calls one of the five functions call eaves.

    The arguments, their order and the outputs are those of the installed Liger. Losses are float32, from the product's
    float32 sums; the gradient of a head is added up in float32, whatever accum_dtype is. Liger's arguments about its
    own kernels are not read: ce_impl, ce_mode, jsd_impl, jsd_mode, chunk_mem_const, m_tiles_per_cluster, chunk_size and
    compiled; `workspace_bytes` says how much is computed at once. LigerCrossEntropyFunction writes the gradient over
    the logits, as Liger does, unless they are a leaf or a part of a tensor, other parts of which may have a loss too.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_cross_entropy. The divergences and selected_token_ids
            read workspace_bytes alone.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: liger-kernel is not installed, or cannot be imported (it needs Triton).
        RuntimeError: it is a version that eaves does not know, a function takes arguments that eaves does not know, or
            somebody else has replaced one (LIGER_KERNEL_IMPL does too).
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_cross_entropy", **options)

    def make(theirs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            None if their is None else _stand_in(their, arguments, functools.partial(function, options))
            for their, (arguments, function) in zip(theirs, _FUNCTIONS, strict=True)
        )

    installed = replacement.install(make)
    if not replacement.is_active():
        warnings.warn(
            "eaves.liger: Liger computes the loss of logits with another kernel, chosen by set_impl or the environment "
            "(LIGER_KERNEL_IMPL_CROSS_ENTROPY, LIGER_KERNEL_BACKEND), so the call does not reach eaves",
            stacklevel=3,
        )
    return installed


uninstall, is_active = replacement.uninstall, replacement.is_active


def _stand_in(their: Any, arguments: type[Any], function: Any) -> SimpleNamespace:
    """An object with `apply`. A subclass would not do: torch.compile traces the forward of an autograd function."""
    names = [name.lstrip("_") for name in inspect.signature(getattr(their, "forward", their.apply)).parameters]
    names = [name for name in names if name != "ctx"]
    if tuple(names) != arguments._fields[: len(names)]:
        raise RuntimeError(
            f"eaves.liger: {their.__name__} takes {', '.join(names)}, which eaves does not know; nothing was replaced"
        )
    outputs = 2 + ("return_token_accuracy" in names) + ("return_predicted_tokens" in names)

    def apply(*given: Any, **named: Any) -> Any:
        found = function(arguments(*given, **{name.lstrip("_"): each for name, each in named.items()}))
        return found[:outputs] if "return_z_loss" in names else found

    return SimpleNamespace(apply=apply, supports_inner_impl_dispatch="ce_impl" in names)


# ------------------------------------------------------------------------------------------------------ cross entropies


class _HeadCall(NamedTuple):
    """The arguments of LigerFusedLinearCrossEntropyFunction.apply of Liger 0.8.5. Older ones have the first of them."""

    input: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]
    bias: Tensor | None = None  # [V]
    ce_weight: Tensor | None = None  # [V]
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    ce_impl: object = None
    ce_mode: object = None
    chunk_mem_const: int = 1


class _LogitsCall(NamedTuple):
    """The arguments of LigerCrossEntropyFunction.apply of Liger 0.8.5."""

    input: Tensor  # [N, V]
    target: Tensor  # [N]
    weight: Tensor | None  # [V], of the classes
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False


def _loss_of_head(options: dict[str, Any], call: _HeadCall) -> tuple[Tensor | None, ...]:
    _refuse_float64(call.accum_dtype, call.input)
    call = call._replace(target=call.target.long())
    head: dict[str, Any] = {"linear_bias": call.bias, "softcap": call.softcap, "ignore_index": call.ignore_index}
    keywords = {**_keywords(call, call.ce_weight), **head, **options}
    if call.use_token_scaling:  # a factor of each row: the probability of its target, not 0, which would not count
        with torch.no_grad():
            loss = linear_cross_entropy(call.input, call.weight, call.target, reduction="none", **head, **options)
            keywords["row_weight"] = (-loss).exp().clamp_min(torch.finfo(torch.float32).tiny)
        if call.reduction == "mean":
            keywords["normalizer"] = _class_weights_of_rows(call, call.ce_weight).sum()
    keywords["grad_weight_dtype"] = accumulator_dtype(call.input.dtype)
    return _outputs(call, linear_cross_entropy(call.input, call.weight, call.target, **keywords))


def _loss_of_logits(_: dict[str, Any], call: _LogitsCall) -> tuple[Tensor | None, ...]:
    call = call._replace(target=call.target.long())
    keywords, may_write = _keywords(call, call.weight), False
    if not torch.compiler.is_compiling():  # which chooses the memory itself
        whole = call.input if call.input._base is None else call.input._base
        may_write = not whole.is_leaf and whole.numel() == call.input.numel()
    return _outputs(call, cross_entropy(call.input, call.target, inplace_backward=may_write, **keywords))


def _keywords(call: Any, class_weight: Tensor | None) -> dict[str, Any]:
    """The options that both losses have."""
    z_loss = call.lse_square_scale
    if class_weight is not None:
        class_weight = class_weight.to(torch.promote_types(call.input.dtype, torch.float32))
        if call.reduction == "mean" and z_loss:  # Liger divides this part by the number of rows
            z_loss *= float(_class_weights_of_rows(call, class_weight).sum() / _counts(call).sum().clamp(min=1))
    outputs = ["z_loss"] * call.return_z_loss
    outputs += ["argmax"] * (call.return_token_accuracy or call.return_predicted_tokens)
    return {
        "weight": class_weight, "ignore_index": call.ignore_index, "label_smoothing": call.label_smoothing,
        "reduction": call.reduction, "softcap": call.softcap, "z_loss": z_loss, "outputs": tuple(outputs),
    }  # fmt: skip


def _counts(call: Any) -> Tensor:
    return torch.ne(call.target, call.ignore_index)


def _class_weights_of_rows(call: Any, class_weight: Tensor | None) -> Tensor:
    counts = _counts(call)
    if class_weight is None:
        return counts.float()
    return class_weight[call.target.masked_fill(~counts, 0)] * counts


def _outputs(call: Any, out: Any) -> tuple[Tensor | None, ...]:
    """Loss, z-loss, accuracy and predicted tokens; None for one that was not asked for."""
    if isinstance(out, Tensor):
        return out, None, None, None
    accuracy = tokens = None
    if call.return_token_accuracy:
        accuracy = ((out.argmax == call.target) & _counts(call)).float()
        if call.reduction != "none":
            accuracy = accuracy.sum() / _counts(call).sum()
    if call.return_predicted_tokens:
        tokens = out.argmax.masked_fill(~_counts(call), -1)
    return out.loss, out.z_loss.detach() if call.return_z_loss else None, accuracy, tokens


def _refuse_float64(accum_dtype: torch.dtype | None, input: Tensor) -> None:
    if accum_dtype == torch.float64 and input.dtype != torch.float64:
        raise NotImplementedError(
            f"eaves.liger: accum_dtype is torch.float64, expected torch.float32 for {input.dtype}"
        )


class _ScaledCall(NamedTuple):
    """The arguments of LigerFusedLinearScaledCrossEntropyFunction.apply of Liger 0.8.5."""

    input: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]
    temperature: float = 1.0
    ignore_index: int = -100
    m_tiles_per_cluster: int = 1
    return_entropy: bool = False
    selected_token_ids: Tensor | None = None  # [K]


def _scaled_loss(options: dict[str, Any], call: _ScaledCall) -> Tensor | tuple[Tensor, ...]:
    ignored = call.target == call.ignore_index
    tokens = call.target.masked_fill(ignored, -100)  # no token of selected_token_ids
    if call.selected_token_ids is not None:
        options = {"workspace_bytes": options["workspace_bytes"]}
        rows = call.selected_token_ids.expand(len(tokens), -1)
        tokens = torch.cat([tokens[:, None], rows.masked_fill(ignored[:, None], -100)], dim=1)
    out: Any = linear_log_prob(
        call.input, call.weight, tokens, temperature=call.temperature, outputs=("entropy",) * call.return_entropy,
        grad_weight_dtype=accumulator_dtype(call.input.dtype), **options,
    )  # fmt: skip
    log_prob, *entropy = out if call.return_entropy else (out,)
    if call.selected_token_ids is None:
        return (-log_prob, *entropy) if entropy else -log_prob
    return (-log_prob[:, 0], *entropy, log_prob[:, 1:])


# --------------------------------------------------------------------------------------------------------- divergences


class _DivergenceCall(NamedTuple):
    """The arguments of ops' LigerFusedLinearJSDFunction.apply of Liger 0.8.5."""

    student_input: Tensor  # [N, D]
    student_weight: Tensor  # [V, D]
    teacher_input: Tensor  # [N, E]
    teacher_weight: Tensor  # [V, E]
    shift_labels: Tensor | None = None  # [N]
    jsd_beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    accum_dtype: torch.dtype | None = None
    jsd_impl: object = None
    jsd_mode: object = None


def _divergence(options: dict[str, Any], call: _DivergenceCall) -> Tensor:
    _refuse_float64(call.accum_dtype, call.student_input)
    return linear_kl_div(
        call.student_input, call.student_weight, call.teacher_input.detach(), call.teacher_weight,
        targets=call.shift_labels, divergence="jsd", beta=call.jsd_beta, temperature=call.temperature,
        ignore_index=call.ignore_index, workspace_bytes=options["workspace_bytes"],
    )  # fmt: skip


class _DistillationCall(NamedTuple):
    """The arguments of chunked_loss' LigerFusedLinearJSDFunction.apply of Liger 0.8.5."""

    student_input: Tensor  # [N, D]
    student_weight: Tensor  # [V, D]
    teacher_input: Tensor  # [N, E]
    teacher_weight: Tensor  # [W, E], W >= V
    true_labels: Tensor  # [N]
    student_bias: Tensor | None  # [V]
    teacher_bias: Tensor | None  # [W]
    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False


def _distillation(options: dict[str, Any], call: _DistillationCall) -> Tensor | tuple[Tensor, ...]:
    weight, bias, hard = call.student_weight, call.student_bias, call.weight_hard_loss
    more = call.teacher_weight.shape[0] - weight.shape[0]
    if not call.weight_soft_loss or (more > 0 and (hard or call.return_soft_hard_loss)):
        raise NotImplementedError(
            f"eaves.liger: weight_soft_loss is {call.weight_soft_loss}, weight_hard_loss is {hard}, "
            f"return_soft_hard_loss is {call.return_soft_hard_loss}, and the teacher has {more} classes more than the "
            "student; expected a weight_soft_loss, and with further classes in the teacher neither weight_hard_loss "
            "nor return_soft_hard_loss"
        )
    if more > 0:  # logits of 0, as Liger has them
        weight, bias = pad(weight, (0, 0, 0, more)), None if bias is None else pad(bias, (0, more))
    out: Any = linear_kl_div(
        call.student_input, weight, call.teacher_input.detach(), call.teacher_weight, targets=call.true_labels,
        bias=bias, teacher_bias=call.teacher_bias, divergence="jsd", beta=call.beta, temperature=call.temperature,
        hard_weight=hard / call.weight_soft_loss if hard else None, ignore_index=call.ignore_index,
        outputs=("divergence", "hard_loss") if call.return_soft_hard_loss else (),
        workspace_bytes=options["workspace_bytes"],
    )  # fmt: skip
    if not call.return_soft_hard_loss:
        loss: Tensor = call.weight_soft_loss * out
        return loss
    rows = (call.true_labels != call.ignore_index).sum().clamp(min=1)
    parts = [(each.sum() / rows).detach() for each in (out.divergence, out.hard_loss)]
    return (call.weight_soft_loss * out.loss, *parts)


# In the order of the table in _replacement.py.
_FUNCTIONS: tuple[tuple[type[Any], Any], ...] = (
    (_HeadCall, _loss_of_head),
    (_LogitsCall, _loss_of_logits),
    (_DivergenceCall, _divergence),
    (_DistillationCall, _distillation),
    (_ScaledCall, _scaled_loss),
)
