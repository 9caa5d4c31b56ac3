"""lrpe_cosine and its module for torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaves._calls.lrpe_cosine import LrpeCosineCall, activation_of, encoding_of, heads_first_of
from eaves._torch.checks import index_of, number_of

_OP = "lrpe_cosine"


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

    The inner product of the encodings of a query at position m and a key at position n, with the same theta, then
    depends on m - n alone: with the activations q and k of the two, sum_d q_d k_d cos(theta_d (m - n)). The first
    `extra_tokens` positions have phi = 0, and so do features at or beyond E times the number of axes. The forward reads
    x once (twice for a softmax over the sequence), computes in float32 (float64 for a float64 x) and rounds once. It
    keeps for the backward: theta; x, if an activation or a gradient of theta needs it; two numbers for each column of a
    softmax over the sequence; and nothing of the size of phi. Source: Z. Qin et al., "Linearized Relative Positional
    Encoding", arXiv:2307.09270.

    Args:
        x: [B, N, H, D] (batch, positions, heads, features), or as `layout` says; any strides, on the CPU or a CUDA GPU;
            float16, bfloat16, float32 or float64.
        theta: the angles, [H, E], or [1, E] for all heads (of queries and of fewer keys alike), any E; in the dtype of
            x or float32. A grid of m axes shares D features evenly if E is D / m: with a smaller E the last features
            have no position, with a larger E the last axes have no features. With one axis and E = 1, theta is the
            angle of all features. The call uses theta as it is: in bfloat16 an angle at position 1000 may be off by two
            radians.
        grid: the sizes (n_1, ..., n_m) of a grid. The positions after the extra tokens fill it row by row, the last
            axis fastest. None: one axis, an ordinary sequence.
        extra_tokens: the number of positions at the front that are outside the grid. A softmax over the sequence
            includes them.
        offset: a number that is added to each coordinate, on every axis: how many tokens of the sequence, without its
            extra tokens, were encoded before. An int, or an int32 or int64 tensor on the device of x, with one element
            or one for each batch entry, [B].
        positions: the position of each token, in place of counting: [N] or [B, N], int32 or int64. The positions of
            extra tokens are not read. Only without a grid of several axes and without offset.
        cu_seqlens: for S packed sequences, the start of each on the axis of positions, and N: [S + 1], int32 or int64.
            Positions count from each start, and the starts are the same in every batch entry; for entries that are
            packed differently pass positions of [B, N]. Only without a grid of several axes, extra tokens, offset and
            positions.
        activation: "none", "relu", "sigmoid", "silu" or "softmax".
        activation_dim: the axis of a softmax, whatever the layout: -1 (or None) is the features, -2 the sequence. A
            softmax over the sequence reads later tokens too, so it cannot be decoded token by token. Other activations
            ignore this argument.
        layout: "bnhd", or "bhnd" for an x of [B, H, N, D].

    Returns:
        A new contiguous tensor with the shape of x and twice its features, in the dtype of x.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; on the CPU a cu_seqlens that decreases, or does
            not run from 0 to N. (On a GPU such a cu_seqlens gives meaningless positions.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have, a DTensor, a forward-mode derivative;
            cu_seqlens with a softmax over the sequence.
        torch.OutOfMemoryError: torch's allocator has no memory for a result.

    Under torch.compile a changing offset costs one more compilation, at its second value. Autocast does not change the
    dtype of x.

    Example:
        >>> import torch, eaves
        >>> x = torch.ones(1, 3, 1, 2)  # three positions, one head, two features
        >>> theta = torch.tensor([[torch.pi / 2, 0.0]])  # quarter turns, and none
        >>> eaves.lrpe_cosine(x, theta).squeeze().round(decimals=3).abs()
        tensor([[1., 1., 0., 0.],
                [0., 1., 1., 0.],
                [1., 1., 0., 0.]])
    """
    call = LrpeCosineCall(
        x, theta, grid, extra_tokens, offset, positions, cu_seqlens, activation, activation_dim, layout
    )
    return encoding_of(call)


class LRPECosine(torch.nn.Module):
    """eaves.lrpe_cosine as a module, with its angles: theta is a buffer, or with `learnable` a parameter.

    The initial angles fall geometrically from 1 to nearly base^-2, over the features of the first head, then of the
    second:

        theta[h, e] = base ** (-2 * (h * E + e) / (H * E))          for H heads with E features for each axis

    as in Z. Qin et al., "TransNormerLLM", arXiv:2307.14995. theta is float32, and stays float32 if the module is cast
    to 16 bits, because far positions have no angle in 16 bits; a cast to float64, or from there back to float32, casts
    theta too. Queries and keys need the same angles: if keys have fewer heads, one module with num_heads=1 serves both.

    Args:
        num_heads: H.
        head_dim: D, the features of each head.
        axes: the number of axes of the grid, which share the features. With more than one, forward() needs a grid.
        theta_features: E. None: head_dim // axes; left-over features have no position.
        base: a positive number.
        learnable: whether theta is a parameter.
        activation, activation_dim, layout: as in eaves.lrpe_cosine.
        device: the device of theta.
        dtype: the dtype of theta, float32 or float64. None: float32.

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
        heads_first_of(layout)
        activation_of(activation, activation_dim)
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
        """Sets theta to the initial angles."""
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
            given = "None (one axis)" if grid is None else list(grid)
            raise ValueError(f"{_OP}: grid is {given}, expected a grid of {self.axes} axes (as in the module)")
        return lrpe_cosine(
            x, self.theta, grid=grid, extra_tokens=extra_tokens, offset=offset, positions=positions,
            cu_seqlens=cu_seqlens, activation=self.activation, activation_dim=self.activation_dim, layout=self.layout,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from the default."""
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
