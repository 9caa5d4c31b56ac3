"""A vocabulary that is cut over an axis of a mesh, inside of jax.shard_map.

Each device computes the statistics of its own classes; one gather brings those of all devices to each, and they are
merged in the order of the classes. The core knows a shard by its first class; here that is known only where the program
runs, because all devices run the same one. So labels count from the shard's first class instead, modulo the number of
classes: those of other shards come behind its own.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eaves.jax._call import Call, Operand, bind, row_factors, vary, varying
from eaves.jax._loss import IGNORED, is_soft, loss_results, result_dtype

STATISTICS = 10  # kCrossEntropyStatistics of include/eaves/cross_entropy.h
_BEST = 8  # CrossEntropyStatistic::best
_MOST_CLASSES_OF_ARGMAX = 2**24  # the statistics have classes as float32


class Shard(NamedTuple):
    """The classes are cut over `axis_name`, `own` on each device."""

    axis_name: str
    own: int
    classes: int

    def first(self) -> jax.Array:
        return jax.lax.axis_index(self.axis_name) * self.own


def shard_of(
    op: str, axis_name: str, name: str, array: jax.Array, own: int, labels: jax.Array, wanted: Sequence[str]
) -> Shard:
    """Of `array`, the argument `name`, which has `own` classes here."""
    if axis_name not in varying(array):
        raise ValueError(
            f"{op}: {name} does not vary over the axis {axis_name!r}, expected this device's part of the classes, "
            "inside of jax.shard_map with check_vma=True"
        )
    if is_soft(labels):
        raise NotImplementedError(f"{op}: labels are probabilities, expected classes where axis_name is given")
    shard = Shard(axis_name, own, own * jax.lax.axis_size(axis_name))
    if "argmax" in wanted and shard.classes > _MOST_CLASSES_OF_ARGMAX:
        raise NotImplementedError(f"{op}: argmax is known up to 2^24 classes where axis_name is given")
    return shard


def align(axis_name: str, cut: Sequence[Any], whole: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays that have this device's classes, and those that are the same on all devices of the axis: each varying
    over the same axes of the mesh otherwise."""
    arrays = [array for array in (*cut, *whole) if array is not None]
    axes = frozenset[str]().union(*map(varying, arrays))
    return (
        [None if array is None else vary(array, axes) for array in cut],
        [None if array is None else vary(array, axes - {axis_name}) for array in whole],
    )


def local_labels(shard: Shard, labels: jax.Array, ignore_index: int, replaces_ignored: bool = False) -> jax.Array:
    """The labels as the shard's call takes them; ignored ones are IGNORED, or with `replaces_ignored` any class. What
    is no class stays none."""
    is_class = (labels >= 0) & (labels < shard.classes)
    moved = jnp.where(is_class, (labels - shard.first()) % shard.classes, shard.classes)
    return jnp.where(labels == ignore_index, 0 if replaces_ignored else IGNORED, moved).astype(labels.dtype)


def without_ignore_index(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """The options of a shard's call, whose labels have IGNORED for ignored ones."""
    return tuple((name, value) for name, value in options if name != "ignore_index")


def merge(
    op: str,
    names: tuple[tuple[str, str], ...],
    shard: Shard,
    statistics: jax.Array,
    labels: jax.Array,
    row_weight: jax.Array | None,
    options: tuple[tuple[str, Any], ...],
    has_weight: bool,
    skips_ignored: bool,
    wanted: Sequence[str],
) -> dict[str, jax.Array]:
    """What the statistics of all devices give, by name. `statistics` are this device's, [rows..., STATISTICS]."""
    best = statistics[..., _BEST]
    best = jnp.where(best < shard.own, best + shard.first().astype(best.dtype), best)
    gathered = jax.lax.all_gather(statistics.at[..., _BEST].set(best), shard.axis_name, to="invarying")
    of_rows = row_factors(labels.ndim)
    arrays = [gathered, labels]
    operands = [Operand("statistics", ("s", *of_rows, "k"), batch_axis=1), Operand("targets", of_rows)]
    if row_weight is not None:
        arrays.append(row_weight)
        operands.append(Operand("row_weight", of_rows))
    numbers = (
        ("reduction", 0),
        *options,
        ("classes", shard.classes),
        ("has_weight", has_weight),
        ("skips_ignored", skips_ignored),
    )
    results = loss_results(wanted, of_rows, labels.shape, result_dtype(statistics))
    call = Call(op, "cross_entropy_merge", tuple(operands), tuple(results), numbers, names)
    return dict(zip(wanted, bind(call, *arrays)))


def target_weights(shard: Shard, labels: jax.Array, weight: jax.Array) -> jax.Array:
    """The weight of each row's class, which one of the devices has."""
    place = labels - shard.first()
    is_own = (place >= 0) & (place < shard.own)
    own = jnp.where(is_own, weight[jnp.clip(place, 0, shard.own - 1)], 0)
    weights: jax.Array = jax.lax.psum(own, shard.axis_name)
    return weights
