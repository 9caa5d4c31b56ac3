"""A call of lrpe_cosine: its arguments and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eaves._autograd.lrpe_cosine import FEATURES, NONE, OP, RELU, SEQUENCE, SIGMOID, SILU, SOFTMAX, encode
from eaves._torch.checks import MAX_RANK, check_beside, check_dtype_of, check_tensor, index_of, value_for_message

ACTIVATIONS = {"none": NONE, "relu": RELU, "sigmoid": SIGMOID, "silu": SILU, "softmax": SOFTMAX}

_LAYOUTS = {"bnhd": False, "bhnd": True}  # whether the heads come before the positions
_X_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_POSITION_DTYPES = (torch.int64, torch.int32)
_LARGEST_OFFSET = 2**62


class LrpeCosineCall(NamedTuple):
    """The arguments of eaves.lrpe_cosine, as they were passed."""

    x: Tensor
    theta: Tensor
    grid: Sequence[int] | None
    extra_tokens: int
    offset: int | Tensor
    positions: Tensor | None
    cu_seqlens: Tensor | None
    activation: str
    activation_dim: int | None
    layout: str


def encoding_of(call: LrpeCosineCall) -> Tensor:
    x, theta, grid, extra_tokens, offset, positions, cu_seqlens, activation, activation_dim, layout = call
    heads_first = heads_first_of(layout)
    kind, dim = activation_of(activation, activation_dim)
    batch, length, heads = _check_x(x, heads_first)
    _check_theta(theta, x, heads)
    axes, extra_tokens = _check_grid(grid, extra_tokens, length)
    number, offsets = _offset_of(offset, x, batch)
    if positions is not None:
        _check_positions(positions, x, batch, length)
        _check_alone("positions", axes, offset)
    if cu_seqlens is not None:
        cu_seqlens = _cu_seqlens_of(cu_seqlens, x)
        _check_alone("cu_seqlens", axes, offset)
        if positions is not None:
            raise ValueError(f"{OP}: cu_seqlens is given beside positions, expected one of them")
        if extra_tokens != 0:
            raise ValueError(f"{OP}: cu_seqlens is given with extra tokens, expected none")
        if kind == SOFTMAX and dim == SEQUENCE:
            raise NotImplementedError(
                f"{OP}: cu_seqlens is given with a softmax over the sequence, which would mix the packed sequences; "
                "give positions for a softmax over the whole axis, or call once for each sequence"
            )
    return encode(x, theta, offsets, positions, cu_seqlens, axes, extra_tokens, number, kind, dim, heads_first)


def heads_first_of(layout: object) -> bool:
    heads_first = _LAYOUTS.get(layout) if isinstance(layout, str) else None
    if heads_first is None:
        kind = ValueError if isinstance(layout, str) else TypeError
        raise kind(f'{OP}: layout is {layout!r}, expected "bnhd" or "bhnd"')
    return heads_first


def activation_of(activation: object, activation_dim: object) -> tuple[int, int]:
    """The number of the activation, and the axis of a softmax; FEATURES for another activation."""
    kind = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if kind is None:
        error = ValueError if isinstance(activation, str) else TypeError
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise error(f"{OP}: activation is {activation!r}, expected one of {names}")
    if activation_dim is None:
        return kind, FEATURES
    dim = index_of(OP, "activation_dim", activation_dim)
    if dim not in (FEATURES, SEQUENCE):
        raise ValueError(f"{OP}: activation_dim is {dim}, expected -1 (the features) or -2 (the sequence)")
    return kind, dim if kind == SOFTMAX else FEATURES


def _check_x(x: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """Checks x. Returns the numbers of its batch entries, positions and heads."""
    check_tensor(OP, "x", x)
    check_dtype_of(OP, "x", x, _X_DTYPES, "a floating-point type")
    if x.dim() != 4:
        names = "batch, heads, positions, features" if heads_first else "batch, positions, heads, features"
        raise ValueError(f"{OP}: x has shape {list(x.shape)}, expected four axes ({names})")
    batch, second, third, _ = x.shape
    return (batch, third, second) if heads_first else (batch, second, third)


def _check_theta(theta: Tensor, x: Tensor, heads: int) -> None:
    check_beside(OP, "theta", theta, "x", x)
    check_dtype_of(OP, "theta", theta, (x.dtype, torch.float32), "that of x, or float32")
    if theta.dim() != 2:
        raise ValueError(f"{OP}: theta has shape {list(theta.shape)}, expected two axes (heads, features)")
    if theta.shape[0] != heads and theta.shape[0] != 1:
        raise ValueError(f"{OP}: theta has {theta.shape[0]} heads, expected {heads} (as x) or 1")


def _check_grid(grid: Sequence[int] | None, extra_tokens: int, length: int) -> tuple[Sequence[int], int]:
    """The sizes of the grid, empty without a grid, and the number of extra tokens."""
    extra_tokens = index_of(OP, "extra_tokens", extra_tokens)
    if not 0 <= extra_tokens <= length:
        raise ValueError(f"{OP}: extra_tokens is {extra_tokens}, expected 0 to the number of positions, {length}")
    if grid is None:
        return (), extra_tokens
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise TypeError(f"{OP}: grid is {grid!r}, expected None or a sequence of ints")
    sizes = [index_of(OP, "grid", size) for size in grid]
    if not 1 <= len(sizes) <= MAX_RANK:
        raise ValueError(f"{OP}: grid has {len(sizes)} axes, expected 1 to {MAX_RANK}")
    cells = length - extra_tokens
    product = 1
    for size in sizes:
        product *= size
    if product != cells or any(size < 0 for size in sizes):
        raise ValueError(
            f"{OP}: grid is {sizes}, expected sizes whose product is {cells} ({length} positions, of which "
            f"{extra_tokens} are extra tokens)"
        )
    return sizes, extra_tokens


def _offset_of(offset: int | Tensor, x: Tensor, batch: int) -> tuple[int, Tensor | None]:
    """The offset as a number, and as a tensor or None."""
    if isinstance(offset, Tensor):
        _check_integers("offset", offset, x)
        if offset.numel() != 1 and tuple(offset.shape) != (batch,):
            raise ValueError(
                f"{OP}: offset has shape {list(offset.shape)}, expected [{batch}] (one for each batch entry), or one "
                "element for all"
            )
        return 0, offset
    if type(offset) is not int:
        try:
            offset = index_of(OP, "offset", offset)
        except TypeError as error:
            raise TypeError(f"{error}, or a tensor of them, int32 or int64") from None
    if not -_LARGEST_OFFSET <= offset <= _LARGEST_OFFSET:
        raise ValueError(f"{OP}: offset is {value_for_message(offset)}, expected -2^62 to 2^62")
    return offset, None


def _check_positions(positions: Tensor, x: Tensor, batch: int, length: int) -> None:
    _check_integers("positions", positions, x)
    shape = tuple(positions.shape)
    if shape != (length,) and shape != (batch, length):
        raise ValueError(
            f"{OP}: positions has shape {list(shape)}, expected [{length}] (one for each token) or [{batch}, {length}]"
            " (one for each token of each batch entry)"
        )


def _cu_seqlens_of(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    _check_integers("cu_seqlens", cu_seqlens, x)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{OP}: cu_seqlens has shape {list(cu_seqlens.shape)}, expected one axis with one entry more than there "
            "are sequences"
        )
    return cu_seqlens.contiguous()


def _check_alone(name: str, axes: Sequence[int], offset: int | Tensor) -> None:
    if len(axes) > 1:
        raise ValueError(f"{OP}: {name} is given with a grid {list(axes)}, expected a grid of one axis")
    if isinstance(offset, Tensor) or offset != 0:
        raise ValueError(f"{OP}: {name} is given beside an offset, expected one of them")


def _check_integers(name: str, tensor: Tensor, x: Tensor) -> None:
    check_beside(OP, name, tensor, "x", x)
    check_dtype_of(OP, name, tensor, _POSITION_DTYPES, "positions are integers")
