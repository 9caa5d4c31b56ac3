"""The collectives of torch.distributed. Each may be underway while the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eaves._parallel.shard import ShardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def distributed() -> Any:
    """torch.distributed, imported late because it takes a while to load."""
    from torch import distributed

    return distributed


class Underway(NamedTuple):
    """The result of a collective that has begun."""

    result: Tensor
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


def all_gather(own: Tensor, group: ProcessGroup) -> Underway:
    """The ranks' tensors, [ranks, ...], in the order of ranks."""
    gathered = own.new_empty(group.size(), *own.shape)
    if own.numel() == 0:
        return Underway(gathered, None)
    gather = _renamed("all_gather_single", "all_gather_into_tensor")
    return Underway(gathered, gather(gathered.flatten(0, 1), own.contiguous(), group=group, async_op=True))


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Underway:
    """Writes the sum over the ranks over `tensor`."""
    return Underway(tensor, distributed().all_reduce(tensor, group=group, async_op=True))


def sum_on(rank: int, tensor: Tensor, group: ProcessGroup) -> Underway:
    """Writes the sum over the ranks over `tensor` on one rank; on the other ranks `tensor` is undefined afterwards."""
    return Underway(tensor, distributed().reduce(tensor, group=group, group_dst=rank, async_op=True))


def _renamed(name: str, before_2_13: str) -> Any:
    return getattr(distributed(), name, None) or getattr(distributed(), before_2_13)


def group_of(shard: ShardArguments) -> ProcessGroup:
    return named_group(shard.group)


def named_group(name: str) -> ProcessGroup:
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], ProcessGroup] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009  # not public
    return resolve(name)


class AllRows(torch.autograd.Function):
    """This rank's rows -> the rows of all ranks. The upstream gradient is summed over the ranks already, so each rank
    takes its own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: ShardArguments) -> Tensor:
        group = group_of(shard)
        ctx.rows = slice(group.rank() * own.shape[0], (group.rank() + 1) * own.shape[0])
        return all_gather(own, group).wait().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rows].clone(), None
