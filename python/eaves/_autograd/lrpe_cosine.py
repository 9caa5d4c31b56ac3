"""The derivatives of lrpe_cosine. _torch/lrpe_cosine_rules.py has the fake implementations and batching rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eaves._torch import lrpe_cosine_rules  # noqa: F401  # registers the rules
from eaves._torch.checks import accumulator_dtype
from eaves._torch.operator import apply, call, dispatch, takes
from eaves._torch.registration import give_derivative, record_of, refuse_lost_derivatives
from eaves._torch.transforms import is_transforming, needs_autograd

_forward = torch.ops.eaves.lrpe_cosine_forward.default
_forward_lse = torch.ops.eaves.lrpe_cosine_forward_lse.default
_backward = torch.ops.eaves.lrpe_cosine_backward.default

OP = "lrpe_cosine"

NONE, RELU, SIGMOID, SILU, SOFTMAX = range(5)  # enum Activation of include/eaves/lrpe_cosine.h
FEATURES, SEQUENCE = -1, -2  # the axes of a softmax


# ------------------------------------------------------------------------------------------------------------ autograd


def encode(x: Tensor, theta: Tensor, *arguments: Any) -> Tensor:
    """The encoding, for checked arguments. `arguments` are offsets, positions, cu_seqlens and the options."""
    if torch.compiler.is_compiling() and is_transforming():
        # torch.compile cannot trace the Function in a transform. It gets the operator, which refuses a call if its
        # derivative would be lost.
        plain: Tensor = call(OP, _forward, x, theta, *arguments)
        return plain
    result = dispatch(OP, (x, theta), _LrpeCosine, _forward, x, theta, *arguments)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@takes(*record_of(_forward)._fields)
class _LrpeCosine(torch.autograd.Function):
    """x, theta -> out. With a softmax over the sequence, lse is a second result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        kind, dim = arguments[8:10]
        return call(OP, _forward_lse if kind == SOFTMAX and dim == SEQUENCE else _forward, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        x, theta, offsets, positions, cu_seqlens = inputs[:5]
        ctx.options = inputs[5:]
        ctx.set_materialize_grads(False)  # or each backward would fill a tensor of zeros for lse
        lse = None
        if isinstance(output, tuple):
            _, lse = output
            ctx.mark_non_differentiable(lse)
        # The gradient of x has the layout of x: if heads and positions lie in the other order in memory, the gradient's
        # do too.
        ctx.turned = not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
        # Under torch.func only the backward knows whether theta has a gradient.
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
    """grad_x and grad_theta, None for an unwanted one. `arguments` are the arguments of _Gradient behind theta."""
    turned, wants_x, wants_theta = arguments[-3:]
    tensors = (grad_out, theta) if x is None else (grad_out, x, theta)
    if torch.compiler.is_compiling() or needs_autograd(*tensors):
        grad_x, grad_theta = apply(OP, _Gradient, grad_out, x, theta, *arguments)
    else:
        grad_x, grad_theta = _Gradient.forward(grad_out, x, theta, *arguments)
    if turned and wants_x:
        grad_x = grad_x.transpose(1, 2)
    return grad_x if wants_x else None, grad_theta if wants_theta else None


@takes(*record_of(_backward)._fields)
class _Gradient(torch.autograd.Function):
    """grad_x and grad_theta as far as they are wanted, differentiable in grad_out, x and theta.

    Second derivatives are rare, so PyTorch's operators compute them from the formula.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *given, heads_first, turned, wants_x, wants_theta = arguments
        return call(OP, _backward, *given, heads_first, heads_first != turned, wants_x, wants_theta)

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
            return encode(v, theta, offsets, positions, cu_seqlens, *ctx.options), None, None, *nothing
        places = (offsets, positions, cu_seqlens)
        second = _second_derivatives(grad_out, x, theta, v, u, places, ctx.options)
        return *second, *nothing


def _second_derivatives(
    grad_out: Tensor,
    x: Tensor,
    theta: Tensor,
    v: Tensor | None,
    u: Tensor | None,
    places: tuple[Any, ...],
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives of <v, grad_x> + <u, grad_theta> with respect to grad_out, x and theta. `places` are offsets,
    positions and cu_seqlens, `options` are the arguments behind them.

    With w = g_cos cos + g_sin sin, r = g_sin cos - g_cos sin, p the positions and J the Jacobian of the activation:
    <v, grad_x> = <J v, w> and <u, grad_theta> = <p u a, r>, where dw/dphi = r and dr/dphi = -w.
    """
    dtype = accumulator_dtype(x.dtype)
    *of_positions, kind, dim, heads_first = options

    def in_order(tensor: Tensor) -> Tensor:  # [B, H, N, ...]
        return (tensor if heads_first else tensor.transpose(1, 2)).to(dtype)

    z, (g_cos, g_sin) = in_order(x), in_order(grad_out).chunk(2, -1)
    position = _positions(z, theta.shape[1], *places, *of_positions)
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
    return (z * s, lambda values: values * (s + z * slope), lambda v, w: v * w * slope * (2 + z * (1 - 2 * s)))


give_derivative(OP, _forward, encode, "x", "theta")
refuse_lost_derivatives(OP, _forward_lse, _backward)
