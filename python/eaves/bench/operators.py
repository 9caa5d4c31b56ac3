"""The list of all operators that the benchmark knows."""

from __future__ import annotations

from eaves.bench import cross_entropy, linear_cross_entropy, logsumexp, lrpe_cosine
from eaves.bench.benchmark import Operator

OPERATORS: tuple[Operator, ...] = (
    logsumexp.OPERATOR,
    cross_entropy.OPERATOR,
    linear_cross_entropy.OPERATOR,
    lrpe_cosine.OPERATOR,
)
