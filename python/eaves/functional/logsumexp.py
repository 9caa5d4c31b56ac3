"""logsumexp for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eaves._calls.logsumexp import logsumexp_of


def logsumexp(
    x: Tensor, dim: int | Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """log(sum(exp(x))) over the axes `dim`, as torch.logsumexp, with its gradient.

        out = log(sum over dim of exp(x)),    dL/dx = dL/dout * exp(x - out)

    The forward reads x once, sums in float32 (float64 for a float64 x) and rounds once (M. Milakov, N. Gimelshein,
    "Online normalizer calculation for softmax", arXiv:1805.02867). The gradient is computed from an lse that is not
    rounded to the dtype of x: the forward keeps x and two numbers for each row, lse and the remainder of its rounding.

    Args:
        x: any shape of at most 16 axes, any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32, float64, or
            an integer type or bool, which the call converts to float32 first.
        dim: the axis or axes to sum over, each in [-x.dim(), x.dim()), none twice; an empty tuple means all of them.
        keepdim: whether the summed axes stay, with size 1.
        dtype: the dtype of the result: the (promoted) dtype of x, which is the default, or torch.float32.

    Returns:
        A new contiguous tensor with the shape of x without the axes `dim`; with keepdim these axes have size 1.

    Raises:
        ValueError: `dim` names an axis that x does not have, or one twice; `dtype` is neither x's nor float32.
        TypeError: x is not a tensor, `dim` not an int or a sequence of them, `keepdim` no bool, `dtype` no dtype.
        NotImplementedError: a dtype, layout or device that eaves does not have, a DTensor, a forward-mode derivative.
        torch.OutOfMemoryError: torch's allocator has no memory for the result.

    Differences from torch.logsumexp: a row that is all -inf has gradient 0, not NaN; integers give float32 whatever
    torch.get_default_dtype() is; autocast does not change the dtype of x (torch then gives float32 on a GPU).

    Example:
        >>> import torch, eaves
        >>> x = torch.tensor([[0.0, 1.0, 2.0], [1000.0, 1000.0, 1000.0]], requires_grad=True)
        >>> lse = eaves.logsumexp(x, dim=-1)
        >>> lse.detach()
        tensor([   2.4076, 1001.0986])
        >>> lse.sum().backward()
        >>> x.grad
        tensor([[0.0900, 0.2447, 0.6652],
                [0.3333, 0.3333, 0.3333]])
    """
    return logsumexp_of(x, dim, keepdim, dtype)
