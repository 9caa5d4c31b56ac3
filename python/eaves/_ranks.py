"""A vocabulary that is cut over the ranks of a torch.distributed group: the arguments that say so, DTensors among them,
the agreement of the ranks before the first collective, the collectives, and the gather of the rows' statistics.

A call is the same on all ranks but for its shard of the head or the logits. Before anything else is exchanged, but the
rows of a DTensor, each rank tells the others what it was called with, or what error it has. Where they differ, or one
has an error, all of them raise a ValueError or that error, and none hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from eaves._loss import ARGMAX, shape_of
from eaves._operator import accumulator_dtype, call, check_bool, index_of, is_transforming, name_of, needs_autograd

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_merge = torch.ops.eaves.cross_entropy_merge.default

STATISTICS = 10  # kCrossEntropyStatistics of include/eaves/cross_entropy.h

_Result = TypeVar("_Result")


class Shard(NamedTuple):
    """What a call says of its shard, as the operators take it."""

    group: str  # its name
    ranks: int
    first_class: int  # -1: those of the ranks before come first
    classes: int  # -1: as many as all shards have
    sequence_parallel: bool = False
    reduce_input_grad: bool = True
    reduce_dtype: torch.dtype | None = None


SCHEMA = (
    "str group, int ranks, SymInt first_class, SymInt classes, bool sequence_parallel, bool reduce_input_grad, "
    "ScalarType? reduce_dtype"
)


class Place(NamedTuple):
    """Which classes a rank has, without those of padding."""

    first_class: int
    classes: int  # of all ranks
    columns: int  # of this one
    most: int  # the most columns that a rank has

    def tensor(self) -> Tensor:
        """For the backward: a call that is compiled keeps tensors alone."""
        return torch.tensor(self, dtype=torch.int64)

    @staticmethod
    def of(tensor: Tensor) -> Place:
        return Place(*tensor.tolist())


# ----------------------------------------------------------------------------------------------------------- arguments


def is_distributed(tensor: object) -> bool:
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:  # asked in each call
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def rows_of(op: str, shard: Shard, input: Tensor, name: str = "input") -> tuple[int, ...]:
    """The rows that a target has, in the shape of input without its features."""
    rows = tuple(input.shape[:-1])
    if not shard.sequence_parallel:
        return rows
    if not rows:
        raise ValueError(f"{op}: with sequence_parallel {name} is cut along its first axis, and it has features alone")
    return (rows[0] * shard.ranks, *rows[1:])


def dtype_of_parts(shard: Shard, dtype: torch.dtype) -> torch.dtype:
    """In which the ranks' parts of the gradient of an input are computed and added up."""
    if not shard.reduce_input_grad:
        return dtype
    # A part of float16 may be infinite where the sum is not.
    return shard.reduce_dtype or (torch.float32 if dtype == torch.float16 else dtype)


def check_reduce_dtype(op: str, shard: Shard, input: Tensor) -> None:
    allowed = (input.dtype, accumulator_dtype(input.dtype))
    if shard.reduce_dtype is not None and shard.reduce_dtype not in allowed:
        names = " or ".join(dict.fromkeys(map(name_of, allowed)))
        raise ValueError(f"{op}: reduce_dtype is {name_of(shard.reduce_dtype)}, expected {names}")


def without_padding(op: str, classes: int, *tensors: Any) -> list[Any]:
    """The first `classes` of tensors whose first axis are those and padding, as views."""
    total = index_of(op, "classes", classes)
    for each in tensors:
        if isinstance(each, Tensor) and not 1 <= total <= (each.shape[0] if each.dim() else 0):
            raise ValueError(f"{op}: classes is {total}, expected at most those of the tensors, {shape_of(each)}")
    return [each[:total] if isinstance(each, Tensor) else each for each in tensors]


def shard_of(
    op: str,
    group: ProcessGroup,
    first_class: int | None,
    classes: int | None,
    sequence_parallel: bool = False,
    reduce_input_grad: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> Shard:
    """The arguments of a call with a group, checked."""
    first = -1 if first_class is None else index_of(op, "first_class", first_class)
    total = -1 if classes is None else index_of(op, "classes", classes)
    if (first_class is not None and first < 0) or (classes is not None and total < 1):
        raise ValueError(f"{op}: first_class is {first_class} and classes {classes}, expected a part of the classes")
    check_bool(op, "sequence_parallel", sequence_parallel)
    check_bool(op, "reduce_input_grad", reduce_input_grad)
    if sequence_parallel and not reduce_input_grad:
        raise ValueError(
            f"{op}: with sequence_parallel each rank gets the whole gradient of its rows: expected "
            "reduce_input_grad=True"
        )
    if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{op}: reduce_dtype is {reduce_dtype!r}, expected a torch.dtype or None")
    if reduce_dtype is not None and not reduce_input_grad:
        raise ValueError(f"{op}: reduce_dtype says how parts are added up, and with reduce_input_grad=False none are")
    return Shard(group.group_name, group.size(), first, total, sequence_parallel, reduce_input_grad, reduce_dtype)


def refuse_without_group(op: str) -> NoReturn:
    raise ValueError(
        f"{op}: first_class, sequence_parallel, reduce_input_grad and reduce_dtype say how a group shares the work, "
        "and there is no group"
    )


def distributed() -> Any:
    """torch.distributed, which takes a while to load."""
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
    """[ranks, ...], in the order of ranks."""
    gathered = own.new_empty(group.size(), *own.shape)
    if own.numel() == 0:
        return Underway(gathered, None)
    gather = _renamed("all_gather_single", "all_gather_into_tensor")
    return Underway(gathered, gather(gathered.flatten(0, 1), own.contiguous(), group=group, async_op=True))


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Underway:
    """The sum over the ranks, in its place."""
    return Underway(tensor, distributed().all_reduce(tensor, group=group, async_op=True))


def sum_on(rank: int, tensor: Tensor, group: ProcessGroup) -> Underway:
    """The sum over the ranks, in its place on one of them; elsewhere what is there is of no use afterwards."""
    return Underway(tensor, distributed().reduce(tensor, group=group, group_dst=rank, async_op=True))


def _renamed(name: str, before_2_13: str) -> Any:
    return getattr(distributed(), name, None) or getattr(distributed(), before_2_13)


def group_of(shard: Shard) -> ProcessGroup:
    return named_group(shard.group)


def named_group(name: str) -> ProcessGroup:
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], ProcessGroup] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009  # not public
    return resolve(name)


class Local(NamedTuple):
    """What a DTensor whose classes are cut over a mesh says of a call."""

    tensor: Tensor
    mesh: Any
    axis: int  # of the mesh, over whose ranks the classes are cut

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group(self.axis)  # type: ignore[no-any-return]


def local_shard(op: str, name: str, tensor: Any, class_axis: int) -> Local:
    """This rank's part of a DTensor, whose gradient stays in its place."""
    if not -tensor.dim() <= class_axis < tensor.dim():
        raise ValueError(f"{op}: {name} has {tensor.dim()} axes, expected one of the classes, {class_axis}")
    cut = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(class_axis % tensor.dim())]
    # Along another axis ranks may have rows of their own, or the same: nothing says which.
    if len(cut) != 1 or tensor.device_mesh.size() != tensor.device_mesh.size(cut[0]):
        raise NotImplementedError(
            f"{op}: {name} is a DTensor with the placements {list(map(str, tensor.placements))}, expected its classes "
            f"cut over the one axis of its mesh; pass {name}.to_local() and the group of an axis of a larger mesh, or "
            f"{name}.full_tensor(), where ranks have rows of their own with a Partial('avg') (of "
            "torch.distributed.tensor) for each axis of the mesh as grad_placements"
        )
    return Local(tensor.to_local(), tensor.device_mesh, cut[0])


def told(op: str, tensor: Any, run: Callable[[], _Result]) -> _Result:
    """What `run` gives. Its error is told to the other ranks of a DTensor, where its mesh has one axis alone."""
    mesh = tensor.device_mesh
    return with_agreement(op, mesh.get_group(), lambda _: run()) if mesh.ndim == 1 else run()


def agree_on_placements(op: str, group: ProcessGroup, **tensors: Any) -> None:
    """Before DTensors are gathered, each rank tells which of them it has: a gather of some ranks alone would wait."""
    if torch.compiler.is_compiling() or _is_capturing():
        return
    facts = {
        f"the placements of {name}": list(map(str, each.placements)) if is_distributed(each) else None
        for name, each in tensors.items()
    }
    _compare(op, facts, (0, 0), group)
    _call.awaits_agreement = True


def refuse_in_place_of_dtensor(op: str, name: str, logits: Any, inplace_backward: object) -> None:
    if inplace_backward is True and needs_autograd(logits):
        raise NotImplementedError(
            f"{op}: inplace_backward would write over this rank's part of the DTensor {name}, which autograd does not "
            f"notice; pass {name}.to_local() and its group, or leave inplace_backward out"
        )


def local_classes(op: str, name: str, tensor: Any) -> Any:
    """This rank's part of a tensor whose first axis are the classes, where it is a DTensor."""
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
    """The classes of all rows; of probabilities those of this rank's classes, without a collective."""
    if not is_distributed(target) or not target.is_floating_point():
        return local_rows(op, "target", target, head)
    from torch.distributed.tensor import Shard as Cut

    _check_mesh(op, "target", target, head)
    placements = list(target.placements)
    placement, cut = placements[head.axis], Cut(class_axis % max(1, target.dim()))
    if placement != cut and not placement.is_replicate():
        raise NotImplementedError(
            f"{op}: target is a DTensor of probabilities with the placements {list(map(str, placements))}, expected "
            "its classes whole, or cut as the head's"
        )
    placements[head.axis] = cut
    return target.redistribute(placements=placements).to_local()


def _check_mesh(op: str, name: str, tensor: Any, head: Local) -> None:
    if tensor.device_mesh != head.mesh:
        raise NotImplementedError(
            f"{op}: {name} is a DTensor on the mesh {tensor.device_mesh}, expected that of the classes, {head.mesh}"
        )


# ----------------------------------------------------------------------------------------------------------- agreement

_NUMBERS = struct.Struct("qq")  # of what a rank tells the others, and behind them text
_BYTES = 2048
_SENTENCE = 300  # characters of an error among them
# A NotImplementedError is a RuntimeError too, and comes first.
_ERRORS = {each.__name__: each for each in (ValueError, TypeError, NotImplementedError, RuntimeError)}


class _Call(threading.local):
    awaits_agreement = False


_call = _Call()
_places: dict[tuple[Shard, int], Place] = {}  # of the last calls, which the next ones expect
_unsteady: set[tuple[Shard, int]] = set()  # whose place has changed between calls: nothing is expected
_streams: dict[torch.device, torch.cuda.Stream] = {}


def with_agreement(op: str, group: object, run: Callable[[ProcessGroup], _Result]) -> _Result:
    """What `run` gives with the group, which calls agreed_place(). An error before that is told to the other ranks."""
    if not isinstance(group, distributed().ProcessGroup):
        hint = " (get_group() of a mesh)" if type(group).__name__ == "DeviceMesh" else ""
        raise TypeError(f"{op}: group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup{hint}")
    if is_transforming():  # which the collective that tells of an error does not go with either
        raise NotImplementedError(f"{op}: a group does not go with torch.vmap and torch.func; leave it out")
    if torch.compiler.is_compiling():
        return run(group)
    _call.awaits_agreement = True
    try:
        return run(group)
    except Exception as error:
        if _call.awaits_agreement and not _is_capturing():
            kind = next((name for name, each in _ERRORS.items() if isinstance(error, each)), "RuntimeError")
            sentence = str(error).removeprefix(f"{op}: ").encode("ascii", "replace").decode()[:_SENTENCE]
            _exchange({"error": [kind, sentence]}, (0, 0), group)
        raise
    finally:
        _call.awaits_agreement = False


class PlaceChanged(Exception):
    """The ranks have agreed upon another place than was expected: what was computed for that one is of no use."""


def _expects_last(target: Tensor) -> bool:
    return target.is_cuda and os.environ.get("EAVES_CHECK_TARGETS", "0") == "0"


class Agreement:
    """agreed_place(), late: while the ranks compare their arguments the GPU computes, by the place that the last such
    call had. Before anything else is exchanged, settle(). Not where targets are compared with the place's classes."""

    def __init__(self, op: str, shard: Shard, target: Tensor, columns: int, facts: Callable[[], Mapping[str, object]]):
        self._begin: Callable[[], Place] = lambda: agreed_place(op, shard, columns, facts())
        self._place: Place | None = None
        self._key = shard, columns
        self._expected = _places.get(self._key) if _expects_last(target) and self._key not in _unsteady else None

    def expected(self) -> Place:
        return self._place or self._expected or self.settle()

    def settle(self) -> Place:
        if self._place is None:
            self._place = self._begin()
            if self._expected not in (None, self._place):
                _unsteady.add(self._key)
        return self._place

    def settle_as(self, expected: Place) -> None:
        if self.settle() != expected:
            raise PlaceChanged


def agreed_place(op: str, shard: Shard, columns: int, facts: Mapping[str, object]) -> Place:
    """The first collective of a call. `columns` is how many classes this rank's tensors have, padding among them;
    `facts` are what has to be the same on all ranks, by names for an error."""
    facts = {
        **facts,
        "classes": shard.classes,
        "the kind of first_class": "None" if shard.first_class < 0 else "int",
        "sequence_parallel": shard.sequence_parallel,
        "reduce_input_grad": shard.reduce_input_grad,
        "reduce_dtype": str(shard.reduce_dtype),
    }
    if _is_capturing():
        if (shard, columns) not in _places:
            raise RuntimeError(
                f"{op}: ranks cannot agree while a CUDA graph is captured; run the same call once before the capture"
            )
        return _places[shard, columns]
    shards = _compare(op, facts, (shard.first_class, columns), group_of(shard))
    place = _places[shard, columns] = _place_of(op, shard, shards)
    return place


def _compare(
    op: str, facts: Mapping[str, object], of_shard: tuple[int, int], group: ProcessGroup
) -> list[tuple[int, int]]:
    """What each rank tells of its shard; an error where the ranks' facts differ."""
    texts, shards = _exchange({"the operator": op, **facts}, of_shard, group)
    if any(text != texts[0] for text in texts):  # 0.0 and -0.0 do not differ, but their texts
        _refuse_differences(op, [json.loads(text) for text in texts])
    return shards


def _refuse_differences(op: str, told: Sequence[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        if "error" in each:
            kind, sentence = each["error"]
            raise _ERRORS[kind](f"{op}: rank {rank} of the group: {sentence}")
    for rank, each in enumerate(told):
        for name, value in each.items():
            if value != (other := told[0].get(name)):
                how = _HINTS.get(name, "") if name in _DIGESTS else f": {other} and {value}, expected the same"
                raise ValueError(f"{op}: ranks 0 and {rank} of the group differ in {name}{how}")


_OF_ROWS = ": a group shares one head, and each rank has all rows"
_HINTS = {"target": _OF_ROWS, "tokens": _OF_ROWS, "which rows count": _OF_ROWS}
_DIGESTS = (*_HINTS, "row_weight", "normalizer", "temperature")  # whose numbers say nothing


def _place_of(op: str, shard: Shard, shards: Sequence[Sequence[int]]) -> Place:
    sizes = [columns for _, columns in shards]
    firsts = [first if first >= 0 else sum(sizes[:rank]) for rank, (first, _) in enumerate(shards)]
    total = max(first + size for first, size in zip(firsts, sizes))
    classes = total if shard.classes < 0 else shard.classes
    usable = [max(0, min(size, classes - first)) for first, size in zip(firsts, sizes)]
    end = 0
    for first, size in zip(firsts, usable):
        if size and first != end:
            raise ValueError(
                f"{op}: the ranks' shards begin with the classes {firsts} and have {sizes}, expected each to begin "
                "where the one before ends"
            )
        end += size
    if end != classes or classes == 0:
        raise ValueError(f"{op}: the ranks' shards have {end} classes, expected {max(1, classes)}")
    rank = group_of(shard).rank()
    return Place(min(firsts[rank], classes - usable[rank]), classes, usable[rank], max(usable))


def _exchange(
    own: Mapping[str, object], of_shard: tuple[int, int], group: ProcessGroup
) -> tuple[list[bytes], list[tuple[int, int]]]:
    """What each rank tells, in the order of ranks: JSON, and two numbers. The host waits for the others. Where the
    group has a backend for the CPU it does not wait for the device; NCCL alone takes its turn behind the group's
    collectives that are enqueued."""
    text = json.dumps(own).encode()
    if len(text) > _BYTES:
        raise RuntimeError(f"arguments that take {len(text)} bytes to compare, expected at most {_BYTES}")
    _call.awaits_agreement = False
    padded = torch.frombuffer(bytearray(_NUMBERS.pack(*of_shard) + text.ljust(_BYTES)), dtype=torch.uint8)
    if torch.device("cpu") in group._device_types:
        told = all_gather(padded, group).wait()
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(_streams[device]):
            told = all_gather(padded.to(device), group).wait().cpu()
    of_ranks = [ctypes.string_at(each.data_ptr(), each.numel()) for each in told]
    return [each[_NUMBERS.size :] for each in of_ranks], [_NUMBERS.unpack_from(each) for each in of_ranks]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def digest(tensor: Tensor | None) -> str | None:
    """A text that other numbers, and the same in another order, almost certainly do not have. None of a tensor on a
    GPU, which would be waited for."""
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    numbers = tensor.detach().to(wide).contiguous()
    return hashlib.blake2b(ctypes.string_at(numbers.data_ptr(), numbers.nbytes), digest_size=8).hexdigest()


def check_targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """The error of the core for a target out of range, on the CPU. Here, because a rank without classes does not call
    the core."""
    if target.device.type != "cpu":
        return
    flat = target.reshape(-1).to(torch.int64)
    is_wrong = (flat != ignore_index) & ((flat < 0) | (flat >= classes))
    if bool(is_wrong.any()):
        row = is_wrong.to(torch.int8).argmax()
        place = [int(index) for index in torch.unravel_index(row, target.shape)]
        raise ValueError(
            f"{op}: target{place} is {int(flat[row])}, expected 0 to {classes - 1}, or ignore_index {ignore_index}"
        )


# ---------------------------------------------------------------------------------------------------------- statistics


def gather_statistics(shard: Shard, own: Tensor, target: Tensor | None) -> Underway:
    """Of the rows of a shard, [rows, STATISTICS], with their targets, [rows], where these are classes."""
    classes = own.new_zeros(own.shape[0]) if target is None else target.to(_BITS[own.dtype]).view(own.dtype)
    return all_gather(torch.cat([own, classes.unsqueeze(-1)], -1), group_of(shard))


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def statistics_of(gathered: Tensor) -> Tensor:
    """[ranks, rows, STATISTICS], the same on all ranks. Rows whose targets differ from rank to rank are NaN: on a GPU
    they have not been compared before."""
    targets = gathered[..., STATISTICS].contiguous().view(_BITS[gathered.dtype])
    differs = (targets != targets[0]).any(0)
    return torch.where(differs.unsqueeze(-1), torch.nan, gathered[..., :STATISTICS]).contiguous()


def no_statistics(rows: int, logits: Tensor) -> Tensor:
    """Those of a shard without classes, in the order of CrossEntropyStatistic."""
    statistics = logits.new_zeros(rows, STATISTICS, dtype=accumulator_dtype(logits.dtype))
    statistics[:, [0, 7]] = -torch.inf  # largest, best_value
    return statistics


def refuse_argmax(op: str, outputs: int, place: Place, dtype: torch.dtype) -> None:
    if outputs & ARGMAX and dtype != torch.float64 and place.classes > 2**24:
        raise NotImplementedError(
            f"{op}: the class of the largest logit is one of {place.classes}, expected at most {2**24} with a group: "
            "statistics have it in float32"
        )


def merged(
    op: str,
    statistics: Tensor,
    target: Tensor | None,
    row_weight: Tensor | None,
    normalizer: Tensor | None,
    options: tuple[int, int, Sequence[float]],
    place: Place,
    has_weight: bool,
    outputs: int,
) -> list[Tensor]:
    """The loss and the outputs that the bits name; `options` are ignore_index, reduction and numbers. `target` is None
    where it was probabilities."""
    result: list[Tensor] = call(
        op, _merge, statistics, target, row_weight, normalizer, *options, place.classes, has_weight, outputs
    )
    return result


def facts_of_target(target: Tensor, rows: Sequence[int]) -> dict[str, object]:
    """For the agreement; `rows` is the shape of the rows. Of probabilities each rank has others."""
    is_soft = target.is_floating_point()
    return {
        "the shape of target": list(rows),
        "the kind of target": "probabilities" if is_soft else "classes",
        "target": None if is_soft else digest(target),
    }


def dtypes(**tensors: Tensor | None) -> dict[str, object]:
    """Of each tensor, for the agreement."""
    return {f"the dtype of {name}": None if each is None else name_of(each.dtype) for name, each in tensors.items()}
