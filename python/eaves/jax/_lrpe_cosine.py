"""lrpe_cosine for JAX arrays, and its gradients."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaves.jax._call import Arrays, Operand, Result, Wanted, alike, call_core, given
from eaves.jax._options import number_of, result_dtype

_OP = "lrpe_cosine"

_ACTIVATIONS = ("none", "relu", "sigmoid", "silu", "softmax")  # enum Activation of include/eaves/lrpe_cosine.h
_LAYOUTS = ("bnhd", "bhnd")
_SEQUENCE = -2


def lrpe_cosine(
    x: jax.Array,
    theta: jax.Array,
    *,
    grid: Sequence[int] | None = None,
    extra_tokens: int = 0,
    offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    activation: str = "none",
    activation_dim: int = -1,
    layout: str = "bnhd",
) -> jax.Array:
    """Linearized relative positional encoding by cosines and sines, with an activation in front and its gradients.

        a   = activation(x)
        phi = theta[h, d mod E] * (offset + coordinate of n on axis d // E)
        out = [ a * cos(phi), a * sin(phi) ]                    the cosine half first: twice the features

    Args:
        x: [B, N, H, D] (batch, positions, heads, features), or as `layout` says; float16, bfloat16, float32 or float64.
        theta: [H, E], or [1, E] for all heads; in the dtype of x or float32.
        grid: the sizes of a grid, which the positions after the extra tokens fill; None: an ordinary sequence.
        extra_tokens: the number of positions at the front that have angle 0.
        offset: a number that is added to each coordinate. An int is a constant of the program. An array, of one element
            or [B], is not a constant, which suits decoding.
        positions: the position of each token, in place of counting: [N] or [B, N], int32 or int64.
        cu_seqlens: the start of each of S packed sequences, and N: [S + 1], int32 or int64.
        activation: "none", "relu", "sigmoid", "silu" or "softmax".
        activation_dim: the axis of a softmax: -1 is the features, -2 the sequence.
        layout: "bnhd" or "bhnd".

    Returns:
        An array with the shape of x and twice its features, in the dtype of x.

    Raises:
        ValueError: an array or a number is not as above; on the CPU also an invalid cu_seqlens, when the call runs.
        NotImplementedError: a dtype or a shape that eaves does not have, cu_seqlens with a softmax over the sequence.

    x and theta have first derivatives; only the gradients that are needed are computed.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> x = jnp.ones((1, 3, 1, 2))  # three positions, one head, two features
        >>> theta = jnp.array([[jnp.pi / 2, 0.0]])  # quarter turns, and none
        >>> print(jnp.abs(eaves.jax.lrpe_cosine(x, theta).squeeze().round(3)))
        [[1. 1. 0. 0.]
         [0. 1. 1. 0.]
         [1. 1. 0. 0.]]
    """
    x, theta = jnp.asarray(x), jnp.asarray(theta)
    for name, value, known in (("layout", layout, _LAYOUTS), ("activation", activation, _ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"{_OP}: {name} is {value!r}, expected one of {', '.join(known)}")
    for name, array, rank in (("x", x, 4), ("theta", theta, 2)):
        if array.ndim != rank:
            raise ValueError(f"{_OP}: {name} has shape {list(array.shape)}, expected {rank} axes")
    offsets, number = None, 0
    if isinstance(offset, (jax.Array, jax.core.Tracer)) or hasattr(offset, "dtype"):
        offsets = jnp.asarray(offset)
        offsets = offsets.reshape(1) if offsets.size == 1 else offsets
    else:
        number = number_of(_OP, "offset", offset, operator.index)
    setting = _Setting(
        grid=() if grid is None else tuple(number_of(_OP, "grid", each, operator.index) for each in grid),
        extra_tokens=number_of(_OP, "extra_tokens", extra_tokens, operator.index),
        offset=number,
        activation=_ACTIVATIONS.index(activation),
        activation_dim=number_of(_OP, "activation_dim", activation_dim, operator.index),
        heads_first=layout == "bhnd",
    )
    positions, cu_seqlens = (None if each is None else jnp.asarray(each) for each in (positions, cu_seqlens))
    result: jax.Array = _encode(setting)(*alike(x, theta, offsets, positions, cu_seqlens))
    return result


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The settings that are known while JAX traces."""

    grid: tuple[int, ...]
    extra_tokens: int
    offset: int
    activation: int
    activation_dim: int
    heads_first: bool

    @property
    def numbers(self) -> tuple[tuple[str, Any], ...]:
        return tuple((field.name, getattr(self, field.name)) for field in dataclasses.fields(self)[:-1])

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The core's order of the axes, [B, H, N, D]."""
        return None if self.heads_first else (0, 2, 1, 3)

    @property
    def has_lse(self) -> bool:
        return _ACTIVATIONS[self.activation] == "softmax" and self.activation_dim == _SEQUENCE

    def factors(self, features: str) -> tuple[str, ...]:
        return ("rb", "rh", "n", features) if self.heads_first else ("rb", "n", "rh", features)

    def heads(self, x: Any) -> int:
        count: int = x.shape[1 if self.heads_first else 2]
        return count

    def call(self, function: str, arrays: Arrays, results: list[Result]) -> tuple[jax.Array, ...]:
        names = (("offsets", "offset"),)
        return call_core(_OP, function, arrays, results, numbers=self.numbers, names=names, has_fixed_rank=True)


@functools.cache
def _encode(setting: _Setting) -> Any:
    """(x, theta, offsets, positions, cu_seqlens) -> out"""

    def forward(wants_lse: bool, x: Any, theta: Any, *of_positions: Any) -> tuple[jax.Array, jax.Array | None]:
        arrays = {Operand("x", setting.factors("d"), axes=setting.axes): x, **_angles(setting, x, theta, *of_positions)}
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        results = [Result("out", setting.factors("halves"), axes=setting.axes, shape=shape, dtype=x.dtype)]
        if wants_lse:
            of_lse = (x.shape[0], setting.heads(x), 2, x.shape[-1])
            results.append(Result("lse", ("rb", "rh", "two", "d"), shape=of_lse, dtype=result_dtype(x)))
        outputs = setting.call("lrpe_cosine_forward", arrays, results)
        return outputs[0], outputs[1] if wants_lse else None

    @jax.custom_vjp
    def function(*values: Any) -> jax.Array:
        return forward(False, *values)[0]

    def forward_rule(*primals: Any) -> Any:
        x, theta, *of_positions = (None if primal is None else primal.value for primal in primals)
        wants = Wanted((primals[0].perturbed, primals[1].perturbed))
        out, lse = forward(setting.has_lse, x, theta, *of_positions)
        needs_x = wants.each[1] or _ACTIVATIONS[setting.activation] != "none"
        return out, (x if needs_x else None, theta, of_positions, lse, wants)

    def backward_rule(residuals: Any, cotangent: Any) -> Any:
        x, theta, of_positions, lse, wants = residuals
        grad_out = given(cotangent)
        if grad_out is None:
            return (None,) * 5
        arrays = {
            Operand("grad_out", setting.factors("halves"), axes=setting.axes): grad_out,
            Operand("x", setting.factors("d"), axes=setting.axes): x,
            Operand("lse", ("rb", "rh", "two", "d")): lse,
            **_angles(setting, grad_out, theta, *of_positions),
        }
        results = []
        of_x, of_theta = wants.each
        if of_x:
            shape = (*grad_out.shape[:-1], grad_out.shape[-1] // 2)
            factors = setting.factors("d")
            results.append(Result("grad_x", factors, axes=setting.axes, shape=shape, dtype=grad_out.dtype))
        if of_theta:
            factors = _theta_factors(setting.heads(grad_out), theta)
            results.append(Result("grad_theta", factors, per_row=False, shape=theta.shape, dtype=theta.dtype))
        gradients = setting.call("lrpe_cosine_backward", arrays, results)
        return (*wants.by_place(gradients), None, None, None)

    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return function


def _theta_factors(heads: int, theta: Any) -> tuple[str, ...]:
    return ("rh" if theta.shape[0] == heads else "one", "e")


def _angles(setting: _Setting, x: Any, theta: Any, offsets: Any, positions: Any, cu_seqlens: Any) -> Arrays:
    """The operands of the angles. `x` may be any array with the heads and positions of x."""
    heads, length = setting.heads(x), x.shape[2 if setting.heads_first else 1]
    arrays: Arrays = {Operand("theta", _theta_factors(heads, theta), per_row=False): theta}
    if offsets is not None:
        of_batch = offsets.size != 1
        arrays[Operand("offsets", ("rb" if of_batch else "one_offset",), per_row=of_batch)] = offsets
    if positions is not None:
        of_batch = positions.ndim == 2
        arrays[Operand("positions", ("rb", "n") if of_batch else ("n",), per_row=of_batch)] = positions
    if cu_seqlens is not None:
        one_sequence = (0,) * (cu_seqlens.size - 1) + (length,) * min(cu_seqlens.size, 1)
        arrays[Operand("cu_seqlens", ("sequences",), per_row=False, values=one_sequence)] = cu_seqlens
    return arrays
