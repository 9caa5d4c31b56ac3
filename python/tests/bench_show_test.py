"""Tests of what `python -m eaves.bench` shows: the tables and the plots."""

from __future__ import annotations

import inspect
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bench_toy import DIM, TOY, Eaves, FailsAt64, Peer, column, measured_table, small_flush, toy, toy_row  # noqa: F401
from eaves.bench import published, run
from eaves.bench.__main__ import main
from eaves.bench.benchmark import InvalidArgument, Operator, Request, Row, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.operators import OPERATORS
from eaves.bench.protocol import Protocol
from eaves.bench.providers import known_names
from eaves.bench.report import Kind, MeasuredTable, marks_legend, text_table
from eaves.bench.timing import Column, Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_name_of_the_published_tables_is_explained(operator: Operator) -> None:
    for sweep in ("seed", "quick"):
        for device in ("cpu", "cuda"):
            for table in operator.tables(Request(sweep, torch.device(device), "bf16", has_dtype=False)):
                assert not table.title_op or f"`{table.title_op}` means {table.op}" in published.TEXT.replace("\n", " ")


def test_help_and_output_say_what_the_published_tables_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert help_text.index(published.TEXT) < help_text.index("options:")

    def output(title_op: str, *options: str) -> str:
        plain = toy(Eaves(), modes=("fwd",))
        operator = replace(plain, tables=lambda request: [replace(each, title_op=title_op)
                                                          for each in plain.tables(request)])  # fmt: skip
        assert main([*TOY, "--max-bytes", "1K", *options], [operator]) == 0
        return capsys.readouterr().out.replace("# ", "")

    assert published.TEXT not in output("")
    assert published.TEXT in output("", "--protocol", "seed")
    assert published.TEXT in output("lce")


def test_the_program_has_the_same_words() -> None:
    program = (Path(__file__).parents[2] / "cli/bench.cpp").read_text()
    lines = re.findall(r'^ +"(.*)"', program.partition("kPublished[] = {")[2].partition("};")[0], re.MULTILINE)
    other = ", `--protocol seed` the same backward (it accumulates into .grad)"
    assert " ".join(lines) == published.TEXT.replace("\n", " ").replace(other, "")
    for words in (
        "stopped; what was measured, ",
        "above, and in no file without --json",
        "stopped before a row was measured; nothing is written",
    ):
        assert words in program and words in inspect.getsource(run)


def test_a_table_has_the_published_layout() -> None:
    measured = measured_table(
        {"eaves": column(0.1), "torch": column(0.4), "torch.compile": column(0.3), LIMIT: column(0.08)},
        {"eaves": column(12.5), "torch": column(25), "torch.compile": column(100), LIMIT: column(10)},
    )
    assert text_table(measured, "speed") == (
        "toy-speed-fwd-dim16-fp32:\n"
        "          n      eaves      torch  torch.compile      limit  eaves / limit  best peer / eaves\n"
        "0    1024.0   0.100000   0.400000       0.300000   0.080000          1.250              3.000\n"
        "1  131072.0  12.500000  25.000000     100.000000  10.000000          1.250              2.000\n"
    )


def test_the_memory_table_is_in_mib() -> None:
    measured = measured_table({"eaves": column(1, 8), "torch": column(1, 16.25), LIMIT: column(1, 8)}, mode="bwd")
    assert text_table(measured, "memory") == (
        "toy-memory-bwd-dim16-fp32:\n"
        "        n     eaves      torch     limit  eaves / limit  best peer / eaves\n"
        "0  1024.0  8.000000  16.250000  8.000000          1.000              2.031\n"
    )


def test_the_host_table_has_no_limit() -> None:
    measured = measured_table({"eaves": column(1, 1, 0.02), "torch": column(1, 1, 0.05), LIMIT: column(1, 1, 0.01)})
    assert text_table(measured, "host") == (
        "toy-host-fwd-dim16-fp32:\n"
        "        n     eaves     torch  best peer / eaves\n"
        "0  1024.0  0.020000  0.050000              2.500\n"
    )


def test_a_skipped_column_is_nan_and_its_reason_ends_the_row() -> None:
    measured = measured_table({"eaves": column(1), "torch": Column("no compiler"), LIMIT: column(1)})
    row = text_table(measured, "speed").splitlines()[2]
    assert row == "0  1024.0  1.000000    NaN  1.000000          1.000                NaN  torch: no compiler"


def test_rows_with_options_name_what_the_first_column_does_not() -> None:
    rows = [toy_row("fwd", 8, {"axes": [axis]}) for axis in (0, 1)]
    table = Table("toy", "fwd", "layouts-fp32", "n", "fp32", rows)
    measured = MeasuredTable(table, ["eaves"], [Measurement({"eaves": column(1), LIMIT: column(1)})] * 2)
    assert [line.split("1.000  ")[1] for line in text_table(measured, "speed").splitlines()[2:]] == [
        "dim=16 axes=[0]",
        "dim=16 axes=[1]",
    ]


def test_what_is_the_same_option_in_every_row_is_left_to_the_title() -> None:
    options = [{"mean": True, "scale": 2}, {"mean": True, "scale": 3}, {"mean": True}]
    table = Table("toy", "fwd", "options-fp32", "n", "fp32", [toy_row("fwd", 8, dict(each)) for each in options])
    measured = MeasuredTable(table, ["eaves"], [Measurement({"eaves": column(1), LIMIT: column(1)})] * 3)
    assert [line.split("1.000  ")[1] for line in text_table(measured, "speed").splitlines()[2:]] == [
        "dim=16 scale=2",
        "dim=16 scale=3",
        "dim=16",
    ]


def test_a_table_is_a_curve_where_its_rows_differ_along_the_axis_alone() -> None:
    def is_curve(*rows: Row) -> bool:
        return Table("toy", "fwd", "fp32", "n", "fp32", rows).is_curve

    assert is_curve(toy_row("fwd", 8), toy_row("fwd", 64))
    assert is_curve(toy_row("fwd", 8, {"mean": True}), toy_row("fwd", 64, {"mean": True}))
    assert not is_curve(toy_row("fwd", 8, {"mean": True}), toy_row("fwd", 64))
    assert not is_curve(toy_row("fwd", 8), replace(toy_row("fwd", 64), shape={"dim": 2 * DIM, "n": 64}))


def test_speed_is_the_median() -> None:
    measured = measured_table({"eaves": Column("", Timing(2.0, 1.5, 40.0, 9)), LIMIT: column(1)})
    assert text_table(measured, "speed").splitlines()[2].split()[2] == "2.000000"


def test_an_unsteady_row_says_so() -> None:
    unsteady = Column("", Timing(5.0, 1.0, 6.0, 2), None, 0)
    measured = measured_table({"eaves": unsteady, LIMIT: column(1)})
    assert text_table(measured, "speed").splitlines()[2].endswith("  unsteady, fastest eaves 1.000")
    assert marks_legend([measured]).startswith("# rows of a busy machine: 1 unsteady (")
    assert ", 0 slow\n" in marks_legend([measured])


def with_limits(*limits: tuple[float, int], flops: int = 0, dtype: str = "fp32") -> MeasuredTable:
    """Rows whose limit takes so many milliseconds for so much work."""
    measured = measured_table(*({"eaves": column(9), LIMIT: column(ms)} for ms, _ in limits))
    rows = [replace(row, flops=flops) for row in measured.table.rows]
    measurements = [replace(each, limit_work=work) for each, (_, work) in zip(measured.measurements, limits)]
    return MeasuredTable(replace(measured.table, dtype=dtype, rows=rows), measured.providers, measurements)


def test_a_row_whose_fastest_repetition_is_slow_says_so() -> None:
    measured = with_limits((2.0, 200), (4.0, 150))  # 100 in a millisecond, and less than half
    run = [measured]
    lines = text_table(measured, "speed", run).splitlines()
    assert "slow" not in lines[2]
    assert lines[3].endswith("  slow, fastest eaves 9.000, limit 4.000")
    assert ": 0 unsteady (" in marks_legend(run) and ", 1 slow\n" in marks_legend(run)
    assert "slow" not in text_table(measured, "speed", [with_limits((4.0, 150))])  # nothing else to be compared with


def test_a_row_that_only_a_later_table_shows_to_be_slow_has_no_mark_and_is_not_counted() -> None:
    assert marks_legend([with_limits((4.0, 150)), with_limits((2.0, 200))]) == ""


def test_limits_of_other_things_and_short_ones_are_not_compared() -> None:
    short = with_limits((0.5, 1000), (0.5, 1))  # 2000 in a millisecond, and 2
    streams = with_limits((2.0, 20))
    products = with_limits((2.0, 2000), flops=1)
    others = with_limits((2.0, 200), flops=1, dtype="bf16")
    assert marks_legend([short, streams, products, others]) == ""
    assert marks_legend([products, with_limits((2.0, 200), flops=1)]) != ""


# ---------------------------------------------------------------------------------------------------------------- plots


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_plots_are_png_files_of_a_readable_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*TOY, "--plot", str(tmp_path / "new" / "plots")], [toy(Eaves(), Peer(), FailsAt64())]) == 0
    files = sorted((tmp_path / "new" / "plots").iterdir())
    titles = [f"toy-{kind}-{mode}-dim16-fp32.png" for kind in ("memory", "speed") for mode in ("bwd", "fwd")]
    assert [path.name for path in files] == titles
    for path in files:
        assert png_size(path) == (1600, 900)


SETTING = {"device": "NVIDIA H200", "eaves_version": "0.1.0", "torch_version": "2.11.0"}
NAMES = ["eaves", "torch", "torch.compile", "other"]


def plotted(kind: Kind, measured: MeasuredTable, protocol: Protocol) -> Figure:
    plot = pytest.importorskip("eaves.bench.plot", exc_type=InvalidArgument)
    figure: Figure = plot.figure(measured, kind, NAMES, plot.Setting(**SETTING, protocol=protocol))
    plot.pyplot.close(figure)
    return figure


def lines_of(figure: Figure) -> dict[str, Line2D]:
    """The curves by their names in the legend."""
    return {str(line.get_label()): line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")}


def measured_curves(*names: str, unsteady: tuple[str, ...] = ()) -> MeasuredTable:
    """Two lengths; the milliseconds and the MiB say whose they are."""

    def of(name: str, length: int) -> Column:
        ms = {"eaves": 1.0, "torch": 4.0, "torch.compile": 2.0, LIMIT: 0.5}[name] * length
        fastest = ms / 3 if name in unsteady and length == 2 else ms
        return Column("", Timing(ms, fastest, 9 * ms, 5), None, int(8 * ms * 2**20))

    measured = measured_table(*[{name: of(name, length) for name in [*names, LIMIT]} for length in (1, 2)])
    table = replace(measured.table, axis_words="length of a row", shape_words="reduced over n")
    return replace(measured, table=table)


@pytest.mark.parametrize(("kind", "factor"), [("speed", 1), ("memory", 8)])
def test_every_provider_has_its_curve_and_so_has_the_limit(kind: Kind, factor: int) -> None:
    figure = plotted(kind, measured_curves("eaves", "torch", "torch.compile"), Protocol("autograd"))
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = lines_of(figure)
    limit = {"speed": "limit (streams the same bytes)", "memory": "limit (inputs and outputs alone)"}[kind]
    of_one = {"eaves": 1.0, "torch": 4.0, "torch.compile": 2.0, limit: 0.5}
    assert list(lines) == list(of_one)
    for name, value in of_one.items():
        assert list(lines[name].get_xdata()) == [1024, 131072]
        assert list(lines[name].get_ydata()) == [value * factor, 2 * value * factor]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(of_one)
    assert lines[limit].is_dashed() and not lines["eaves"].is_dashed()


@pytest.mark.parametrize("empty", [Column("no such GEMM"), column(0)])
def test_who_has_no_curve_is_not_in_the_legend(empty: Column) -> None:
    measured = measured_curves("eaves", "torch", "torch.compile")
    measurements = [replace(each, columns=each.columns | {"torch": empty}) for each in measured.measurements]
    figure = plotted("speed", replace(measured, measurements=measurements), Protocol("autograd"))
    words = ["eaves", "torch.compile", "limit (streams the same bytes)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == words
    assert list(lines_of(figure)) == words
    without_limit = [replace(each, columns=each.columns | {LIMIT: empty}) for each in measured.measurements]
    figure = plotted("speed", replace(measured, measurements=without_limit), Protocol("autograd"))
    assert list(lines_of(figure)) == NAMES[:3]


def test_who_is_measured_at_one_length_alone_is_in_the_legend() -> None:
    measured = measured_curves("eaves", "torch")
    first, second = measured.measurements
    failed = replace(second, columns=second.columns | {"torch": Column("does not fit in memory")})
    lines = lines_of(plotted("memory", replace(measured, measurements=[first, failed]), Protocol("autograd")))
    assert list(lines)[:2] == ["eaves", "torch"]


@pytest.mark.parametrize(
    ("kind", "words"), [("speed", "limit (the matrix products alone)"), ("memory", "limit (inputs and outputs alone)")]
)
def test_a_limit_of_products_says_so(kind: Kind, words: str) -> None:
    measured = measured_curves("eaves", "torch")
    rows = [replace(row, make_limit=lambda inputs: lambda: None) for row in measured.table.rows]
    of_products = replace(measured, table=replace(measured.table, rows=rows))
    assert words in lines_of(plotted(kind, of_products, Protocol("autograd")))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_provider_of_an_operator_has_a_curve_of_its_own(operator: Operator) -> None:
    plot = pytest.importorskip("eaves.bench.plot", exc_type=InvalidArgument)
    names = known_names(OPERATORS)
    places = [names.index(provider.name) for provider in operator.providers]
    curves = {(plot._COLOURS[i % len(plot._COLOURS)], plot._MARKS[i % len(plot._MARKS)]) for i in places}
    assert len(curves) == len(operator.providers)


def test_a_provider_has_the_same_colour_and_mark_in_every_plot() -> None:
    both = lines_of(plotted("speed", measured_curves("eaves", "torch.compile"), Protocol("autograd")))
    alone = lines_of(plotted("memory", measured_curves("torch.compile"), Protocol("autograd")))
    colour = both["torch.compile"].get_color()
    assert colour == alone["torch.compile"].get_color() != both["eaves"].get_color()
    assert both["torch.compile"].get_marker() == alone["torch.compile"].get_marker() != both["eaves"].get_marker()


def test_curves_on_each_other_are_all_seen() -> None:
    lines = list(lines_of(plotted("memory", measured_curves(*NAMES[:3]), Protocol("autograd"))).values())
    assert [line.get_zorder() for line in lines] == sorted(line.get_zorder() for line in lines)
    for sizes in ([line.get_linewidth() for line in lines], [line.get_markersize() for line in lines[:3]]):
        assert len(set(sizes)) == len(sizes) and sizes == sorted(sizes, reverse=True)


def test_the_words_of_a_plot_say_what_was_measured_where() -> None:
    (axes,) = plotted("speed", measured_curves("eaves"), Protocol("autograd")).axes
    assert axes.get_title(loc="left") == "toy, forward: time"
    assert [text.get_text() for text in axes.texts] == [
        "[16, n], float32, reduced over n\nNVIDIA H200, eaves 0.1.0, torch 2.11.0, protocol autograd"
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("n, length of a row", "time (ms)")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1024", "131072"]


def test_a_backward_that_accumulates_says_so() -> None:
    measured = measured_curves("eaves")
    backward = replace(measured, table=replace(measured.table, mode="bwd"))
    (axes,) = plotted("memory", backward, Protocol("seed")).axes
    assert axes.get_title(loc="left") == "toy, backward, adding to .grad: peak memory"
    assert axes.texts[0].get_text().endswith("protocol seed")


def test_an_unsteady_time_has_a_hollow_mark() -> None:
    measured = measured_curves("eaves", "torch", unsteady=("torch",))
    (axes,) = plotted("speed", measured, Protocol("autograd")).axes
    (hollow,) = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert (list(hollow.get_xdata()), list(hollow.get_ydata())) == ([131072], [8.0])
    assert "hollow: unsteady" in axes.texts[0].get_text()
    (memory,) = plotted("memory", measured, Protocol("autograd")).axes
    assert "hollow" not in memory.texts[0].get_text()


@pytest.mark.parametrize(
    ("low", "high", "first", "last", "count"),
    [
        (0.0061, 2.33, 0.005, 5, 10),
        (8, 2048, 5, 5000, 10),
        (8, 8, 5, 10, 2),
        (10, 20, 10, 20, 2),
        (0.01, 300, 0.01, 300, 10),
        (3, 3e7, 1, 1e8, 9),
    ],
)
def test_the_axis_begins_and_ends_with_a_label(low: float, high: float, first: float, last: float, count: int) -> None:
    plot = pytest.importorskip("eaves.bench.plot", exc_type=InvalidArgument)
    numbers = plot.round_numbers(low, high)
    assert (numbers[0], numbers[-1], len(numbers)) == (pytest.approx(first), pytest.approx(last), count)


def test_only_rows_of_the_same_options_are_drawn(tmp_path: Path) -> None:
    plot = pytest.importorskip("eaves.bench.plot", exc_type=InvalidArgument)
    setting = plot.Setting(**SETTING, protocol=Protocol("autograd"))
    measured = measured_curves("eaves")
    for axes, plots in (((0, 1), 0), ((1, 1), 2)):
        rows = [toy_row("fwd", n, {"axes": [axis]}) for n, axis in zip((8, 64), axes)]
        table = replace(measured.table, rows=rows)
        assert len(plot.draw([replace(measured, table=table)], NAMES, setting, str(tmp_path))) == plots


def test_the_file_of_a_plot_has_no_plus_in_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*TOY, "--plot", str(tmp_path)], [toy(Eaves(), modes=("fwd+bwd",))]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "toy-memory-fwd-bwd-dim16-fp32.png",
        "toy-speed-fwd-bwd-dim16-fp32.png",
    ]


def test_one_length_is_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*TOY, "--max-bytes", "1K", "--plot", str(tmp_path)], [toy(Eaves(), modes=("fwd",))]) == 0
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_plots_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eaves.bench.plot", raising=False)
    monkeypatch.delattr("eaves.bench.plot", raising=False)
    assert main([*TOY, "--plot", str(tmp_path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert err == "eaves.bench: --plot: matplotlib is not installed, expected it: pip install eaves[bench]\n"
    assert out == ""
