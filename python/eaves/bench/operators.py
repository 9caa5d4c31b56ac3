"""The list of all operators that the benchmark knows."""

from __future__ import annotations

from collections.abc import Sequence

from eaves.bench import logsumexp
from eaves.bench.benchmark import Operator
from eaves.bench.errors import InvalidArgument

OPERATORS: tuple[Operator, ...] = (logsumexp.OPERATOR,)


def chosen_operators(operators: Sequence[Operator], names: Sequence[str]) -> list[Operator]:
    """Those of the names, in the names' order; without names all."""
    by_name = {operator.name: operator for operator in operators}
    for name in names:
        if name not in by_name:
            raise InvalidArgument(f'there is no operator "{name}", expected one of: {", ".join(by_name)}')
    return [by_name[name] for name in names] or list(operators)
