"""Tests of the folder that `python -m eaves.bench` writes without an operator, and of the page in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from bench_toy import (  # noqa: F401
    CPU,
    QUICK,
    TOY,
    Eaves,
    FailsAt64,
    Missing,
    Peer,
    column,
    exp_sum,
    measured_table,
    small_flush,
    toy,
    toy_row,
)
from eaves.bench import harness, page, published, results
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Operator, Provider, Request, Row, Table
from eaves.bench.device import device_name
from eaves.bench.harness import LIMIT
from eaves.bench.operators import OPERATORS
from eaves.bench.protocol import Protocol
from eaves.bench.report import MeasuredTable
from eaves.bench.stored import StoredFolder
from eaves.bench.timing import Column

ROOT = Path(__file__).resolve().parents[2]
DEVICE = results.folder_name(device_name(CPU), is_gpu=False)
OPERATOR_NAMES = ("first", "second")
TITLES = [f"{name}-{kind}-fwd-dim16-fp32" for name in OPERATOR_NAMES for kind in ("speed", "memory")]


def two_operators() -> list[Operator]:
    return [toy(Eaves(), Peer(), name=name, modes=("fwd",)) for name in OPERATOR_NAMES]


def files_of(folder: Path) -> dict[str, bytes]:
    """By their paths in the folder; hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file()}  # fmt: skip


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each row the garbage is collected, which is most of a small row's time."""
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are most of a page's time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eaves.bench.plot", raising=False)
    monkeypatch.delattr("eaves.bench.plot", raising=False)


# ----------------------------------------------------------------------------------------------------------- the folder


def test_without_an_operator_all_of_them_are_measured_by_both_protocols_into_the_folder_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(QUICK, two_operators()) == 0
    folder = tmp_path / "benchmarks" / "results" / DEVICE
    pictures = [f"{place}/{title}.png" for place in ("plots", "plots/seed") for title in TITLES]
    files = [f"{name}_{protocol}.json" for name in OPERATOR_NAMES for protocol in ("autograd", "seed")]
    assert sorted(files_of(folder)) == sorted(["README.md", *files, *pictures])
    for name in files:
        result = json.loads((folder / name).read_text())
        assert (f"{result['rows'][0]['op']}_{result['protocol']}.json") == name
        assert len(result["rows"]) == 2 * 3  # lengths, columns
    text = (folder / "README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("### ")] == [f"### {title}:" for title in TITLES]
    assert all(text.count(f'<img src="{picture}"') == 1 for picture in pictures)
    assert "Every row of the published tables is above" in text
    out, err = capsys.readouterr()
    assert f"# wrote {Path('benchmarks/results', DEVICE, 'second_seed.json')}" in out.splitlines()
    assert err == ""


def test_the_page_has_the_numbers_of_the_files_under_their_protocols(tmp_path: Path, no_matplotlib: None) -> None:
    assert main([*QUICK, "--results", str(tmp_path)], two_operators()) == 0
    folder = tmp_path / DEVICE
    sections = (folder / "README.md").read_text().split("### second-speed-fwd-dim16-fp32:\n")[1].split("###")[0]
    _, autograd, seed = sections.split("Protocol ")
    for protocol, section in (("autograd", autograd), ("seed", seed)):
        assert section.startswith(f"{protocol}, ms:\n")
        rows = json.loads((folder / f"second_{protocol}.json").read_text())["rows"]
        ms = [f"{row['ms']:.6f}" for row in rows if row["shape"]["n"] == 64]
        assert f"| 64 | {' | '.join(ms)} | " in section


def test_the_page_is_drawn_again_from_the_files_byte_by_byte(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    operators = [toy(Eaves(), Peer(), modes=("fwd",))]
    assert main([*QUICK, "--results", str(tmp_path)], operators) == 0
    folder = tmp_path / DEVICE
    written = files_of(folder)
    for path in [*folder.rglob("*.png"), folder / "README.md"]:
        path.unlink()
    assert main(["--page", str(folder)], operators) == 0
    assert files_of(folder) == written


def test_what_is_named_is_measured_and_the_page_has_everything_that_is_there(
    tmp_path: Path, no_matplotlib: None
) -> None:
    operators = two_operators()
    assert main([*QUICK, "--results", str(tmp_path)], operators) == 0
    folder = tmp_path / DEVICE
    before = files_of(folder)
    argv = ["first", *QUICK, "--repetitions", "3", "--protocol", "seed", "--results", str(tmp_path)]
    assert main(argv, operators) == 0
    after = files_of(folder)
    assert [name for name in before if before[name] != after[name]] == ["README.md", "first_seed.json"]
    assert after["README.md"].count(b"### ") == len(TITLES)
    assert main(["second", *QUICK, "--repetitions", "3", "--results", str(tmp_path)], operators) == 0
    changed = [name for name, content in files_of(folder).items() if content != after[name]]
    assert changed == ["README.md", "second_autograd.json", "second_seed.json"]


def test_without_matplotlib_there_is_a_page_without_curves(
    tmp_path: Path, no_matplotlib: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--results", str(tmp_path)], [toy(Eaves(), modes=("fwd",))]) == 0
    err = capsys.readouterr().err
    assert err == "# no curves are drawn: matplotlib is not installed, expected it: pip install eaves[bench]\n"
    assert "<img" not in (tmp_path / DEVICE / "README.md").read_text()


@pytest.mark.parametrize(
    ("device", "is_gpu", "folder"),
    [
        ("NVIDIA H200", True, "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090", True, "nvidia-geforce-rtx-4090"),
        ("AMD EPYC 7B13 64-Core Processor (2 threads)", False, "amd-epyc-7b13"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics (8 threads)", False, "amd-ryzen-7-7840u"),
        ("AMD Ryzen 7 5800H with Radeon Graphics (8 threads)", False, "amd-ryzen-7-5800h"),
        ("13th Gen Intel(R) Core(TM) i7-13700 (8 threads)", False, "13th-gen-intel-core-i7-13700"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz (2 threads)", False, "intel-xeon"),
        ("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz (2 threads)", False, "intel-xeon-e5-2686-v4"),
        ("AMD EPYC (2 threads)", False, "amd-epyc"),
        ("Intel(R) Xeon(R) Platinum 8480C (16 threads)", False, "intel-xeon-platinum-8480c"),
        ("CPU (1 thread)", False, "cpu"),
    ],
)
def test_the_folder_has_the_name_of_the_device(device: str, is_gpu: bool, folder: str) -> None:
    assert results.folder_name(device, is_gpu) == folder


# ------------------------------------------------------------------------------------------------------------- the page


def put(
    folder: Path, measured: Sequence[MeasuredTable], protocol: Literal["autograd", "seed"] = "autograd", **head: object
) -> None:
    """A result file of the operator toy."""
    result = results.result(measured, CPU, Protocol(protocol), {"torch": "2.11.0"}) | head
    (folder / f"toy_{protocol}.json").write_text(results.to_json(result))


def text_of(folder: Path, *tables: MeasuredTable, providers: Sequence[Provider] = ()) -> str:
    """The page of the operator toy, whose published tables these are."""
    operator = Operator("toy", providers, lambda request: [each.table for each in tables])
    return page.text(StoredFolder(folder, [operator]))


def two_lengths() -> MeasuredTable:
    return measured_table(
        {"eaves": column(0.1, 8), "torch": column(0.4, 16), "fla": column(0.05, 32), LIMIT: column(0.08, 8)},
        {"eaves": column(10, 64), "torch": column(25, 96), "fla": column(40, 128), LIMIT: column(8, 64)},
    )


def test_a_file_that_says_nothing_of_cuda_is_one_of_a_cpu(tmp_path: Path) -> None:
    put(tmp_path, [two_lengths()])
    path = tmp_path / "toy_autograd.json"
    result = json.loads(path.read_text())
    del result["cuda"]
    expected = text_of(tmp_path, two_lengths())
    path.write_text(results.to_json(result))
    assert text_of(tmp_path, two_lengths()) == expected


def test_a_table_has_the_columns_of_the_printed_one_and_names_the_best_peer() -> None:
    assert page.markdown_table(two_lengths(), "speed") == [
        "| n | eaves | torch | fla | limit | eaves / limit | best peer | best peer / eaves |",
        "|---:|---:|---:|---:|---:|---:|---|---:|",
        "| 1024 | 0.100000 | 0.400000 | 0.050000 | 0.080000 | 1.250 | fla | 0.500 |",
        "| 131072 | 10.000000 | 25.000000 | 40.000000 | 8.000000 | 1.250 | torch | 2.500 |",
    ]
    memory = page.markdown_table(two_lengths(), "memory")
    assert memory[2] == "| 1024 | 8.000000 | 16.000000 | 32.000000 | 8.000000 | 1.000 | torch | 2.000 |"


def test_rows_that_differ_in_more_than_the_length_are_described() -> None:
    measured = measured_table({"eaves": column(1), LIMIT: column(1)}, {"eaves": column(2), LIMIT: column(1)})
    rows = [toy_row("fwd", 8, {"axes": [axis]}) for axis in (0, 1)]
    described = MeasuredTable(Table("toy", "fwd", "layouts", "n", "fp32", rows), ["eaves"], measured.measurements)
    assert page.markdown_table(described, "speed") == [
        "| n | row | eaves | limit | eaves / limit |",
        "|---:|---|---:|---:|---:|",
        "| 8 | dim=16 axes=[0] | 1.000000 | 1.000000 | 1.000 |",
        "| 8 | dim=16 axes=[1] | 2.000000 | 1.000000 | 2.000 |",
    ]


def test_the_summary_has_the_ranges_and_names_the_worst_rows(tmp_path: Path) -> None:
    measured = two_lengths()
    put(tmp_path, [measured])
    lines = text_of(tmp_path, measured).splitlines()
    link = "(#toy-speed-fwd-dim16-fp32)"
    assert (
        f"| toy | fwd | autograd | 2 | n 1024 to 131072 | 1.250 to 1.250 ([n 1024]{link}) "
        f"| 0.500 to 2.500 ([n 1024]{link}) |"
    ) in lines
    assert "| toy | fwd | seed | 0 | [not measured](#not-measured) | - | - |" in lines
    begin = lines.index("<!-- summary -->")
    assert lines[begin + 3 : begin + 6] == [
        "| toy | fwd | dim 16, n 131072 | 10.0000 | 8.0000 | 1.250 | torch 25.0000 | 2.500 |",
        "| toy | fwd | dim 16, n 1024 | 0.1000 | 0.0800 | 1.250 | fla 0.0500 | 0.500 |",
        "<!-- end -->",
    ]


def test_the_page_says_what_the_published_tables_are_before_the_first(tmp_path: Path) -> None:
    put(tmp_path, [two_lengths()])
    text = text_of(tmp_path, two_lengths())
    assert text.index(published.TEXT) < text.index("## ")


def test_the_page_says_where_a_peer_is_faster_or_takes_less_memory(tmp_path: Path) -> None:
    measured = measured_table(
        {"eaves": column(0.1, 8), "torch": column(0.098, 16), "fla": column(0.05, 32), LIMIT: column(0.08, 8)},
        {"eaves": column(10, 64), "torch": column(9.8, 32), "fla": column(40, 128), LIMIT: column(8, 64)},
    )
    put(tmp_path, [measured])
    put(tmp_path, [measured], "seed")
    lines = text_of(tmp_path, measured).splitlines()
    assert "- [Where a peer is faster](#where-a-peer-is-faster)" in lines
    begin = lines.index("<!-- slower -->")
    assert lines[begin + 1 : begin + 10] == [
        "| operator | mode | what | rows | where | best peer / eaves, at worst | peer |",
        "|---|---|---|---|---|---:|---|",
        # 0.98, the time of torch over 131072, is within the noise.
        "| toy | fwd | time | 2 of 4 | n 1024 | 0.500 | fla, n 1024 of dim16-fp32 |",
        "| toy | fwd | memory | 2 of 4 | n 131072 | 0.500 | torch, n 131072 of dim16-fp32 |",
        "<!-- end -->",
        "",
        "| table | protocol | peer | rows | best peer / eaves |",
        "|---|---|---|---|---|",
        "| [toy-speed-fwd-dim16-fp32](#toy-speed-fwd-dim16-fp32) | autograd, seed | fla | n 1024 | 0.500 |",
    ]


def test_the_page_says_where_a_peer_is_at_least_as_good_in_time_and_memory(tmp_path: Path) -> None:
    def columns(**peers: Column) -> dict[str, Column]:
        return {"eaves": column(1, 100), "eaves-memory": column(2, 50), **peers, LIMIT: column(1, 10)}

    measured = measured_table(
        # Slower than eaves, in more memory than eaves-memory: this much is no difference. And one that only trades.
        columns(torch=column(1.2, 51), fla=column(30, 20)),
        columns(torch=column(1.5, 50), fla=column(2.04, 40)),
    )
    put(tmp_path, [measured])
    put(tmp_path, [measured_table(columns(torch=column(1.2, 52), fla=column(2, 50)))], "seed")
    lines = text_of(tmp_path, measured).splitlines()
    begin = lines.index("<!-- as-good -->")
    assert lines[begin + 1 : begin + 6] == [
        "| operator | mode | provider | peer | rows | where | time, peer / provider | memory, peer / provider |",
        "|---|---|---|---|---|---|---|---|",
        "| toy | fwd | eaves-memory | torch | 2 of 3 | n 1024, 131072 | 0.600 to 0.750 | 1.000 to 1.020 |",
        "| toy | fwd | eaves-memory | fla | 1 of 3 | n 131072 | 1.020 | 0.800 |",
        "<!-- end -->",
    ]


def test_the_page_says_that_no_peer_is_faster(tmp_path: Path) -> None:
    measured = measured_table({"eaves": column(1, 8), "torch": column(1, 8), LIMIT: column(1, 8)})
    put(tmp_path, [measured])
    text = text_of(tmp_path, measured)
    words = "No row is slower than its best peer, or takes more memory, by more than 3 %."
    assert f"<!-- slower -->\n{words}\n<!-- end -->\n" in text
    assert "<!-- as-good -->\nThere is no such row.\n<!-- end -->\n" in text


def test_the_page_opens_with_where_and_when_it_was_measured(tmp_path: Path) -> None:
    measured = two_lengths()
    commit = "0123456789abcdef0123456789abcdef01234567-dirty"
    put(tmp_path, [measured], device="NVIDIA H200", cuda="13.0", driver="580", commit=commit,
        date="2026-11-21T12:17:35Z", versions={"eaves": "0.1.0", "torch": "2.11.0"})  # fmt: skip
    lines = text_of(tmp_path, measured).splitlines()
    assert lines[0] == "# NVIDIA H200: eaves beside its peers"
    assert (
        "| [toy, autograd](toy_autograd.json) | NVIDIA H200, CUDA 13.0, driver 580 | `0123456789ab-dirty` "
        "| 2026-11-21 12:17:35 UTC | eaves 0.1.0, torch 2.11.0 |"
    ) in lines


def test_a_cell_without_a_number_is_a_dash_and_its_reason_stands_once_below(tmp_path: Path) -> None:
    lacks = Column("not supported: no `z_loss`")
    measured = measured_table(
        {"eaves": column(1), "torch": lacks, "fla": Column("does not fit"), LIMIT: column(1)},
        {"eaves": column(1), "torch": lacks, "fla": column(3), LIMIT: column(1)},
    )
    put(tmp_path, [measured])
    speed = text_of(tmp_path, measured).split("### toy-speed-")[1].split("###")[0]
    assert "| 1024 | 1.000000 | - | - | 1.000000 | 1.000 | - | - |" in speed
    assert [line for line in speed.splitlines() if line.startswith("- ")] == [
        "- `-`: torch: `not supported: no 'z_loss'`",
        "- `-`: fla: `does not fit` (n=1024)",
    ]


class Lacks(Peer):
    name = "lacks"

    def lacks(self, row: Row) -> str:
        return "no backward alone"


def test_who_has_no_column_is_named_with_the_reason(tmp_path: Path) -> None:
    measured = two_lengths()
    put(tmp_path, [measured])
    text = text_of(tmp_path, measured, providers=[Eaves(), Lacks(), Missing()])
    assert "- no column: lacks: `no backward alone`" in text
    assert "no column: missing" not in text


class OnGpu(Peer):
    name = "on-gpu"
    device_types = ("cuda",)


def test_who_has_no_number_in_a_file_is_named_with_the_reason(tmp_path: Path) -> None:
    failed = measured_table({"eaves": column(1), "peer": column(2), "fails": Column("no such GEMM"), LIMIT: column(1)})
    whole = measured_table({"eaves": column(1), "peer": column(2), "fails": column(2), LIMIT: column(1)})
    put(tmp_path, [failed])
    put(tmp_path, [whole], "seed")
    text = text_of(tmp_path, failed, providers=[Eaves(), Peer(), FailsAt64(), Missing(), Lacks(), OnGpu()])
    not_measured = text.split("## Not measured\n")[1].splitlines()
    why = "`was not installed, or was left out: the file has no row of it`"
    assert not_measured[1:] == [
        "- toy, protocol autograd, no number of fails: `no such GEMM`",
        f"- toy, protocol autograd, no number of missing: {why}",
        "- toy, protocol autograd, no number of lacks: `no backward alone`",
        "- toy, protocol autograd, no number of on-gpu: `needs a GPU`",
        f"- toy, protocol seed, no number of missing: {why}",
        "- toy, protocol seed, no number of lacks: `no backward alone`",
        "- toy, protocol seed, no number of on-gpu: `needs a GPU`",
        "",
        "Every row of the published tables is above, by both protocols.",
    ]
    # The part that other documents show has who could be there, in one line below the table.
    shown = text.split("<!-- summary -->\n")[1].split("<!-- end -->")[0].splitlines()
    assert shown[-2:] == ["", "Not measured: fails and missing in toy."]


def test_published_rows_without_a_number_are_listed(tmp_path: Path) -> None:
    whole = two_lengths()
    one = measured_table({"eaves": column(0.1), LIMIT: column(0.08)})
    put(tmp_path, [one])
    assert text_of(tmp_path, whole).split("## Not measured\n")[1].splitlines()[1:] == [
        "- toy-speed-fwd-dim16-fp32, toy-memory-fwd-dim16-fp32, protocol autograd, n 131072: "
        "`the file has no such row`",
        "- toy-speed-fwd-dim16-fp32, toy-memory-fwd-dim16-fp32, protocol seed, n 1024, 131072: "
        "`there is no result file`",
    ]  # fmt: skip


def test_a_published_row_that_eaves_could_not_do_is_listed_with_the_reason(tmp_path: Path) -> None:
    measured = measured_table({"eaves": Column("does not fit in memory"), LIMIT: column(0.08)})
    for protocol in ("autograd", "seed"):
        put(tmp_path, [measured], protocol)
    text = text_of(tmp_path, measured)
    assert text.split("## Not measured\n")[1].count("n 1024: `does not fit in memory`") == 2
    assert "| toy | fwd | seed | 0 | [not measured](#not-measured) | - | - |" in text


def test_rows_beyond_the_published_ones_stand_under_more(tmp_path: Path) -> None:
    published, other = two_lengths(), measured_table({"eaves": column(7), LIMIT: column(1)}, mode="bwd")

    def tables(request: Request) -> list[Table]:
        return [published.table] + ([other.table] if request.sweep == "quick" else [])

    put(tmp_path, [published, other])
    text = page.text(StoredFolder(tmp_path, [Operator("toy", [Eaves()], tables)]))
    assert "[More of toy](#more-of-toy)" in text
    own, more = text.split("## More of toy\n")
    assert "### toy-speed-fwd-dim16-fp32:" in own and "### toy-speed-bwd" not in own
    assert "### toy-speed-bwd-dim16-fp32:" in more and "| 1024 | 7.000000 |" in more
    assert "bwd" not in more.split("## Not measured\n")[1]


def test_an_operator_without_published_rows_is_summed_up_by_the_others(tmp_path: Path) -> None:
    """As on a CPU, whose default sweep has smaller sizes."""
    published = two_lengths()
    rows = [toy_row("fwd", n) for n in (8, 64)]
    smaller = replace(published, table=replace(published.table, title_suffix="small", rows=rows))

    def tables(request: Request) -> list[Table]:
        return [(published if request.sweep == "seed" else smaller).table]

    put(tmp_path, [smaller])
    lines = page.text(StoredFolder(tmp_path, [Operator("toy", [Eaves()], tables)])).splitlines()
    assert "None of the published rows is measured here." in lines
    row = "| toy | fwd | autograd | 2 | n 8 to 64 | 1.250 to 1.250 ([n 8](#toy-speed-fwd-small))"
    assert any(line.startswith(row) for line in lines)


def test_files_and_rows_that_are_not_shown_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = two_lengths()
    put(tmp_path, [measured])
    put(tmp_path, [measured], "seed")
    path = tmp_path / "toy_seed.json"
    path.write_text(path.read_text().replace('"protocol": "seed"', '"protocol": "kernel"'))
    shorter = measured_table({"eaves": column(1), LIMIT: column(1)})
    text = text_of(tmp_path, shorter)
    assert "- toy_seed.json is not shown: its protocol is kernel\n" in text
    assert "- toy_autograd.json: 4 numbers of rows that the program no longer has\n" in text
    page.check(tmp_path, [Operator("toy", [], lambda request: [measured.table])])
    assert "# toy_seed.json is left out: its protocol is kernel\n" in capsys.readouterr().err


def test_what_a_run_skips_is_on_its_page(tmp_path: Path, no_matplotlib: None) -> None:
    argv = [*QUICK, "--protocol", "autograd", "--results", str(tmp_path)]
    assert main(argv, [toy(Eaves(), FailsAt64(), Missing(), modes=("fwd",))]) == 0
    text = (tmp_path / DEVICE / "README.md").read_text()
    assert "- `-`: fails: `64 is too many` (n=64)" in text
    assert "| n | eaves | fails | limit |" in text


# -------------------------------------------------------------------------------------------------------- other devices


def test_files_of_another_device_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = two_lengths()
    folder = tmp_path / "amd-epyc-9654"
    folder.mkdir()
    put(folder, [measured], device="AMD EPYC 7B13 64-Core Processor (2 threads)")
    put(folder, [measured], "seed", device="AMD EPYC 9654 96-Core Processor (2 threads)")
    for name, device in (
        ("a", "AMD EPYC 7B13 64-Core Processor"),
        ("b", "AMD EPYC 9654 96-Core Processor (8 threads)"),
    ):
        (folder / f"{name}.json").write_text(f'{{"device": "{device}", "protocol": "kernel"}}')
    text = text_of(folder, measured)
    assert text.splitlines()[0] == "# AMD EPYC 9654 96-Core Processor (2 threads): eaves beside its peers"
    assert "Protocol autograd, ms" not in text and "Protocol seed, ms" in text
    why = "AMD EPYC 7B13 64-Core Processor (2 threads), the others' AMD EPYC 9654 96-Core Processor (2 threads)"
    assert f"- toy_autograd.json is not shown: its device is {why}\n" in text
    assert "- a.json is not shown: its device is AMD EPYC 7B13 64-Core Processor, the others'" in text
    assert "From C++, without peers: [b.json](b.json).\n" in text
    page.check(folder, [Operator("toy", [], lambda request: [measured.table])])
    assert f"# toy_autograd.json is left out: its device is {why}\n" in capsys.readouterr().err


def test_a_folder_of_another_device_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / DEVICE
    folder.mkdir()
    put(folder, [two_lengths()], device="Another")
    before = files_of(tmp_path)
    assert main([*QUICK, "--replace", "--results", str(tmp_path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert f'--results: "{folder}" holds results of Another, but this run is on {device_name(CPU)}, expected' in err
    assert out == "" and files_of(tmp_path) == before


# -------------------------------------------------------------------------------------------------- what would be lost


@pytest.mark.parametrize(
    ("argv", "loss"),
    [
        (["--provider", "eaves"], "would lose the numbers of peer, which"),
        (["--max-bytes", "1K"], "would lose 1 row, the last fwd fp32 dim 16, n 64, which"),
    ],
)
def test_a_run_that_would_lose_numbers_is_refused_before_anything_is_measured(
    argv: list[str], loss: str, tmp_path: Path, no_matplotlib: None, capsys: pytest.CaptureFixture[str]
) -> None:
    operators = [toy(Eaves(), Peer(), modes=("fwd",))]
    common = [*QUICK, "--protocol", "autograd", "--results", str(tmp_path)]
    assert main(common, operators) == 0
    before = files_of(tmp_path)
    capsys.readouterr()
    assert main([*common, *argv], operators) == 2
    out, err = capsys.readouterr()
    path = tmp_path / DEVICE / "toy_autograd.json"
    assert f'eaves.bench: --results: "{path}" {loss} this run does not measure' in err
    assert out == "" and files_of(tmp_path) == before
    assert main([*common, *argv, "--protocol", "seed"], operators) == 0  # a file that is not there loses nothing
    assert main([*common, *argv, "--replace"], operators) == 0
    assert files_of(tmp_path)[f"{DEVICE}/toy_autograd.json"] != before[f"{DEVICE}/toy_autograd.json"]


def test_a_run_that_measures_more_replaces_a_file(tmp_path: Path, no_matplotlib: None) -> None:
    common = [*QUICK, "--protocol", "autograd", "--results", str(tmp_path)]
    assert main([*common, "--provider", "eaves"], [toy(Eaves(), Peer(), modes=("fwd",))]) == 0
    assert main(common, [toy(Eaves(), Peer())]) == 0


# ---------------------------------------------------------------------------------------------------- who else shows it


def test_who_draws_a_page_that_the_readme_shows_is_told_what_writes_it_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks" / "results" / "here"
    folder.mkdir(parents=True)
    put(folder, [two_lengths()])
    (tmp_path / "tools").mkdir()
    readme, tool = tmp_path / "README.md", tmp_path / "tools" / "check_docs"

    def is_told() -> bool:
        assert main(["--page", str(folder)], [toy(Eaves())]) == 0
        return "shows this page: tools/check_docs --write brings it up to date\n" in capsys.readouterr().out

    assert not is_told()
    readme.write_text("<!-- page: benchmarks/results/here slower -->\n")
    assert not is_told()
    tool.write_text("")
    assert is_told()
    readme.write_text("<!-- page: benchmarks/results/here -->\n")
    assert is_told()
    readme.write_text("<!-- page: benchmarks/results/there -->\n")
    assert not is_told()
    readme.write_bytes(b"\xff<!-- page: benchmarks/results/here -->\n")
    assert not is_told()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--json", "a.json"], "--json: expected the names of the operators beside it; without any, --results names a"),
        (["--plot", "plots"], "--plot: expected the names of the operators beside it; without any, --results names a"),
        (["toy", "--json", "a.json", "--results", "r"], "--json: the folder of --results has what it writes, expected"),
        (["toy", "--plot", "plots", "--results", "r"], "--plot: the folder of --results has what it writes, expected"),
        (["toy", "--replace"], "--replace: is for the result files of a folder, expected --results beside it"),
        (["--page", ".", "--replace"], "expected nothing beside it, but there is --replace"),
        (["--results", ""], "--results: is empty, expected the name of a folder"),
        (["--results", "file"], "cannot be made: "),
        (["--page", ""], "--page: is empty, expected the name of a folder"),
        (["--page", "new"], '--page: "new" has no result file, expected such as toy_autograd.json'),
        (["--page", "."], '--page: "." has no result file, expected such as toy_autograd.json'),
        (["toy", "--page", "."], "--page: measures nothing, expected nothing beside it, but there is the operator toy"),
        (["--page", ".", "--sweep", "seed"], "expected nothing beside it, but there is --sweep"),
        (["--page", ".", "--max-bytes", "1K"], "expected nothing beside it, but there is --max-bytes"),
        (["--page", ".", "--provider", "eaves"], "expected nothing beside it, but there is --provider"),
        (["--page", ".", "--results", "r"], "expected nothing beside it, but there is --results"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_measured(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(argv, [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.startswith("eaves.bench: ") and err.count("\n") == 1
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_with_a_file_that_cannot_be_read_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / DEVICE).mkdir()
    (tmp_path / DEVICE / "toy_seed.json").write_text("{")
    assert main([*TOY, "--protocol", "autograd", "--results", str(tmp_path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert 'toy_seed.json" is no result file of this program: ' in err
    assert out == ""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"ms": 0.1,', '"ms": "0.1",', 'rows[0]: ms is "0.1", expected a number or null'),
        ('"ms": 0.1,', '"ms": NaN,', "NaN is no number of JSON"),
        ('"ms": 0.1,', '"ms": 1e999,', "rows[0]: ms is Infinity, expected a number or null"),
        ('"ms": 0.1,', '"ms": null,', "rows[0]: there is no skipped, expected a string"),
        ('"ms_min": 0.1,', "", "rows[0]: there is no ms_min, expected a number"),
        ('"dtype": "fp32"', '"dtype": "fp31"', 'rows[0]: dtype is "fp31", expected one of bf16, fp16, fp32, fp64'),
        ('"torch": "2.11.0"', '"torch": null', "versions: torch is null, expected a string"),
        ('"schema": 1', '"schema": 2', "schema is 2, expected 1"),
        ('"schema": 1', '"schema": "\xff"', "is no UTF-8"),
        ('{\n "schema"', '[{\n "schema"', "Expecting ',' delimiter"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_sentence(
    old: str, new: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, [two_lengths()])
    path = tmp_path / "toy_autograd.json"
    text = path.read_text()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode("latin-1"))
    assert main(["--page", str(tmp_path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert f'eaves.bench: "{path}" is no result file of this program: ' in err and why in err
    assert err.count("\n") == 1 and out == ""


def test_a_file_beside_that_is_no_text_is_left_alone(tmp_path: Path) -> None:
    measured = two_lengths()
    put(tmp_path, [measured])
    before = text_of(tmp_path, measured)
    (tmp_path / "other.json").write_bytes(b"\xff\xfe")
    assert text_of(tmp_path, measured) == before


def test_an_error_in_the_tables_of_an_operator_is_not_said_to_be_one_of_a_file(tmp_path: Path) -> None:
    def tables(request: Request) -> list[Table]:
        raise KeyError("a mistake")

    put(tmp_path, [two_lengths()])
    with pytest.raises(KeyError, match="a mistake"):
        main(["--page", str(tmp_path)], [Operator("toy", [Eaves()], tables)])


# ---------------------------------------------------------------------------------------------------- what is committed

COMMITTED = sorted(ROOT.glob("benchmarks/results/*/README.md"))


def test_there_is_a_committed_page() -> None:
    assert "nvidia-h200" in [path.parent.name for path in COMMITTED]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_page_is_what_its_files_say(path: Path) -> None:
    stored = StoredFolder(path.parent, OPERATORS)
    text = path.read_text()
    assert text == page.text(stored), f"python -m eaves.bench --page {path.parent} draws it again"
    # Each curve is there and on the page.
    linked = {line.split('"')[1] for line in text.splitlines() if line.startswith("<a ")}
    assert all((path.parent / picture).exists() for picture in linked)
    curves = [each for result in stored.results for each in result.tables
              if each.table.is_curve and len(each.table.rows) > 1]  # fmt: skip
    assert len(linked) == 2 * len(curves)  # speed and memory


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_page_lies_in_the_folder_of_its_device(path: Path) -> None:
    heads = [result.head for result in StoredFolder(path.parent, OPERATORS).results]
    assert {results.folder_name(head["device"], head["cuda"] is not None) for head in heads} == {path.parent.name}
