"""verl with eaves.linear_log_prob in place of its fused kernel (`use_fused_kernels` with the backend "triton").

    eaves.verl.install()          in every process that trains (a worker's initialisation, say)
    eaves.verl.uninstall()        undoes it
    with eaves.verl.install():    both

`eaves.verl.is_active()` is True while installed. `python -m eaves info` says whether eaves knows this verl.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._parallel.shard import Shard
from eaves._replacement import Installed, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("verl")


@answers_unknown
def install(*, algorithm: str = "auto", workspace_bytes: int | None = None, keep_bytes: int | None = None) -> Installed:
    """Makes verl compute log-probabilities and entropies with eaves.

    Numbers and gradients equal verl's function; no log-probability is above 0, for any vocabulary. The gradient of a
    16-bit head is summed in float32, in a tensor of the head's shape, and rounded once.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_log_prob. If the head is frozen (LoRA) and the
            entropy is for metrics alone (entropy_coeff 0), "speed" takes two products instead of three. If the head
            learns, "keep" takes three products instead of four, and 2 bytes for each logit of a micro-batch.

    Returns:
        A context manager that undoes the installation at its end. A second install sets new options.

    Raises:
        ImportError: verl is not installed, or cannot be imported.
        RuntimeError: eaves does not know this version.
        ValueError, TypeError: an option is not valid for eaves.linear_log_prob.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_log_prob", **options)
    return replacement.install(lambda _: (functools.partial(_linear_cross_entropy, options),))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _linear_cross_entropy(
    options: dict[str, Any],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: torch.distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """linear_cross_entropy of verl 0.9 by eaves. Takes hidden, [..., D], weight, [V, D], and labels, [...]; returns the
    log-probabilities and entropies, [tokens]. With a group, weight has this rank's classes, and the gradient of hidden
    is this rank's part of the sum: verl's gather of hidden (gather_from_sequence_parallel_region) adds the parts up."""
    if reduction.lower() != "none":
        raise NotImplementedError(f'eaves.verl: reduction is {reduction!r}, expected "none"')
    group = None if dist_process_group is None else Shard(dist_process_group, reduce_input_grad=False)
    # The product of two tensors of one dtype has that dtype, under torch.autocast too.
    is_cast = hidden.dtype != weight.dtype and torch.is_autocast_enabled(hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=is_cast):
        out = linear_log_prob(
            hidden.flatten(0, -2), weight, labels.flatten(), temperature=temperature, outputs="entropy", group=group,
            grad_weight_dtype=accumulator_dtype(weight.dtype), **options,
        )  # fmt: skip
    return out.log_prob, out.entropy
