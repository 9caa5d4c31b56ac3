"""logsumexp for JAX arrays, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaves.jax._call import Operand, Result, call_core
from eaves.jax._options import axis_of

_OP = "logsumexp"


def logsumexp(
    x: jax.Array,
    axis: int | Sequence[int] | None = None,
    *,
    keepdims: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """log(sum(exp(x))) over `axis`, as jax.nn.logsumexp, with its gradient.

        out = log(sum over axis of exp(x)),    dL/dx = dL/dout * exp(x - out)

    The forward reads x once, sums in float32 (float64 for a float64 x) and rounds once (M. Milakov, N. Gimelshein,
    arXiv:1805.02867). The gradient is computed from sums in float32, whatever the dtype of x; the forward keeps x and
    two numbers for each row.

    Args:
        x: at most 16 axes; float16, bfloat16, float32, float64; integers and bools are converted to float32.
        axis: the axis or axes to sum over; None: all.
        keepdims: whether the summed axes stay, with size 1.
        dtype: the dtype of the result: the dtype of x (the default), or float32.

    Raises:
        ValueError: `axis` names an axis that x does not have, or one twice; `dtype` is neither x's nor float32.
        NotImplementedError: a dtype, or a number of axes, that eaves does not have.

    A row that is all -inf has gradient 0.

    Example:
        >>> import jax, jax.numpy as jnp, eaves.jax
        >>> x = jnp.array([[0.0, 1.0, 2.0], [1000.0, 1000.0, 1000.0]])
        >>> print(eaves.jax.logsumexp(x, axis=-1).astype(int))
        [   2 1001]
        >>> print(jax.grad(lambda x: eaves.jax.logsumexp(x).sum())(x[0]).round(4))
        [0.09   0.2447 0.6652]
    """
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise NotImplementedError(f"{_OP}: x has dtype {x.dtype}, expected real numbers")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    axes = _axes_of(x, axis)
    if not axes:  # a scalar, or no axes: each sum has one element
        x, axes, keepdims = x[..., None], (-1,), False
    result: jax.Array = _of(axes, bool(keepdims), dtype)(x)
    return result


def _axes_of(x: jax.Array, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    given = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    axes = tuple(axis_of(_OP, "x", x, each) for each in given)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{_OP}: axis is {axis}, expected each axis once")
    return axes


@functools.cache
def _of(axes: tuple[int, ...], keepdims: bool, dtype: Any) -> Any:
    call = functools.partial(call_core, _OP, numbers=(("axes", axes), ("keepdim", keepdims)))

    def forward(x: jax.Array, wants_lse: bool) -> tuple[jax.Array, jax.Array]:
        """The result, and the lse that the gradient needs."""
        accumulator = jnp.promote_types(x.dtype, jnp.float32)
        factors, kept, shape = _rows(x, axes, keepdims)
        results = [Result("out", kept, shape=shape, dtype=dtype)]
        if wants_lse:  # as two numbers
            _, of_rows, rows = _rows(x, axes, False)
            results.append(Result("lse", (*of_rows, "high_and_low"), shape=(*rows, 2), dtype=accumulator))
        outputs = call("logsumexp_forward", {Operand("x", factors): x}, results)
        return outputs[0], outputs[-1]

    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return forward(x, False)[0]

    def forward_rule(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, lse = forward(x, True)
        return out, (x, lse)

    def backward_rule(kept: tuple[jax.Array, jax.Array], grad_out: jax.Array) -> tuple[jax.Array]:
        x, lse = kept
        factors, of_rows, _ = _rows(x, axes, keepdims)
        of_lse = (*_rows(x, axes, False)[1], "high_and_low")
        arrays = {Operand("grad_out", of_rows): grad_out, Operand("x", factors): x, Operand("lse", of_lse): lse}
        results = [Result("grad_x", factors, shape=x.shape, dtype=x.dtype)]
        return (call("logsumexp_backward", arrays, results)[0],)

    function.defvjp(forward_rule, backward_rule)
    return function


def _rows(x: Any, axes: tuple[int, ...], keepdims: bool) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """The factors of x, and factors and shape of the result. A kept axis of size 1 is a factor of its own."""
    reduced = {axis + x.ndim for axis in axes}
    factors = tuple(f"c{axis}" if axis in reduced else f"r{axis}" for axis in range(x.ndim))
    kept = [axis for axis in range(x.ndim) if keepdims or axis not in reduced]
    return (
        factors,
        tuple(f"k{axis}" if axis in reduced else f"r{axis}" for axis in kept),
        tuple(1 if axis in reduced else x.shape[axis] for axis in kept),
    )
