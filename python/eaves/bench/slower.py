"""Where a peer is faster, or takes less memory: every row of every result file whose best peer is below eaves by more
than noise, merged twice: by operator and mode, and by table and peer.

The first stands between two markers, because README.md of the repository shows it too (tools/check_docs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eaves.bench.benchmark import Row, Table
from eaves.bench.protocol import Protocol
from eaves.bench.report import PEER_TO_EAVES, Kind, best_peer, number, ratios_of, title, values_of
from eaves.bench.stored import StoredFolder
from eaves.bench.summary import anchor

HEADING = "Where a peer is faster"

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


_NOWHERE = f"No row is slower than its best peer, or takes more memory, by more than {NOISE:.0%}.".replace("%", " %")

_Key = Callable[[_Cell], tuple[str, ...]]


def _grouped(cells: Sequence[_Cell], key: _Key) -> dict[tuple[str, ...], list[_Cell]]:
    groups: dict[tuple[str, ...], list[_Cell]] = {}
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
    return lines + _by_table([cell for cell in cells if cell.is_slower])


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
        ratios = dict.fromkeys(number(ratio, 3) for ratio in (min(map(_ratio, group)), max(map(_ratio, group))))
        link = f"[{heading}](#{anchor(f'{heading}:')})"
        lines.append(f"| {link} | {protocols} | {peer} | {_lengths(group)} | {' to '.join(ratios)} |")
    return [*lines, ""]


def _ratio(cell: _Cell) -> float:
    return cell.ratio


def _lengths(cells: Sequence[_Cell]) -> str:
    """n 64, 1024 to 8192: of each axis up to three lengths, or the least and the greatest."""
    by_axis: dict[str, set[int]] = {}
    for cell in cells:
        by_axis.setdefault(cell.table.axis_name, set()).add(cell.row.axis_value)
    return "; ".join(f"{axis} {_short(sorted(lengths))}" for axis, lengths in by_axis.items())


def _short(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths)) if len(lengths) <= 3 else f"{lengths[0]} to {lengths[-1]}"
