"""The statistics of a shard's rows: their gather, and the operator that merges them."""

from __future__ import annotations

import torch
from torch import Tensor

from eaves._parallel.collectives import Underway, all_gather, group_of
from eaves._parallel.shard import Place, ShardArguments
from eaves._torch.checks import accumulator_dtype
from eaves._torch.outputs import ARGMAX

# Computes the loss and the outputs from statistics. The target is None for probabilities.
merge = torch.ops.eaves.cross_entropy_merge.default

STATISTICS = 10  # kCrossEntropyStatistics of include/eaves/cross_entropy.h


def gather_statistics(shard: ShardArguments, own: Tensor, target: Tensor | None) -> Underway:
    """Gathers the statistics of a shard's rows, [rows, STATISTICS], together with class targets, [rows]."""
    classes = own.new_zeros(own.shape[0]) if target is None else target.to(_BITS[own.dtype]).view(own.dtype)
    return all_gather(torch.cat([own, classes.unsqueeze(-1)], -1), group_of(shard))


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def statistics_of(gathered: Tensor) -> Tensor:
    """[ranks, rows, STATISTICS], the same on all ranks. Rows whose targets differ between ranks become NaN, because
    targets on a GPU were not compared before."""
    targets = gathered[..., STATISTICS].contiguous().view(_BITS[gathered.dtype])
    differs = (targets != targets[0]).any(0)
    return torch.where(differs.unsqueeze(-1), torch.nan, gathered[..., :STATISTICS]).contiguous()


def no_statistics(rows: int, logits: Tensor) -> Tensor:
    """The statistics of a shard without classes, in the order of CrossEntropyStatistic."""
    statistics = logits.new_zeros(rows, STATISTICS, dtype=accumulator_dtype(logits.dtype))
    statistics[:, [0, 7]] = -torch.inf  # largest, best_value
    return statistics


def refuse_argmax(op: str, outputs: int, place: Place, dtype: torch.dtype) -> None:
    if outputs & ARGMAX and dtype != torch.float64 and place.classes > 2**24:
        raise NotImplementedError(
            f"{op}: the vocabulary has {place.classes} classes, expected at most {2**24} for argmax over ranks, which "
            "exchange the class in float32"
        )
