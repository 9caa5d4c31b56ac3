"""A head in chunks of rows, for several operators: the size of a chunk, the product, and the two products of its
gradients.

Logits are float32 sums of a product (float64 for float64). Gradients are summed over the chunks. The gradient of the
logits is rounded once, to the dtype of the hidden states, because it is a factor of two products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eaves._parallel.collectives import all_reduce, group_of
from eaves._parallel.shard import Place, ShardArguments, dtype_of_parts
from eaves._torch.checks import accumulator_dtype
from eaves._torch.chunked_rules import add_product
from eaves._torch.head import Product
from eaves._torch.rows import has_values


class OverRanks(NamedTuple):
    """The shard and the place of classes that are cut over ranks."""

    shard: ShardArguments
    place: Place


def chunk_size(rows: int, bytes_of_row: int, limit: int) -> int:
    """The rows of a chunk: all chunks have one size, as large as the limit allows."""
    chunks = math.ceil(rows / max(1, limit // bytes_of_row))
    return math.ceil(rows / max(1, chunks))


def matrices(x: Tensor) -> list[Tensor]:
    """The rows of x, [..., columns], in their order, as views of two axes; one view if the strides allow it."""
    if x.dim() <= 2:
        return [x if x.dim() == 2 else x.unsqueeze(0)]
    try:
        return [x.view(math.prod(x.shape[:-1]), x.shape[-1])]
    except RuntimeError:
        return [matrix for part in x for matrix in matrices(part)]


def chunks_of(rows: Sequence[Tensor], size: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of up to `size` rows of one matrix, and their places among the rows of all matrices."""
    first = 0
    for matrix in rows:
        for begin in range(0, matrix.shape[0], max(1, size)):
            part = matrix[begin : begin + max(1, size)]
            yield slice(first + begin, first + begin + part.shape[0]), part
        first += matrix.shape[0]


def skips_ignored(x: Tensor, skip_ignored: bool) -> bool:
    """True if ignored rows are left out before the product. Counting them waits for a GPU, and a CUDA graph cannot
    wait."""
    if not x.is_cuda:
        return has_values(x)
    return skip_ignored and not torch.cuda.is_current_stream_capturing()


def counted(rows: Tensor, counts: Tensor | None) -> Tensor:
    """The rows, with 0 in rows that do not count: not even their NaN enters a sum. `counts`: [rows, 1]."""
    return rows if counts is None else rows.masked_fill(~counts, 0)


class Tempering(NamedTuple):
    """z' = cap * tanh(factor * z / cap), or without a cap factor * z: scale and softcap, divided by the temperature."""

    factor: Tensor | float  # a Tensor has one number for each row, [rows, 1]
    cap: Tensor | float | None

    @staticmethod
    def of(scale: float, softcap: float | None, temperature: Tensor | float | None) -> Tempering:
        if not isinstance(temperature, Tensor):
            divisor = 1.0 if temperature is None else temperature
            return Tempering(scale / divisor, None if softcap is None else softcap / divisor)
        exact = temperature.double()  # rounded once, as for a number
        cap = None if softcap is None else (softcap / exact).to(temperature.dtype)
        return Tempering((scale / exact).to(temperature.dtype), cap)

    @property
    def is_identity(self) -> bool:
        return self.cap is None and isinstance(self.factor, float) and self.factor == 1

    def apply_(self, z: Tensor) -> Tensor:
        """Writes z' over z."""
        if self.cap is not None:
            return z.mul_(self.factor / self.cap).tanh_().mul_(self.cap)
        return z.mul_(self.factor)

    def slope(self, z: Tensor) -> Tensor | float:
        """dz'/dz."""
        if self.cap is None:
            return self.factor
        # 1 - tanh^2 would cancel.
        return (z * (self.factor / self.cap)).cosh_().square_().reciprocal_().mul_(self.factor)


# ------------------------------------------------------------------------------------------------------------- products


_CONVERTED_BYTES = 4 << 20  # of a 16-bit head, converted to the dtype of sums at once


def logits_of(product: Product) -> Tensor:
    """[rows, classes], in the dtype of sums."""
    (x, head, bias), dtype = product, accumulator_dtype(product.hidden.dtype)
    if x.dtype == dtype:
        # In memory of its own: a selective checkpoint keeps the product's result, and callers write over the logits.
        z = torch.mm(x, head.t(), out=x.new_empty((x.shape[0], head.shape[0])))
    elif x.is_cuda:
        z = torch.mm(x, head.t(), out_dtype=dtype)
    else:
        # Not add_product: a selective checkpoint that keeps the results of eaves' operators would not run it again.
        z, x = x.new_empty((x.shape[0], head.shape[0]), dtype=dtype), x.to(dtype)
        size = max(1, _CONVERTED_BYTES // (head.shape[1] * dtype.itemsize))
        for begin in range(0, head.shape[0], size):
            torch.mm(x, head[begin : begin + size].to(dtype).t(), out=z[:, begin : begin + size])
    return z if bias is None else z.add_(bias)


def add_gradients(grad: Tensor, product: Product, gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradients of hidden states, head and bias, computed from `grad`, the gradient of the logits. `grad` has
    the dtype of sums; without a bias it may have the dtype of the hidden states. The sums have the dtype of sums, but
    the sum for the head may have the dtype of the product; each chunk then rounds it."""
    (x, head, _), (grad_hidden, grad_head, grad_bias) = product, gradients
    if grad_bias is not None:
        grad_bias.add_(grad.sum(0))
    grad = grad.to(x.dtype)
    if grad_hidden is not None:
        _add_product(grad_hidden, grad, head)
    if grad_head is not None:
        _add_product(grad_head, grad.t(), x)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a @ b, without copies of a, b or the product in the dtype of sums."""
    if a.dtype == accumulator_dtype(a.dtype):
        sums.addmm_(a, b)
    elif sums.is_contiguous():
        # torch.addmm with out_dtype does the same, but not in every version of PyTorch.
        add_product(sums, _with_unit_stride(a), _with_unit_stride(b))
        torch.autograd.graph.increment_version(sums)
    else:
        product = torch.zeros_like(sums, dtype=accumulator_dtype(a.dtype), memory_format=torch.contiguous_format)
        _add_product(product, a, b)
        sums.add_(product)


def _with_unit_stride(matrix: Tensor) -> Tensor:
    """The matrix, or a contiguous copy if it has no axis of unit stride or its rows or columns overlap."""
    (rows, columns), (of_row, of_column) = matrix.shape, matrix.stride()
    lies_well = (of_column == 1 and of_row >= columns) or (of_row == 1 and of_column >= rows)
    return matrix if lies_well else matrix.contiguous()


def sum_over_ranks(part: Tensor, dtype: torch.dtype, over_ranks: OverRanks | None) -> Tensor:
    """The sum over the ranks of their parts of the gradient of hidden states, which have `dtype`."""
    if over_ranks is None or not over_ranks.shard.reduce_input_grad:
        return part
    shard = over_ranks.shard
    return all_reduce(part.to(dtype_of_parts(shard, dtype)), group_of(shard)).wait()
