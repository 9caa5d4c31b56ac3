"""The head of 40 classes that tests cut over ranks."""

from typing import Any

import torch
from torch import Tensor, distributed

import eaves
from linear_cross_entropy_test import problem
from ranks import here

CLASSES = 40


def pieces(ranks: int, is_even: bool = True) -> list[slice]:
    """The classes of each rank. With `is_even` False the sizes differ, and one piece is empty."""
    sizes = [CLASSES // ranks] * ranks if is_even else [7, 0, 21, 12][:ranks]
    sizes[-1] = CLASSES - sum(sizes[:-1])
    return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(ranks)]


def problem_of(group: distributed.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the whole head, targets, and this rank's part of the head, in float64."""
    x, head, target, _ = problem((24, 16), CLASSES, torch.float64, here())
    return x, head, target, head[pieces(group.size())[group.rank()]]


def over(group: distributed.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the group, in a Shard if some are fields of a Shard."""
    of_shard = {name: options[name] for name in eaves.Shard._fields if name in options}
    others = {name: value for name, value in options.items() if name not in of_shard}
    return {"group": eaves.Shard(group, **of_shard) if of_shard else group, **others}
