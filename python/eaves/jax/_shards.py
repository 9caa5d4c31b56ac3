"""A vocabulary that is cut over an axis of a mesh, inside of jax.shard_map.

Each device computes the statistics of its own classes. One gather brings all of them to each device, which merges them
in the order of the classes. The core identifies a shard by its first class, but all devices run one program, and the
first class is known only when it runs. So targets count from the shard's first class instead, modulo the number of
classes: the classes of other shards follow the shard's own.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eaves.jax._call import varying
from eaves.jax._options import IGNORED, is_soft

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

    def targets(self, targets: jax.Array, ignore_index: int, replaces_ignored: bool = False) -> jax.Array:
        """The targets in the form that the shard's call takes. Ignored ones become IGNORED, or with `replaces_ignored`
        some class. A target that is no class remains none."""
        is_class = (targets >= 0) & (targets < self.classes)
        moved = jnp.where(is_class, (targets - self.first()) % self.classes, self.classes)
        return jnp.where(targets == ignore_index, 0 if replaces_ignored else IGNORED, moved).astype(targets.dtype)

    def gathered(self, statistics: jax.Array) -> jax.Array:
        """The statistics of all devices, [shards, rows..., STATISTICS]; the largest logit's class counts from 0."""
        best = statistics[..., _BEST]
        best = jnp.where(best < self.own, best + self.first().astype(best.dtype), best)
        found: jax.Array = jax.lax.all_gather(statistics.at[..., _BEST].set(best), self.axis_name, to="invarying")
        return found


def shard_of(
    op: str,
    axis_name: str | None,
    name: str,
    array: jax.Array,
    own: int,
    targets: jax.Array | None = None,
    outputs: Sequence[str] = (),
) -> Shard | None:
    """The shard of `array`, the argument `name`, which has `own` classes on this device; None without an axis."""
    if axis_name is None:
        return None
    if axis_name not in varying(array):
        raise ValueError(
            f"{op}: {name} does not vary over the axis {axis_name!r}, expected this device's part of the classes, "
            "inside of jax.shard_map with check_vma=True"
        )
    if targets is not None and is_soft(targets):
        raise NotImplementedError(f"{op}: targets are probabilities, expected classes beside axis_name")
    shard = Shard(axis_name, own, own * jax.lax.axis_size(axis_name))
    if "argmax" in outputs and shard.classes > _MOST_CLASSES_OF_ARGMAX:
        raise NotImplementedError(
            f"{op}: the vocabulary has {shard.classes} classes, expected at most 2^24 for argmax beside axis_name"
        )
    return shard


def target_weights(shard: Shard | None, targets: jax.Array, weight: jax.Array) -> jax.Array:
    """The weight of each row's class. One of the devices has it."""
    if shard is None:
        return weight[jnp.clip(targets, 0, weight.shape[0] - 1)]
    place = targets - shard.first()
    is_own = (place >= 0) & (place < shard.own)
    own = jnp.where(is_own, weight[jnp.clip(place, 0, shard.own - 1)], 0)
    weights: jax.Array = jax.lax.psum(own, shard.axis_name)
    return weights
