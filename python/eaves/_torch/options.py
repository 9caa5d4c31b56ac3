"""The arguments that the losses have in common, checked as the extension takes them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from eaves._torch.checks import (
    accumulator_dtype,
    check_beside,
    check_dtype_of,
    check_shape,
    check_tensor,
    index_of,
    name_of,
    name_of_rows,
    number_of,
    refuse_gradient,
    said,
    value_for_message,
)
from eaves._torch.operator import number_tensor_of
from eaves._torch.outputs import MEAN

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class LossKeywords(TypedDict, total=False):
        """The keywords that the losses have in common, for the overloads of their functions and for their modules."""

        reduction: str
        label_smoothing: float
        softcap: float | None
        z_loss: float


CLASS_DTYPES = (torch.int64, torch.int32)

# For each dtype of logits and hidden states, the dtype of the loss.
RESULT_DTYPES = {
    dtype: accumulator_dtype(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def refuse_numbers(op: str, name: str, tensor: Tensor, meaning: str) -> NoReturn:
    raise ValueError(said(op, f"`{name}` has dtype {name_of(tensor.dtype)}, expected a floating-point type: {meaning}"))


def check_class_dtype(op: str, targets: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError if `targets` has no dtype of classes. `dtype` is the dtype of the logits or hidden states; the
    message names it, because probabilities may have it."""
    if targets.dtype not in CLASS_DTYPES:
        expected = f"int64 or int32 for classes, {_or_float32(dtype)} for probabilities"
        raise ValueError(said(op, f"`targets` has dtype {name_of(targets.dtype)}, expected {expected}"))


def check_probabilities(op: str, targets: Tensor, dtype: torch.dtype, shape: Sequence[int], of: str) -> None:
    """Checks the dtype and the shape of targets with a floating-point type, which hold probabilities."""
    if targets.dtype != dtype and targets.dtype != torch.float32:
        expected = f"{_or_float32(dtype)} for probabilities, or int64 or int32 for classes"
        raise ValueError(
            said(op, f"`targets` has the floating-point type {name_of(targets.dtype)}, expected {expected}")
        )
    if targets.shape != tuple(shape):
        found = f"shape {shape_of(targets)} and the floating-point type {name_of(targets.dtype)}"
        expected = f"{list(shape)} for probabilities ({of}), or int64 or int32 for classes"
        raise ValueError(said(op, f"`targets` has {found}, expected {expected}"))


def _or_float32(dtype: torch.dtype) -> str:
    return " or ".join(dict.fromkeys((name_of(dtype), "float32")))


def numbers_of(
    op: str, label_smoothing: float = 0, scale: float | None = None, softcap: float | None = None, z_loss: float = 0
) -> tuple[tuple[float, ...], Tensor | None]:
    """The checked numbers among the options, in the extension's order, and None. The tuple is empty if all are absent
    in eager mode. If torch.compile has symbols for numbers, the tuple is empty too, and a tensor of the numbers is in
    the place of None.

    An absent number is the int 0 and not 0.0: torch.compile(dynamic=True) treats a float default as a number that
    changes, and compiles twice.
    """
    given = (label_smoothing, scale, softcap, z_loss)
    if not torch.compiler.is_compiling():
        if all(map(operator.is_, given, _ABSENT)):
            return (), None
        found = list(_DEFAULTS)
        for index, value in enumerate(given):
            if value is not _ABSENT[index]:
                name, _, low, high, expected = _TABLE[index]
                found[index] = number_of(op, name, value, low, high, expected)
        return tuple(found), None
    numbers = []
    for value, absent, (name, default, low, high, expected) in zip(given, _ABSENT, _table()):
        is_absent = value is None if absent is None else type(value) is int and value == 0
        numbers.append(default if is_absent else number_of(op, name, value, low, high, expected))
    number_tensor = number_tensor_of(*numbers)
    return (tuple(numbers) if number_tensor is None else ()), number_tensor


# The table of the extension, kLossOptions in src/core/loss_options.h, has the ranges and their order.
_ABSENT = numbers_of.__defaults__ or ()
NUMBERS = numbers_of.__code__.co_varnames[1 : 1 + len(_ABSENT)]
_words, _numbers = torch.ops.eaves.loss_options()
assert _words[::2] == [f"--{name.replace('_', '-')}" for name in NUMBERS], _words
assert NUMBERS[0] == "label_smoothing"  # both losses read the smoothing from numbers[0]
NUMBERS_IN_WORDS = f"{', '.join(NUMBERS[:-1])} and {NUMBERS[-1]}"
_WAYS_OUT = {"scale": "; multiply logits or hidden states by a learned scale", "softcap": "; None for no soft cap"}
_EXPECTED = [words + _WAYS_OUT.get(name, "") for name, words in zip(NUMBERS, _words[1::2])]
_TABLE = tuple(zip(NUMBERS, _numbers[::3], _numbers[1::3], _numbers[2::3], _EXPECTED))
_DEFAULTS = [default for _, default, _, _, _ in _TABLE]
# The least and the largest value of each number, and the words of an error for both.
RANGES = {
    name: (low, high, words) for name, low, high, words in zip(NUMBERS, _numbers[1::3], _numbers[2::3], _words[1::2])
}


def _table() -> tuple[tuple[str, float, float, float, str], ...]:
    return _TABLE


# Without this attribute torch.compile would take floats of this module for symbols.
# torch.compiler.assume_constant_result sets it too, but loads torch._dynamo.
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


def class_weight_of(op: str, weight: Tensor, like: Tensor, classes: int, of: str = "logits") -> Tensor:
    """The weights of the classes, as the core takes them. `like` are the logits or hidden states. `of` is the name of
    the argument that has the classes."""
    name, rows = "class_weight", name_of_rows(op)
    check_beside(op, name, weight, rows, like)
    check_dtype_of(op, name, weight, (like.dtype, torch.float32), f"as `{rows}`, or float32")
    check_shape(op, name, weight, [classes], f"one per class of `{of}`")
    refuse_gradient(op, name, weight)
    return weight.contiguous() if weight.layout == torch.strided else weight  # other layouts are refused later


def row_weight_of(op: str, row_weight: Tensor, like: Tensor, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights of the rows, as the core takes them. `like` are the logits or hidden states, `dtype` is the dtype of
    the loss."""
    name = name_of_rows(op)
    check_beside(op, "row_weight", row_weight, name, like)
    if row_weight.shape != tuple(rows):
        check_shape(op, "row_weight", row_weight, rows, f"one per row of `{name}` {shape_of(like)}")
    refuse_gradient(op, "row_weight", row_weight)
    return row_weight.to(dtype).contiguous() if row_weight.layout == torch.strided else row_weight


def normalizer_of(op: str, normalizer: object, mode: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The normalizer as one number on the device. The host does not wait for the device."""
    if mode != MEAN:
        raise ValueError(f'{op}: normalizer is given, but only the mean divides by a number; expected reduction="mean"')
    if not isinstance(normalizer, Tensor):
        expected = f"a number from 0 in the range of {name_of(dtype)}, or a tensor of one number"
        number = number_of(op, "normalizer", normalizer, 0, torch.finfo(dtype).max, expected)
        if torch.compiler.is_compiling():  # the number stays a symbol, see number_tensor_of
            return torch.ones((), dtype=dtype, device=device) * number
        return torch.full((), number, dtype=dtype, device=device)
    check_tensor(op, "normalizer", normalizer)
    if normalizer.numel() != 1:
        raise ValueError(f"{op}: normalizer has shape {shape_of(normalizer)}, expected one element")
    if normalizer.device != device:
        expected = f"{device} (as `{name_of_rows(op)}`), or a number"
        raise ValueError(said(op, f"`normalizer` is on {normalizer.device}, expected {expected}"))
    refuse_gradient(op, "normalizer", normalizer)
    return normalizer.to(dtype)


def limit_of(op: str, workspace_bytes: object) -> int:
    limit = index_of(op, "workspace_bytes", workspace_bytes)
    if limit <= 0:
        raise ValueError(f"{op}: workspace_bytes is {value_for_message(limit)}, expected a positive number of bytes")
    return limit
