"""A head in chunks of rows, for several operators: the size of a chunk, the product, and the two products of its
gradients.

Logits are float32 sums of a product (float64 for float64). Gradients are added up over the chunks, and what the
gradient of the logits is rounded to, once, is the dtype of the hidden states, as the factor of two products that it is.
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
    """Of classes that are cut over ranks."""

    shard: ShardArguments
    place: Place


def chunk_size(rows: int, bytes_of_row: int, limit: int) -> int:
    """Rows of a chunk: all chunks of one size, as large as the limit allows."""
    chunks = math.ceil(rows / max(1, limit // bytes_of_row))
    return math.ceil(rows / max(1, chunks))


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


def skips_ignored(x: Tensor, skip_ignored: bool) -> bool:
    """Are rows that are ignored left out before the product? Counting them waits for a GPU, and a CUDA graph cannot."""
    if not x.is_cuda:
        return has_values(x)
    return skip_ignored and not torch.cuda.is_current_stream_capturing()


def counted(rows: Tensor, counts: Tensor | None) -> Tensor:
    """Those that do not count, by the [rows, 1] of `counts`, are 0, so that none of their numbers comes into a sum, not
    even NaN."""
    return rows if counts is None else rows.masked_fill(~counts, 0)


class Tempering(NamedTuple):
    """z' = cap * tanh(factor * z / cap), or without a cap factor * z: scale and softcap, divided by the temperature."""

    factor: Tensor | float  # a Tensor has one for each row, [rows, 1]
    cap: Tensor | float | None

    @staticmethod
    def of(scale: float, softcap: float | None, temperature: Tensor | float | None) -> Tempering:
        if not isinstance(temperature, Tensor):
            divisor = 1.0 if temperature is None else temperature
            return Tempering(scale / divisor, None if softcap is None else softcap / divisor)
        exact = temperature.double()  # rounded once, as a number is
        cap = None if softcap is None else (softcap / exact).to(temperature.dtype)
        return Tempering((scale / exact).to(temperature.dtype), cap)

    @property
    def is_identity(self) -> bool:
        return self.cap is None and isinstance(self.factor, float) and self.factor == 1

    def apply_(self, z: Tensor) -> Tensor:
        """z' in place of z."""
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


_CONVERTED_BYTES = 4 << 20  # of a head of 16 bits, in the dtype of sums


def logits_of(product: Product) -> Tensor:
    """[rows, classes], in the dtype of sums."""
    (x, head, bias), dtype = product, accumulator_dtype(product.hidden.dtype)
    if x.dtype == dtype:
        # Into memory of our own: selective checkpoints keep the product's result, and logits are written over.
        z = torch.mm(x, head.t(), out=x.new_empty((x.shape[0], head.shape[0])))
    elif x.is_cuda:
        z = torch.mm(x, head.t(), out_dtype=dtype)
    else:
        # Not by add_product: a selective checkpoint that keeps the results of eaves' operators does not run it again.
        z, x = x.new_empty((x.shape[0], head.shape[0]), dtype=dtype), x.to(dtype)
        size = max(1, _CONVERTED_BYTES // (head.shape[1] * dtype.itemsize))
        for begin in range(0, head.shape[0], size):
            torch.mm(x, head[begin : begin + size].to(dtype).t(), out=z[:, begin : begin + size])
    return z if bias is None else z.add_(bias)


def add_gradients(grad: Tensor, product: Product, gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradients of hidden states, head and bias from that of the logits, which is in the dtype of sums, or
    without a bias in that of hidden states. They are added to tensors in the dtype of sums; that of the head may also
    have the dtype of the product, and is rounded in each chunk then."""
    (x, head, _), (grad_hidden, grad_head, grad_bias) = product, gradients
    if grad_bias is not None:
        grad_bias.add_(grad.sum(0))
    grad = grad.to(x.dtype)
    if grad_hidden is not None:
        _add_product(grad_hidden, grad, head)
    if grad_head is not None:
        _add_product(grad_head, grad.t(), x)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a @ b, without a copy of either in the dtype of sums, nor of the product."""
    if a.dtype == accumulator_dtype(a.dtype):
        sums.addmm_(a, b)
    elif sums.is_contiguous():
        # torch.addmm with out_dtype adds to a sum of that dtype, but not in every PyTorch.
        add_product(sums, _with_unit_stride(a), _with_unit_stride(b))
        torch.autograd.graph.increment_version(sums)
    else:
        product = torch.zeros_like(sums, dtype=accumulator_dtype(a.dtype), memory_format=torch.contiguous_format)
        _add_product(product, a, b)
        sums.add_(product)


def _with_unit_stride(matrix: Tensor) -> Tensor:
    """One whose rows or columns do not overlap, with elements side by side."""
    (rows, columns), (of_row, of_column) = matrix.shape, matrix.stride()
    lies_well = (of_column == 1 and of_row >= columns) or (of_row == 1 and of_column >= rows)
    return matrix if lies_well else matrix.contiguous()


def sum_over_ranks(part: Tensor, dtype: torch.dtype, over_ranks: OverRanks | None) -> Tensor:
    """The gradient of hidden states, of this `dtype`, from the ranks' parts of it."""
    if over_ranks is None or not over_ranks.shard.reduce_input_grad:
        return part
    shard = over_ranks.shard
    return all_reduce(part.to(dtype_of_parts(shard, dtype)), group_of(shard)).wait()
