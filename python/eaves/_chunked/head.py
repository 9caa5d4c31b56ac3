"""What the operators share that compute a head in chunks of rows, in PyTorch's own operators: the size of a
chunk, the product, and the two products of its gradients.

Logits are float32 sums of a product (float64 for float64). Gradients are added up over the chunks, and what the
gradient of the logits is rounded to, once, is the dtype of the hidden states, as the factor of two products that it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import Head


class Cut(NamedTuple):
    chunk: int  # rows
    block: int  # classes of a head, or of its gradient, that are converted at once


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
