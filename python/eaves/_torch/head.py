"""Checks of a head: the tensors of its product, and the options of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eaves._torch.checks import (
    DENSE,
    accumulator_dtype,
    check_beside,
    check_device,
    check_dtype_of,
    check_not_packed,
    check_shape,
    check_tensor,
    index_of,
    name_of,
    refuse_gradient,
    said,
)
from eaves._torch.linear_cross_entropy_rules import WIDE_HEAD
from eaves._torch.options import RESULT_DTYPES, limit_of, refuse_numbers
from eaves._torch.transforms import is_transforming

# The scratch memory of a call in bytes, if the caller sets no limit.
_WORKSPACE_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}


class Product(NamedTuple):
    """The operands of a head's product: hidden states, [rows, features], head and bias. Under torch.autocast a float32
    head keeps its dtype until `as_multiplied` casts it."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None

    def as_multiplied(self) -> Product:
        return self._replace(head=self.head.to(self.hidden.dtype))


def check_dense(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Checks that `tensor` is dense and on the device of the reference."""
    check_beside(op, name, tensor, reference_name, reference)
    if tensor.layout != torch.strided or tensor.device.type not in _WORKSPACE_BYTES:
        raise NotImplementedError(said(op, f"`{name}` is {tensor.layout} on {tensor.device.type}, {DENSE}"))


def check_floating(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """check_dense, and checks that `tensor` has floating-point numbers."""
    check_dense(op, name, tensor, reference_name, reference)
    if not tensor.is_floating_point():
        check_not_packed(op, name, tensor)
        raise ValueError(said(op, f"`{name}` has dtype {name_of(tensor.dtype)}, expected a floating-point type"))


def refuse_zero3(op: str, **head: Tensor | None) -> None:
    """Raises NotImplementedError if ZeRO-3 has cut a tensor of the head into pieces. The forward calls this, and so
    does a backward that reads the head or gives it a gradient."""
    for name, each in head.items():
        if each is not None and each.numel() == 0 and hasattr(each, "ds_id"):
            raise NotImplementedError(
                said(op, f"`{name}` has no elements here, because DeepSpeed's ZeRO-3 has it in pieces; gather it from ")
                + "the forward to the end of the backward, with deepspeed.zero.GatheredParameters or as a parameter of "
                "the module that calls this (register_external_parameter)"
            )


def checked_head(
    op: str,
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    names: tuple[str, str, str] = ("hidden", "head", "bias"),
    dense: tuple[str, Tensor] | None = None,
    may_be_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The checked operands of a product, as in Product. `names` are their names in messages. Callers that multiply with
    PyTorch's own operators pass `dense`, the name of a tensor and the tensor: the operands are then checked to be dense
    and on its device. The core makes this check itself."""
    of_hidden, of_head, of_bias = names
    if dense is not None:
        for name, tensor in zip(names, (hidden, head) if bias is None else (hidden, head, bias)):
            check_floating(op, name, tensor, *dense)
    else:
        check_tensor(op, of_hidden, hidden)
        if hidden.dtype not in RESULT_DTYPES:
            refuse_numbers(op, of_hidden, hidden, "what is multiplied")
        check_tensor(op, of_head, head)
        if head.dtype != hidden.dtype:
            check_not_packed(op, of_head, head)
        if head.device != hidden.device:
            check_device(op, of_head, head, of_hidden, hidden)
        if bias is not None:
            check_beside(op, of_bias, bias, of_hidden, hidden)
    device = "cpu" if hidden.is_cpu else hidden.device.type  # device.type costs a small call 0.3 us
    is_cast = device in _WORKSPACE_BYTES and torch.is_autocast_enabled(device)
    if is_cast:
        hidden, head, bias = _autocast(hidden, head, bias)
    sizes, shape = hidden.shape, head.shape
    if not sizes:
        raise ValueError(said(op, f"`{of_hidden}` has no axes, expected at least the axis of the features"))
    features = sizes[-1]
    if features == 0:
        raise ValueError(said(op, f"`{of_hidden}` has shape {list(sizes)}, expected at least one feature"))
    if 0 in shape:
        refuse_zero3(op, **{of_head: head})
    if len(shape) != 2 or shape[1] != features:
        found = f"`{of_head}` has shape {list(shape)}, expected [classes, {features}]"
        if len(shape) > 2:
            raise NotImplementedError(said(op, f"{found}; call the operator once for each head"))
        raise ValueError(said(op, f"{found} (features as `{of_hidden}` {list(sizes)})"))
    if shape[0] == 0 and not may_be_empty:
        raise ValueError(said(op, f"`{of_head}` has shape {list(shape)}, expected at least one class"))
    if head.dtype != hidden.dtype and not (is_cast and head.dtype == torch.float32 and hidden.dtype != torch.float64):
        raise ValueError(
            said(
                op,
                f"`{of_head}` has dtype {name_of(head.dtype)}, expected {name_of(hidden.dtype)} (as `{of_hidden}`); ",
            )
            + "convert one of them, or call the operator under torch.autocast, which converts both"
        )
    if not (head.layout != torch.strided or head.is_contiguous() or _is_matrix(head)):
        head = head.contiguous()  # the core refuses other layouts
    if bias is not None:
        refuse_zero3(op, **{of_bias: bias})
        check_dtype_of(op, of_bias, bias, (hidden.dtype, torch.float32), f"as `{of_hidden}`, or float32")
        check_shape(op, of_bias, bias, shape[:1], f"one per class of `{of_head}`")
        bias = bias.contiguous()
    return hidden, head, bias


def _is_matrix(head: Tensor) -> bool:
    """Whether the head has unit stride along one axis, and its lines along that axis do not overlap."""
    (rows, columns), (row, column) = head.shape, head.stride()
    is_row_major = (column == 1 or columns == 1) and (row >= columns or rows == 1)
    return is_row_major or ((row == 1 or rows == 1) and (column >= rows or columns == 1))


def _autocast(hidden: Tensor, head: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts the operands as torch.autocast casts those of F.linear: floating-point numbers other than float64. A head
    or a bias in float32 stays as it is. The bias is added in float32. The head is cast only for the product, or
    autograd would round its gradient."""
    dtype = torch.get_autocast_dtype(hidden.device.type)

    def cast(tensor: Tensor, *but_for: torch.dtype) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype not in but_for else tensor

    hidden = cast(hidden, torch.float64)
    if hidden.dtype == torch.float64:  # refused later, with the dtypes that the caller passed
        return hidden, head, bias
    head = cast(head, torch.float64, torch.float32)
    return hidden, head, None if bias is None else cast(bias, torch.float64, torch.float32)


def workspace_of(op: str, workspace_bytes: int | None, device: torch.device) -> int:
    """The scratch memory in bytes that the size of the chunks is chosen for."""
    if workspace_bytes is None:
        return _WORKSPACE_BYTES[device.type]
    return limit_of(op, workspace_bytes)


_ALGORITHMS = ("auto", "speed", "memory", "recompute", "keep")


def check_algorithm(op: str, algorithm: object, workspace_bytes: object, keep_bytes: object = None) -> None:
    """The checks that a call makes of these three options."""
    if algorithm_of(op, algorithm) == "keep" or keep_bytes is not None:
        keep_bytes_of(op, algorithm, keep_bytes, False)
    if workspace_bytes is not None:
        limit_of(op, workspace_bytes)


def keep_bytes_of(op: str, algorithm: object, keep_bytes: object, is_shard: bool) -> int:
    """The most bytes that a forward keeps for the backward; -1 is room for all rows."""
    if algorithm not in ("keep", "auto"):
        raise ValueError(
            f'{op}: keep_bytes is {keep_bytes!r}, expected None with algorithm "{algorithm}"; pass algorithm="keep"'
        )
    if is_shard:
        given = 'algorithm is "keep"' if algorithm == "keep" else "keep_bytes is given"
        raise NotImplementedError(f"{op}: {given}, but a call over ranks keeps nothing for the backward; leave it out")
    if keep_bytes is None:
        return -1
    most = index_of(op, "keep_bytes", keep_bytes)
    if most < 0:
        raise ValueError(f"{op}: keep_bytes is {most}, expected a number of bytes from 0, or None to keep all rows")
    return most


def algorithm_of(op: str, algorithm: object) -> str:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        error = ValueError if isinstance(algorithm, str) else TypeError
        raise error(f"{op}: algorithm is {algorithm!r}, expected one of {', '.join(_ALGORITHMS)}")
    return algorithm


def wide_head(op: str, multiplied: torch.dtype, passed: torch.dtype, grad_weight_dtype: object) -> int:
    """The bit that says that the gradient of the head is summed in the dtype of the loss. `multiplied` is the dtype of
    the product's factors, `passed` the dtype of the head."""
    if grad_weight_dtype is None:
        return WIDE_HEAD if passed != multiplied else 0
    if not isinstance(grad_weight_dtype, torch.dtype):
        raise TypeError(f"{op}: grad_weight_dtype is {grad_weight_dtype!r}, expected a torch.dtype or None")
    wide = accumulator_dtype(multiplied)
    if grad_weight_dtype not in (multiplied, wide):
        raise ValueError(
            f"{op}: grad_weight_dtype is {name_of(grad_weight_dtype)}, expected "
            + " or ".join(dict.fromkeys(map(name_of, (multiplied, wide))))
        )
    return WIDE_HEAD if grad_weight_dtype != multiplied else 0


def check_grad_weight_out(
    op: str,
    out: Tensor,
    multiplied: torch.dtype,
    head: Tensor,
    grad_weight_dtype: object,
    wide: torch.dtype,
    is_compiling: bool,
) -> int:
    """Raises an error if the gradient of the head cannot be added to `out`. Returns WIDE_HEAD if `out` has the dtype of
    the loss and the product does not, else 0."""
    check_tensor(op, "grad_weight_out", out)
    if is_compiling or is_transforming():
        raise NotImplementedError(
            f"{op}: grad_weight_out is written in the backward, which torch.compile, torch.vmap and torch.func cannot "
            "follow; leave it out"
        )
    if grad_weight_dtype is not None:
        raise ValueError(
            f"{op}: grad_weight_dtype is given, but the gradient has the dtype of grad_weight_out; leave it out"
        )
    check_dtype_of(op, "grad_weight_out", out, (multiplied, wide), "as `head`, or as the loss")
    if out.is_neg():
        raise ValueError(f"{op}: grad_weight_out is negated lazily, expected a tensor that is not")
    check_shape(op, "grad_weight_out", out, head.shape, "as `head`")
    check_device(op, "grad_weight_out", out, "head", head)
    (classes, features), (of_class, of_feature) = out.shape, out.stride()
    if (of_feature != 1 and features != 1) or (of_class < features and classes != 1):
        raise ValueError(
            f"{op}: grad_weight_out has strides {list(out.stride())}, expected unit stride along the features"
        )
    refuse_gradient(op, "grad_weight_out", out)
    return WIDE_HEAD if out.dtype != multiplied else 0


def check_overlap(op: str, out: Tensor, read: Mapping[str, object]) -> None:
    """Refuses a grad_weight_out that overlaps a tensor of the call: "speed" adds with torch, which does not check for
    overlap."""
    for name, tensor in read.items():
        if isinstance(tensor, Tensor) and _shares_memory(out, tensor):
            raise ValueError(said(op, f"`grad_weight_out` overlaps `{name}`, expected memory of its own"))


def _shares_memory(out: Tensor, other: Tensor) -> bool:
    """Whether `out`, a matrix with unit stride, and `other` share a byte. Separate columns of one buffer do not share;
    any other interleaving counts as sharing."""
    if other.layout != torch.strided or out.device != other.device or other.numel() == 0:
        return False
    if "meta" in (out.untyped_storage().device.type, other.untyped_storage().device.type):
        return False  # a fake tensor has no bytes
    begin, other_begin = out.data_ptr(), other.data_ptr()
    if begin == 0 or other_begin == 0:
        return False  # a subclass keeps its bytes elsewhere
    run, row = out.shape[1] * out.itemsize, out.stride(0) * out.itemsize
    axes = [(size - 1, stride * other.itemsize) for size, stride in zip(other.shape, other.stride())]
    distance = other_begin - begin
    last = distance + sum(steps * stride for steps, stride in axes) + other.itemsize
    if last <= 0 or distance >= (out.shape[0] - 1) * row + run:
        return False
    # The rows of `out` repeat at one distance, so it is enough to see which part of a row `other` covers.
    row = max(row, run)
    extent = sum(steps * stride for steps, stride in axes if stride % row) + other.itemsize
    return not (run <= distance % row and distance % row + extent <= row)
