"""The agreement of the ranks of a group before their first collective.

A call is the same on all ranks except for its shard of the head or the logits. Each rank tells the others its
arguments, or its error, before anything else is exchanged except the rows of a DTensor. If arguments differ, all ranks
raise a ValueError; if one rank has an error, all ranks raise that error. None hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from eaves._parallel.collectives import all_gather, distributed, group_of
from eaves._parallel.shard import Place, ShardArguments
from eaves._torch.checks import is_distributed, name_in, name_of
from eaves._torch.options import NUMBERS_IN_WORDS
from eaves._torch.outputs import REDUCTION_NAMES
from eaves._torch.rows import are_checked
from eaves._torch.transforms import is_transforming

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")


_NUMBERS = struct.Struct("qq")  # the numbers at the front of a rank's message; text follows
_BYTES = 2048
_SENTENCE = 300  # characters of an error in a message
# NotImplementedError precedes RuntimeError, of which it is a subclass.
_ERRORS = {each.__name__: each for each in (ValueError, TypeError, NotImplementedError, RuntimeError)}


class _ThisThread(threading.local):
    awaits_agreement = False


_this_thread = _ThisThread()
_places: dict[tuple[ShardArguments, int], Place] = {}  # of the last calls, expected for the next calls
_unsteady: set[tuple[ShardArguments, int]] = set()  # calls whose place has changed: nothing is expected
_streams: dict[torch.device, torch.cuda.Stream] = {}


def with_agreement(op: str, group: object, run: Callable[[ProcessGroup], _Result]) -> _Result:
    """The result of `run` with the group; `run` calls agreed_place(). The other ranks learn of an error before that."""
    if not isinstance(group, distributed().ProcessGroup):
        hint = " (get_group() of a mesh)" if type(group).__name__ == "DeviceMesh" else ""
        raise TypeError(
            f"{op}: group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup{hint}, or an "
            "eaves.Shard of one"
        )
    if is_transforming():  # the collective that tells of an error does not work there either
        raise NotImplementedError(f"{op}: group does not work inside of torch.vmap and torch.func; leave it out")
    if torch.compiler.is_compiling():
        return run(group)
    _this_thread.awaits_agreement = True
    try:
        return run(group)
    except Exception as error:
        if _this_thread.awaits_agreement and not _is_capturing():
            kind = next((name for name, each in _ERRORS.items() if isinstance(error, each)), "RuntimeError")
            sentence = str(error).removeprefix(f"{op}: ").encode("ascii", "replace").decode()[:_SENTENCE]
            _exchange({"error": [kind, sentence]}, (0, 0), group)
        raise
    finally:
        _this_thread.awaits_agreement = False


def agree_on_placements(op: str, group: ProcessGroup, **tensors: Any) -> None:
    """Each rank tells which arguments are DTensors before any is gathered: a gather that only some ranks start
    hangs."""
    if torch.compiler.is_compiling() or _is_capturing():
        return
    facts = {
        f"the placements of {name_in(op, name)}": list(map(str, each.placements)) if is_distributed(each) else None
        for name, each in tensors.items()
    }
    _compare(op, facts, (0, 0), group)
    _this_thread.awaits_agreement = True


class PlaceChanged(Exception):
    """The ranks have agreed on another place than the expected one, so the results for the expected place are
    useless."""


def _expects_last(target: Tensor) -> bool:
    return target.is_cuda and not are_checked(target)


class Agreement:
    """agreed_place(), late: the GPU computes for the place of the last such call while the ranks compare their
    arguments. Call settle() before anything else is exchanged. Not for targets that are compared with the place's
    classes."""

    def __init__(self, shard: ShardArguments, target: Tensor, columns: int, facts: Callable[[], Mapping[str, object]]):
        self._begin: Callable[[], Place] = lambda: agreed_place(shard, columns, facts())
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


def agreed_place(shard: ShardArguments, columns: int, facts: Mapping[str, object]) -> Place:
    """The first collective of a call. `columns` is the number of classes in this rank's tensors, with padding. `facts`
    have to be the same on all ranks; their names are for an error."""
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
                f"{shard.op}: ranks cannot agree while a CUDA graph is captured; run the same call once before the "
                "capture"
            )
        return _places[shard, columns]
    shards = _compare(shard.op, facts, (shard.first_class, columns), group_of(shard))
    place = _places[shard, columns] = _place_of(shard, shards)
    return place


def _compare(
    op: str, facts: Mapping[str, object], of_shard: tuple[int, int], group: ProcessGroup
) -> list[tuple[int, int]]:
    """The two numbers that each rank tells of its shard; an error if the ranks' facts differ."""
    texts, shards = _exchange({"the operator": op, **facts}, of_shard, group)
    if any(text != texts[0] for text in texts):  # 0.0 and -0.0 are equal, but their texts differ
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
_DIGESTS = (*_HINTS, "row_weight", "normalizer", "temperature")  # an error does not show these digests


def _place_of(shard: ShardArguments, shards: Sequence[Sequence[int]]) -> Place:
    sizes = [columns for _, columns in shards]
    firsts = [first if first >= 0 else sum(sizes[:rank]) for rank, (first, _) in enumerate(shards)]
    total = max(first + size for first, size in zip(firsts, sizes))
    classes = total if shard.classes < 0 else shard.classes
    usable = [max(0, min(size, classes - first)) for first, size in zip(firsts, sizes)]
    end = 0
    for first, size in zip(firsts, usable):
        if size and first != end:
            raise ValueError(
                f"{shard.op}: the ranks' shards begin with the classes {firsts} and have {sizes} classes, expected "
                "neither gaps nor overlaps"
            )
        end += size
    if end != classes or classes == 0:
        raise ValueError(f"{shard.op}: the ranks' shards have {end} classes in all, expected {max(1, classes)}")
    rank = group_of(shard).rank()
    return Place(min(firsts[rank], classes - usable[rank]), classes, usable[rank], max(usable))


def _exchange(
    own: Mapping[str, object], of_shard: tuple[int, int], group: ProcessGroup
) -> tuple[list[bytes], list[tuple[int, int]]]:
    """The messages of all ranks, in the order of ranks: JSON, and two numbers. The host waits for the other ranks. If
    the group has a backend for the CPU, it does not wait for the device; with NCCL alone the exchange waits for the
    group's enqueued collectives."""
    text = json.dumps(own).encode()
    if len(text) > _BYTES:
        raise RuntimeError(f"the arguments that ranks compare take {len(text)} bytes, expected at most {_BYTES}")
    _this_thread.awaits_agreement = False
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
    """A hash of the numbers and their order. None for a tensor on a GPU, because reading it would wait."""
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    numbers = tensor.detach().to(wide).contiguous()
    return hashlib.blake2b(ctypes.string_at(numbers.data_ptr(), numbers.nbytes), digest_size=8).hexdigest()


def facts_of_loss(op: str, given: Any, rows: Sequence[int]) -> dict[str, object]:
    """The facts to compare for a loss's operator over ranks; `rows` is the shape of the rows. Probabilities are no
    fact, because each rank has its own classes of them."""
    is_soft, name = given.targets.is_floating_point(), name_in(op, "targets")
    passed = given._asdict()
    with_dtypes = ("logits", "hidden", "head", "bias", "class_weight", "row_weight", "normalizer")
    return {
        f"the shape of {name}": list(rows),
        f"the kind of {name}": "probabilities" if is_soft else "classes",
        name: None if is_soft else digest(given.targets),
        "row_weight": digest(given.row_weight),
        "normalizer": digest(given.normalizer),
        **dtypes(op, **{each: passed[each] for each in with_dtypes if each in passed}),
        "ignore_index": given.ignore_index,
        "reduction": REDUCTION_NAMES[given.reduction],
        NUMBERS_IN_WORDS: list(given.numbers),
        "which outputs are computed": given.outputs,
    }


def dtypes(op: str, **tensors: Tensor | None) -> dict[str, object]:
    """The dtype of each tensor, for the agreement."""
    of_names = {name_in(op, name): None if each is None else name_of(each.dtype) for name, each in tensors.items()}
    return {f"the dtype of {name}": dtype for name, dtype in of_names.items()}
