"""TRL's trainers with eaves.linear_cross_entropy as their head.

    eaves.trl.install()           in every process that trains, before it makes a trainer or after
    eaves.trl.uninstall()         as it was
    with eaves.trl.install():     both

SFT, DPO, KTO, GRPO and RLOO all take their log-probabilities from one function of TRL, ChunkedLogProbFunction, which is
what is replaced. `eaves.trl.is_active()` says whether it is, and `python -m eaves info` whether this TRL is known.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._calls.log_prob import tempered
from eaves._replacement import Installed, Replacement
from eaves._torch.head import check_algorithm
from eaves.functional.linear_cross_entropy import linear_cross_entropy

__all__ = ["install", "is_active", "uninstall"]

# The outputs of linear_cross_entropy by TRL's names.
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "sum_sq", "mean_logits": "mean_logit", "is_top1": "argmax"}

replacement = Replacement(
    "trl",
    ("1.16",),
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"),
    ("trl.trainer.utils", "_ChunkedLogProbFunction"),
)


def install(
    *, algorithm: str = "speed", workspace_bytes: int | None = None, keep_bytes: int | None = None
) -> Installed:
    """Lets TRL's trainers compute log-probabilities, entropies and their metrics with eaves.

    Log-probabilities, entropies and gradients are those of TRL's function, from the product's float32 sums; the
    gradient of the head is added up in float32. Metrics take no product of their own. Of a 16-bit head that is cast to
    float32 (cast_lm_head_to_fp32) the copy is kept until the backward.
    TRL's `chunk_size` is not read: `workspace_bytes` says how much is computed at once.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_cross_entropy. With "speed" a frozen head (LoRA)
            takes two products instead of three; a gradient of the entropy, which TRL's trainers do not take, two more.
            "keep" takes three where the head learns, in 4 bytes for each logit: TRL's metrics need all of a row.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: TRL is not installed, or cannot be imported.
        RuntimeError: it is a version that eaves does not know, or somebody else has replaced the function.
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_cross_entropy", **options)
    apply = functools.partial(_apply, options)
    return replacement.install(SimpleNamespace(apply=apply))


uninstall, is_active = replacement.uninstall, replacement.is_active


class _Call(NamedTuple):
    """The arguments of ChunkedLogProbFunction.apply of TRL 1.16."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    chunk_size: int
    softcap: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _apply(options: dict[str, Any], *arguments: Any) -> tuple[Tensor | None, ...]:
    """As ChunkedLogProbFunction.apply: the log-probabilities and all outputs; what `outputs` does not name is None."""
    hidden, weight, bias, targets, temperature, _, final_softcap, logit_scale, outputs = _Call(*arguments)
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            "eaves.trl: this head is in pieces (DeepSpeed's ZeRO-3), and would be read again after they are released; "
            "call eaves.trl.uninstall()"
        )
    product: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not torch.is_autocast_enabled(hidden.device.type) and weight.dtype != hidden.dtype:
        if weight.dtype == torch.float32 and hidden.dtype != torch.float64:
            # The gradient of a float32 head is not rounded there.
            product = torch.autocast(hidden.device.type, hidden.dtype)
        else:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    scale, softcap = tempered("eaves.trl", temperature, logit_scale, final_softcap)
    assert scale is not None
    names = [name for name in _OUTPUTS if name in outputs]  # TRL names log_probs too
    with product:
        out: Any = linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="none", scale=scale, softcap=softcap,
            outputs=tuple(_OUTPUTS[name] for name in names),
            grad_weight_dtype=None if hidden.dtype == torch.float64 else torch.float32, **options,
        )  # fmt: skip
    loss, *others = out if names else (out,)
    found = dict(zip(names, others))
    if "log_sum_sq_probs" in found:
        found["log_sum_sq_probs"] = found["log_sum_sq_probs"].log()
    if "is_top1" in found:
        found["is_top1"] = found["is_top1"] == targets
    entropy, log_sum_sq_probs, mean_logits, is_top1 = map(found.get, _OUTPUTS)
    return 0 - loss, entropy, log_sum_sq_probs, mean_logits, is_top1
