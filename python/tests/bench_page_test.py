"""Tests of the text that `python benchmarks` makes of results: tables, sentences, pictures, and a folder's pages."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import page, plot, program, results, tables
from bench.benchmark import InvalidArgument
from bench.harness import CASE, Entry
from bench.operators import OPERATORS
from bench.program import main
from bench.tables import text_table
from bench_toy import CPU, DEVICE, EAVES, MISSING, PEER, PROGRAM, QUICK, entries, small_flush, toy  # noqa: F401

TWO_LENGTHS = [
    *entries("fwd", 1024, eaves=(0.1, 8), torch=(0.4, 16), fla=(0.05, 32), limit=(0.08, 8)),
    *entries("fwd", 131072, eaves=(10, 64), torch=(25, 96), fla=(40, 128), limit=(8, 64)),
]


# --------------------------------------------------------------------------------------------------------------- tables


def test_a_table_has_a_line_for_each_provider_and_a_column_for_each_length() -> None:
    (table,) = tables.tables(TWO_LENGTHS)
    assert tables.cells(tables.tables(TWO_LENGTHS[::-1])[0], "ms")[0] == tables.cells(table, "ms")[0]  # ascending
    assert text_table(table, "ms") == (
        "toy, forward: dim 16, fp32; time in ms\n"
        "n                    1024  131072\n"
        "eaves               0.100    10.0\n"
        "torch               0.400    25.0\n"
        "fla                0.0500    40.0\n"
        "limit              0.0800    8.00\n"
        "eaves / limit        1.25    1.25\n"
        "best peer / eaves   0.500    2.50\n"
    )
    assert tables.markdown_table(table, "peak_mib")[-3:-1] == [
        "| eaves / limit | 1.00 | 1.00 |",
        "| best peer / eaves | 2.00 | 1.50 |",
    ]
    host = [entry | {"host_ms": 0.5} for entry in TWO_LENGTHS]
    assert [line[0] for line in tables.cells(tables.tables(host)[0], "host_ms")][1:4] == ["eaves", "torch", "fla"]


def test_cases_that_are_alone_stand_in_a_table_of_other_rows() -> None:
    alone = [entries("fwd", 8, options={"axes": [axis]}, eaves=(axis + 1, 1), limit=(1, 1)) for axis in (0, 1)]
    first, others = tables.tables([*TWO_LENGTHS, *alone[0], *alone[1]])
    assert first.is_curve and not others.is_curve
    text = text_table(others, "ms")
    assert text.startswith("toy, forward: other rows; time in ms\nrow             (1)   (2)\n")
    assert "(2) n 8, dim 16, axes [1], fp32\n" in text and "eaves / limit  1.00  2.00\n" in text
    alone[1][0]["ms_min"] = 0.5
    assert tables.notes(others, "ms")[-1] == "busy, fastest eaves 0.500 (2)"
    assert "busy" not in str(tables.notes(others, "peak_mib"))


def test_a_number_that_is_missing_is_a_dash_and_its_reason_stands_once_below() -> None:
    lines = [
        *entries("fwd", 8, eaves=(1, 1), torch="no `z_loss`", fla="does not fit", limit=(1, 1)),
        *entries("fwd", 16, eaves=(1, 1), torch="no `z_loss`", fla=(3, 1), limit=(1, 1)),
        *entries("fwd", 32, eaves="too large", torch="too large", fla="too large", limit="too large"),
    ]
    (table,) = tables.tables(lines)
    assert tables.cells(table, "ms")[2] == ["fla", "-", "3.00", "-"]
    assert tables.notes(table, "ms") == ["torch: no `z_loss` (8, 16)", "fla: does not fit (8)", "all: too large (32)"]
    assert "- `torch: no 'z_loss' (8, 16)`" in tables.markdown_table(table, "ms")


def test_rows_that_do_not_fit_in_memory_come_after_shorter_rows() -> None:
    no_room = {name: "does not fit in memory" for name in ("eaves", "torch", "limit")}
    long = entries("fwd", 131072, **no_room)
    all_tables = tables.tables([*TWO_LENGTHS[:4], *long])
    assert tables.headline(all_tables)[1][0].size == 1024
    assert tables.headline_table(all_tables)[1] == ["eaves", "0.100", "8.00"]
    assert "n 1024" in plot.of_operator("toy", all_tables, "a device")["toy"]
    # If no row of the first table fits, another table of the mode comes first.
    other = [entries("fwd", n, options={"z_loss": 1}, eaves=(1, 1), limit=(1, 1)) for n in (8, 16)]
    (chosen,), (case,) = tables.headline(tables.tables([*long, *entries("fwd", 64, **no_room), *other[0], *other[1]]))
    assert "z loss 1" in chosen.words and case.size == 16
    assert plot.of_operator("toy", tables.tables(long), "a device") == {}


def test_a_peak_below_inputs_and_outputs_is_shown_nowhere() -> None:
    lines = entries("fwd", 8, eaves=(2, 10), torch=(2, 8.9), fla=(2, 9.1), limit=(1, 10))
    (table,) = tables.tables(lines)
    assert [table.cases[0].value(name, "peak_mib") for name in ("eaves", "torch", "fla")] == [10, None, 9.1]
    assert table.cases[0].value("torch", "ms") == 2
    assert table.cases[0].best_peer("peak_mib") == "fla"


def test_rows_of_a_busy_machine_count_in_no_sentence_but_one() -> None:
    rows = [entries("fwd", n, eaves=(2, 1), torch=(3, 1), limit=(1, 1)) for n in (8, 16, 32, 64)]

    def disturbed(count: int) -> list[Entry]:
        return [entry | {"ms": 9.0} if row < count else entry for row in range(4) for entry in rows[row]]

    kept, busy = tables.summary(tables.tables(disturbed(2)))
    assert kept.startswith("toy, forward, 2 rows: eaves takes 2.00 times the limit. The best peer takes 1.50 times")
    assert busy == "Other programs slowed down 2 of 4 rows, which these sentences leave out."
    *_, busy, most = tables.summary(tables.tables(disturbed(3)))
    assert busy.startswith("Other programs slowed down 3 of 4 rows, ") and most == tables.MOST_ARE_BUSY
    assert tables.summary(tables.tables(disturbed(4))) == [busy.replace("3 of", "4 of"), most]


def test_the_rows_where_a_peer_is_faster_or_takes_less_memory() -> None:
    lines = [
        *entries("fwd", 1024, eaves=(0.1, 8), torch=(0.098, 16), fla=(0.05, 32), limit=(0.08, 8)),
        *entries("fwd", 131072, eaves=(10, 64), torch=(9.8, 32), fla=(40, 128), limit=(8, 32)),
    ]
    assert tables.slower(tables.tables(lines))[1:] == [
        # The time of torch at 131072 is 0.98 of eaves' time, which is within the noise.
        ["toy", "forward", "time", "1 of 2", "n 1024", "0.500", "fla, n 1024, dim 16, fp32"],
        ["toy", "forward", "memory", "1 of 2", "n 131072", "0.500", "torch, n 131072, dim 16, fp32"],
    ]


def test_the_rows_where_a_peer_is_at_least_as_good_in_time_and_memory() -> None:
    def columns(n: int, **peers: Any) -> list[Entry]:
        return entries("fwd", n, eaves=(1, 100), eaves_memory=(2, 50), **peers, limit=(1, 10))

    # torch is slower than eaves and takes a little more memory than eaves-memory, within the margin that counts as
    # equal. At 1024 fla only trades time for memory.
    lines = columns(1024, torch=(1.2, 51), fla=(30, 20)) + columns(131072, torch=(1.5, 50), fla=(2.04, 40))
    assert tables.as_good(tables.tables(lines) + tables.tables(columns(1024, torch=(1.2, 52), fla=(2, 50))))[1:] == [
        ["toy", "forward", "eaves-memory", "torch", "2 of 3", "n 1024, 131072", "0.600 to 0.750", "1.00 to 1.02"],
        ["toy", "forward", "eaves-memory", "fla", "1 of 3", "n 131072", "1.02", "0.800"],
    ]


# ------------------------------------------------------------------------------------------------------------- pictures


def words_of(picture: str) -> list[tuple[float, float, str, str | None]]:
    """Place, words and colour of each text; fails if the picture is no XML."""
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return [(float(each.attrib["x"]), float(each.attrib["y"]), each.text or "", each.get("fill")) for each in found]


def test_bars_have_the_numbers_of_the_longest_row_and_a_sentence_about_them() -> None:
    lines = entries("fwd+bwd", 64, eaves=(2, 8), torch=(8, 16), fla=(1, 8), limit=(1, 8))
    lines[2]["peak_mib"] = None
    (picture,) = plot.of_operator("toy", tables.tables([*TWO_LENGTHS, *lines]), "a <device>").values()
    words = [each for _, _, each, _ in words_of(picture)]
    assert words[0] == "eaves takes 25 % of torch's time, 50 % of its memory"
    assert words[1] == "toy, forward and backward: n 64, dim 16, fp32"
    # The fastest provider is the first, and the limit the last; then the numbers.
    assert words[2:11] == ["time in ms", "1.00", "fla", "2.00", "eaves", "8.00", "torch", "1.00", "limit"]
    assert words[11:] == ["peak memory in MiB", "-", "8.00", "16.0", "8.00", "shorter is better; a <device>"]


def test_the_names_of_curves_stand_apart_and_a_library_has_one_colour() -> None:
    alike = {name: (10, 64) for name in ("eaves", "eaves-memory", "liger", "liger-larger", "torch", "limit")}
    lines = [entry for n in (1024, 1536, 131072) for entry in entries("fwd", n, **alike)]
    words = words_of(plot.of_operator("toy", tables.tables(lines), "a device")["toy-time"])
    places = {name: (y, colour) for _, y, name, colour in words if name in alike}
    assert len(places) == len(alike) == 6
    heights = sorted(y for y, _ in places.values())
    assert min(above - below for below, above in itertools.pairwise(heights)) >= 15
    assert places["eaves"][1] == places["eaves-memory"][1] != places["liger"][1] == places["liger-larger"][1]
    # 1536 is too near to 1024.
    assert {"1024", "131072", "1"} <= {each for _, _, each, _ in words} and "1536" not in {each[2] for each in words}


def test_every_library_has_a_colour_of_its_own() -> None:
    names = [provider.name for operator in OPERATORS for provider in operator.providers]
    assert plot._GREY not in map(plot._colour, names)
    assert len(set(plot._COLOURS.values())) == len(plot._COLOURS)


# ----------------------------------------------------------------------------------------------------------- the folder


def test_without_an_operator_all_of_them_are_measured_by_both_protocols_and_drawn_again_byte_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    operators = [toy(EAVES, PEER, name=name, modes=("fwd",)) for name in ("first", "second")]
    assert main(QUICK, operators) == 0
    folder = tmp_path / DEVICE
    written = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sorted(written) == sorted(
        ["README.md", "details.md"]
        + [f"{name}_{protocol}.json" for name in ("first", "second") for protocol in ("autograd", "accumulate")]
        + [f"plots/{name}.svg" for name in ("first", "first-time", "second", "second-time")]
    )
    out, err = capsys.readouterr()
    assert f"# wrote {folder / 'second_accumulate.json'}" in out.splitlines() and err == ""
    for path in [*folder.rglob("*.svg"), *folder.glob("*.md")]:
        path.unlink()
    page.draw(folder, operators)
    assert {name: (folder / name).read_bytes() for name in written} == written


def put(folder: Path, lines: list[Entry], protocol: str = "autograd", **head: object) -> Path:
    """Writes a result file of the operator toy."""
    path = folder / f"toy_{protocol}.json"
    results.write(path, results.result(lines, CPU, protocol) | head)
    return path


def test_a_run_that_would_lose_numbers_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--provider", "eaves"]
    arguments = ["toy", *QUICK, "--protocol", "autograd", "--results", str(tmp_path)]
    assert main(arguments, [toy(EAVES, PEER)]) == 0
    path = tmp_path / DEVICE / "toy_autograd.json"
    before = path.read_bytes()
    assert main([*arguments, *argv], [toy(EAVES, PEER)]) == 2
    err = capsys.readouterr().err
    assert (
        "would lose 4 numbers that this run does not measure, the last of peer at bwd fp32 {'dim': 16, 'n': 64}" in err
    )
    assert err.endswith("; expected another folder or --replace\n")
    assert path.read_bytes() == before
    assert main([*arguments, *argv, "--replace"], [toy(EAVES, PEER)]) == 0
    assert path.read_bytes() != before


def test_a_folder_of_another_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / DEVICE).mkdir()
    put(tmp_path / DEVICE, TWO_LENGTHS, device="NVIDIA H200")
    assert main([*QUICK, "--results", str(tmp_path)], [toy(EAVES)]) == 2
    assert "holds results of NVIDIA H200, but this run is on" in capsys.readouterr().err
    put(tmp_path / DEVICE, TWO_LENGTHS, "accumulate", device="NVIDIA H100")
    with pytest.raises(InvalidArgument, match="holds results of NVIDIA H200 and NVIDIA H100, expected one folder for"):
        page.draw(tmp_path / DEVICE, [toy(EAVES)])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: "{",
        lambda content: "[]",
        lambda content: json.dumps(content | {"protocol": "accumulate"}),
        lambda content: json.dumps({key: value for key, value in content.items() if key != "device"}),
        lambda content: json.dumps(content | {"rows": [content["rows"][0] | {"ms": "fast"}]}),
        lambda content: json.dumps(content | {"rows": [{key: content["rows"][0][key] for key in CASE}]}),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_sentence(spoil: Any, tmp_path: Path) -> None:
    path = put(tmp_path, TWO_LENGTHS)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(InvalidArgument, match="is not a result file of this program: ") as raised:
        page.draw(tmp_path, [toy(EAVES)])
    assert str(raised.value).startswith(f'"{path}"') and "\n" not in str(raised.value)


def test_the_page_says_why_a_provider_did_not_load(tmp_path: Path) -> None:
    operators = [toy(EAVES, MISSING)]
    assert main(["toy", *QUICK, "--results", str(tmp_path)], operators) == 0
    details = (tmp_path / DEVICE / "details.md").read_text()
    assert details.endswith("- toy, protocol accumulate, missing: `No module named 'no_such_module'`\n")


# ------------------------------------------------------------------------------------------------------ committed files

COMMITTED = sorted(PROGRAM.glob("results/*/README.md"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_committed_pages_are_what_their_files_say(path: Path) -> None:
    folder = page.Folder(path.parent, OPERATORS)
    drawn = page.texts(folder)
    for name, text in drawn.items():
        assert (path.parent / name).read_text() == text, f"python benchmarks page {path.parent} draws it again"
    # Every picture has a link on a page.
    linked = set(re.findall(r"\]\((plots/[^)]*)\)", "".join(drawn.values())))
    assert linked == {f"plots/{each.name}" for each in path.parent.glob("plots/*")} and linked
    heads = folder.files.values()
    assert {results.folder_name(head["device"], head["cuda"] is not None) for head in heads} == {path.parent.name}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_every_committed_number_is_on_a_page(path: Path) -> None:
    """Looks up each row of each file: the time and the memory of every measured provider, below the row's own title."""
    text = "".join(page.texts(page.Folder(path.parent, OPERATORS)).values())
    for file in [*path.parent.glob("*_autograd.json"), *path.parent.glob("*_accumulate.json")]:
        for table in tables.tables(json.loads(file.read_text())["rows"]):
            for kind in ("ms", "peak_mib"):
                drawn = "\n".join(tables.markdown(tables.cells(table, kind)))  # type: ignore[arg-type]
                assert table.title in text and drawn in text
