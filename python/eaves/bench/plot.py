"""The curves: time and memory against the length, one PNG for each table whose rows differ in length alone.

Wide enough for a page, on logarithmic axes. A provider has one colour and one mark in all plots. matplotlib is imported
here and nowhere else, and this file only where plots are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eaves.bench.benchmark import Table
from eaves.bench.errors import InvalidArgument
from eaves.bench.harness import LIMIT
from eaves.bench.protocol import Protocol
from eaves.bench.report import Kind, MeasuredTable, has_numbers, title, value_of

try:
    import matplotlib
except ImportError as error:
    raise InvalidArgument("--plot: matplotlib is not installed, expected it: pip install eaves[bench]") from error

matplotlib.use("agg")  # files only, no window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# 8 inches at 200 dots: sharp where a page shows it 800 pixels wide.
_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 200

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow and black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#8C510A")
_MARKS = "osD^vPX*"

_MODES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
_WORDS: dict[Kind, tuple[str, str]] = {"speed": ("time", "ms"), "memory": ("peak memory", "MiB")}
_LIMIT_WORDS: dict[Kind, str] = {
    "speed": "limit (streams the same bytes)",
    "memory": "limit (inputs and outputs alone)",
}


def make_folder(path: str) -> None:
    """Before minutes of measuring, so that a wrong path is known at once."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f'--plot: "{path}" cannot be made: {error.strerror}') from error


def draw(
    tables: Sequence[MeasuredTable], names: Sequence[str], device: str, protocol: Protocol, folder: str
) -> list[Path]:
    """The files written. `names` are all providers that there are: a name's place in them is its colour."""
    places = {name: place for place, name in enumerate(names)}
    written = []
    for measured in tables:
        if len(_lengths(measured)) < 2 or any(row.options for row in measured.table.rows):
            continue
        for kind in _WORDS:
            if has_numbers(measured, kind):
                path = Path(folder, f"{title(measured.table, kind)}.png")
                _draw_one(measured, kind, places, device, protocol, path)
                written.append(path)
    return written


def _draw_one(
    measured: MeasuredTable,
    kind: Kind,
    places: Mapping[str, int],
    device: str,
    protocol: Protocol,
    path: Path,
) -> None:
    table = measured.table
    figure, axes = pyplot.subplots(figsize=_INCHES, layout="constrained")
    lengths = _lengths(measured)
    # The first, eaves, on top, and with the smallest marks: where curves lie on each other, all are seen.
    for below, name in enumerate(measured.providers):
        axes.plot(
            lengths,
            _values(measured, kind, name),
            label=name,
            color=_COLOURS[places[name] % len(_COLOURS)],
            marker=_MARKS[places[name] % len(_MARKS)],
            markersize=6 + 8 * below / len(measured.providers),
            linewidth=2,
            zorder=3 - 0.1 * below,
        )
    axes.plot(lengths, _values(measured, kind, LIMIT), "k--", label=_LIMIT_WORDS[kind], linewidth=1.2, zorder=3.1)
    _set_axes(axes, lengths)
    word, unit = _WORDS[kind]
    axes.set_xlabel(table.axis_name)
    axes.set_ylabel(f"{word} ({unit})")
    accumulates = ", adding to .grad" if protocol.name == "seed" and table.mode != "fwd" else ""
    what = f"{table.op} {_MODES[table.mode]}{accumulates}: {word}"
    axes.set_title(f"{what}\n{_shape(table)}, {device}", fontsize=11, loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    pyplot.close(figure)


def _lengths(measured: MeasuredTable) -> list[int]:
    """Of the rows that were not left out."""
    rows = zip(measured.table.rows, measured.measurements)
    return [row.axis_value for row, measurement in rows if not measurement.skipped]


def _values(measured: MeasuredTable, kind: Kind, name: str) -> list[float]:
    """At these lengths; NaN, which is a gap in the curve, where there is none."""
    kept = [measurement for measurement in measured.measurements if not measurement.skipped]
    values = [value_of(kind, measurement.columns[name]) for measurement in kept]
    return [float("nan") if value is None else value for value in values]


def _shape(table: Table) -> str:
    """batch 4, dim 1024, bf16."""
    fixed = [f"{key} {value}" for key, value in table.rows[0].shape.items() if key != table.axis_name]
    return ", ".join([*fixed, table.dtype])


def _set_axes(axes: Axes, lengths: Sequence[int]) -> None:
    """Logarithmic; the lengths themselves below, plain numbers at the side."""
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    # A few labels whatever the range: 1 2 5 10 below two decades, powers of ten above.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
