"""Few combinations of many options: every two values meet, three or more by chance. An error in a kernel or a rule
usually depends on one option or on two together."""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis in which any two values of two axes meet; the same each time."""
    generator = random.Random(1)
    indices = [range(len(axis)) for axis in axes]

    def pairs_in(chosen: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), 2))

    missing = {((i, a), (j, b)) for i, j in combinations(range(len(axes)), 2) for a in indices[i] for b in indices[j]}
    chosen = []
    while missing:
        first = dict(min(missing))
        drawn = [[first.get(i, generator.choice(of_axis)) for i, of_axis in enumerate(indices)] for _ in range(100)]
        best = max(drawn, key=lambda each: len(pairs_in(each) & missing))
        missing -= pairs_in(best)
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return chosen
