"""What the losses share: their options as the core's table has them, their outputs, and the reductions.

The core gives the loss of each row. Sums over rows are taken here, of all rows on every device: so a loss has the same
bits however the rows are cut over devices.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning

from eaves.jax._call import Operand, Result, explicit_mesh
from eaves.jax._library import TABLE

NONE, SUM, MEAN = 0, 1, 2  # enum Reduction of include/eaves/cross_entropy.h
_REDUCTIONS = {"none": NONE, "sum": SUM, "mean": MEAN}

IGNORED = -100
CLASS_DTYPES = ("int32", "int64")


class CrossEntropyOutput(NamedTuple):
    """What the losses give with any of their return_* arguments; None for what was not asked for."""

    loss: jax.Array
    lse: jax.Array | None = None
    argmax: jax.Array | None = None
    entropy: jax.Array | None = None
    z_loss: jax.Array | None = None
    sum_sq: jax.Array | None = None
    mean_logit: jax.Array | None = None


# By the user's name of each option that of the core and its default: the core's table.
_TABLE = {row["keyword"].replace("-", "_"): (row["name"], row["default"]) for row in TABLE["loss_options"]}

# The user's names of the core's arguments, where they differ.
NAMES = tuple((name, keyword) for keyword, (name, _) in _TABLE.items() if name != keyword)


def reduction_of(op: str, reduction: str) -> int:
    mode = _REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if mode is None:
        error = ValueError if isinstance(reduction, str) else TypeError
        raise error(f'{op}: reduction is {reduction!r}, expected "none", "sum" or "mean"')
    return mode


def number_of(op: str, name: str, value: Any, as_number: Callable[[Any], Any] = float) -> Any:
    """An option, which has to be known while JAX traces."""
    try:
        if isinstance(value, (str, bool)):  # which float() would read
            raise TypeError
        number = as_number(value)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{op}: {name} is no number, or one that is not known while JAX traces; bind it with "
            "functools.partial or name it in static_argnames"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name} is {number}, expected a finite number")
    return number


def options_of(op: str, ignore_index: int, **given: float | None) -> tuple[tuple[str, Any], ...]:
    """The options as numbers of a call, those alone that differ from the defaults."""
    numbers: list[tuple[str, Any]] = []
    index = number_of(op, "ignore_index", ignore_index, operator.index)
    if index != IGNORED:
        numbers.append(("ignore_index", index))
    for keyword, (name, default) in _TABLE.items():
        value = given[keyword]
        if value is not None and (number := number_of(op, keyword, value)) != default:
            numbers.append((name, number))
    return tuple(numbers)


def result_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def is_soft(labels: Any) -> bool:
    return bool(jnp.issubdtype(labels.dtype, jnp.floating))


def labels_of(op: str, labels: Any, shape: tuple[int, ...]) -> jax.Array:
    """Classes, or probabilities of that shape."""
    array = jnp.asarray(labels)
    if is_soft(array):
        if array.shape != shape:
            raise ValueError(
                f"{op}: labels has shape {list(array.shape)} and the floating-point type {array.dtype}, expected "
                f"{list(shape)} for probabilities, or int32 or int64 for classes"
            )
    elif array.dtype not in CLASS_DTYPES:
        raise ValueError(
            f"{op}: labels has dtype {array.dtype}, expected int32 or int64 for classes, or a floating-point type for "
            "probabilities"
        )
    return array


OUTPUTS = CrossEntropyOutput._fields[1:]


def wanted_outputs(*are_wanted: bool) -> tuple[str, ...]:
    """The names of the outputs, of the return_* arguments in the order of CrossEntropyOutput."""
    return tuple(name for name, is_wanted in zip(OUTPUTS, are_wanted) if is_wanted)


def loss_results(names: Sequence[str], factors: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> list[Result]:
    """The outputs of a call that have a number for each row; lse has two, which the backward needs."""
    return [
        Result(
            name,
            (*factors, *_LSE_FACTORS) if name == "lse" else factors,
            shape=(*shape, 2) if name == "lse" else shape,
            dtype=jnp.dtype("int64") if name == "argmax" else jnp.dtype(dtype),
        )
        for name in names
    ]


_LSE_FACTORS = ("high_and_low",)


def returned(written: dict[str, jax.Array], wanted: Sequence[str]) -> dict[str, jax.Array]:
    """The outputs that the user gets."""
    return {name: written[name][..., 0] if name == "lse" else written[name] for name in wanted}


@dataclasses.dataclass
class Arrays:
    """The operands of a call with their descriptions; what is None is left out."""

    operands: list[Operand] = dataclasses.field(default_factory=list)
    arrays: list[jax.Array] = dataclasses.field(default_factory=list)

    def add(self, name: str, array: jax.Array | None, factors: tuple[str, ...], **more: Any) -> None:
        if array is not None:
            self.operands.append(Operand(name, factors, **more))
            self.arrays.append(array)


def given(cotangent: Any) -> jax.Array | None:
    """A cotangent, None where it is known to be 0."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent


# ----------------------------------------------------------------------------------------------------------- reductions


def _sum(rows: jax.Array) -> jax.Array:
    return rows.sum()


@functools.cache
def _of_whole_array(rank: int) -> Any:
    """The sum, of all rows on every device."""
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
    """The sum of all rows, in an order that their number alone decides."""
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


def target_weights(labels: jax.Array, weight: jax.Array) -> jax.Array:
    """The weight of each row's class."""
    return weight[jnp.clip(labels, 0, weight.shape[0] - 1)]


def divisor_of(
    labels: jax.Array,
    weight: jax.Array | None,
    row_weight: jax.Array | None,
    ignore_index: int,
    dtype: Any,
    rows: tuple[int, ...],
    weights_of: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The divisor of the mean: the weights of the rows that count."""
    if is_soft(labels):
        weights = jnp.ones(rows, dtype) if row_weight is None else row_weight
        return _divisor(total(weights))
    counts = labels != ignore_index
    if weight is None and row_weight is None:
        return counts.sum().astype(dtype)
    if row_weight is not None:
        counts &= row_weight != 0  # whatever the class weighs
    weights = jnp.ones(rows, dtype) if row_weight is None else row_weight
    if weight is not None:
        weights = weights * weights_of(labels, weight.astype(dtype))
    return _divisor(total(jnp.where(counts, weights, 0)))


def _divisor(weights: jax.Array) -> jax.Array:
    """A mean by weights that add up to 0 is 0: as by infinity. By infinite ones loss and gradient are NaN."""
    return jnp.where(weights == 0, jnp.inf, jnp.where(jnp.isinf(weights), jnp.nan, weights))


def quotient(number: jax.Array, divisor: jax.Array) -> jax.Array:
    """Of a sum that nothing counts in, 0. By a normalizer of 0 any other is infinite, and has gradient 0."""
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
    return quotient(number, divisor)


def add_saved(arrays: Arrays, of_rows: tuple[str, ...], kept: Any, grad_lse: Any, grad_entropy: Any) -> None:
    """What a backward takes beside its inputs and dL/d(loss): `kept` is what the forward has saved, by name."""
    arrays.add("grad_lse", grad_lse, of_rows)
    arrays.add("grad_entropy", grad_entropy, of_rows)
    arrays.add("lse", kept["lse"], (*of_rows, *_LSE_FACTORS))
    arrays.add("entropy", kept["entropy"] if grad_entropy is not None else None, of_rows)
    arrays.add("target_mass", kept["target_mass"], of_rows)


def share_of(number: jax.Array, divisor: jax.Array | None) -> jax.Array:
    """The factor of the rows in a mean's gradient; of a mean without rows, which is 0, 0."""
    if divisor is None:
        return number
    return jnp.where(divisor == 0, 0, number / jnp.where(divisor == 0, 1, divisor))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def constant(op: str, name: str, array: jax.Array) -> jax.Array:
    """What has no derivative: it is refused, where stop_gradient would make a gradient of 0."""
    return array


@constant.defjvp
def _refuse(op: str, name: str, _primals: Any, _tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op}: there is no derivative with respect to {name}; with jax.lax.stop_gradient({name}) it counts as constant"
    )


def normalizer_of(op: str, normalizer: Any, mode: int, dtype: Any) -> jax.Array | None:
    if normalizer is None:
        return None
    if mode != MEAN:
        raise ValueError(f'{op}: normalizer is given, but only the mean divides: expected reduction="mean"')
    array = jnp.asarray(normalizer, dtype)
    if array.size != 1:
        raise ValueError(f"{op}: normalizer has shape {list(array.shape)}, expected one element")
    if isinstance(normalizer, (int, float, np.floating, np.integer)) and float(normalizer) < 0:  # not of an array
        raise ValueError(f"{op}: normalizer is {normalizer}, expected a number that is not negative")
    return constant(op, "normalizer", array.reshape(()))


def row_weight_of(op: str, row_weight: Any, rows: tuple[int, ...], dtype: Any) -> jax.Array | None:
    if row_weight is None:
        return None
    array = jnp.asarray(row_weight)
    if array.shape != rows:
        raise ValueError(f"{op}: row_weight has shape {list(array.shape)}, expected {list(rows)} (one per row)")
    return constant(op, "row_weight", array.astype(dtype))


def output_of(loss: jax.Array, outputs: dict[str, Any]) -> jax.Array | CrossEntropyOutput:
    """What the user gets: the loss, with any output a CrossEntropyOutput. Of the outputs lse and entropy alone have
    derivatives."""
    if not outputs:
        return loss
    kept = {name: each if name in ("lse", "entropy") else jax.lax.stop_gradient(each) for name, each in outputs.items()}
    return CrossEntropyOutput(loss, **kept)
