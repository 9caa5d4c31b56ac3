"""Few combinations of many options: every two values meet, three or more by chance. What a kernel or a rule gets wrong
depends on one option or on how two of them go together."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis in which any two values of two axes meet; the same each time."""
    everything = list(itertools.product(*(range(len(axis)) for axis in axes)))

    def pairs_in(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(indices), 2))

    missing = set().union(*map(pairs_in, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda indices: len(pairs_in(indices) & missing))
        missing -= pairs_in(best)
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return chosen
