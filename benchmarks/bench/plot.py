"""The pictures, as the text of SVG files: bars of time and memory of an operator's longest row, and curves of time /
limit over the size. Each curve and bar has its name beside it, and a library has one colour in all pictures.

The background is transparent. Text and colours have a medium lightness, so that one file reads on white and on black.
Letters are those of the reader's own sans-serif: distances leave room for the widest, DejaVu Sans.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .harness import LIMIT, Entry
from .head import parse_shape
from .tables import EAVES, MODES, QUANTITIES, Case, Kind, Table, headline, tables, three

WIDTH = 760
_KINDS: tuple[Kind, Kind] = ("ms", "peak_mib")
_GREY = "#7a7a7a"
_COLOURS = {
    EAVES: "#1a7fc4", "torch": "#d55e00", "liger": "#8a63d2", "cut": "#009e73", "fla": "#c2417c", "quack": "#a87a08",
    "trl": "#1f9595", "verl": "#7f8c1f", "jax": "#5a961c", "tokamax": "#a0624a",
}  # fmt: skip
_DASHES = ("", "9 4", "3 4", "9 4 3 4")
"""Of the variants of a library, in turn."""

_AXES = {"v": "classes (v)", "n": "length (n)"}
_ROUND = (1, 10, 100, 2, 5, 20, 50, 0.5, 3, 30, 0.2, 1.5, 0.8, 0.9, 1.2, 1.1, 0.7, 0.6, 1.3, 4, 7, 15, 40, 70)
"""Ticks of a ratio: an earlier one is drawn rather than a later one nearby."""

_LINE = 18
"""Pixels between the lines of text."""

_Points = Sequence[tuple[float, float | None]]


class Panel(NamedTuple):
    height: float
    elements: list[str]


def _picture(panels: Iterable[Panel], foot: str) -> str:
    """The panels below each other."""
    drawn, top = [], 0.0
    for panel in panels:
        drawn += [f'<g transform="translate(0 {top:g})">', *panel.elements, "</g>"]
        top += panel.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 28:g}" width="{WIDTH}"'
    head += f' font-family="Helvetica, Arial, sans-serif" font-size="15" fill="{_GREY}">'
    return "\n".join([head, *drawn, _text(4, top + 16, foot, 'font-size="13"'), "</svg>\n"])


def of_operator(name: str, all_tables: Sequence[Table], foot: str) -> dict[str, str]:
    """The pictures of an operator by their names: of forward and backward together, or of both if no row has both. None
    if no row was measured."""
    rows = [(table, case) for table, case in zip(*headline(all_tables)) if case.is_measured]
    step = [(table, case) for table, case in rows if table.mode == "fwd+bwd"] or rows
    curves = [table for table, _ in step
              if table.is_curve and any(case.ratio(EAVES, LIMIT, "ms") for case in table.cases)]  # fmt: skip
    if not step:
        return {}
    found = {name: _picture([_bars(table, case) for table, case in step], f"shorter is better; {foot}")}
    return found | ({f"{name}-time": _picture(map(_ratios, curves), f"lower is better; {foot}")} if curves else {})


def of_jax(content: Mapping[str, Any]) -> dict[str, str]:
    """The pictures of a file of `python benchmarks jax`, for the rows and features of most shapes."""
    names = {"products": LIMIT, "torch": "eaves-pytorch"}
    entries: list[Entry] = []
    for row in (row for row in content["rows"] if "ms" in row):
        rows, features, classes = parse_shape(row["shape"])
        provider = names.get(row["provider"], row["provider"])
        # The products hold all the logits: their memory is no limit.
        peak = row["memory_bytes"] / 2**20 if provider != LIMIT else None
        shape = {"batch": rows, "dim": features, "v": classes}
        entries.append({"op": "head and loss from JAX", "mode": "fwd+bwd", "dtype": "bf16", "shape": shape,
                        "options": {}, "provider": provider, "ms": row["ms"], "peak_mib": peak})  # fmt: skip
    longest_first = sorted(tables(entries), key=lambda table: -len(table.cases))
    versions = content["versions"]
    return of_operator("jax", longest_first, f"{content['device']}, eaves {versions['eaves']}, jax {versions['jax']}")


def of_training(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The picture of a file of examples/python/train_language_model.py: the losses of each step."""
    lines: dict[str, _Points] = {run["backend"]: list(enumerate(run["losses"], 1)) for run in runs}
    first = runs[0]
    steps, entropy = len(first["losses"]), first["unigram_entropy"]
    apart = max(abs(one - two) for run in runs for one, two in zip(first["losses"], run["losses"]))
    title = f"The losses of {' and '.join(lines)} differ by up to {apart:.2g}"
    lines["single tokens' entropy"] = [(1, entropy), (steps, entropy)]
    words = f"loss in nats per token, {first['vocabulary']} classes, {first['parameters'] / 1e6:.3g} million parameters"
    versions = f"eaves {first['versions']['eaves']}, torch {first['versions']['torch']}"
    ticks = range(0, steps + 1, max(steps // 5, 1)), range(100)
    body = _curves(lines, ticks, "step", log=False)
    return {"train_language_model": _picture([_titled(title, words, body)], f"{first['device']}, {versions}")}


# ------------------------------------------------------------------------------------------------------------- elements


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" {more}>{html.escape(words)}</text>'


def _colour(name: str) -> str:
    return _COLOURS.get(re.split(r"[-.]", name)[0], _GREY)


def _name(x: float, y: float, name: str, more: str = "", words: str = "") -> str:
    weight = ' font-weight="bold"' if name == EAVES else ""
    return _text(x, y, words or name, f'fill="{_colour(name)}"{weight} {more}')


def _titled(title: str, words: str, body: Panel) -> Panel:
    top = [_text(4, 20, title, 'font-size="17" font-weight="bold"'), _text(4, 41, words, 'font-size="14"')]
    return Panel(54 + body.height, [*top, '<g transform="translate(0 54)">', *body.elements, "</g>"])


# ----------------------------------------------------------------------------------------------------------------- bars


def _bars(table: Table, case: Case) -> Panel:
    """Two columns of bars from 0, the fastest above and the limit below."""
    found = {name: entry for name, entry in case.entries.items() if entry.get("ms") is not None}
    names = sorted(found, key=lambda name: (name == LIMIT, found[name]["ms"]))
    left = max(100, *(8.7 * len(name) + 14 for name in names))
    column = (WIDTH - left) / 2
    elements = []
    for index, kind in enumerate(_KINDS):
        values = [case.value(name, kind) for name in names]
        unit = (column - 64) / max((value for value in values if value is not None), default=1)
        x = left + index * column
        elements.append(_text(x, 14, QUANTITIES[kind]))
        for y, (name, value) in enumerate(zip(names, values)):
            top, length = 24 + 24 * y, unit * (value or 0)
            opacity = ' fill-opacity="0.5"' if name == LIMIT else ""
            box = f"M{x:.4g} {top}h{length:.4g}v16h{-length:.4g}z"
            elements.append(f'<path d="{box}" fill="{_colour(name)}"{opacity}/>')
            elements.append(_name(x + length + 5, top + 13, name, words=three(value)))
            if not index:
                elements.append(_name(x - 8, top + 13, name, 'text-anchor="end"'))
    other = next((name for name in ("torch", "jax") if name in found), "")
    ratios = [case.ratio(EAVES, other, kind) for kind in _KINDS]
    shares = [f"{100 * ratio:.0f} %" if ratio else "" for ratio in ratios]
    title = f"eaves takes {shares[0]} of {other}'s time" if shares[0] else "time and memory"
    title += f", {shares[1]} of its memory" if shares[1] else ""
    words = f"{table.op}, {MODES.get(table.mode, table.mode)}: {case.words}"
    return _titled(title, words, Panel(34 + 24 * len(names), elements))


# --------------------------------------------------------------------------------------------------------------- curves


def _ratios(table: Table) -> Panel:
    sizes = [case.size for case in table.cases]
    lines: dict[str, _Points] = {
        name: [(case.size, case.ratio(name, LIMIT, "ms")) for case in table.cases] for name in table.names("ms")
    }
    own = [ratio for _, ratio in lines[EAVES] if ratio is not None]
    title = f"eaves takes {' to '.join(dict.fromkeys((three(min(own)), three(max(own)))))} times the limit"
    ticks = sorted(sizes, key=lambda size: size & (size - 1))  # powers of two first
    body = _curves(lines, (ticks, _ROUND), _AXES.get(table.axis, table.axis))
    return _titled(title, f"time / limit; {table.title}", body)


def _curves(
    lines: Mapping[str, _Points], ticks: tuple[Iterable[float], Iterable[float]], axis: str, log: bool = True
) -> Panel:
    """Lines over an axis; the names are on the right, at the lines' ends. A line of no library is dashed, and so is
    a long line, which may lie on the one of eaves."""
    points = {name: [(x, y) for x, y in line if y is not None] for name, line in lines.items()}
    points = {name: line for name, line in points.items() if line}
    left, right, top = 44, WIDTH - 46 - 8.7 * max(map(len, points)), 8
    bottom = max(260, 34 * len(points))
    xs, ys = zip(*(point for line in points.values() for point in line))
    to_x, to_y = _scale(xs, left + 8, right, log), _scale(ys, bottom - 8, top + 8, log)

    elements = [_text(right, bottom + 38, axis, 'text-anchor="end"')]
    for x, tick in _spaced(ticks[0], to_x, 66, left, right):
        elements.append(_text(x, bottom + 19, f"{tick}", 'text-anchor="middle"'))
        elements.append(_path(f"M{x:.4g} {bottom}v5"))
    for y, tick in _spaced(ticks[1], to_y, 24, top, bottom):
        elements.append(_text(left - 8, y + 5, f"{tick}", 'text-anchor="end"'))
        elements.append(_path(f"M{left} {y:.4g}H{right:.4g}", opacity=0.25))

    ends = sorted((to_y(line[-1][1]), name) for name, line in points.items())
    places = dict(zip([name for _, name in ends], _apart([y for y, _ in ends], top, bottom)))
    variants: dict[str, int] = {}
    for name, line in points.items():
        colour, width = _colour(name), 5 if name == EAVES else 2
        number = variants[colour] = variants.get(colour, -1) + 1
        drawn = [(f"{to_x(x):.4g}", f"{to_y(y):.4g}") for x, y in line]
        has_points = colour != _GREY and len(line) <= 20
        dash = _DASHES[number % len(_DASHES)] if has_points or name == EAVES else "5 9"
        elements.append(_path("M" + "L".join(map(" ".join, drawn)), colour, width, dash))
        if has_points:  # lines of no length with round ends
            elements.append(_path("".join(f"M{x} {y}h0" for x, y in drawn), colour, width + 4))
        elements.append(_path(f"M{' '.join(drawn[-1])}L{right + 32:.4g} {places[name]:.4g}", colour, 1, opacity=0.6))
        elements.append(_name(right + 37, places[name] + 5, name))
    return Panel(bottom + 56, elements)


def _path(way: str, colour: str = _GREY, width: float = 1, dash: str = "", opacity: float = 1) -> str:
    more = (f' stroke-dasharray="{dash}"' if dash else "") + (f' opacity="{opacity}"' if opacity < 1 else "")
    return f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-linecap="round"{more}/>'


def _scale(values: Iterable[float], first: float, last: float, log: bool) -> Callable[[float], float]:
    """From the values onto pixels."""
    on_axis = math.log if log else float
    known = [on_axis(value) for value in values]
    low, width = min(known), max(known) - min(known) or 1
    return lambda value: first + (on_axis(value) - low) / width * (last - first)


def _spaced(
    ticks: Iterable[float], to: Callable[[float], float], least: float, low: float, high: float
) -> list[tuple[float, float]]:
    """The ticks between two pixels with their places; of two that are too near, the earlier one."""
    found: list[tuple[float, float]] = []
    for tick in ticks:
        place = to(tick)
        if low <= place <= high and all(abs(place - other) >= least for other, _ in found):
            found.append((place, tick))
    return found


def _apart(places: Sequence[float], low: float, high: float) -> list[float]:
    """Ascending places of lines of text, moved as far as none covers another."""
    down, up = list(places), list(places)
    for index in range(1, len(places)):
        down[index] = max(down[index], down[index - 1] + _LINE)
        up[-1 - index] = min(up[-1 - index], up[-index] - _LINE)
    last = len(places) - 1
    return [min(max((one + two) / 2, low + _LINE * index), high - _LINE * (last - index))
            for index, (one, two) in enumerate(zip(down, up))]  # fmt: skip
