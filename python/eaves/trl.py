"""TRL's trainers with eaves.linear_cross_entropy and eaves.linear_kl_div as their heads.

    eaves.trl.install()           in every process that trains, before it makes a trainer or after
    eaves.trl.uninstall()         as it was
    with eaves.trl.install():     both

Functions of TRL are replaced, by version (_replacement.py): log-probabilities (ChunkedLogProbFunction), up to 1.14 the
loss of SFTTrainer, from 1.10 on the divergence of DistillationTrainer, and the method of GKDTrainer that computes its
loss (hf/distillation.py). docs/trainers.md lists the trainers that call them. `eaves.trl.is_active()` says whether all
are replaced, and `python -m eaves info` whether this TRL is known.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._calls.log_prob import tempered
from eaves._replacement import Installed, called_like, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.functional.linear_kl_div import linear_kl_div
from eaves.hf.distillation import gkd_loss

__all__ = ["install", "is_active", "uninstall"]

# The outputs of linear_cross_entropy by TRL's names.
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "sum_sq", "mean_logits": "mean_logit", "is_top1": "argmax"}

_GKD = "trl.experimental.gkd.gkd_trainer"

replacement = replacement_of("trl")


@answers_unknown
def install(
    *, algorithm: str = "speed", workspace_bytes: int | None = None, keep_bytes: int | None = None
) -> Installed:
    """Lets TRL's trainers compute log-probabilities, entropies, losses, divergences and their metrics with eaves.

    Results and gradients are those of TRL's functions, from the product's float32 sums; the gradient of the head is
    added up in float32. Metrics take no product of their own. The float32 copy of a 16-bit head
    (cast_lm_head_to_fp32) is kept until the backward. The entropy beside log-probabilities has a gradient,
    which TRL drops up to 1.12.
    TRL's `chunk_size` is not read: `workspace_bytes` says how much is computed at once.

    DistillationTrainer takes four products on a GPU, three with a frozen head (LoRA); TRL's own function computes both
    logits two to three times. GKDTrainer does not hold the logits of either model. It keeps TRL's own loss if
    eaves.hf.patch refuses a head, under DeepSpeed, FSDP of version 1, torch.compile, DDP with find_unused_parameters,
    with Liger's loss (use_liger_kernel, up to 1.13), and in an evaluation with compute_metrics, which reads the logits.

    Args:
        algorithm, keep_bytes: as in eaves.linear_cross_entropy, for log-probabilities and the loss of SFT. With "speed"
            a frozen head (LoRA) takes two products instead of three; a gradient of the entropy, which TRL's trainers do
            not take, two more. "keep" takes three where the head learns, in 4 bytes for each logit: TRL's metrics need
            all of a row.
        workspace_bytes: as in eaves.linear_cross_entropy and eaves.linear_kl_div.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: TRL is not installed, or cannot be imported.
        RuntimeError: it is a version that eaves does not know, or somebody else has replaced one of the functions.
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_cross_entropy", **options)
    if replacement.is_known() and _GKD not in sys.modules:
        with warnings.catch_warnings():  # TRL warns users of its experimental trainers
            warnings.simplefilter("ignore")
            import_module(_GKD)
    return replacement.install(lambda theirs: tuple(_ours(each, options) for each in theirs))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _ours(theirs: Any, options: dict[str, Any]) -> Any:
    """What takes the place of one function of TRL."""
    name = theirs.__name__.lstrip("_")
    if name == "ChunkedLogProbFunction":
        return SimpleNamespace(apply=called_like(theirs.forward, functools.partial(_log_probs, options), None))
    if name == "chunked_cross_entropy_loss":
        return called_like(theirs, functools.partial(_cross_entropy, options))
    if name == "chunked_divergence_loss":
        return called_like(theirs, functools.partial(_divergence, options["workspace_bytes"]))
    assert name == "compute_loss"
    return gkd_loss(theirs, options["workspace_bytes"])


def _log_probs(options: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """As ChunkedLogProbFunction.apply: hidden [N, D], weight [V, D], bias [V] or None (from 1.13 on), targets [N]. The
    log-probabilities and entropies; from 1.15 on all outputs, and what `outputs` does not name is None."""
    hidden = given["hidden" if "hidden" in given else "last_hidden"]
    targets, names = given["targets"], [name for name in _OUTPUTS if name in given.get("outputs", ("entropy",))]
    scale, softcap = tempered("eaves.trl", given["temperature"], given["logit_scale"], given["final_logit_softcapping"])
    out: Any = _product(
        hidden, given["weight"], given.get("bias"), targets, reduction="none", scale=scale, softcap=softcap,
        outputs=tuple(_OUTPUTS[name] for name in names), **options,
    )  # fmt: skip
    loss, *others = out if names else (out,)
    found = dict(zip(names, others))
    if "log_sum_sq_probs" in found:
        found["log_sum_sq_probs"] = found["log_sum_sq_probs"].log()
    if "is_top1" in found:
        found["is_top1"] = found["is_top1"] == targets
    if "outputs" not in given:
        return 0 - loss, found["entropy"]
    return 0 - loss, *map(found.get, _OUTPUTS)


def _cross_entropy(options: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As _chunked_cross_entropy_loss: hidden_states [B, S, D], labels or shift_labels [B, S]. The loss, the number of
    right tokens, the sum of entropies, and the number of tokens that count."""
    hidden, labels = given["hidden_states"], given["shift_labels"]
    if labels is None:
        if given["labels"] is None:
            raise ValueError("eaves.trl: neither labels nor shift_labels are given, expected one of them")
        hidden, labels = hidden[..., :-1, :], given["labels"][..., 1:]
    counts = labels != -100
    out: Any = _product(
        hidden, given["lm_head_weight"], given["lm_head_bias"], labels, scale=given["logit_scale"],
        softcap=given["final_logit_softcapping"], outputs=("argmax", "entropy"), skip_ignored=True,
        normalizer=_divisor(given, counts), **options,
    )  # fmt: skip
    return out.loss, (out.argmax == labels).sum().float(), out.entropy.detach().sum(), counts.sum()


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> Any:
    """linear_cross_entropy in the dtype of hidden, whatever that of the head."""
    _refuse_zero3(weight)
    product: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not torch.is_autocast_enabled(hidden.device.type) and weight.dtype != hidden.dtype:
        if weight.dtype == torch.float32 and hidden.dtype != torch.float64:
            # The gradient of a float32 head is not rounded there.
            product = torch.autocast(hidden.device.type, hidden.dtype)
        else:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    with product:
        return linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, grad_weight_dtype=accumulator_dtype(hidden.dtype), **options
        )


def _refuse_zero3(weight: Tensor) -> None:
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            "eaves.trl: DeepSpeed's ZeRO-3 has this head in pieces and releases them before eaves reads them again; "
            "call eaves.trl.uninstall()"
        )


def _divisor(given: dict[str, Any], counts: Tensor) -> Tensor | float:
    """The divisor of the loss: num_items_in_batch, or the number of rows that count; 1 if none does."""
    number = given["num_items_in_batch"]
    if number is None:
        return counts.sum().clamp(min=1)
    return number.to(counts.device) if isinstance(number, Tensor) else float(number)


def _divergence(workspace_bytes: int | None, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """As _chunked_divergence_loss: hidden states of student and teacher [B, K, D], completion_mask [B, K]. The loss,
    the sum of the student's entropies, without a gradient, and the number of rows that count."""
    counts = given["completion_mask"] != 0
    heads = [_of_model(given, name) for name in ("student", "teacher")]
    (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = heads
    out = linear_kl_div(
        hidden, weight, teacher_hidden, teacher_weight, bias=bias, teacher_bias=teacher_bias,
        targets=torch.where(counts, 0, -100), skip_ignored=True, normalizer=_divisor(given, counts), divergence="jsd",
        beta=given["beta"], temperature=given["temperature"], scale=given["student_logit_scale"],
        softcap=given["student_final_logit_softcapping"], teacher_scale=given["teacher_logit_scale"],
        teacher_softcap=given["teacher_final_logit_softcapping"], outputs="entropy", workspace_bytes=workspace_bytes,
    )  # fmt: skip
    return out.loss, out.entropy.detach().sum(), counts.sum()


def _of_model(given: dict[str, Any], name: str) -> list[Any]:
    """Hidden states, head and bias of student or teacher, whole and in one dtype."""
    hidden, head = given[f"{name}_hidden_states"], [given[f"{name}_lm_head_{each}"] for each in ("weight", "bias")]
    _refuse_zero3(head[0])
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in head]
    return [hidden, *(None if each is None else each.to(hidden.dtype) for each in whole)]
