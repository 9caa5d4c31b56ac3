"""Calls with DTensors whose classes are cut over a mesh: this rank's part of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from eaves._arguments import refuse_unknown as refuse_on_this_rank
from eaves._parallel.agreement import with_agreement
from eaves._parallel.fully_shard import is_fully_sharded, needs_whole_head, with_whole_head
from eaves._parallel.shard import Shard, ShardArguments, shard_arguments, shard_of
from eaves._torch.checks import is_distributed, name_in, said
from eaves._torch.transforms import needs_autograd

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_Result = TypeVar("_Result")


class Local(NamedTuple):
    """This rank's part of a DTensor whose classes are cut over a mesh."""

    tensor: Tensor
    class_axis: int
    mesh: Any
    axis: int  # of the mesh, over whose ranks the classes are cut

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group(self.axis)  # type: ignore[no-any-return]


def local_shard(op: str, name: str, tensor: Any, class_axis: int) -> Local:
    """This rank's part of a DTensor. Its gradient keeps the DTensor's placements."""
    if not -tensor.dim() <= class_axis < tensor.dim():
        raise ValueError(said(op, f"`{name}` has {tensor.dim()} axes, expected an axis {class_axis} of classes"))
    cut = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(class_axis % tensor.dim())]
    # Along another axis ranks may have different rows or the same rows, and nothing says which.
    if len(cut) != 1 or tensor.device_mesh.size() != tensor.device_mesh.size(cut[0]):
        name = name_in(op, name)
        raise NotImplementedError(
            f"{op}: {name} is a DTensor with the placements {list(map(str, tensor.placements))}, expected classes "
            f"that are cut over a mesh of one axis. Pass {name}.to_local() and the group of the axis that cuts the "
            f"classes, or gather the tensor with {name}.full_tensor(). If ranks have different rows, gather it with a "
            "Partial('avg') (of torch.distributed.tensor) for each axis of the mesh as grad_placements"
        )
    return Local(tensor.to_local(), class_axis, tensor.device_mesh, cut[0])


def refuse_in_place_of_dtensor(op: str, logits: Any, inplace_backward: object) -> None:
    if inplace_backward is True and needs_autograd(logits):
        name = name_in(op, "logits")
        raise NotImplementedError(
            f"{op}: inplace_backward would write over this rank's part of the DTensor {name}, which autograd does not "
            f"notice; pass {name}.to_local() and its group, or leave inplace_backward out"
        )


def local_classes(op: str, name: str, tensor: Any) -> Any:
    """This rank's part of a DTensor that has the classes on its first axis; any other tensor as it is."""
    return local_shard(op, name, tensor, 0).tensor if is_distributed(tensor) else tensor


def local_rows(op: str, name: str, tensor: Any, head: Local, is_summed: bool = False) -> Any:
    """A DTensor of rows, gathered so that each rank has all rows. Its gradient is the same on all ranks; with
    `is_summed` the ranks have parts of its sum."""
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


def local_targets(op: str, targets: Any, cut: Local, class_axis: int = -1, name: str = "targets") -> Any:
    """The class targets of all rows; or the probabilities of this rank's classes, which take no collective."""
    if not is_distributed(targets) or not targets.is_floating_point():
        return local_rows(op, name, targets, cut)
    from torch.distributed.tensor import Shard as Cut

    _check_mesh(op, name, targets, cut)
    placements = list(targets.placements)
    placement, of_classes = placements[cut.axis], Cut(class_axis % max(1, targets.dim()))
    if placement != of_classes and not placement.is_replicate():
        raise NotImplementedError(
            said(op, f"`{name}` is a DTensor of probabilities with the placements {list(map(str, placements))}, ")
            + "expected its classes whole, or cut as the head's"
        )
    placements[cut.axis] = of_classes
    return targets.redistribute(placements=placements).to_local()


def _check_mesh(op: str, name: str, tensor: Any, head: Local) -> None:
    if tensor.device_mesh != head.mesh:
        raise NotImplementedError(
            said(op, f"`{name}` is a DTensor on the mesh {tensor.device_mesh}, ")
            + f"expected the mesh of the classes, {head.mesh}"
        )


def told_to_ranks(op: str, group: object, cut: Any, run: Callable[[], _Result]) -> _Result:
    """The result of `run`. The other ranks of a group, or of the DTensor `cut`, learn of an error. They do not if
    fully_shard has cut the head, which they may be gathering, or if no axis of the mesh is known to be the axis of the
    classes."""
    ranks = None if group is None else shard_of(group).group
    if ranks is None and is_distributed(cut) and not is_fully_sharded(cut):
        mesh = cut.device_mesh
        long_axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        if len(long_axes) == 1 or mesh.ndim == 1:
            ranks = mesh.get_group(long_axes[0] if long_axes else 0)
    return run() if ranks is None else with_agreement(op, ranks, lambda _: run())


def over_ranks(call: Any, run: Callable[[Any, ShardArguments | None], _Result]) -> _Result:
    """The result of `run` with the call and the shard of this rank. The ranks of a group learn of each other's errors
    before they wait for each other.

    A call is a record with op, group and classes. with_classes is the name of the tensor that has the classes, and the
    tensor. class_axis() is the axis of its classes if it is a DTensor. of_rank(cut) is the call with this rank's parts
    of its DTensors; `cut` is this rank's part of the tensor with the classes. A call with a head also has hidden, head
    and bias."""
    op, shard, (name, tensor) = call.op, shard_of(call.group), call.with_classes
    is_cut, has_head = is_distributed(tensor), name == "head"
    if call.group is None and not is_cut:
        return run(call, None)
    if has_head and needs_whole_head(tensor, shard.group, shard.sequence_parallel):
        if shard != Shard():
            raise ValueError(
                f"{op}: group is a Shard, but fully_shard has cut the head, so eaves gathers the whole head; leave "
                "group out"
            )
        # The gathered head may still be a rank's piece of a vocabulary under tensor parallelism.
        return with_whole_head(op, lambda whole: over_ranks(whole._replace(group=None), run), call)
    group, cut = shard.group, None
    if group is None:
        if not is_cut:
            raise ValueError(
                f"{op}: group is a Shard without a group, and no tensor is a DTensor; pass Shard(group, ...)"
            )
        # Only this tensor decides: an error of one rank in another tensor has to be an error on all ranks.
        cut = told_to_ranks(op, None, tensor, lambda: local_shard(op, name, tensor, call.class_axis()))
        group = cut.group

    def run_on(group: ProcessGroup) -> _Result:
        if is_cut and cut is None:
            raise ValueError(said(op, f"`{name}` is a DTensor, which knows its group; leave group out"))
        if not has_head and shard._replace(group=None, first_class=None) != Shard():
            raise ValueError(
                f"{op}: sequence_parallel, reduce_input_grad and reduce_dtype of a Shard need a head, which "
                "this operator does not have; leave them out"
            )
        of_rank = call if cut is None else call.of_rank(cut)
        return run(of_rank, shard_arguments(op, group, shard, call.classes))

    return with_agreement(op, group, run_on)


def refuse_unknown(
    op: str, unknown: Mapping[str, object], function: Callable[..., object], group: object, cut: Any
) -> NoReturn:
    """refuse_unknown, and the other ranks learn of the error. `cut` has the classes: a tensor, or a torch.nn.Linear."""

    tensor = cut.weight if isinstance(cut, torch.nn.Linear) else cut
    told_to_ranks(op, group, tensor, lambda: refuse_on_this_rank(op, unknown, function))
    raise AssertionError
