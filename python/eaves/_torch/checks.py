"""Checks of arguments. Their errors have the words of the core's checks."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
})  # fmt: skip

DENSE = "expected dense ones (torch.strided) on cpu or cuda"

MAX_RANK = 16  # kMaxRank of include/eaves/tensor.h

# Each function's own names of the core's arguments.
_NAMES = {
    "cross_entropy": {"logits": "input", "targets": "target", "class_weight": "weight", "class_axis": "class_dim"},
    "linear_cross_entropy": {
        "hidden": "input", "head": "linear_weight", "bias": "linear_bias", "targets": "target",
        "class_weight": "weight",
    },
    "log_prob": {"targets": "tokens"},
    "linear_log_prob": {"targets": "tokens"},
    "linear_log_prob_loss": {"targets": "tokens"},
    "lrpe_cosine": {"offsets": "offset"},
}  # fmt: skip


def said(op: str, sentence: str) -> str:
    """The message of an error. `sentence` has the core's names of arguments in backticks (include/eaves/error.h); the
    message has the names that `op` uses, without backticks."""
    words = enumerate(sentence.split("`"))
    return f"{op}: {''.join([name_in(op, word) if place % 2 else word for place, word in words])}"


def name_in(op: str, name: str) -> str:
    """The name that `op` gives the core's argument."""
    return _NAMES.get(op, {}).get(name, name)


def name_of_rows(op: str) -> str:
    """The core's name of the argument whose rows `op` classifies."""
    return "hidden" if op.startswith("linear_") else "logits"


def check_tensor(op: str, name: str, value: Any) -> None:
    """Raises TypeError if `value` is no tensor, NotImplementedError if eaves does not support its kind, rank or
    dtype."""
    kind = type(value)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        _check_kind(op, name, value)
    if value.is_nested:  # a nested tensor has no shape
        raise NotImplementedError(said(op, f"`{name}` is {kind_of(value)}, {DENSE}"))
    if value.dim() > MAX_RANK:
        raise NotImplementedError(said(op, f"`{name}` has {value.dim()} axes, expected at most {MAX_RANK}"))
    if value.dtype not in DTYPES:
        expected = ", ".join(sorted(map(name_of, DTYPES)))
        raise NotImplementedError(said(op, f"`{name}` has dtype {name_of(value.dtype)}, expected one of {expected}"))


def check_device(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raises ValueError if the two tensors are on different devices. The dispatcher does not check this: for a tensor
    on the CPU and one on the device "meta" it returns a result without values."""
    if tensor.device != reference.device:
        hint = "; if accelerate offloads it, keep it on a device (device_map)"
        is_offloaded = tensor.is_meta and isinstance(tensor, torch.nn.Parameter)
        raise ValueError(
            said(op, f"`{name}` is on {tensor.device}, expected {reference.device} (as `{reference_name}`)")
            + (hint if is_offloaded else "")
        )


def check_beside(op: str, name: str, value: Any, reference_name: str, reference: Tensor) -> None:
    """check_tensor, then check_device against the reference."""
    check_tensor(op, name, value)
    check_device(op, name, value, reference_name, reference)


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int], why: str) -> None:
    """Raises ValueError in the words of the core's check::has_shape."""
    if tensor.shape != tuple(expected):
        raise ValueError(said(op, f"`{name}` has shape {list(tensor.shape)}, expected {list(expected)} ({why})"))


def check_dtype_of(op: str, name: str, tensor: Tensor, expected: Sequence[torch.dtype], why: str) -> None:
    """Raises ValueError in the words of the core's check::has_dtype."""
    if tensor.dtype not in expected:
        names = " or ".join(dict.fromkeys(map(name_of, expected)))
        raise ValueError(said(op, f"`{name}` has dtype {name_of(tensor.dtype)}, expected {names} ({why})"))


def _check_kind(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(said(op, f"`{name}` is a {type(value).__name__}, expected a torch.Tensor"))
    if is_distributed(value):
        name = name_in(op, name)
        raise NotImplementedError(
            f"{op}: {name} is a DTensor, expected a tensor of one device. Gather it with {name}.full_tensor(); if "
            "ranks have different rows, with grad_placements=[Partial('avg')] (of torch.distributed.tensor), or the "
            f"gradient is one rank's alone. If the call needs only this rank's part, pass {name}.to_local()"
        )


def is_distributed(tensor: object) -> bool:
    """True for a DTensor. No DTensor exists before its module is imported."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:  # the common case comes first, because each call asks
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_foreign(tensor: object) -> bool:
    """Whether the tensor's class is not PyTorch's. Such a class may store its numbers in another form."""
    kind = type(tensor)
    is_plain = kind is Tensor or kind is torch.nn.Parameter
    return not is_plain and isinstance(tensor, Tensor) and not kind.__module__.startswith("torch.")


def refuse_foreign(op: str, name: str, tensor: Tensor, error: Exception | None = None) -> NoReturn:
    kind = type(tensor)
    raise NotImplementedError(
        f"{op}: {name_in(op, name)} is a {kind.__module__}.{kind.__qualname__} of {name_of(tensor.dtype)}, which eaves "
        "does not read, expected a torch.Tensor of floating-point numbers; pass it dequantised, as a torch.Tensor"
    ) from error


def check_not_packed(op: str, name: str, head: Tensor) -> None:
    """Refuses a quantised head that stores integers: their shape and dtype say nothing about the head's numbers."""
    if not head.is_floating_point() and is_foreign(head):
        refuse_foreign(op, name, head)


def explain(op: str, error: Exception, **tensors: object) -> None:
    """Raises a refusal in place of `error` if one of the tensors has a foreign class with operators of its own."""
    if isinstance(error, (ValueError, torch.OutOfMemoryError)) or str(error).startswith(f"{op}: "):
        return
    for name, tensor in tensors.items():
        has_operators = getattr(type(tensor), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
        if has_operators and is_foreign(tensor):
            refuse_foreign(op, name, cast("Tensor", tensor), error)


def check_dtype(op: str, dtype: object, *expected: torch.dtype) -> None:
    """Raises TypeError if `dtype` is no torch.dtype, ValueError if it is not one of `expected`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype is {dtype!r}, expected a torch.dtype")
    if dtype not in expected:
        names = " or ".join(dict.fromkeys(map(name_of, expected)))
        raise ValueError(f"{op}: dtype is {name_of(dtype)}, expected {names}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def axes_of(op: str, x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """The axes of x that `dim` names, one axis or several. An empty result means all axes.

    Raises TypeError if `dim` is no int and no sequence of ints, ValueError for an axis that x does not have or that
    `dim` names twice. The core makes the same checks, but it sees no fake tensors, and under torch.vmap it does not
    know which axis is the batch.
    """
    if type(dim) is int:
        axes: tuple[int, ...] = (dim,)
    else:
        try:
            axes = tuple(map(_as_axis, dim)) if isinstance(dim, Sequence) else (_as_axis(dim),)
        except TypeError:
            raise TypeError(f"{op}: dim is {dim!r}, expected an int or a sequence of ints") from None
    # As in torch, a tensor without axes has an axis 0 that may be named.
    rank = x.dim() or 1
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(f"{op}: dim contains {axis}, expected {-rank} to {rank - 1} (x has {x.dim()} axes)")
    if len(axes) > 1 and len({axis % rank for axis in axes}) < len(axes):
        raise ValueError(f"{op}: dim is {list(axes)}, expected each axis once (x has {x.dim()} axes)")
    return axes


def _as_axis(value: object) -> int:
    if isinstance(value, (bool, Tensor)):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]  # numpy's integers too


def refuse_gradient(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            said(op, f"`{name}` requires a gradient, which this operator does not compute; pass `{name}`.detach()")
        )


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over numbers of `dtype`, and of the losses that are returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_bool(op: str, name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{op}: {name} is {value!r}, expected a bool")


def number_of(op: str, name: str, value: object, low: float, high: float, expected: str) -> float:
    """`value` as a float in [low, high]. An infinite bound is not part of the interval.

    Raises TypeError if `value` is no number, ValueError if it is not in the interval.
    """
    # A float or an int may be a symbol of torch.compile, which traces neither hasattr nor math.isinf of a symbol. In
    # torch.export symbols have types of their own.
    number: Any = value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        number = torch.sym_float(value)  # type: ignore[no-untyped-call]
    elif type(value) is not float:
        is_number = type(value) is int or (not isinstance(value, (bool, Tensor, str)) and hasattr(value, "__float__"))
        if not is_number:
            raise TypeError(f"{op}: {name} is {value!r}, expected {expected}")
        try:
            number = float(number)
        except OverflowError:  # an int may be too large for a float
            number = math.inf
        except (TypeError, ValueError):  # an array of several elements
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected {expected}") from None
    if not (low <= number <= high and -math.inf < number < math.inf):
        raise ValueError(f"{op}: {name} is {value_for_message(value)}, expected {expected}")
    return number  # type: ignore[no-any-return]


def value_for_message(value: object) -> str:
    """The value for an error's message. torch.compile cannot write a symbol into a message."""
    return "out of range" if torch.compiler.is_compiling() else repr(value)


_LARGEST_INDEX = 2**63 - 1  # the extension takes ints of 64 bits


def index_of(op: str, name: str, value: object) -> int:
    """`value` as an int of 64 bits. Raises TypeError if it is no integer, ValueError if 64 bits do not hold it."""
    index: Any = value
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, (bool, Tensor)):
            _no_index(op, name, value)
        try:
            index = operator.index(value)  # type: ignore[arg-type]  # numpy's integers too
        except TypeError:
            _no_index(op, name, value)
    if not -_LARGEST_INDEX - 1 <= index <= _LARGEST_INDEX:
        raise ValueError(f"{op}: {name} is {value_for_message(index)}, expected an int of 64 bits")
    return index  # type: ignore[no-any-return]


def _no_index(op: str, name: str, value: object) -> NoReturn:
    raise TypeError(f"{op}: {name} is {value!r}, expected an int")


def kind_of(tensor: Tensor) -> str:
    return f"{'nested' if tensor.is_nested else tensor.layout} on {tensor.device.type}"


def given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
