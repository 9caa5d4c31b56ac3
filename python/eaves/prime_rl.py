"""prime-rl with eaves.linear_log_prob in place of its fused head (`fused_lm_head_token_chunk_size`).

    eaves.prime_rl.install()          in every process that trains
    eaves.prime_rl.uninstall()        undoes it
    with eaves.prime_rl.install():    both

`eaves.prime_rl.is_active()` is True while installed. `python -m eaves info` says whether eaves knows this prime-rl.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._replacement import Installed, called_like, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("prime_rl")


@answers_unknown
def install(
    *, algorithm: str = "speed", workspace_bytes: int | None = None, keep_bytes: int | None = None
) -> Installed:
    """Makes prime-rl compute log-probabilities and entropies with eaves.

    Each token has a temperature, which divides the hidden states of its row and so rounds them to their dtype once
    more; 1 and other powers of two round nothing. Logits are float32 sums of the product; prime-rl rounds them to the
    dtype of the hidden states. For a head with a soft cap (Gemma), the temperature divides the logits, and chunks of
    PyTorch's products compute them ("recompute", for any `algorithm`). The entropy has a gradient, which prime-rl
    refuses. prime-rl's chunk size is ignored: `workspace_bytes` sets the size of the chunks.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_log_prob. With "speed" a frozen head (LoRA) takes two
            products instead of three. If the head learns, "keep" takes three products instead of four, and 2 bytes for
            each logit of a micro-batch.

    Returns:
        A context manager that undoes the installation at its end. A second install sets new options.

    Raises:
        ImportError: prime-rl is not installed, or cannot be imported.
        RuntimeError: eaves does not know this version, or other code has replaced one of the functions.
        ValueError, TypeError: an option is not valid for eaves.linear_log_prob.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_log_prob", **options)
    ours = functools.partial(_log_probs, options)
    return replacement.install(
        lambda theirs: tuple(SimpleNamespace(apply=called_like(each.forward, ours, None)) for each in theirs)
    )


uninstall, is_active = replacement.uninstall, replacement.is_active


def _log_probs(options: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """_SequenceChunkedLogProbEntropyFn.apply by eaves. Takes hidden, [N, D], weight, [V, D], labels and
    inv_temperature, [N], and in Gemma's function a softcap; returns the log-probabilities and entropies, [N]."""
    hidden, inverse, softcap = given["hidden"], given["inv_temperature"], given.get("softcap")
    if softcap is None:
        hidden = (hidden * inverse.unsqueeze(-1)).to(hidden.dtype)
    else:  # the temperature divides after the soft cap
        options = {
            "workspace_bytes": options["workspace_bytes"], "softcap": softcap,
            "temperature": 1 / inverse.to(accumulator_dtype(hidden.dtype)),  # FSDP2 casts it to 16 bits
        }  # fmt: skip
    out = linear_log_prob(
        hidden, given["weight"], given["labels"], outputs="entropy",
        grad_weight_dtype=accumulator_dtype(hidden.dtype), **options,
    )  # fmt: skip
    return out.log_prob, out.entropy
