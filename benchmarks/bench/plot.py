"""The curves, as PNG: time / limit and memory / limit over the size, with a panel for each table; and time over memory
of an operator's longest rows, with a point for each provider.

The axis of time / limit ends at 2, so that 2 % are visible, or higher if eaves and the best peer need it. Other
providers beyond the end are drawn on the edge. matplotlib is imported here, and only a request for curves imports this
file.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from .benchmark import InvalidArgument
from .harness import LIMIT
from .operators import OPERATORS
from .tables import EAVES, MODES, QUANTITIES, Case, Kind, Table, headline, is_peer

try:
    import matplotlib
except ImportError as error:
    raise InvalidArgument("matplotlib is not installed, expected benchmarks/requirements.txt") from error

matplotlib.use("agg")  # files only, no window

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image  # a dependency of matplotlib

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow and black, and dark colours.
_COLOURS = (
    *("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#8C510A", "#666666", "#332288", "#117733", "#882255", "#999933", "#661100", "#44AA99", "#DDCC77"),
)
_MARKS = "osD^vPX*<>ph8dH"
_NAMES = list(dict.fromkeys(provider.name for operator in OPERATORS for provider in operator.providers))
_NEWEST = ("fla-weight-dtype", "eaves-keep", "eaves-keep-half", "eaves-function", "torch.compile-max-autotune")
_NAMES.sort(key=lambda name: (name in _NEWEST and 1 + _NEWEST.index(name), is_peer(name), not name.startswith("torch")))
"""A name's place is its colour and mark. The newest are the last, and the others keep theirs."""

_RATIO_TICKS: dict[Kind, tuple[float, ...]] = {
    "ms": (0.95, 1, 1.1, 1.25, 1.5, 2),
    "peak_mib": (0.95, 1, 1.5, 2, 3, 5, 8),
}
_BEYOND = (3, 5, 8, 12, 20, 30, 50, 80, 120)
"""Ticks of time / limit where 2 is too little."""


def draw(folder: Path, op: str, protocol: str, all_tables: Sequence[Table], where: str) -> list[Path]:
    """Draws one operator by one protocol, and returns the files. `where` is the line below each title."""
    curves = [table for table in all_tables if table.is_curve and EAVES in table.names("ms")]
    main = [table for table in headline(all_tables)[0] if table in curves]
    written = []

    def add(name: str, count: int, panel: Callable[[Axes, int], None], title: str) -> None:
        if count:
            written.append(folder / f"{op}-{name}.png")
            save(figure(count, panel, f"{title}\n{where}, protocol {protocol}"), written[-1])

    def ratios(shown: Sequence[Table], kind: Kind) -> Callable[[Axes, int], None]:
        return lambda axes, index: _ratio_panel(axes, shown[index], kind)

    if protocol == "autograd":
        chosen, cases = headline(all_tables)
        add("time", len(main), ratios(main, "ms"), f"{op}: time / limit")
        add("memory", len(cases), lambda axes, i: _memory_panel(axes, chosen[i], cases[i], all_tables),
             f"{op}: time over memory")  # fmt: skip
        more = [table for table in curves if table not in main]
        add("more-time", len(more), ratios(more, "ms"), f"{op}: time / limit")
        add("all-memory", len(curves), ratios(curves, "peak_mib"), f"{op}: memory / inputs and outputs")
    else:
        add("accumulate-time", len(curves), ratios(curves, "ms"), f"{op}: time / limit")
        add("accumulate-memory", len(curves), ratios(curves, "peak_mib"), f"{op}: memory / inputs and outputs")
    return written


def figure(count: int, panel: Callable[[Axes, int], None], title: str) -> Figure:
    columns = min(count, 3)
    lines = math.ceil(count / columns)
    drawn, grid = pyplot.subplots(lines, columns, figsize=(max(6.5, 5.2 * columns), 1 + 3.6 * lines), squeeze=False,
                                  layout="constrained")  # fmt: skip
    for index, axes in enumerate(grid.flat):
        axes.spines[["top", "right"]].set_visible(False)
        if index < count:
            panel(axes, index)
        else:
            axes.set_axis_off()
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    drawn.suptitle(title, fontsize=11)
    drawn.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(5, 3 * columns), frameon=False
    )
    return drawn


def save(drawn: Figure, path: Path) -> None:
    """Saves with few colours, which takes a third of the size, and without the name of the writing program: the same
    drawing is the same file, byte for byte."""
    pixels = BytesIO()
    drawn.savefig(pixels, dpi=100, format="png", metadata={"Software": None})
    with Image.open(pixels) as image:
        image.convert("RGB").quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, "PNG")
    pyplot.close(drawn)


def _style(name: str) -> dict[str, Any]:
    place = _NAMES.index(name) if name in _NAMES else len(name)
    return {"label": name, "color": _COLOURS[place % len(_COLOURS)], "marker": _MARKS[place % len(_MARKS)]}


def _ratio_panel(axes: Axes, table: Table, kind: Kind) -> None:
    ticks = _RATIO_TICKS[kind]
    if kind == "ms":
        compared = [case.ratio(name, LIMIT, kind) for case in table.cases for name in (EAVES, case.best_peer(kind))]
        largest = max((ratio for ratio in compared if ratio is not None), default=0)
        beyond = next((count for count, tick in enumerate((ticks[-1], *_BEYOND)) if tick >= largest), len(_BEYOND))
        if beyond:  # labels of small steps would overlap
            ticks = (*(tick for tick in ticks if tick <= 1 or tick >= 1.5), *_BEYOND[:beyond])
    for place, name in enumerate(each for each in table.names(kind) if each != LIMIT):
        ratios = [case.ratio(name, LIMIT, kind) for case in table.cases]
        shown = [math.nan if ratio is None else min(max(ratio, ticks[0]), ticks[-1]) for ratio in ratios]
        # Curves that coincide stay visible: eaves is a broad line, and each next one is narrower, on top.
        axes.plot([case.size for case in table.cases], shown, linewidth=max(1.2, 3.6 - 0.5 * place), markersize=5,
                  clip_on=False, zorder=3 + 0.1 * place, **_style(name))  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", zorder=2)
    axes.set_xscale("log", base=2)
    sizes = [case.size for case in table.cases]
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(ticks[0], ticks[-1])
    labels = [f"{ticks[0]} or less", *(f"{tick:g}" for tick in ticks[1:-1]), f"{ticks[-1]} or more"]
    axes.set_yticks(ticks, labels, fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_xlabel(table.axis)
    _set_title(axes, table, table.words)


def _memory_panel(axes: Axes, table: Table, case: Case, all_tables: Sequence[Table]) -> None:
    points = {name: (entry["peak_mib"], entry["ms"]) for name, entry in case.entries.items() if entry.get("peak_mib")}
    own = []
    for other in (each for t in all_tables if (t.op, t.mode) == (table.op, table.mode) for each in t.cases):
        # The same row with less or more workspace.
        entry, first = other.entries.get(EAVES, {}), next(iter(case.entries.values()))
        options = {key: value for key, value in entry.get("options", {}).items() if key != "workspace_mib"}
        is_same = all(entry.get(key) == first[key] for key in ("shape", "dtype")) and options == first["options"]
        if is_same and "workspace_mib" in entry["options"] and entry["ms"] is not None:
            own.append((entry["peak_mib"], entry["ms"]))
    own.sort()
    if len(own) > 1:
        memories, times = zip(*own)
        axes.plot(memories, times, color=_COLOURS[0], linewidth=1.5, marker=".", label=f"{EAVES}, workspace_mib")
    for name, (memory, time) in points.items():
        if name == LIMIT:
            axes.axhline(time, color="black", linewidth=0.8, linestyle="--", label=LIMIT)
            axes.axvline(memory, color="black", linewidth=0.8, linestyle="--")
        else:
            axes.plot([memory], [time], linestyle="none", markersize=9, zorder=3, **_style(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}")
        axis.set_tick_params(which="both", labelsize=7)
    axes.grid(color="#DDDDDD", linewidth=0.8, which="both")
    axes.set_xlabel(QUANTITIES["peak_mib"])
    axes.set_ylabel(QUANTITIES["ms"])
    _set_title(axes, table, case.words)


def _set_title(axes: Axes, table: Table, words: str) -> None:
    axes.set_title(textwrap.fill(f"{MODES.get(table.mode, table.mode)}: {words}", 60), fontsize=9)
