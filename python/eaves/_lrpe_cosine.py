"""lrpe_cosine for torch tensors: the public function and module, and their autograd. Fake implementations and batching
rules are in _lrpe_cosine_rules.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eaves import _lrpe_cosine_rules  # noqa: F401  # registers them
from eaves._operator import (
    MAX_RANK,
    accumulator_dtype,
    apply,
    binds_quickly,
    call,
    check_device,
    check_dtype_of,
    check_tensor,
    dispatch,
    give_derivative,
    index_of,
    is_transforming,
    needs_autograd,
    number_of,
    refuse_lost_derivatives,
    value_for_message,
)

_forward = torch.ops.eaves.lrpe_cosine_forward.default
_forward_lse = torch.ops.eaves.lrpe_cosine_forward_lse.default
_backward = torch.ops.eaves.lrpe_cosine_backward.default

_OP = "lrpe_cosine"

NONE, RELU, SIGMOID, SILU, SOFTMAX = range(5)  # enum Activation of include/eaves/lrpe_cosine.h
ACTIVATIONS = {"none": NONE, "relu": RELU, "sigmoid": SIGMOID, "silu": SILU, "softmax": SOFTMAX}
FEATURES, SEQUENCE = -1, -2  # the axes of a softmax

_LAYOUTS = {"bnhd": False, "bhnd": True}  # whether the heads come before the positions
_X_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_POSITION_DTYPES = (torch.int64, torch.int32)
_LARGEST_OFFSET = 2**62


def lrpe_cosine(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    extra_tokens: int = 0,
    offset: int | Tensor = 0,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
    activation_dim: int | None = None,
    layout: str = "bnhd",
) -> Tensor:
    """Linearized relative positional encoding by cosines and sines, with an activation in front and its gradients.

    For batch entry b, head h, position n and feature d, with E angles for each axis of a grid:

        a   = activation(x)
        phi = theta[h, d mod E] * (offset + coordinate of n on axis d // E)
        out = [ a * cos(phi), a * sin(phi) ]                    the cosine half first: twice the features

    so that the inner product of the encodings of a query at position m and a key at position n, with the same theta,
    depends on m - n alone: with the activations q and k of the two, sum_d q_d k_d cos(theta_d (m - n)). The first
    `extra_tokens` positions, and features at or beyond E times the number of axes, have phi = 0. One pass over x (two
    for a softmax over the sequence), computed in float32 (float64 for a float64 x) and rounded once; for the backward
    are kept: theta, x where an activation or a gradient of theta needs it, two numbers for each column of a softmax
    over the sequence, and nothing of the size of phi. Source: Z. Qin et al., "Linearized Relative Positional
    Encoding", arXiv:2307.09270.

    Args:
        x: [B, N, H, D] (batch, positions, heads, features), or as `layout` says; any strides, on the CPU or a CUDA GPU;
            float16, bfloat16, float32 or float64.
        theta: [H, E], or [1, E] for all heads (of queries and of fewer keys alike), any E; in the dtype of x or
            float32. A grid of m axes shares D features evenly where E is D / m: with fewer the last features have no
            position, with more the last axes have no features. With one axis and E = 1 it is the angle of all
            features. It is taken as it is: in bfloat16 an angle at position 1000 may be off by two radians.
        grid: the sizes (n_1, ..., n_m) of a grid that the positions behind the extra tokens fill, row by row, the last
            axis fastest. None: one axis, an ordinary sequence.
        extra_tokens: how many positions at the front are not of the grid. A softmax over the sequence has them too.
        offset: added to each coordinate, on every axis: how many tokens of the sequence, without its extra tokens,
            have been encoded before. An int, or a tensor on the device of x, int32 or int64, with one element or one
            for each batch entry, [B].
        positions: instead of counting, the position of each token: [N] or [B, N], int32 or int64; those of the extra
            tokens are not read. Without a grid of several axes and without offset.
        cu_seqlens: of S packed sequences, where each starts on the axis of positions, and N: [S + 1], int32 or int64.
            Positions count from each start, in every batch entry from the same ones: for entries that are packed each
            in its own way give positions of [B, N]. Without a grid of several axes, extra tokens, offset and positions.
        activation: "none", "relu", "sigmoid", "silu" or "softmax".
        activation_dim: of a softmax: -1 (or None) over the features, -2 over the sequence, whatever the layout; that
            one looks at later tokens too, and cannot be decoded token by token. Other activations take no notice of
            it.
        layout: "bnhd", or "bhnd" for an x of [B, H, N, D].

    Returns:
        A new contiguous tensor with the shape of x and twice its features, in the dtype of x.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; on the CPU a cu_seqlens that decreases, or does
            not run from 0 to N. (On a GPU its positions have no meaning.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have, a DTensor, a forward-mode derivative;
            cu_seqlens with a softmax over the sequence.
        torch.OutOfMemoryError: torch's allocator has no memory for a result.

    Under torch.compile an offset that changes is one more compilation at its second value, and none at any later one.
    Under autocast the dtype stays that of x.

    Example:
        >>> import torch, eaves
        >>> x = torch.ones(1, 3, 1, 2)  # three positions, one head, two features
        >>> theta = torch.tensor([[torch.pi / 2, 0.0]])  # quarter turns, and none
        >>> eaves.lrpe_cosine(x, theta).squeeze().round(decimals=3).abs()
        tensor([[1., 1., 0., 0.],
                [0., 1., 1., 0.],
                [1., 1., 0., 0.]])
    """
    heads_first = _heads_first(layout)
    kind, dim = _activation_of(activation, activation_dim)
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
            raise ValueError(f"{_OP}: cu_seqlens is given beside positions, expected one of them")
        if extra_tokens != 0:
            raise ValueError(f"{_OP}: cu_seqlens is given with extra tokens, expected none")
        if kind == SOFTMAX and dim == SEQUENCE:
            raise NotImplementedError(
                f"{_OP}: cu_seqlens is given with a softmax over the sequence, which would mix the packed sequences; "
                "give positions for a softmax over the whole axis, or call once for each sequence"
            )
    return _encode(x, theta, offsets, positions, cu_seqlens, axes, extra_tokens, number, kind, dim, heads_first)


class LRPECosine(torch.nn.Module):
    """eaves.lrpe_cosine as a module, with its angles: theta is a buffer, or with `learnable` a parameter.

    At first they fall geometrically from 1 to nearly base^-2, over the features of the first head, then of the second:

        theta[h, e] = base ** (-2 * (h * E + e) / (H * E))          of H heads with E features for each axis

    as in Z. Qin et al., "TransNormerLLM", arXiv:2307.14995. theta is float32, and still is after a cast to 16 bits, in
    which far positions have no angle; a cast to float64 takes it along, and so does one back to float32. Queries and
    keys need the same angles: where keys have fewer heads, a module with num_heads=1 serves both.

    Args:
        num_heads: H.
        head_dim: D, the features of each head.
        axes: of the grid, between which the features are shared. With more than one, forward() needs a grid.
        theta_features: E. None: head_dim // axes; features that are left over have no position.
        base: a positive number.
        learnable: whether theta is a parameter.
        activation, activation_dim, layout: as in eaves.lrpe_cosine.
        device: of theta.
        dtype: of theta, float32 or float64. None: float32.

    Example:
        >>> import torch, eaves
        >>> encode = eaves.LRPECosine(num_heads=4, head_dim=16, activation="silu")
        >>> encode(torch.randn(2, 10, 4, 16)).shape
        torch.Size([2, 10, 4, 32])
    """

    theta: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        axes: int = 1,
        theta_features: int | None = None,
        base: float = 10000.0,
        learnable: bool = False,
        activation: str = "none",
        activation_dim: int | None = None,
        layout: str = "bnhd",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("axes", axes)):
            if index_of(_OP, name, value) < 1:
                raise ValueError(f"{_OP}: {name} is {value}, expected a positive number")
        features = head_dim // axes if theta_features is None else index_of(_OP, "theta_features", theta_features)
        if features < 1:
            raise ValueError(f"{_OP}: theta has {features} features for each of {axes} axes, expected at least one")
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"{_OP}: dtype of theta is {dtype}, expected torch.float32 or torch.float64")
        _heads_first(layout)
        _activation_of(activation, activation_dim)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.axes = axes
        self.base = number_of(_OP, "base", base, math.ulp(0.0), math.inf, "a positive number")
        self.learnable = learnable
        self.activation = activation
        self.activation_dim = activation_dim
        self.layout = layout
        theta = torch.empty(num_heads, features, device=device, dtype=torch.float32 if dtype is None else dtype)
        if learnable:
            self.theta = torch.nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets theta to what it is at first."""
        heads, features = self.theta.shape
        exponents = torch.arange(heads * features, dtype=torch.float64, device="cpu").view(heads, features)
        with torch.no_grad():
            self.theta.copy_(self.base ** (-2 * exponents / (heads * features)))

    def forward(
        self,
        x: Tensor,
        *,
        grid: Sequence[int] | None = None,
        extra_tokens: int = 0,
        offset: int | Tensor = 0,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """eaves.lrpe_cosine(x, theta, ...) with the options of the module, for an x and a grid that fit it."""
        if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] != self.head_dim:
            what = f"x has {x.shape[-1]} features, expected {self.head_dim} (head_dim of the module)"
            raise ValueError(f"{_OP}: {what}")
        axes = 1 if grid is None else len(grid)
        if axes != self.axes:
            given = "None, one axis" if grid is None else list(grid)
            raise ValueError(f"{_OP}: grid is {given}, expected one of {self.axes} axes (as the module has)")
        return lrpe_cosine(
            x,
            self.theta,
            grid=grid,
            extra_tokens=extra_tokens,
            offset=offset,
            positions=positions,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            activation_dim=self.activation_dim,
            layout=self.layout,
        )

    def extra_repr(self) -> str:
        """The sizes, and the options that are not the default's."""
        defaults = {
            "axes": 1,
            "theta_features": self.head_dim // self.axes,
            "base": 10000.0,
            "learnable": False,
            "activation": "none",
            "activation_dim": None,
            "layout": "bnhd",
        }
        values = {**vars(self), "theta_features": self.theta.shape[1]}
        changed = [f"{name}={values[name]!r}" for name, default in defaults.items() if values[name] != default]
        return ", ".join([f"num_heads={self.num_heads}", f"head_dim={self.head_dim}", *changed])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LRPECosine:
        def at_least_float32(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_narrowed = result.dtype.itemsize < torch.float32.itemsize <= tensor.dtype.itemsize
            return tensor.to(result.device, torch.float32) if is_narrowed else result

        super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call]
        return self


# ----------------------------------------------------------------------------------------------------------- arguments


def _heads_first(layout: object) -> bool:
    heads_first = _LAYOUTS.get(layout) if isinstance(layout, str) else None
    if heads_first is None:
        kind = ValueError if isinstance(layout, str) else TypeError
        raise kind(f'{_OP}: layout is {layout!r}, expected "bnhd" or "bhnd"')
    return heads_first


def _activation_of(activation: object, activation_dim: object) -> tuple[int, int]:
    """The number of the activation, and the axis of a softmax; without one FEATURES."""
    kind = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if kind is None:
        error = ValueError if isinstance(activation, str) else TypeError
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise error(f"{_OP}: activation is {activation!r}, expected one of {names}")
    if activation_dim is None:
        return kind, FEATURES
    dim = index_of(_OP, "activation_dim", activation_dim)
    if dim not in (FEATURES, SEQUENCE):
        raise ValueError(f"{_OP}: activation_dim is {dim}, expected -1 (the features) or -2 (the sequence)")
    return kind, dim if kind == SOFTMAX else FEATURES


def _check_x(x: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """Its batch entries, positions and heads."""
    check_tensor(_OP, "x", x)
    check_dtype_of(_OP, "x", x, _X_DTYPES, "a floating-point type")
    if x.dim() != 4:
        names = "batch, heads, positions, features" if heads_first else "batch, positions, heads, features"
        raise ValueError(f"{_OP}: x has shape {list(x.shape)}, expected four axes ({names})")
    batch, second, third, _ = x.shape
    return (batch, third, second) if heads_first else (batch, second, third)


def _check_theta(theta: Tensor, x: Tensor, heads: int) -> None:
    check_tensor(_OP, "theta", theta)
    check_device(_OP, "theta", theta, "x", x)
    check_dtype_of(_OP, "theta", theta, (x.dtype, torch.float32), "that of x, or float32")
    if theta.dim() != 2:
        raise ValueError(f"{_OP}: theta has shape {list(theta.shape)}, expected two axes (heads, features)")
    if theta.shape[0] != heads and theta.shape[0] != 1:
        raise ValueError(f"{_OP}: theta has {theta.shape[0]} heads, expected {heads} (as x) or 1")


def _check_grid(grid: Sequence[int] | None, extra_tokens: int, length: int) -> tuple[Sequence[int], int]:
    """The sizes of the grid, none for one axis; and the extra tokens."""
    extra_tokens = index_of(_OP, "extra_tokens", extra_tokens)
    if not 0 <= extra_tokens <= length:
        raise ValueError(f"{_OP}: extra_tokens is {extra_tokens}, expected 0 to the number of positions, {length}")
    if grid is None:
        return (), extra_tokens
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise TypeError(f"{_OP}: grid is {grid!r}, expected None or a sequence of ints")
    sizes = [index_of(_OP, "grid", size) for size in grid]
    if not 1 <= len(sizes) <= MAX_RANK:
        raise ValueError(f"{_OP}: grid has {len(sizes)} axes, expected 1 to {MAX_RANK}")
    cells = length - extra_tokens
    product = 1
    for size in sizes:
        product *= size
    if product != cells or any(size < 0 for size in sizes):
        raise ValueError(
            f"{_OP}: grid is {sizes}, expected sizes whose product is {cells} ({length} positions, of which "
            f"{extra_tokens} are extra tokens)"
        )
    return sizes, extra_tokens


def _offset_of(offset: int | Tensor, x: Tensor, batch: int) -> tuple[int, Tensor | None]:
    """The offset as a number, and as a tensor."""
    if isinstance(offset, Tensor):
        _check_integers("offset", offset, x)
        if offset.numel() != 1 and tuple(offset.shape) != (batch,):
            raise ValueError(
                f"{_OP}: offset has shape {list(offset.shape)}, expected [{batch}] (one for each batch entry), or one "
                "element for all"
            )
        return 0, offset
    if type(offset) is not int:
        try:
            offset = index_of(_OP, "offset", offset)
        except TypeError as error:
            raise TypeError(f"{error}, or a tensor of them, int32 or int64") from None
    if not -_LARGEST_OFFSET <= offset <= _LARGEST_OFFSET:
        raise ValueError(f"{_OP}: offset is {value_for_message(offset)}, expected -2^62 to 2^62")
    return offset, None


def _check_positions(positions: Tensor, x: Tensor, batch: int, length: int) -> None:
    _check_integers("positions", positions, x)
    shape = tuple(positions.shape)
    if shape != (length,) and shape != (batch, length):
        raise ValueError(
            f"{_OP}: positions has shape {list(shape)}, expected [{length}] (one for each token) or [{batch}, {length}]"
            " (for each of a batch entry)"
        )


def _cu_seqlens_of(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    _check_integers("cu_seqlens", cu_seqlens, x)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{_OP}: cu_seqlens has shape {list(cu_seqlens.shape)}, expected one axis with one entry more than there "
            "are sequences"
        )
    return cu_seqlens.contiguous()


def _check_alone(name: str, axes: Sequence[int], offset: int | Tensor) -> None:
    if len(axes) > 1:
        raise ValueError(f"{_OP}: {name} is given with a grid {list(axes)}, expected a grid of one axis")
    if isinstance(offset, Tensor) or offset != 0:
        raise ValueError(f"{_OP}: {name} is given beside an offset, expected one of them")


def _check_integers(name: str, tensor: Tensor, x: Tensor) -> None:
    check_tensor(_OP, name, tensor)
    check_device(_OP, name, tensor, "x", x)
    check_dtype_of(_OP, name, tensor, _POSITION_DTYPES, "positions are integers")


# ------------------------------------------------------------------------------------------------------------ autograd


def _encode(x: Tensor, theta: Tensor, *arguments: Any) -> Tensor:
    """The call with arguments that have been checked: offsets, positions, cu_seqlens and the options."""
    if torch.compiler.is_compiling() and is_transforming():
        # A Function that torch cannot trace: the operator, which refuses where a derivative would be lost.
        plain: Tensor = call(_OP, _forward, x, theta, *arguments)
        return plain
    result = dispatch(_OP, (x, theta), _LrpeCosine, _forward, x, theta, *arguments)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@binds_quickly
class _LrpeCosine(torch.autograd.Function):
    """x, theta -> out, and of a softmax over the sequence the lse too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        theta: Tensor,
        offsets: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        grid: Sequence[int],
        extra_tokens: int,
        offset: int,
        kind: int,
        dim: int,
        heads_first: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        overload = _forward_lse if kind == SOFTMAX and dim == SEQUENCE else _forward
        result: Tensor | tuple[Tensor, Tensor] = call(
            _OP, overload, x, theta, offsets, positions, cu_seqlens, grid, extra_tokens, offset, kind, dim, heads_first
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        x, theta, offsets, positions, cu_seqlens = inputs[:5]
        ctx.options = inputs[5:]
        ctx.set_materialize_grads(False)  # or each backward would fill a tensor of zeros for lse
        lse = None
        if isinstance(output, tuple):
            _, lse = output
            ctx.mark_non_differentiable(lse)
        # As x lies in memory: where its axes are in the other order there, those of its gradient are too.
        ctx.turned = not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
        # Under torch.func it shows in the backward only whether theta has a gradient.
        needs_x = ctx.options[3] != NONE or theta.requires_grad
        needs_x = needs_x or (not torch.compiler.is_compiling() and is_transforming())
        ctx.save_for_backward(x if needs_x else None, theta, lse, offsets, positions, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 9
        wants_x, wants_theta = ctx.needs_input_grad[:2]
        if grad_out is None or not (wants_x or wants_theta):
            return None, None, *nothing
        x, theta, lse, offsets, positions, cu_seqlens = ctx.saved_tensors
        grad_x, grad_theta = _gradients(
            grad_out, x, theta, None if lse is None else lse.detach(), offsets, positions, cu_seqlens, *ctx.options,
            ctx.turned, wants_x, wants_theta,
        )  # fmt: skip
        return grad_x, grad_theta, *nothing


def _gradients(grad_out: Tensor, x: Tensor | None, theta: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """grad_x and grad_theta, None for what is not wanted. `arguments` are those of _Gradient behind theta."""
    turned, wants_x, wants_theta = arguments[-3:]
    tensors = (grad_out, theta) if x is None else (grad_out, x, theta)
    if torch.compiler.is_compiling() or needs_autograd(*tensors):
        grad_x, grad_theta = apply(_OP, _Gradient, grad_out, x, theta, *arguments)
    else:
        grad_x, grad_theta = _Gradient.forward(grad_out, x, theta, *arguments)
    if turned and wants_x:
        grad_x = grad_x.transpose(1, 2)
    return grad_x if wants_x else None, grad_theta if wants_theta else None


@binds_quickly
class _Gradient(torch.autograd.Function):
    """grad_x and grad_theta, those that are wanted, differentiable in grad_out, x and theta.

    Second derivatives are rare, so they are written in torch's own operators, from the formula.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_out: Tensor,
        x: Tensor | None,
        theta: Tensor,
        lse: Tensor | None,
        offsets: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        grid: Sequence[int],
        extra_tokens: int,
        offset: int,
        kind: int,
        dim: int,
        heads_first: bool,
        turned: bool,
        wants_x: bool,
        wants_theta: bool,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = call(
            _OP, _backward, grad_out, x, theta, lse, offsets, positions, cu_seqlens, grid, extra_tokens, offset, kind,
            dim, heads_first, heads_first != turned, wants_x, wants_theta,
        )  # fmt: skip
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grad_out, x, theta, _, offsets, positions, cu_seqlens = inputs[:7]
        ctx.options, (ctx.turned, ctx.wants_x, ctx.wants_theta) = inputs[7:13], inputs[13:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_out, x, theta, offsets, positions, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 13
        v, u = (grads[0] if ctx.wants_x else None), (grads[1] if ctx.wants_theta else None)
        if v is None and u is None:
            return None, None, None, *nothing
        grad_out, x, theta, offsets, positions, cu_seqlens = ctx.saved_tensors
        if v is not None and ctx.turned:
            v = v.transpose(1, 2)
        if x is None:  # without an activation, and with a fixed theta, the gradient is linear
            assert v is not None
            return _encode(v, theta, offsets, positions, cu_seqlens, *ctx.options), None, None, *nothing
        second = _second_derivatives(grad_out, x, theta, v, u, offsets, positions, cu_seqlens, *ctx.options)
        return *second, *nothing


def _second_derivatives(
    grad_out: Tensor,
    x: Tensor,
    theta: Tensor,
    v: Tensor | None,
    u: Tensor | None,
    offsets: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    grid: Sequence[int],
    extra_tokens: int,
    offset: int,
    kind: int,
    dim: int,
    heads_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives of <v, grad_x> + <u, grad_theta> with respect to grad_out, x and theta.

    With w = g_cos cos + g_sin sin, r = g_sin cos - g_cos sin, p the positions and J the Jacobian of the activation:
    <v, grad_x> = <J v, w> and <u, grad_theta> = <p u a, r>, where dw/dphi = r and dr/dphi = -w.
    """
    dtype = accumulator_dtype(x.dtype)

    def in_order(tensor: Tensor) -> Tensor:  # [B, H, N, ...]
        return (tensor if heads_first else tensor.transpose(1, 2)).to(dtype)

    z, (g_cos, g_sin) = in_order(x), in_order(grad_out).chunk(2, -1)
    position = _positions(z, theta.shape[1], offsets, positions, cu_seqlens, grid, extra_tokens, offset)
    features = torch.arange(z.shape[-1], device=z.device) % max(theta.shape[1], 1)

    def of_features(angles: Tensor) -> Tensor:  # [H or 1, 1, D]
        if theta.shape[1] == 0:
            return position.new_zeros(())
        return angles.to(dtype).index_select(1, features).unsqueeze(1)

    phi = of_features(theta) * position
    cos, sin = phi.cos(), phi.sin()
    w, r = g_cos * cos + g_sin * sin, g_sin * cos - g_cos * sin
    a, jacobian, curvature = _activated(z, kind, dim)
    t = torch.zeros_like(z) if v is None else jacobian(in_order(v))
    moved = torch.zeros_like(z) if u is None else of_features(u) * position
    grad_z = jacobian(moved * r)
    if v is not None:
        grad_z = grad_z + curvature(in_order(v), w)
    of_phi = (t * r - moved * a * w) * position
    of_theta = of_phi.sum((0, 2)) if theta.shape[0] == of_phi.shape[1] else of_phi.sum((0, 1, 2)).unsqueeze(0)
    grad_theta = of_theta.new_zeros(theta.shape).index_add(1, features, of_theta) if theta.shape[1] else of_theta[:, :0]
    grad_g = torch.cat([t * cos - moved * a * sin, t * sin + moved * a * cos], -1)
    if not heads_first:
        grad_g, grad_z = grad_g.transpose(1, 2), grad_z.transpose(1, 2)
    return grad_g.to(grad_out.dtype), grad_z.to(x.dtype), grad_theta.to(theta.dtype)


def _positions(
    x: Tensor,
    theta_features: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    grid: Sequence[int],
    extra_tokens: int,
    offset: int,
) -> Tensor:
    """The position of each feature, [B or 1, 1, N, D], in the dtype of x, which is [B, H, N, D]."""
    length, features = x.shape[2:]
    sizes = list(grid) or [length - extra_tokens]
    if positions is not None:
        coordinates = positions[..., extra_tokens:].unsqueeze(-1)
    else:
        cell = torch.arange(length - extra_tokens, device=x.device)
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens, cell.to(cu_seqlens.dtype), right=True) - 1
            cell = cell - cu_seqlens[sequence]
        behind = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        coordinates = torch.stack([cell // max(b, 1) % max(n, 1) for b, n in zip(behind, sizes)], -1)
        if cu_seqlens is not None:
            coordinates = cell.unsqueeze(-1)
        coordinates = coordinates + offset
        if offsets is not None:
            coordinates = coordinates + offsets.reshape(-1, 1, 1)
    # A column of zeros for the features that belong to no axis, and rows of zeros for the extra tokens.
    padded = torch.nn.functional.pad(coordinates.to(x.dtype), (0, 1, extra_tokens, 0))
    is_one_angle = theta_features == 1 and len(sizes) == 1
    owner = torch.arange(features, device=x.device) // (max(features, 1) if is_one_angle else max(theta_features, 1))
    owner = owner.clamp(max=len(sizes)) if theta_features else torch.full_like(owner, len(sizes))
    of_features = padded.index_select(-1, owner)
    return of_features.unsqueeze(1) if of_features.dim() == 3 else of_features


_Map = Callable[[Tensor], Tensor]


def _activated(z: Tensor, kind: int, dim: int) -> tuple[Tensor, _Map, Callable[[Tensor, Tensor], Tensor]]:
    """The activation of z; its Jacobian J, which is symmetric, as a map; and the gradient of <J v, w> by z."""
    if kind == SOFTMAX:
        a = z.softmax(dim)

        def centred(values: Tensor) -> Tensor:
            return a * (values - (a * values).sum(dim, keepdim=True))

        def curvature(v: Tensor, w: Tensor) -> Tensor:
            mean_v, mean_w = (a * v).sum(dim, keepdim=True), (a * w).sum(dim, keepdim=True)
            return centred(v * w - v * mean_w - w * mean_v)

        return a, centred, curvature
    if kind == NONE:
        return z, lambda values: values, lambda v, w: torch.zeros_like(v)
    if kind == RELU:
        return z.relu(), lambda values: values * (z > 0), lambda v, w: torch.zeros_like(v)
    s = z.sigmoid()
    slope = s * (1 - s)
    if kind == SIGMOID:
        return s, lambda values: values * slope, lambda v, w: v * w * slope * (1 - 2 * s)
    return (
        z * s,
        lambda values: values * (s + z * slope),
        lambda v, w: v * w * slope * (2 + z * (1 - 2 * s)),
    )


give_derivative(_OP, _forward, _encode, "x", "theta")
refuse_lost_derivatives(_OP, _forward_lse, _backward)
