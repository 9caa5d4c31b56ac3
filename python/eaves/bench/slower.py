"""Where a peer is faster, or takes less memory: every row of every result file whose best peer is below eaves by more
than noise, merged twice: by operator and mode, and by table and peer. And where a peer is at least as good in time and
memory together as a provider of eaves (eaves, eaves-memory).

The first and the last table stand between two markers, because other documents show them too (tools/check_docs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from eaves.bench.benchmark import Row, Table
from eaves.bench.protocol import Protocol
from eaves.bench.report import PEER_TO_EAVES, Kind, best_peer, is_peer, number, quotient, ratios_of, title, values_of
from eaves.bench.stored import StoredFolder
from eaves.bench.summary import anchor

HEADING = "Where a peer is faster"
AS_GOOD = "Where a peer is at least as good in time and memory"

NOISE = 0.03
"""Two runs of one row differ by so much."""

_WORDS: dict[Kind, str] = {"speed": "time", "memory": "memory"}


@dataclass(frozen=True)
class _Cell:
    """A row that eaves and a peer have a number of."""

    operator: str
    protocol: Protocol
    table: Table
    row: Row
    kind: Kind
    peer: str
    ratio: float

    @property
    def is_slower(self) -> bool:
        return self.ratio < 1 - NOISE


def _cells(stored: StoredFolder) -> Iterator[_Cell]:
    for result in stored.results:
        for measured in result.tables:
            for kind in _WORDS:
                ratio_of = ratios_of(measured.providers, kind).get(PEER_TO_EAVES)
                if ratio_of is None:
                    continue
                for row, measurement in zip(measured.table.rows, measured.measurements):
                    values = values_of(measured, kind, measurement)
                    peer, ratio = best_peer(values), ratio_of(values)
                    if peer is not None and ratio is not None:
                        yield _Cell(result.operator.name, result.protocol, measured.table, row, kind, peer, ratio)


@dataclass(frozen=True)
class _Pair:
    """A row that a provider of eaves and a peer have both numbers of."""

    operator: str
    table: Table
    row: Row
    provider: str
    peer: str
    time: float
    """The peer's by the provider's; memory too."""
    memory: float

    @property
    def is_as_good(self) -> bool:
        ratios = (self.time, self.memory)
        return min(ratios) < 1 - NOISE and max(ratios) <= 1 + NOISE


def _pairs(stored: StoredFolder) -> Iterator[_Pair]:
    for result in stored.results:
        for measured in result.tables:
            for row, measurement in zip(measured.table.rows, measured.measurements):
                times, memory = (values_of(measured, kind, measurement) for kind in _WORDS)
                for provider in (name for name in measured.providers if not is_peer(name)):
                    for peer in filter(is_peer, measured.providers):
                        of_time, of_memory = (quotient(values[peer], values[provider]) for values in (times, memory))
                        if of_time is not None and of_memory is not None:
                            yield _Pair(result.operator.name, measured.table, row, provider, peer, of_time, of_memory)


_PERCENT = f"{100 * NOISE:.0f} %"
_NOWHERE = f"No row is slower than its best peer, or takes more memory, by more than {_PERCENT}."
_NONE_AS_GOOD = "There is no such row."

_Item = TypeVar("_Item")


def _grouped(cells: Sequence[_Item], key: Callable[[_Item], tuple[str, ...]]) -> dict[tuple[str, ...], list[_Item]]:
    groups: dict[tuple[str, ...], list[_Item]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def section(stored: StoredFolder) -> list[str]:
    cells = list(_cells(stored))
    lines = [
        f"## {HEADING}",
        "",
        f"Every row of this page, by both protocols, where `best peer / eaves` is below {1 - NOISE:.2f}: by operator",
        "and mode, then by table and peer.",
        "",
        "<!-- slower -->",
        *_by_mode(cells),
        "<!-- end -->",
        "",
    ]
    lines += _by_table([cell for cell in cells if cell.is_slower])
    return lines + [
        f"## {AS_GOOD}",
        "",
        f"The rows where a peer takes less time or less memory, by more than {_PERCENT}, and at most {_PERCENT}",
        "more of the other. The provider `eaves` is the default, `eaves-<algorithm>` is called with that",
        "`algorithm`. The backward of linear_cross_entropy by itself is `memory` in the column `eaves`,",
        "because the default has computed the gradients by then.",
        "",
        "<!-- as-good -->",
        *_by_provider(list(_pairs(stored))),
        "<!-- end -->",
        "",
    ]


def _by_mode(cells: Sequence[_Cell]) -> list[str]:
    lines = [
        "| operator | mode | what | rows | where | best peer / eaves, at worst | peer |",
        "|---|---|---|---|---|---:|---|",
    ]
    groups = _grouped(cells, lambda cell: (cell.operator, cell.table.mode, _WORDS[cell.kind]))
    for words, group in groups.items():
        slower = [cell for cell in group if cell.is_slower]
        if slower:
            worst = min(slower, key=lambda cell: cell.ratio)
            at = f"{worst.table.axis_name} {worst.row.axis_value} of {worst.table.title_suffix}"
            rows = f"{len(slower)} of {len(group)}"
            parts = [*words, rows, _lengths(slower), number(worst.ratio, 3), f"{worst.peer}, {at}"]
            lines.append(f"| {' | '.join(parts)} |")
    return lines if len(lines) > 2 else [_NOWHERE]


def _by_table(slower: Sequence[_Cell]) -> list[str]:
    if not slower:
        return []
    lines = ["| table | protocol | peer | rows | best peer / eaves |", "|---|---|---|---|---|"]
    for (heading, peer), group in _grouped(slower, lambda cell: (title(cell.table, cell.kind), cell.peer)).items():
        protocols = ", ".join(dict.fromkeys(cell.protocol.name for cell in group))
        ratios = _range(cell.ratio for cell in group)
        link = f"[{heading}](#{anchor(f'{heading}:')})"
        lines.append(f"| {link} | {protocols} | {peer} | {_lengths(group)} | {ratios} |")
    return [*lines, ""]


def _by_provider(pairs: Sequence[_Pair]) -> list[str]:
    lines = [
        "| operator | mode | provider | peer | rows | where | time, peer / provider | memory, peer / provider |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = _grouped(pairs, lambda pair: (pair.operator, pair.table.mode, pair.provider, pair.peer))
    for words, group in groups.items():
        as_good = [pair for pair in group if pair.is_as_good]
        if as_good:
            parts = [*words, f"{len(as_good)} of {len(group)}", _lengths(as_good)]
            parts += [_range(pair.time for pair in as_good), _range(pair.memory for pair in as_good)]
            lines.append(f"| {' | '.join(parts)} |")
    return lines if len(lines) > 2 else [_NONE_AS_GOOD]


def _range(ratios: Iterable[float]) -> str:
    """0.500 to 0.750, or one number where they are the same."""
    known = list(ratios)
    return " to ".join(dict.fromkeys(number(ratio, 3) for ratio in (min(known), max(known))))


def _lengths(cells: Sequence[_Cell | _Pair]) -> str:
    """n 64, 1024 to 8192: of each axis up to three lengths, or the least and the greatest."""
    by_axis: dict[str, set[int]] = {}
    for cell in cells:
        by_axis.setdefault(cell.table.axis_name, set()).add(cell.row.axis_value)
    return "; ".join(f"{axis} {_short(sorted(lengths))}" for axis, lengths in by_axis.items())


def _short(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths)) if len(lengths) <= 3 else f"{lengths[0]} to {lengths[-1]}"
