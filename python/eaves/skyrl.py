"""SkyRL's Megatron backend with eaves.linear_log_prob in place of its fused head (`fused_lm_head_logprob`).

    eaves.skyrl.install()          in every process that trains (a worker's initialisation, say)
    eaves.skyrl.uninstall()        undoes it
    with eaves.skyrl.install():    both

`eaves.skyrl.is_active()` is True while installed. `python -m eaves info` says whether eaves knows this SkyRL.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._parallel.shard import shard_of_range
from eaves._replacement import Installed, called_like, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("skyrl")


@answers_unknown
def install(*, workspace_bytes: int | None = None) -> Installed:
    """Makes SkyRL compute log-probabilities with eaves, over the tensor-parallel group.

    Numbers and gradients equal SkyRL's function, from the product's float32 sums, for any
    `fused_lm_head_logprob_backend`. SkyRL's chunk size is ignored: `workspace_bytes` sets the size of the chunks. SkyRL
    still computes the entropy for metrics.

    Args:
        workspace_bytes: as in eaves.linear_log_prob.

    Returns:
        A context manager that undoes the installation at its end. A second install sets new options.

    Raises:
        ImportError: SkyRL is not installed, or cannot be imported.
        RuntimeError: eaves does not know this version, or other code has replaced the function.
        ValueError, TypeError: the option is not valid for eaves.linear_log_prob.
    """
    check_algorithm("linear_log_prob", "auto", workspace_bytes)
    return replacement.install(lambda theirs: (called_like(theirs[0], functools.partial(_log_probs, workspace_bytes)),))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _log_probs(workspace_bytes: int | None, given: dict[str, Any]) -> Tensor:
    """_fused_lm_head_logprob_apply by eaves. Takes hidden, [B, S, D], this rank's weight, [V / ranks, D], and target,
    [B, S]; returns the log-probabilities, [B, S]. The gradient of hidden is this rank's part of the sum: Megatron adds
    the parts up."""
    weight = given["weight"]
    shard = shard_of_range(
        "eaves.skyrl", given["tp_group"], given["vocab_start_index"], given["vocab_end_index"], weight
    )._replace(reduce_input_grad=False)  # fmt: skip
    with torch.set_grad_enabled(torch.is_grad_enabled() and not given["inference_only"]):
        log_probs: Tensor = linear_log_prob(
            given["hidden"].to(weight.dtype), weight, given["target"], group=shard, workspace_bytes=workspace_bytes,
            grad_weight_dtype=accumulator_dtype(weight.dtype),
        )  # fmt: skip
    return log_probs
