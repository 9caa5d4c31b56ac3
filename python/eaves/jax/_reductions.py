"""Reductions of the rows' losses.

The core computes the loss of each row. This file sums all rows, on every device, so a loss has the same bits however
the rows are cut over devices.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning

from eaves._arguments import NONE, SUM
from eaves.jax._call import explicit_mesh


def _sum(rows: jax.Array) -> jax.Array:
    return rows.sum()


@functools.cache
def _of_whole_array(rank: int) -> Any:
    """The function that sums all rows on every device."""
    partitioned = custom_partitioning(_sum)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        if mesh.empty:  # as in _call.py
            return mesh, _sum, result.sharding, tuple(each.sharding for each in operands)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return mesh, _sum, whole, (whole,)

    factors = tuple(f"r{axis}" for axis in range(rank))
    partitioned.def_partition(
        partition=partition, sharding_rule=f"{' '.join(factors)} -> ", need_replication_factors=factors
    )
    batched = custom_vmap(partitioned)

    @batched.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], rows: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(_sum)(rows), True

    return jax.jit(batched, inline=True)


def _spread(rows: jax.Array, grad: jax.Array) -> jax.Array:
    """The gradient of each row, cut over devices as the rows are."""
    grads = jnp.broadcast_to(grad, rows.shape)
    if explicit_mesh(rows) is None:
        return grads
    sharding = jax.typeof(rows).sharding
    resharded: jax.Array = jax.sharding.reshard(grads, jax.sharding.NamedSharding(sharding.mesh, sharding.spec))
    return resharded


@jax.custom_vjp
def total(rows: jax.Array) -> jax.Array:
    """The sum of all rows, in an order that depends only on their number."""
    if rows.ndim == 0:
        return rows
    mesh = explicit_mesh(rows)
    if mesh is not None:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return _sum(jax.sharding.reshard(rows, whole))
    result: jax.Array = _of_whole_array(rows.ndim)(rows)
    return result


total.defvjp(
    lambda rows: (total(rows), rows),
    lambda rows, grad: (_spread(rows, grad),),
)


def as_divisor(weights: jax.Array) -> jax.Array:
    """The divisor of a mean by weights: infinity if they add up to 0, so that the mean is 0; NaN if they add up to
    infinity, so that loss and gradient are NaN."""
    return jnp.where(weights == 0, jnp.inf, jnp.where(jnp.isinf(weights), jnp.nan, weights))


def _quotient(number: jax.Array, divisor: jax.Array) -> jax.Array:
    """number / divisor: 0 if nothing counts in the sum. Any other number over a normalizer of 0 is infinite and has
    gradient 0."""
    is_empty = jnp.isinf(divisor) | ((divisor == 0) & (number == 0))
    is_constant = is_empty | (divisor == 0)
    constant = jnp.where(is_empty, 0, jax.lax.stop_gradient(number) / divisor)
    return jnp.where(is_constant, constant, number / jnp.where(is_constant, 1, divisor))


def reduced(rows: jax.Array, mode: int, divisor: jax.Array | None) -> jax.Array:
    """Losses of rows, or their sum, or their mean."""
    if mode == NONE:
        return rows
    number: jax.Array = total(rows)
    if mode == SUM:
        return number
    assert divisor is not None
    return _quotient(number, divisor)


def share_of(number: jax.Array, divisor: jax.Array | None) -> jax.Array:
    """The factor of the rows in a mean's gradient; 0 for a mean without rows, which is 0."""
    if divisor is None:
        return number
    return jnp.where(divisor == 0, 0, number / jnp.where(divisor == 0, 1, divisor))
