"""Calls with DTensors whose classes are cut over a mesh: this rank's part of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from eaves._arguments import refuse_unknown as refuse_on_this_rank
from eaves._parallel.agreement import with_agreement
from eaves._parallel.fully_shard import is_fully_sharded
from eaves._parallel.shard import shard_of
from eaves._torch.checks import is_distributed, name_in, said
from eaves._torch.transforms import needs_autograd

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_Result = TypeVar("_Result")


class Local(NamedTuple):
    """This rank's part of a DTensor whose classes are cut over a mesh."""

    tensor: Tensor
    mesh: Any
    axis: int  # of the mesh, over whose ranks the classes are cut

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group(self.axis)  # type: ignore[no-any-return]


def local_shard(op: str, name: str, tensor: Any, class_axis: int) -> Local:
    """This rank's part of a DTensor, whose gradient stays in its place."""
    if not -tensor.dim() <= class_axis < tensor.dim():
        raise ValueError(said(op, f"`{name}` has {tensor.dim()} axes, expected one of the classes, {class_axis}"))
    cut = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(class_axis % tensor.dim())]
    # Along another axis ranks may have rows of their own, or the same: nothing says which.
    if len(cut) != 1 or tensor.device_mesh.size() != tensor.device_mesh.size(cut[0]):
        name = name_in(op, name)
        raise NotImplementedError(
            f"{op}: {name} is a DTensor with the placements {list(map(str, tensor.placements))}, expected its classes "
            f"cut over the one axis of its mesh; pass {name}.to_local() and the group of an axis of a larger mesh, or "
            f"{name}.full_tensor(), where ranks have rows of their own with a Partial('avg') (of "
            "torch.distributed.tensor) for each axis of the mesh as grad_placements"
        )
    return Local(tensor.to_local(), tensor.device_mesh, cut[0])


def told(op: str, tensor: Any, run: Callable[[], _Result]) -> _Result:
    """The result of `run`. Its error is told to the other ranks of a DTensor, if its mesh has one axis alone."""
    mesh = tensor.device_mesh
    return with_agreement(op, mesh.get_group(), lambda _: run()) if mesh.ndim == 1 else run()


def refuse_in_place_of_dtensor(op: str, name: str, logits: Any, inplace_backward: object) -> None:
    if inplace_backward is True and needs_autograd(logits):
        name = name_in(op, name)
        raise NotImplementedError(
            f"{op}: inplace_backward would write over this rank's part of the DTensor {name}, which autograd does not "
            f"notice; pass {name}.to_local() and its group, or leave inplace_backward out"
        )


def local_classes(op: str, name: str, tensor: Any) -> Any:
    """This rank's part of a DTensor whose first axis are the classes; any other tensor as it is."""
    return local_shard(op, name, tensor, 0).tensor if is_distributed(tensor) else tensor


def local_rows(op: str, name: str, tensor: Any, head: Local, is_summed: bool = False) -> Any:
    """A DTensor of rows as each rank has all of them. Its gradient is the same on all ranks, or with `is_summed`, their
    parts of it."""
    if not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Partial, Replicate

    _check_mesh(op, name, tensor, head)
    placements = list(tensor.placements)
    placements[head.axis] = Replicate()
    whole = tensor.redistribute(placements=placements)
    if is_summed:
        placements[head.axis] = Partial()
    local: Tensor = whole.to_local(grad_placements=placements)
    return local


def local_target(op: str, target: Any, head: Local, class_axis: int) -> Any:
    """The classes of all rows, or the probabilities of this rank's classes, without a collective."""
    if not is_distributed(target) or not target.is_floating_point():
        return local_rows(op, "targets", target, head)
    from torch.distributed.tensor import Shard as Cut

    _check_mesh(op, "targets", target, head)
    placements = list(target.placements)
    placement, cut = placements[head.axis], Cut(class_axis % max(1, target.dim()))
    if placement != cut and not placement.is_replicate():
        raise NotImplementedError(
            said(op, f"`targets` is a DTensor of probabilities with the placements {list(map(str, placements))}, ")
            + "expected its classes whole, or cut as the head's"
        )
    placements[head.axis] = cut
    return target.redistribute(placements=placements).to_local()


def _check_mesh(op: str, name: str, tensor: Any, head: Local) -> None:
    if tensor.device_mesh != head.mesh:
        raise NotImplementedError(
            said(op, f"`{name}` is a DTensor on the mesh {tensor.device_mesh}, ")
            + f"expected that of the classes, {head.mesh}"
        )


def told_to_ranks(op: str, group: object, cut: object, run: Callable[[object], _Result]) -> _Result:
    """The result of `run`. Its error is told to the other ranks of a group, or of the DTensor `cut`; not of a head that
    fully_shard has cut, which they may be gathering."""
    ranks = None if group is None else shard_of(group).group
    if ranks is not None:
        return with_agreement(op, ranks, run)
    if is_distributed(cut) and not is_fully_sharded(cut):
        return told(op, cut, lambda: run(None))
    return run(None)


def refuse_unknown(
    op: str, unknown: Mapping[str, object], function: Callable[..., object], group: object, cut: Any
) -> NoReturn:
    """The same, of which the other ranks learn. `cut` has the classes: a tensor, or a torch.nn.Linear."""

    def refuse(_: object) -> NoReturn:
        refuse_on_this_rank(op, unknown, function)

    told_to_ranks(op, group, cut.weight if isinstance(cut, torch.nn.Linear) else cut, refuse)
    raise AssertionError
