"""What the operators share that compute a head in chunks of rows, in PyTorch's own operators: the head's tensors and
their checks, the size of a chunk, the product, and the two products of its gradients.

Logits are float32 sums of a product (float64 for float64). Gradients are added up over the chunks, and what the
gradient of the logits is rounded to, once, is the dtype of the hidden states, as the factor of two products that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from eaves._loss import limit_of, shape_of
from eaves._operator import (
    accumulator_dtype,
    check_device,
    check_dtype_of,
    check_not_packed,
    check_shape,
    check_tensor,
    name_of,
)

# Scratch memory of a call, in bytes, where none is given.
_WORKSPACE_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}


class Head(NamedTuple):
    """A head and its hidden states, [rows, features], as they are multiplied, but for the dtype of a float32 weight
    under torch.autocast."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None

    def as_multiplied(self) -> Head:
        return self._replace(weight=self.weight.to(self.input.dtype))


class Cut(NamedTuple):
    chunk: int  # rows
    block: int  # classes of a head, or of its gradient, that are converted at once


# ----------------------------------------------------------------------------------------------------------- arguments


def check_dense(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Is it a dense tensor on the device of another?"""
    check_tensor(op, name, tensor)
    check_device(op, name, tensor, reference_name, reference)
    if tensor.layout != torch.strided or tensor.device.type not in _WORKSPACE_BYTES:
        raise NotImplementedError(
            f"{op}: {name} is {tensor.layout} on {tensor.device.type}, expected dense ones (torch.strided) on cpu or "
            "cuda"
        )


def check_floating(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Is it a dense tensor of floating-point numbers, on the device of another?"""
    check_dense(op, name, tensor, reference_name, reference)
    if not tensor.is_floating_point():
        raise ValueError(f"{op}: {name} has dtype {name_of(tensor.dtype)}, expected a floating-point type")


def refuse_zero3(op: str, **head: Tensor | None) -> None:
    """Raises NotImplementedError if ZeRO-3 has a tensor of the head in pieces. For the forward, and for a backward that
    reads the head or gives it a gradient."""
    for name, each in head.items():
        if each is not None and each.numel() == 0 and hasattr(each, "ds_id"):
            raise NotImplementedError(
                f"{op}: {name} has no elements here, because DeepSpeed's ZeRO-3 has it in pieces; gather it from the "
                "forward to the end of the backward, with deepspeed.zero.GatheredParameters or as a parameter of the "
                "module that calls this (register_external_parameter)"
            )


def checked_head(
    op: str,
    names: tuple[str, str, str],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reference_name: str,
    reference: Tensor,
    may_be_empty: bool = False,
) -> Head:
    """The head of the arguments that are called `names`, as it is multiplied; cast where torch.autocast is on."""
    input_name, weight_name, bias_name = names
    tensors = {input_name: input, weight_name: weight} | ({} if bias is None else {bias_name: bias})
    check_tensor(op, weight_name, weight)
    check_not_packed(op, weight_name, weight)
    for name, tensor in tensors.items():
        check_floating(op, name, tensor, reference_name, reference)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: {input_name} has shape {shape_of(input)}, expected at least one feature")
    features = input.shape[-1]
    refuse_zero3(op, **{weight_name: weight, bias_name: bias})
    if weight.dim() != 2 or weight.shape[1] != features:
        raise ValueError(
            f"{op}: {weight_name} has shape {shape_of(weight)}, expected [classes, {features}] (features as "
            f"{input_name} {shape_of(input)})"
        )
    if weight.shape[0] == 0 and not may_be_empty:
        raise ValueError(f"{op}: {weight_name} has shape {shape_of(weight)}, expected at least one class")
    passed = weight.dtype
    is_autocast = torch.is_autocast_enabled(input.device.type)
    if is_autocast and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(input.device.type)
        input = input.to(dtype)
        # A float32 head is cast where it is multiplied, or autograd would round its gradient.
        weight = weight if weight.dtype in (torch.float32, torch.float64) else weight.to(dtype)
    is_cast = is_autocast and weight.dtype == torch.float32 and input.dtype != torch.float64
    if weight.dtype != input.dtype and not is_cast:
        raise ValueError(
            f"{op}: {weight_name} has dtype {name_of(weight.dtype)}, expected that of {input_name}, "
            f"{name_of(input.dtype)}; convert one of them, or call it under torch.autocast, which converts both"
        )
    if bias is not None:
        allowed = (passed, input.dtype, torch.float32)
        check_dtype_of(op, bias_name, bias, allowed, f"that of {weight_name}, or float32")
        check_shape(op, bias_name, bias, [weight.shape[0]], f"one per class of {weight_name}")
    if 1 not in weight.stride():
        weight = weight.contiguous()  # once, where each chunk's products would
    return Head(input.reshape(-1, features), weight, bias)


def workspace_of(op: str, workspace_bytes: int | None, device: torch.device) -> int:
    """The scratch memory that chunks are cut for, in bytes."""
    if workspace_bytes is None:
        return _WORKSPACE_BYTES[device.type]
    return limit_of(op, workspace_bytes)


def cut(rows: int, classes: int, bytes_of_row: int, limit: int, *heads: Head) -> Cut:
    """Chunks of one size, as large as the limit allows: `bytes_of_row` for each row, and what heads of 16 bits need."""
    block = classes
    if any(each.input.dtype.itemsize == 2 for each in heads):
        # A quarter for classes in float32: of a head, which the CPU's products need, or of its gradient.
        features = max(each.weight.shape[1] for each in heads)
        block = min(classes, max(1, limit // 4 // (features * torch.float32.itemsize)))
        limit -= limit // 4
    chunks = math.ceil(rows / max(1, limit // bytes_of_row))
    return Cut(math.ceil(rows / max(1, chunks)), block)


def matrices(x: Tensor) -> list[Tensor]:
    """The rows of x, [..., columns], in their order, as views of two axes; one, where its strides allow it."""
    if x.dim() <= 2:
        return [x if x.dim() == 2 else x.unsqueeze(0)]
    try:
        return [x.view(math.prod(x.shape[:-1]), x.shape[-1])]
    except RuntimeError:
        return [matrix for part in x for matrix in matrices(part)]


def chunks_of(rows: Sequence[Tensor], size: int) -> Iterator[tuple[slice, Tensor]]:
    """Up to `size` rows of a matrix at once, and which rows of all matrices they are."""
    first = 0
    for matrix in rows:
        for begin in range(0, matrix.shape[0], max(1, size)):
            part = matrix[begin : begin + max(1, size)]
            yield slice(first + begin, first + begin + part.shape[0]), part
        first += matrix.shape[0]


def of_rows(input: Tensor, chunk: slice, counts: Tensor | None) -> Tensor:
    """Rows of a chunk. Those that do not count, by the [rows, 1] of `counts`, are 0, so that none of their numbers
    comes into a sum, not even NaN."""
    return input[chunk] if counts is None else input[chunk].masked_fill(~counts[chunk], 0)


# ------------------------------------------------------------------------------------------------------------- products


def logits_of(head: Head, block: int) -> Tensor:
    """[rows, classes], in the dtype of sums."""
    x, weight, dtype = head.input, head.weight, accumulator_dtype(head.input.dtype)
    if x.dtype == dtype:
        # Into memory of our own: selective checkpoints keep the product's result, and logits are written over.
        z = torch.mm(x, weight.t(), out=x.new_empty((x.shape[0], weight.shape[0])))
    elif x.is_cuda:
        z = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        z, x = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype), x.to(dtype)
        for classes in _blocks(weight, block):
            torch.mm(x, weight[classes].to(dtype).t(), out=z[:, classes])
    return z if head.bias is None else z.add_(head.bias)


def add_gradients(
    grad: Tensor,
    head: Head,
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    block: int,
) -> None:
    """Adds the gradients of the head's tensors from that of its logits, which is in the dtype of sums. What they are
    added to is in that too; grad_weight may also have the dtype of the product, and is rounded in each chunk then."""
    x, weight, dtype = head.input, head.weight, grad.dtype
    if grad_bias is not None:
        grad_bias.add_(grad.sum(0))
    grad = grad.to(x.dtype)
    if x.dtype == dtype:
        if grad_input is not None:
            grad_input.addmm_(grad, weight)
        if grad_weight is not None:
            grad_weight.addmm_(grad.t(), x)
    elif x.is_cuda:
        if grad_input is not None:
            grad_input.add_(torch.mm(grad, weight, out_dtype=dtype))
        if grad_weight is not None:
            # torch.addmm with out_dtype would add at once, but not in every PyTorch to a sum of that dtype.
            for classes in _blocks(weight, block):
                grad_weight[classes].add_(torch.mm(grad[:, classes].t(), x, out_dtype=dtype))
    else:
        x = x.to(dtype)
        for classes in _blocks(weight, block):
            of_classes = grad[:, classes].to(dtype)
            if grad_input is not None:
                grad_input.addmm_(of_classes, weight[classes].to(dtype))
            if grad_weight is not None and grad_weight.dtype == dtype:
                grad_weight[classes].addmm_(of_classes.t(), x)
            elif grad_weight is not None:
                grad_weight[classes].add_(torch.mm(of_classes.t(), x))


def _blocks(weight: Tensor, block: int) -> Iterator[slice]:
    for begin in range(0, weight.shape[0], block):
        yield slice(begin, begin + block)


# ------------------------------------------------------------------------------------------------------------- autograd


class Gradients(torch.autograd.Function):
    """What `compute` gives, which depends on the tensors behind it and has no derivative itself: `refusal` says so."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], tuple[Tensor | None, ...]], refusal: str, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.refusal = refusal
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(ctx.refusal)


def gradients_of(
    compute: Callable[[], tuple[Tensor | None, ...]], refusal: str, differentiable: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """What `compute` gives in a backward, where there may be a derivative of it (create_graph=True)."""
    if not torch.is_grad_enabled():
        return compute()
    computed: tuple[Tensor | None, ...] = Gradients.apply(compute, refusal, *differentiable)  # type: ignore[no-untyped-call]
    return computed
