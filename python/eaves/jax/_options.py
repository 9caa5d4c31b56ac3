"""Arguments of the losses, checked and in the form that the core takes."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaves._arguments import MEAN
from eaves.jax._library import TABLE

IGNORED = -100
CLASS_DTYPES = ("int32", "int64")

# The core's table: the user's name of each option -> the core's name and the default.
_TABLE = {row["keyword"].replace("-", "_"): (row["name"], row["default"]) for row in TABLE["loss_options"]}

# The core's arguments whose name in the user's functions differs, and that name.
NAMES = tuple((name, keyword) for keyword, (name, _) in _TABLE.items() if name != keyword)


def number_of(op: str, name: str, value: Any, as_number: Callable[[Any], Any] = float) -> Any:
    """An option as a number; it has to be known while JAX traces."""
    try:
        if isinstance(value, (str, bool)):  # which float() would read
            raise TypeError
        number = as_number(value)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{op}: {name} is not a number that is known while JAX traces; bind it with "
            "functools.partial or name it in static_argnames"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name} is {number}, expected a finite number")
    return number


def axis_of(op: str, name: str, array: jax.Array, axis: Any) -> int:
    """An axis of `array`, the argument `name`, counted from the end, because jax.vmap adds an axis at the front."""
    rank, axis = array.ndim, number_of(op, "axis", axis, operator.index)
    if not -rank <= axis < rank:
        raise ValueError(f"{op}: axis is {axis}, expected {-rank} to {rank - 1} ({name} has {rank} axes)")
    return int(axis - rank if axis >= 0 else axis)


def options_of(op: str, ignore_index: int, **given: float | None) -> tuple[tuple[str, Any], ...]:
    """The options that differ from their defaults, as the numbers of a call."""
    numbers: list[tuple[str, Any]] = []
    index = number_of(op, "ignore_index", ignore_index, operator.index)
    if index != IGNORED:
        numbers.append(("ignore_index", index))
    for keyword, (name, default) in _TABLE.items():
        value = given.get(keyword)
        if value is not None and (number := number_of(op, keyword, value)) != default:
            numbers.append((name, number))
    return tuple(numbers)


def result_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def is_soft(targets: Any) -> bool:
    return bool(jnp.issubdtype(targets.dtype, jnp.floating))


def targets_of(op: str, targets: Any, shape: tuple[int, ...]) -> jax.Array:
    """The targets as an array: classes, or probabilities of this shape."""
    array = jnp.asarray(targets)
    if is_soft(array):
        if array.shape != shape:
            raise ValueError(
                f"{op}: targets has shape {list(array.shape)} and the floating-point type {array.dtype}, expected "
                f"{list(shape)} for probabilities, or int32 or int64 for classes"
            )
    elif array.dtype not in CLASS_DTYPES:
        raise ValueError(
            f"{op}: targets has dtype {array.dtype}, expected int32 or int64 for classes, or a floating-point type for "
            "probabilities"
        )
    return array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def constant(op: str, name: str, array: jax.Array) -> jax.Array:
    """The array, whose derivative is refused; stop_gradient would make it 0."""
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
        raise ValueError(f'{op}: normalizer is given, but only the mean divides by a number; expected reduction="mean"')
    array = jnp.asarray(normalizer, dtype)
    if array.size != 1:
        raise ValueError(f"{op}: normalizer has shape {list(array.shape)}, expected one element")
    if isinstance(normalizer, (int, float, np.floating, np.integer)) and float(normalizer) < 0:  # not an array
        raise ValueError(f"{op}: normalizer is {normalizer}, expected a number that is not negative")
    return constant(op, "normalizer", array.reshape(()))


def row_weight_of(op: str, row_weight: Any, rows: tuple[int, ...], dtype: Any) -> jax.Array | None:
    if row_weight is None:
        return None
    array = jnp.asarray(row_weight)
    if array.shape != rows:
        raise ValueError(f"{op}: row_weight has shape {list(array.shape)}, expected {list(rows)} (one per row)")
    return constant(op, "row_weight", array.astype(dtype))
