"""The curves: time and memory against the length, one PNG for each table whose rows differ in length alone.

Wide enough for a page, on logarithmic axes. A provider has one colour and one mark in all plots. Curves that lie on
each other are all seen: eaves is a broad line below, each that follows is narrower and above it, the limit is dashed
and on top. matplotlib is imported here and nowhere else, and this file only where plots are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from eaves.bench.benchmark import DTYPES, InvalidArgument, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import Kind, MeasuredTable, has_numbers, picture_name, value_of

try:
    import matplotlib
except ImportError as error:
    raise InvalidArgument("--plot: matplotlib is not installed, expected it: pip install eaves[bench]") from error

matplotlib.use("agg")  # files only, no window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image  # which matplotlib needs

# 8 inches at 200 dots: sharp where a page shows it 800 pixels wide.
_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 200
_PALETTE = 128

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow and black; and for plots of more
# providers dark ones, which the marks tell apart from it.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#8C510A"),
    *("#332288", "#882255", "#117733", "#999933"),
)
_MARKS = "osD^vPX*<>ph"

_MODES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
_WORDS: dict[Kind, tuple[str, str]] = {"speed": ("time", "ms"), "memory": ("peak memory", "MiB")}
_LIMIT_WORDS: dict[Kind, str] = {
    "speed": "limit (streams the same bytes)",
    "memory": "limit (inputs and outputs alone)",
}
_PRODUCTS = "limit (the matrix products alone)"


@dataclass(frozen=True)
class Setting:
    """Where and how all was measured: what stands below every title."""

    device: str
    eaves_version: str
    torch_version: str
    protocol: Protocol


def draw(tables: Iterable[MeasuredTable], names: Sequence[str], setting: Setting, folder: str) -> list[Path]:
    """The files written. `names` are all providers that there are: a name's place in them is its colour."""
    written = []
    for measured in tables:
        if not measured.table.is_curve or len(_kept(measured)) < 2:
            continue
        for kind in _WORDS:
            if has_numbers(measured, kind):
                path = Path(folder, picture_name(measured.table, kind))
                drawn = figure(measured, kind, names, setting)
                _save(drawn, path)
                pyplot.close(drawn)
                written.append(path)
    return written


def _save(drawn: Figure, path: Path) -> None:
    """As PNG of few colours, a third as large, and without words about the program that wrote it: one drawing is one
    file, byte for byte."""
    pixels = BytesIO()
    drawn.savefig(pixels, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})
    with Image.open(pixels) as image:
        image.convert("RGB").quantize(_PALETTE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, "PNG")


def figure(measured: MeasuredTable, kind: Kind, names: Sequence[str], setting: Setting) -> Figure:
    """One plot, which the caller closes."""
    table = measured.table
    lengths = [length for length, _ in _kept(measured)]
    drawn, axes = pyplot.subplots(figsize=_INCHES, layout="constrained")
    notes = [_shape(table)]
    curves = _curves(measured, kind)
    names_of_curves = [name for name in curves if name != LIMIT]
    last = max(1, len(names_of_curves) - 1)
    for place, name in enumerate(names_of_curves):
        colour, mark = _COLOURS[names.index(name) % len(_COLOURS)], _MARKS[names.index(name) % len(_MARKS)]
        narrow = place / last  # 0 for the first, 1 for the last
        size, values = 9 - 4.5 * narrow, curves[name]
        axes.plot(
            lengths,
            values,
            label=name,
            color=colour,
            marker=mark,
            markersize=size,
            linewidth=5 if place == 0 else 2.8 - 1.2 * narrow,
            zorder=3 + 0.1 * place,
        )
        unsteady = [_is_unsteady(measurement, name) and kind == "speed" for _, measurement in _kept(measured)]
        if any(unsteady):
            notes = [_shape(table), "hollow: unsteady, the machine was busy"]
            axes.plot(
                [length for length, is_hollow in zip(lengths, unsteady) if is_hollow],
                [value for value, is_hollow in zip(values, unsteady) if is_hollow],
                linestyle="none",
                color=colour,
                marker=mark,
                markersize=size,
                markerfacecolor="white",
                markeredgewidth=1.5,
                zorder=3.05 + 0.1 * place,
            )
    if LIMIT in curves:
        is_of_products = kind == "speed" and all(row.make_limit is not None for row in table.rows)
        limit_words = _PRODUCTS if is_of_products else _LIMIT_WORDS[kind]
        axes.plot(lengths, curves[LIMIT], "k", dashes=(4, 4), label=limit_words, linewidth=1.1, zorder=4)
    _set_axes(axes, lengths, (value for values in curves.values() for value in values))
    word, unit = _WORDS[kind]
    axes.set_xlabel(", ".join(part for part in (table.axis_name, table.axis_words) if part))
    axes.set_ylabel(f"{word} ({unit})")
    # The title stands above the two small lines, which may be wider than the axes.
    axes.set_title(_title(measured, kind, setting.protocol), fontsize=12, fontweight="bold", loc="left", pad=36)
    small = f"{'; '.join(notes)}\n{_where(setting)}"
    axes.annotate(small, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=9.5, va="bottom", in_layout=False)
    drawn.legend(loc="outside lower center", ncols=4, frameon=False)
    return drawn


def _kept(measured: MeasuredTable) -> list[tuple[int, Measurement]]:
    """Length and measurement of the rows that were not left out."""
    rows = zip(measured.table.rows, measured.measurements)
    return [(row.axis_value, measurement) for row, measurement in rows if not measurement.skipped]


def _curves(measured: MeasuredTable, kind: Kind) -> dict[str, list[float]]:
    """By the names of the columns, without those that have nothing to be drawn: a column of a table may be empty, but
    the legend would name it all the same. A logarithmic axis has no place for 0."""
    values = {name: _values(measured, kind, name) for name in [*measured.providers, LIMIT]}
    return {name: curve for name, curve in values.items() if any(value > 0 for value in curve)}  # false of NaN


def _values(measured: MeasuredTable, kind: Kind, name: str) -> list[float]:
    """At these lengths; NaN, which is a gap in the curve, where there is none."""
    values = [value_of(kind, measurement.columns[name]) for _, measurement in _kept(measured)]
    return [math.nan if value is None else value for value in values]


def _is_unsteady(measurement: Measurement, name: str) -> bool:
    timing = measurement.columns[name].timing
    return timing is not None and timing.is_unsteady


def _title(measured: MeasuredTable, kind: Kind, protocol: Protocol) -> str:
    """logsumexp, backward: time."""
    table = measured.table
    accumulates = ", adding to .grad" if protocol.name == "seed" and table.mode != "fwd" else ""
    return f"{table.title_op or table.op}, {_MODES[table.mode]}{accumulates}: {_WORDS[kind][0]}"


def _shape(table: Table) -> str:
    """[4, 1024, n], bfloat16, reduced over n."""
    row = table.rows[0]
    sizes = [key if key == table.axis_name else str(size) for key, size in row.shape.items()]
    dtype = str(DTYPES[table.dtype]).removeprefix("torch.")
    options = [f"{key}={value}" for key, value in row.options.items()]
    return ", ".join([f"[{', '.join(sizes)}]", dtype, *options] + ([table.shape_words] if table.shape_words else []))


def _where(setting: Setting) -> str:
    """NVIDIA H200, eaves 0.1.0, torch 2.11.0, protocol autograd."""
    versions = f"eaves {setting.eaves_version}, torch {setting.torch_version}"
    return f"{setting.device}, {versions}, protocol {setting.protocol.name}"


def _set_axes(axes: Axes, lengths: Sequence[int], values: Iterable[float]) -> None:
    """Logarithmic; the lengths themselves below, plain numbers at the side, the first and the last at the very ends."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    positive = [value for value in values if value > 0] or [1.0]  # which leaves NaN out, too
    ticks = round_numbers(min(positive), max(positive))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def round_numbers(low: float, high: float) -> list[float]:
    """A dozen at most, evenly apart on a logarithmic axis: 1 2 5 10 where that is enough, or powers of ten. The first
    is not above `low`, the last not below `high`."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1  # one more, as log10 rounds
    for steps in ((1, 2, 5), (1, 3), (1,)):
        numbers = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        begin = max(i for i, number in enumerate(numbers) if number <= low)
        end = max(begin + 1, min(i for i, number in enumerate(numbers) if number >= high))
        if end - begin < 12 or steps == (1,):
            return numbers[begin : end + 1]
    raise AssertionError("the last steps return")
