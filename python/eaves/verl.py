"""verl with eaves.linear_log_prob in place of its fused kernel (`use_fused_kernels` with the backend "triton").

    eaves.verl.install()          in every process that trains (a worker's initialisation, say)
    eaves.verl.uninstall()        as it was
    with eaves.verl.install():    both

`eaves.verl.is_active()` says whether it is, and `python -m eaves info` whether this verl is known.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from eaves._parallel.shard import Shard
from eaves._replacement import Installed, replacement_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("verl")


def install(*, algorithm: str = "auto", workspace_bytes: int | None = None, keep_bytes: int | None = None) -> Installed:
    """Lets verl compute log-probabilities and entropies with eaves.

    Numbers and gradients are those of verl's function; no log-probability is above 0, whatever the vocabulary. The
    gradient of a 16-bit head is summed in float32, in a tensor of the head's shape, and rounded once.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_log_prob. Where the head is frozen (LoRA) and the
            entropy is for metrics alone (entropy_coeff 0), "speed" takes two products instead of three. Where it
            learns, "keep" takes three instead of four, in 2 bytes for each logit of a micro-batch.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: verl is not installed, or cannot be imported.
        RuntimeError: it is a version that eaves does not know.
        ValueError, TypeError: an option is none of eaves.linear_log_prob.
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
    """As linear_cross_entropy of verl 0.9: hidden [..., D], weight [V, D], labels [...]; the log-probabilities and
    entropies, [tokens]. With a group, weight has this rank's classes, and the gradient of hidden is this rank's part of
    the sum: what verl gathers hidden with adds the parts up (gather_from_sequence_parallel_region)."""
    if reduction.lower() != "none":
        raise NotImplementedError(f'eaves.verl: reduction is {reduction!r}, expected "none"')
    group = None if dist_process_group is None else Shard(dist_process_group, reduce_input_grad=False)
    # Tensors of one dtype are multiplied in that, under torch.autocast too.
    is_cast = hidden.dtype != weight.dtype and torch.is_autocast_enabled(hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=is_cast):
        out = linear_log_prob(
            hidden.flatten(0, -2), weight, labels.flatten(), temperature=temperature, outputs="entropy", group=group,
            grad_weight_dtype=accumulator_dtype(weight.dtype), **options,
        )  # fmt: skip
    return out.log_prob, out.entropy
