"""The layouts of a tensor in memory: each takes a contiguous tensor, and returns one of the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor


def contiguous(x: Tensor) -> Tensor:
    return x


def axes_turned_around(x: Tensor) -> Tensor:
    """The first axis varies fastest."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def every_second_element(x: Tensor) -> Tensor:
    """A slice with a step of 2 along every axis: no unit stride anywhere."""
    buffer = x.new_zeros([2 * size for size in x.shape])
    view = buffer[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def padded_rows(x: Tensor) -> Tensor:
    """Three unused elements after each row, like columns cut from a wider table."""
    if x.dim() == 0:
        return x
    return x.new_zeros([*x.shape[:-1], x.shape[-1] + 3])[..., : x.shape[-1]].copy_(x)


def offset_by_one_element(x: Tensor) -> Tensor:
    """Contiguous, but one element into its storage, so that no row starts on 16 bytes."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def expanded_along_the_first_axis(x: Tensor) -> Tensor:
    """Stride 0: every row is the first one."""
    return x[:1].expand_as(x) if x.dim() else x


def expanded_along_the_last_axis(x: Tensor) -> Tensor:
    """Stride 0 along the axis that rows usually have."""
    return x[..., :1].expand_as(x) if x.dim() else x


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    contiguous,
    axes_turned_around,
    every_second_element,
    padded_rows,
    offset_by_one_element,
    expanded_along_the_first_axis,
    expanded_along_the_last_axis,
)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", deviation: float = 1.0
) -> Tensor:
    """Normally distributed numbers; integers up to 9, because larger ones would make one element the whole sum of
    exp."""
    generator = torch.Generator().manual_seed(11)
    if dtype.is_floating_point:
        return (deviation * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)
    low, high = (0, 2) if dtype == torch.bool else (0, 10) if dtype == torch.uint8 else (-9, 10)
    return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)
