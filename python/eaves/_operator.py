"""What the Python side of every operator shares: checks of arguments, the way into the extension and its errors, and
the question whether autograd has to know of a call.

An operator is three functions in the extension (forward, forward with what the backward needs, backward), a
torch.autograd.Function outside of them, and a fake implementation for each. The Function stands outside because that
is cheaper for each call than registering a gradient (about 3 us against 7 and more), and torch.compile traces it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from eaves import _library  # noqa: F401  # the operators have to be there before they are described

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
})  # fmt: skip

MAX_RANK = 16  # kMaxRank of include/eaves/tensor.h

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_tensor(op: str, name: str, value: object) -> None:
    """Raises TypeError where `value` is no tensor, NotImplementedError where it is one that eaves does not have."""
    kind = type(value)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        _check_kind(op, name, value)
    assert isinstance(value, Tensor)
    if value.dim() > MAX_RANK:
        raise NotImplementedError(f"{op}: {name} has {value.dim()} axes, expected at most {MAX_RANK}")
    if value.dtype not in DTYPES:
        raise NotImplementedError(
            f"{op}: {name} has dtype {_name_of(value.dtype)}, expected one of "
            + ", ".join(sorted(map(_name_of, DTYPES)))
        )


def _check_kind(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected a torch.Tensor")
    # A tensor that is distributed can only be there when its module is.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        raise NotImplementedError(
            f"{op}: {name} is a DTensor, expected a tensor of one device; pass {name}.to_local() where every device "
            f"has whole rows, or {name}.full_tensor()"
        )


def check_dtype(op: str, dtype: object, *expected: torch.dtype) -> None:
    """Raises TypeError where the argument `dtype` is none, ValueError where it is not an expected one."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype is {dtype!r}, expected a torch.dtype")
    if dtype not in expected:
        names = " or ".join(dict.fromkeys(map(_name_of, expected)))
        raise ValueError(f"{op}: dtype is {_name_of(dtype)}, expected {names}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def axes_of(op: str, x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """The axes of x that `dim`, one axis or several, names; none are all.

    Raises TypeError for what is no axis, ValueError for an axis that x does not have, or that is there twice. The core
    checks the same, but it sees neither a fake tensor nor, under torch.vmap, which axis is the batch.
    """
    if type(dim) is int:
        axes: tuple[int, ...] = (dim,)
    else:
        try:
            axes = tuple(map(_as_axis, dim)) if isinstance(dim, (tuple, list)) else (_as_axis(dim),)
        except TypeError:
            raise TypeError(f"{op}: dim is {dim!r}, expected an int or a tuple of ints") from None
    # As in torch, a tensor without axes has an axis 0 that may be named.
    rank = x.dim() or 1
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(
                f"{op}: dim contains {axis}, expected {-rank} to {rank - 1} (x has {x.dim()} axes)"
            )
    if len(axes) > 1 and len({axis % rank for axis in axes}) < len(axes):
        raise ValueError(f"{op}: dim is {list(axes)}, expected each axis once")
    return axes


def _as_axis(value: object) -> int:
    if isinstance(value, (bool, Tensor)):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]  # numpy's integers too


def check_bool(op: str, name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{op}: {name} is {value!r}, expected a bool")


def needs_autograd(*tensors: Tensor) -> bool:
    """True where a call has to go through its autograd.Function, because a derivative depends on it."""
    if forward_ad._current_level >= 0:
        return True  # it refuses; without it a tangent would be lost in silence
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def apply(op: str, function: type[torch.autograd.Function], *arguments: object) -> Any:
    """function.apply(*arguments), without the 20 us that PyTorch 2.13 spends on each call to serve torch.func."""
    if torch.compiler.is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    try:
        if torch._C._are_functorch_transforms_active():
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"{op}: there is no forward-mode derivative; use the reverse mode (torch.autograd.grad, torch.func.vjp)"
        ) from None


def call(op: torch._ops.OpOverload[Any, Any], *arguments: object) -> Any:
    """Calls an operator of the extension, and raises its errors as what they are."""
    try:
        return op(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        _raise_as_what_it_is(error, op, arguments)


# The marks of python/csrc/torch_binding.h.
_ERRORS: dict[str, type[Exception]] = {
    "eaves.InvalidArgument: ": ValueError,
    "eaves.Unsupported: ": NotImplementedError,
    "eaves.OutOfMemory: ": torch.OutOfMemoryError,
}


def _raise_as_what_it_is(error: Exception, op: torch._ops.OpOverload[Any, Any], arguments: tuple[object, ...]) -> NoReturn:
    message = str(error)
    for mark, kind in _ERRORS.items():
        _, found, sentence = message.partition(mark)
        if found:
            raise kind(sentence.partition("\n")[0]) from None
    if isinstance(error, NotImplementedError):  # the dispatcher has no kernel for this kind of tensor
        kinds = sorted({f"{a.layout} on {a.device.type}" for a in arguments if isinstance(a, Tensor)})
        raise NotImplementedError(
            f"{_name(op)}: the tensors are {' and '.join(kinds)}, expected dense ones (torch.strided) on cpu or cuda"
        ) from None
    raise error


def _name(op: torch._ops.OpOverload[Any, Any]) -> str:
    return op._schema.name.removeprefix("eaves::")


def register_fake(op: str) -> Callable[[_Function], _Function]:
    """The decorator of an operator's fake implementation: shapes, strides and dtypes of the outputs, no data."""
    decorator: Callable[[_Function], _Function] = torch.library.register_fake(f"eaves::{op}")
    return decorator


def register_vmap(op: str) -> Callable[[_Function], _Function]:
    """The decorator of an operator's batching rule, see torch.library.register_vmap."""

    def decorate(rule: _Function) -> _Function:
        torch.library.register_vmap(f"eaves::{op}", rule)
        return rule

    return decorate


def batch_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """For a batching rule: each tensor with its batch as the first axis; one without a batch is repeated, not copied.

    `in_dims` begins with the batch axes of `tensors`.
    """
    return tuple(
        tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        for tensor, axis in zip(tensors, in_dims)
    )
