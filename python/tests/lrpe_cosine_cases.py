"""lrpe_cosine by its formula, and its entry in the tests of the whole library."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import eaves
from comparison import Bound, allowed_error, unit_in_last_place
from layouts import LAYOUTS, random_tensor
from operator_cases import Operator

ops = torch.ops.eaves

NONE, RELU, SIGMOID, SILU, SOFTMAX = range(5)
ACTIVATIONS = [("none", None), ("relu", None), ("sigmoid", None), ("silu", None), ("softmax", -1), ("softmax", -2)]


# ---------------------------------------------------------------------------------------------------------- the formula


def positions_of(
    batch: int,
    length: int,
    grid: Sequence[int] | None = None,
    extra_tokens: int = 0,
    offset: int | Tensor = 0,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The position of each token on each axis, [B, N, m], in float64."""
    sizes = [length - extra_tokens] if grid is None else list(grid)
    axes = torch.meshgrid(*[torch.arange(size, dtype=torch.float64) for size in sizes], indexing="ij")
    cells = torch.stack([axis.reshape(-1) for axis in axes], -1).expand(batch, -1, -1)
    if cu_seqlens is not None:
        lengths = cu_seqlens.cpu().diff().tolist()
        cells = torch.cat([torch.arange(each, dtype=torch.float64) for each in lengths]).view(1, -1, 1)
        cells = cells.expand(batch, -1, -1)
    if isinstance(offset, Tensor):
        cells = cells + offset.cpu().double().reshape(-1, 1, 1)
    else:
        cells = cells + offset
    if positions is not None:
        cells = positions.cpu().double().expand(batch, -1)[:, extra_tokens:].unsqueeze(-1)
    return torch.cat([torch.zeros(batch, extra_tokens, len(sizes), dtype=torch.float64), cells], 1)


def phase(x: Tensor, theta: Tensor, rounds: bool, **angles: Any) -> tuple[Tensor, Tensor]:
    """The angle and the position of each feature of x, [B, N, H, D]. With `rounds` they are rounded to float32, but
    stay as differentiable as without."""
    batch, length, _, features = x.shape
    each = theta.shape[1]
    on_axis = positions_of(batch, length, **angles)
    on_axis = on_axis.float().double() if rounds else on_axis
    axes = on_axis.shape[-1]
    if each == 0:
        return x.new_zeros(x.shape), x.new_zeros(batch, length, 1, features)
    d = torch.arange(features)
    axis = 0 * d if each == 1 and axes == 1 else d // each
    # An axis of zeros follows the last one, for the features that belong to no axis.
    of_features = torch.nn.functional.pad(on_axis, (0, 1))[..., axis.clamp(max=axes)].unsqueeze(2)
    angle = of_features * theta[:, d % each]
    if rounds:
        angle = angle + (angle.float().double() - angle).detach()
    return angle, of_features


def activate(x: Tensor, activation: str, activation_dim: int | None) -> Tensor:
    """The activation of x, [B, N, H, D]."""
    if activation == "softmax":
        return x.softmax(1 if activation_dim == -2 else -1)
    return {"none": lambda z: z, "relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[
        activation
    ](x)


def formula(
    x: Tensor,
    theta: Tensor,
    *,
    activation: str = "none",
    activation_dim: int | None = None,
    layout: str = "bnhd",
    rounds: bool = False,
    **angles: Any,
) -> Tensor:
    """eaves.lrpe_cosine in PyTorch, for float64 tensors on the CPU."""
    x = x if layout == "bnhd" else x.transpose(1, 2)
    phi, _ = phase(x, theta, rounds, **angles)
    a = activate(x, activation, activation_dim)
    out = torch.cat([a * phi.cos(), a * phi.sin()], -1)
    return out if layout == "bnhd" else out.transpose(1, 2)


def slope_size(x: Tensor, activation: str) -> Tensor:
    """The size of the derivative of an activation other than softmax, as if silu's two terms did not cancel."""
    if activation == "none":
        return torch.ones_like(x)
    if activation == "relu":
        return (x > 0).to(x.dtype)
    slope = x.sigmoid() * (-x).sigmoid()
    return slope if activation == "sigmoid" else x.sigmoid() + x.abs() * slope


def largest_along(sizes: Tensor, axis: int) -> Tensor:
    return sizes.amax(axis, keepdim=True).expand_as(sizes) if sizes.numel() else sizes


def softmax_scale(sizes: Tensor, axis: int) -> Tensor:
    """The sizes, at least 1/1024 of the largest in the row or column, because smaller exponents have few digits
    left."""
    return torch.maximum(sizes, largest_along(sizes, axis) / 1024)


def softmax_axis(activation_dim: int | None = None, layout: str = "bnhd", **_: Any) -> int:
    return -1 if activation_dim != -2 else 1 if layout == "bnhd" else 2


# `scale` is for each element by itself the sum of the sizes of its own terms; for a softmax also the sum of its row or
# column. testing/tolerance.h says the same.


def allowed_elementwise_error(dtype: torch.dtype, exact: Tensor, scale: Tensor) -> Tensor:
    """The bound for few terms: in 16 bits the contract's 1e-6 is the error of float32 for terms of size 4."""
    if dtype.itemsize != 2:
        return allowed_error(dtype, exact, scale)
    return 0.5 * unit_in_last_place(dtype, exact) + 1e-6 * (scale / 4).clamp(min=1)


def allowed_sum_error(dtype: torch.dtype, exact: Tensor, scale: Tensor) -> Tensor:
    """The bound for many terms: in 16 bits float32's bound, plus one rounding."""
    if dtype.itemsize != 2:
        return allowed_error(dtype, exact, scale)
    return 0.5 * unit_in_last_place(dtype, exact) + allowed_error(torch.float32, exact, scale)


class Oracle:
    """The exact results of eaves.lrpe_cosine and its gradients, and their bounds."""

    def __init__(self, x: Tensor, theta: Tensor, grad_out: Tensor | None = None, **options: Any) -> None:
        z, angles = (t.detach().cpu().double().requires_grad_() for t in (x, theta))
        exact = formula(z, angles, rounds=x.dtype != torch.float64, **options)
        # As if nothing cancelled: a sine next to 0 is as precise as a cosine.
        a = exact.detach().unflatten(-1, (2, -1)).norm(dim=-2)
        is_softmax, axis = options.get("activation") == "softmax", softmax_axis(**options)
        scale = softmax_scale(a, axis) if is_softmax else a
        scale = torch.cat([scale, scale], -1)
        self.out = Bound(exact.detach(), allowed_elementwise_error(x.dtype, exact.detach(), scale))
        if grad_out is None:
            return
        g = grad_out.detach().cpu().double()
        grads = torch.autograd.grad(exact, (z, angles), g, allow_unused=True)
        # Without a turn the formula does not depend on theta.
        grad_x, grad_theta = (torch.zeros_like(t) if d is None else d for d, t in zip(grads, (z, angles)))
        scale_x, scale_theta = gradient_scales(z.detach(), angles, a, g, x.dtype != torch.float64, **options)
        if is_softmax:  # the largest gradient of the row or column, and the element's terms, in case it cancels
            scale_x = torch.maximum(softmax_scale(scale_x, axis), largest_along(grad_x.abs(), axis))
        self.grad_x = Bound(grad_x, allowed_elementwise_error(x.dtype, grad_x, scale_x))
        self.grad_theta = Bound(grad_theta, allowed_sum_error(theta.dtype, grad_theta, scale_theta))


def gradient_scales(
    x: Tensor,
    theta: Tensor,
    a: Tensor,
    grad_out: Tensor,
    rounds: bool,
    *,
    activation: str = "none",
    activation_dim: int | None = None,
    layout: str = "bnhd",
    **angles: Any,
) -> tuple[Tensor, Tensor]:
    """For each element of grad_x and grad_theta, the sum of the sizes of its terms; `a` is the activation's size."""
    x, a, grad_out = (t if layout == "bnhd" else t.transpose(1, 2) for t in (x, a, grad_out))
    phi, position = phase(x, theta.detach(), rounds, **angles)
    g_cos, g_sin = grad_out.abs().chunk(2, -1)
    cos, sin = phi.cos().abs(), phi.sin().abs()
    of_x = g_cos * cos + g_sin * sin
    if activation == "softmax":
        of_x = a * (of_x + (a * of_x).sum(1 if activation_dim == -2 else -1, keepdim=True))
    else:
        of_x = of_x * slope_size(x, activation)
    of_theta = torch.zeros_like(theta)
    if theta.numel():
        of_features = theta[:, torch.arange(x.shape[-1]) % theta.shape[1]].expand(x.shape)
        (of_theta,) = torch.autograd.grad(of_features, theta, position.abs() * a * (g_sin * cos + g_cos * sin))
    return of_x if layout == "bnhd" else of_x.transpose(1, 2), of_theta


def angles(heads: int, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """theta, [heads, features], from 1 down to 0.01, so that near and far positions turn."""
    count = heads * features
    return (0.01 ** (torch.arange(count, dtype=torch.float64) / max(count, 1))).view(heads, features).to(device, dtype)


# ---------------------------------------------------------------------------------------------------- the whole library


def lrpe_cosine_inputs(batch: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    offsets = torch.arange(batch, device=device) % 1000
    return random_tensor((batch, 5, 3, 9), dtype, device), offsets


def of_batch_or_sample(function: Any) -> Any:
    """Turns `function` of x [B, N, H, D], theta and offsets into one of x and offsets alone, or of one entry of
    each."""

    def call(x: Tensor, offset: Tensor) -> Tensor:
        # Made in the call, so that it is a fake or a meta tensor if x is one.
        theta = torch.full((1, 1), 0.7, device=x.device)
        if x.dim() == 4:
            return function(x, theta, offset)
        return function(x.unsqueeze(0), theta, offset).squeeze(0)

    return call


def torch_function(x: Tensor, theta: Tensor, offset: Tensor) -> Tensor:
    index = torch.arange(x.shape[1], device=x.device) + offset.unsqueeze(-1)
    phi = (index.unsqueeze(-1) * theta[:, 0]).unsqueeze(-1)
    a = x.softmax(1)
    return torch.cat([a * phi.cos(), a * phi.sin()], -1)


def lrpe_cosine_large_inputs(device: torch.device | str) -> tuple[Tensor, ...]:
    # Few heads and many positions, which a softmax over the sequence has to share among threads or blocks.
    return random_tensor((1, 4099, 2, 64), torch.float32, device), torch.tensor([3], device=device)


def lrpe_cosine_extension_calls(device: torch.device | str) -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def add(
        x: Tensor,
        theta: Tensor,
        offsets: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        grid: Sequence[int] = (),
        extra_tokens: int = 0,
        offset: int = 0,
        activation: int = SILU,
        activation_dim: int = -1,
        heads_first: bool = False,
    ) -> None:
        angle = (offsets, positions, cu_seqlens, list(grid), extra_tokens, offset)
        options = (*angle, activation, activation_dim, heads_first)
        calls.append((ops.lrpe_cosine_forward.default, (x, theta, *options)))
        lse = None
        if activation == SOFTMAX and activation_dim == -2:
            calls.append((ops.lrpe_cosine_forward_lse.default, (x, theta, *options)))
            out, lse = ops.lrpe_cosine_forward_lse(x, theta, *options)
        else:
            out = ops.lrpe_cosine_forward(x, theta, *options)
        grad_out = torch.ones_like(out)
        for grad_heads_first in (False, True):
            both = (theta, lse, *options, grad_heads_first)
            for wanted in ((True, False), (False, True), (True, True)):
                calls.append((ops.lrpe_cosine_backward.default, (grad_out, x, *both, *wanted)))
        if activation == NONE:
            calls.append((ops.lrpe_cosine_backward.default, (grad_out, None, *both)))

    for layout in LAYOUTS:
        add(layout(random_tensor((2, 5, 3, 4), torch.float32, device)), angles(3, 4, device=device))
    x = random_tensor((2, 5, 3, 4), torch.float32, device)
    theta = angles(1, 2, device=device)
    add(x, theta, activation=SOFTMAX, activation_dim=-2)
    add(x, theta, activation=SOFTMAX, activation_dim=-1, grid=(2, 2), extra_tokens=1, offset=7)
    add(x.transpose(1, 2), theta, activation=SOFTMAX, activation_dim=-2, heads_first=True)
    add(x, theta, offsets=torch.tensor([3, 5], device=device), activation=NONE)
    add(x, theta, positions=torch.arange(5, device=device, dtype=torch.int32), activation=RELU)
    add(x, theta, cu_seqlens=torch.tensor([0, 2, 5], device=device), activation=SIGMOID)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        add(random_tensor((2, 5, 3, 4), dtype, device), angles(3, 1, dtype, device), activation=NONE)
    for empty in ((0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 3, 0)):
        add(random_tensor(empty, torch.float32, device), theta)
        add(random_tensor(empty, torch.float32, device), theta, activation=SOFTMAX, activation_dim=-2)
    return calls


LRPE_COSINE = Operator(
    name="lrpe_cosine",
    # The richest call: a softmax over the sequence has a second result, and each batch entry has an offset.
    function=of_batch_or_sample(
        lambda x, theta, offset: eaves.lrpe_cosine(x, theta, offset=offset, activation="softmax", activation_dim=-2)
    ),
    torch_function=of_batch_or_sample(torch_function),
    differentiable=(0,),
    inputs=lrpe_cosine_inputs,
    tiny_inputs=lambda device, dtype: (
        random_tensor((2, 3, 1, 2), dtype, device),
        torch.tensor([0, 5], device=device),
    ),
    large_inputs=lrpe_cosine_large_inputs,
    has_workspace=False,  # most calls have none
    has_second_derivative=True,
    extension_calls=lrpe_cosine_extension_calls,
)
