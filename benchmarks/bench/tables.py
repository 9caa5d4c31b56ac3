"""Tables as text and as Markdown, sentences, and the rows in which a peer is faster, from the lines of result files.

Lines that differ only in one length form a table; all single cases share one table of other rows. In a table each
provider has a line, and each length a column.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .harness import LIMIT, Entry

Kind = Literal["ms", "peak_mib", "host_ms"]
"""The key of the numbers."""

EAVES = "eaves"
MODES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
QUANTITIES: dict[Kind, str] = {"ms": "time in ms", "peak_mib": "peak memory in MiB", "host_ms": "host time in ms"}
BUSY = 2.0
"""A median above so many times the fastest repetition: the machine is busy with something else."""

MOST_ARE_BUSY = "most rows are left out: measure again on a quiet machine"

NOISE = 0.03
"""Two runs of one row differ by so much."""

LEAST_PEAK = 0.9
"""A provider may keep less than inputs and outputs (a saved lse in 16 bits, a few percent). Below this share of them
something else was freed while it was measured, and the number is shown nowhere."""


@dataclass
class Case:
    """One row and its numbers."""

    size: int
    """Along the axis of its table."""

    words: str
    """The row, but for operator and mode."""

    entries: dict[str, Entry] = field(default_factory=dict)
    """By the names of the providers and `limit`."""

    @property
    def is_measured(self) -> bool:
        return any(entry["ms"] is not None for name, entry in self.entries.items() if name != LIMIT)

    def value(self, provider: str, kind: Kind) -> float | None:
        found: float | None = self.entries.get(provider, {}).get(kind)
        return found

    def ratio(self, numerator: str | None, denominator: str, kind: Kind) -> float | None:
        above, below = self.value(numerator or "", kind), self.value(denominator, kind)
        return above / below if above is not None and below else None

    def best_peer(self, kind: Kind) -> str | None:
        """The peer with the least number."""
        values = {name: self.value(name, kind) or math.inf for name in filter(is_peer, self.entries)}
        return min((name for name in values if values[name] < math.inf), key=lambda name: values[name], default=None)


@dataclass
class Table:
    op: str
    mode: str
    words: str
    """The words that its cases have in common: "batch 4, dim 1024, bf16"."""

    axis: str
    cases: list[Case]

    @property
    def title(self) -> str:
        return f"{self.op}, {MODES.get(self.mode, self.mode)}: {self.words}"

    @property
    def is_curve(self) -> bool:
        return len(self.cases) > 1 and self.words != OTHERS

    def names(self, kind: Kind) -> list[str]:
        """The names of the lines. `limit` is no call from Python, so it costs the host nothing."""
        names = dict.fromkeys(name for case in self.cases for name in case.entries if name != LIMIT)
        with_numbers = [name for name in names if any(case.value(name, kind) is not None for case in self.cases)]
        return with_numbers + ([LIMIT] if with_numbers and kind != "host_ms" else [])


OTHERS = "other rows"


def is_peer(name: str) -> bool:
    """True for a provider other than eaves; eaves-memory is eaves too."""
    return name.split("-")[0] != EAVES and name != LIMIT


def three(value: float | None) -> str:
    """Three significant digits; "-" for no number."""
    if value is None:
        return "-"
    digits = 2 - int(f"{value:.2e}".partition("e")[2]) if value > 0 else 0
    return f"{round(value, digits):.{max(digits, 0)}f}"


def is_busy(entry: Entry) -> bool:
    return entry["ms"] is not None and entry["ms"] > BUSY * entry["ms_min"]


def _words(key: str, value: Any) -> str:
    key = key.replace("_", " ")
    return key if value is True else f"{key} {value}"


def _described(entry: Entry) -> tuple[str, int, str, str]:
    """Axis, size, all other words, all words."""
    shape, options = entry["shape"], dict(entry["options"])
    axis = next((key for key in ("n", "v") if key in shape), list(shape)[-1])
    words = [_words(key, size) for key, size in shape.items() if key != axis]
    if "grid" in options:
        axes = len(options.pop("grid"))
        words.append(f"grid of {axes} {'axis' if axes == 1 else 'axes'}")
    words += [_words(key, value) for key, value in options.items()] + [entry["dtype"]]
    own = f"{axis} {'x'.join(map(str, entry['options'].get('grid') or [shape[axis]]))}"
    return axis, shape[axis], ", ".join(words), ", ".join([own, *words])


def tables(entries: Iterable[Entry]) -> list[Table]:
    """The tables in the order of their first lines. If a file has a case twice, the first is shown."""
    found: dict[tuple[str, str, str, str], dict[str, Case]] = {}
    for entry in entries:
        axis, size, others, all_words = _described(entry)
        cases = found.setdefault((entry["op"], entry["mode"], others, axis), {})
        case = cases.setdefault(json.dumps([entry["shape"], entry["options"]]), Case(size, all_words))
        case.entries.setdefault(entry["provider"], entry)
    for case in (case for cases in found.values() for case in cases.values()):
        least = LEAST_PEAK * (case.value(LIMIT, "peak_mib") or 0)
        for name, entry in case.entries.items():
            if (entry.get("peak_mib") or math.inf) < least:
                case.entries[name] = {**entry, "peak_mib": None}
    made = [Table(*key, sorted(cases.values(), key=lambda case: case.size)) for key, cases in found.items()]
    kept: list[Table] = []
    for table in made:
        alone = [each.cases[0] for each in made
                 if (each.op, each.mode) == (table.op, table.mode) and len(each.cases) == 1]  # fmt: skip
        if len(table.cases) > 1 or len(alone) < 2:
            kept.append(table)
        elif table.cases[0] is alone[0]:
            kept.append(Table(table.op, table.mode, OTHERS, "row", alone))
    return kept


def cells(table: Table, kind: Kind) -> list[list[str]]:
    """The cells: heads, a line for each provider, and the ratios."""
    heads = [str(case.size) if table.is_curve or len(table.cases) == 1 else f"({number})"
             for number, case in enumerate(table.cases, 1)]  # fmt: skip
    names = table.names(kind)
    lines = [[table.axis, *heads]]
    lines += [[name, *(three(case.value(name, kind)) for case in table.cases)] for name in names]
    if EAVES in names and LIMIT in names:
        lines.append(["eaves / limit", *(three(case.ratio(EAVES, LIMIT, kind)) for case in table.cases)])
    if EAVES in names and any(map(is_peer, names)):
        best = [three(case.ratio(case.best_peer(kind), EAVES, kind)) for case in table.cases]
        lines.append(["best peer / eaves", *best])
    return lines


def notes(table: Table, kind: Kind) -> list[str]:
    """The rows of the numbered columns, the reasons of missing numbers, and the times that a busy machine disturbed."""
    is_numbered = not table.is_curve and len(table.cases) > 1
    lines = [f"({number}) {case.words}" for number, case in enumerate(table.cases, 1) if is_numbered]
    reasons: dict[str, list[str]] = {}
    for number, case in enumerate(table.cases, 1):
        place = f"({number})" if is_numbered else str(case.size)
        why = {name: re.sub(r"\x1b\[[\d;]*m", "", entry["skipped"])
               for name, entry in case.entries.items() if entry["ms"] is None}  # fmt: skip
        if len(set(why.values())) == 1 and len(why) == len(case.entries):
            why = {"all": next(iter(why.values()))}  # the whole row was left out
        for name, text in why.items():
            reasons.setdefault(f"{name}: {text}", []).append(place)
        fast = {name: entry["ms_min"] for name, entry in case.entries.items() if kind == "ms" and is_busy(entry)}
        if fast:
            text = ", ".join(f"{name} {three(ms)}" for name, ms in fast.items())
            reasons.setdefault(f"busy, fastest {text}", []).append(place)
    everywhere = len(table.cases)
    where = {why: ", ".join(at) if is_numbered else f"({', '.join(at)})" for why, at in reasons.items()}
    return lines + [f"{why} {where[why]}" if len(at) < everywhere else why for why, at in reasons.items()]


WIDTH = 80


def wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """The lines with aligned columns, the first column on the left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        line[0].ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:]))
        for line in lines
    )


def text_table(table: Table, kind: Kind) -> str:
    title = wrapped(f"{table.title}; {QUANTITIES[kind]}")
    return "\n".join([title, aligned(cells(table, kind)), *map(wrapped, notes(table, kind))]) + "\n"


def markdown(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table in Markdown; its first `left` columns are words."""
    rule = "|" + "|".join(["---"] * left + ["---:"] * (len(lines[0]) - left)) + "|"
    drawn = [f"| {' | '.join(line)} |" for line in lines]
    return [drawn[0], rule, *drawn[1:], ""]


def code(words: str) -> str:
    """A provider's own message, as code, so that nothing in it is Markdown."""
    return f"`{words.replace('`', chr(39))}`"


def markdown_table(table: Table, kind: Kind) -> list[str]:
    said = [f"- {code(note)}" for note in notes(table, kind)]
    return markdown(cells(table, kind)) + ([*said, ""] if said else [])


def headline(all_tables: Sequence[Table]) -> tuple[list[Table], list[Case]]:
    """The first table of each mode, and the longest row that all of these have. Tables and rows without a number, which
    do not fit in a small memory, come last."""
    measured = [table for table in all_tables if table.names("ms")]
    first = {table.mode: table for table in (*reversed(all_tables), *reversed(measured))}
    chosen = sorted(first.values(), key=all_tables.index)
    in_all = set.intersection(*({case.size for case in table.cases if case.is_measured} for table in chosen))
    candidates = [[case for case in table.cases if case.size in in_all] or table.cases for table in chosen]
    return chosen, [max(cases, key=lambda case: (case.is_measured, case.size)) for cases in candidates]


def headline_table(all_tables: Sequence[Table]) -> list[list[str]]:
    """Provider, ms and MiB of the longest row, for each provider that was measured there."""
    chosen, cases = headline(all_tables)
    names = dict.fromkeys(name for table in chosen for name in table.names("ms") if name != LIMIT)
    heads = ["provider"]
    for table in chosen:
        heads += [f"{MODES[table.mode]}, ms" if len(chosen) > 1 else "ms", "MiB"]
    return [heads] + [
        [name, *(three(case.value(name, kind)) for case in cases for kind in ("ms", "peak_mib"))]
        for name in (*names, LIMIT)
    ]


# ------------------------------------------------------------------------------------------------------------ sentences


class _Pair(NamedTuple):
    """A case in which a provider of eaves and a peer have numbers. The ratios are the peer's by the provider's."""

    case: Case
    peer: str
    ratio: float
    memory: float = math.nan


_KINDS: tuple[tuple[Kind, str, str], ...] = (("ms", "takes", "time"), ("peak_mib", "needs", "memory"))


def _best_by_eaves(cases: Iterable[Case], kind: Kind) -> list[_Pair]:
    return [_Pair(case, peer, ratio) for case in cases if (peer := case.best_peer(kind)) is not None
            and (ratio := case.ratio(peer, EAVES, kind)) is not None]  # fmt: skip


def summary(all_tables: Sequence[Table]) -> list[str]:
    """A sentence for each operator and mode: its distance from the limit, and from the best peer. The sentences leave
    out rows that a busy machine disturbed; one more sentence says how many."""
    sentences = []
    all_rows, left_out = 0, 0
    for (op, mode), group in _grouped(all_tables, lambda table: (table.op, table.mode)).items():
        measured = [case for table in group for case in table.cases if case.value(EAVES, "ms") is not None]
        cases = [case for case in measured if not any(map(is_busy, case.entries.values()))]
        all_rows += len(measured)
        left_out += len(measured) - len(cases)
        if not cases:
            continue
        rows = f"{len(cases)} rows" if len(cases) > 1 else cases[0].words
        text = f"{op}, {MODES.get(mode, mode)}, {rows}:"
        of_limit = [ratio for case in cases if (ratio := case.ratio(EAVES, LIMIT, "ms")) is not None]
        text += f" eaves takes {_range(of_limit)} times the limit." if of_limit else ""
        for kind, words, of in _KINDS:
            if at := _best_by_eaves(cases, kind):
                least = min(at, key=lambda each: each.ratio)
                text += f" The best peer {words} {_range(each.ratio for each in at)} times the {of} of eaves"
                text += f" (least: {least.peer}{f', {least.case.words}' if len(cases) > 1 else ''})."
        sentences.append(text)
    if left_out:
        sentences.append(f"Other programs slowed down {left_out} of {all_rows} rows, which these sentences leave out.")
    if 2 * left_out > all_rows:
        sentences.append(MOST_ARE_BUSY)
    return sentences


def _range(ratios: Iterable[float]) -> str:
    """The range as text: 0.500 to 0.750, or one number if both ends are equal."""
    known = list(ratios)
    return " to ".join(dict.fromkeys((three(min(known)), three(max(known)))))


def _grouped(items: Iterable[Any], key: Callable[[Any], tuple[str, ...]]) -> dict[tuple[str, ...], list[Any]]:
    groups: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# -------------------------------------------------------------------------------------------------- rows that peers win


def slower(all_tables: Sequence[Table]) -> list[list[str]]:
    """The rows with a best peer below eaves by more than noise, by operator, mode and quantity."""
    lines = [["operator", "mode", "what", "rows", "where", "best peer / eaves, at worst", "peer"]]
    for (op, mode), group in _grouped(all_tables, lambda table: (table.op, table.mode)).items():
        for kind, _, what in _KINDS:
            pairs = _best_by_eaves((case for table in group for case in table.cases), kind)
            found = [pair for pair in pairs if pair.ratio < 1 - NOISE]
            if found:
                worst = min(found, key=lambda pair: pair.ratio)
                count, at = f"{len(found)} of {len(pairs)}", f"{worst.peer}, {worst.case.words}"
                lines.append([op, MODES.get(mode, mode), what, count, _sizes(found), three(worst.ratio), at])
    return lines


def as_good(all_tables: Sequence[Table]) -> list[list[str]]:
    """The rows in which a peer takes less time or memory than a provider of eaves, and no more of the other."""
    groups: dict[tuple[str, str, str, str], list[_Pair]] = {}
    for table in all_tables:
        for case in table.cases:
            for provider in (name for name in case.entries if name != LIMIT and not is_peer(name)):
                for peer in filter(is_peer, case.entries):
                    time, memory = case.ratio(peer, provider, "ms"), case.ratio(peer, provider, "peak_mib")
                    if time is not None and memory is not None:
                        key = (table.op, table.mode, provider, peer)
                        groups.setdefault(key, []).append(_Pair(case, peer, time, memory))
    quantities = "time, peer / provider", "memory, peer / provider"
    lines = [["operator", "mode", "provider", "peer", "rows", "where", *quantities]]
    for (op, mode, provider, peer), group in groups.items():
        found = [pair for pair in group if min(pair[2:]) < 1 - NOISE and max(pair[2:]) <= 1 + NOISE]
        if found:
            ranges = [_range(pair.ratio for pair in found), _range(pair.memory for pair in found)]
            count = f"{len(found)} of {len(group)}"
            lines.append([op, MODES.get(mode, mode), provider, peer, count, _sizes(found), *ranges])
    return lines


def _sizes(pairs: Sequence[_Pair]) -> str:
    """The sizes as text: v 1024, 8192; n 64 to 131072."""
    parts = []
    for (axis,), group in _grouped(pairs, lambda pair: (pair.case.words.split()[0],)).items():
        sizes = sorted({pair.case.size for pair in group})
        parts.append(f"{axis} {', '.join(map(str, sizes)) if len(sizes) <= 3 else f'{sizes[0]} to {sizes[-1]}'}")
    return "; ".join(parts)
