"""NeMo RL with eaves.linear_log_prob in place of its fused head (`use_fused_linear_logprobs`, Megatron).

    eaves.nemo_rl.install()          in every process that trains (a worker's initialisation, say)
    eaves.nemo_rl.uninstall()        undoes it
    with eaves.nemo_rl.install():    both

`eaves.nemo_rl.is_active()` is True while installed. `python -m eaves info` says whether eaves knows this NeMo RL.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
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

replacement = replacement_of("nemo_rl")


@answers_unknown
def install(*, workspace_bytes: int | None = None) -> Installed:
    """Makes NeMo RL compute log-probabilities with eaves, over the tensor-parallel group, with sequence parallel.

    Numbers and gradients equal NeMo RL's function, from the product's float32 sums; the gradient of the head is summed
    in float32. NeMo RL's chunk size is ignored: `workspace_bytes` sets the size of the chunks.

    Args:
        workspace_bytes: as in eaves.linear_log_prob.

    Returns:
        A context manager that undoes the installation at its end. A second install sets new options.

    Raises:
        ImportError: NeMo RL is not installed, or cannot be imported.
        RuntimeError: eaves does not know this version, or other code has replaced the function.
        ValueError, TypeError: the option is not valid for eaves.linear_log_prob.
    """
    check_algorithm("linear_log_prob", "auto", workspace_bytes)
    ours = functools.partial(_log_probs, workspace_bytes)
    return replacement.install(lambda theirs: (SimpleNamespace(apply=called_like(theirs[0].forward, ours, None)),))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _log_probs(workspace_bytes: int | None, given: dict[str, Any]) -> Tensor:
    """ChunkedDistributedHiddenStatesToLogprobs.apply by eaves. Takes this rank's hidden states, [S / ranks, B, D], this
    rank's head, [V / ranks, D], and target, [B, S]; returns the log-probabilities, [B, S]."""
    weight = given["output_weight_layer"]
    shard = shard_of_range(
        "eaves.nemo_rl", given["tp_group"], given["vocab_start_index"], given["vocab_end_index"], weight
    )._replace(sequence_parallel=True)  # fmt: skip
    with torch.set_grad_enabled(torch.is_grad_enabled() and not given["inference_only"]):
        log_probs: Tensor = linear_log_prob(
            given["tensor_parallel_hidden_states"], weight, given["target"].T, group=shard,
            workspace_bytes=workspace_bytes, grad_weight_dtype=accumulator_dtype(weight.dtype),
        )  # fmt: skip
    return log_probs.T
