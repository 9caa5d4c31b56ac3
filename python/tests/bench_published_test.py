"""Tests of `python benchmarks published`: it prints the tables of the documents, and measured rows are kept."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from bench import published
from bench.benchmark import InvalidArgument
from bench.harness import Harness
from bench.program import main
from bench.published import Document, Table, documents, draw, title
from bench.timing import ColdTimer
from bench_toy import CPU, DEVICE, EAVES, FAILS_AT_64, PEER, PROGRAM, QUICK, ROOT, small_flush, toy  # noqa: F401

STATED = (PROGRAM / "bench/published.txt").read_text()
H100 = PROGRAM / "results/nvidia-h100-80gb-hbm3"
DOCUMENTS = documents()
each_document = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=lambda document: document.name)


def drawn(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Returns the title, the column names and the row labels of each table in a text, in order."""
    found = []
    for heading, lines in re.findall(r"^(\S+:)\n((?:[ \d].*\n)+)", text, re.M):
        first, *rows = lines.splitlines()
        found.append((heading, re.split(r"  +", first.strip()), [" ".join(row.split()[:2]) for row in rows]))
    return found


def page_of(folder: Path, *chosen: Document) -> str:
    return draw(chosen, folder)[0]


# ----------------------------------------------------------------------------------------------------- published tables


def test_fifty_tables_of_five_documents_are_stated() -> None:
    assert {name: (each.card, len(each.tables)) for name, each in DOCUMENTS.items()} == {
        "linear_cross_entropy": ("H100", 2), "cross_entropy": ("H100", 4), "logsumexp": ("H100", 4),
        "md_lrpe_cosine": ("A800", 24), "lrpe_cosine": ("A800", 16),
    }  # fmt: skip
    assert len(drawn(STATED)) == 50


@each_document
def test_numbers_are_printed_with_the_digits_of_the_document(document: Document) -> None:
    for table in document.tables:
        assert f"\n{published.text_of(table, table.published)}\n" in STATED


@each_document
def test_every_stated_row_is_measured_and_no_other(document: Document) -> None:
    declared: dict[str, list[float]] = {}
    for row in document.rows():
        for quantity in ("speed", "memory"):
            declared.setdefault(title(row.case, quantity), []).append([*row.shape.values()][-1])
    assert declared == {table.title: [*table.sizes] for table in document.tables}


@each_document
def test_titles_columns_and_rows_of_the_page_are_the_documents(document: Document) -> None:
    whole = drawn(page_of(H100, *DOCUMENTS.values()))
    stated = [each for each in drawn(STATED) if each[0][:-1] in [table.title for table in document.tables]]
    for heading, (axis, *columns), rows in stated:
        (found,) = [each for each in whole if each[0] == heading]
        assert found[2] == rows
        here = [column for column in found[1] if not column.startswith("published ")]
        assert here[:3] == [axis, "eaves", "limit"]
        # The columns have the documents' order; FLA has one column more.
        assert [column for column in columns if column in here] == [each for each in here[3:] if "dtype" not in each]
        behind = [f"published {column}" for column in columns] if document.card == "H100" else []
        assert found[1][len(here) :] == behind
    assert [each[0] for each in whole] == [each[0] for each in drawn(STATED)]


@each_document
def test_every_column_has_a_provider_or_a_reason(document: Document) -> None:
    stated = {column for table in document.tables for column in table.published}
    assert stated == document.notation.keys() - {"fla-weight-dtype"}
    known = document.providers()
    assert all(column in known or document.notation[column].startswith("- ") for column in stated)
    assert {name for each in DOCUMENTS.values() for name in each.providers()} >= {
        "tr_jg",
        "ptr",
        "Tri",
        "tr_cut",
        "toc",
    }


def test_the_committed_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["published", "--from-results", str(H100)]) == 0
    command = "python benchmarks published --from-results benchmarks/results/nvidia-h100-80gb-hbm3 > docs/published.md"
    assert capsys.readouterr().out == (ROOT / "docs/published.md").read_text(), command


def test_a_difference_is_one_line_with_its_cause_and_a_missing_number_is_said() -> None:
    text = page_of(H100, DOCUMENTS["linear_cross_entropy"])
    (line,) = [line for line in text.splitlines() if line.startswith("- `tr_fla` is 1.22 at v 1024 and 4.58")]
    assert "float32" in line and "accumulate_grad_in_fp32=False" in line
    assert "- Left out: `tr_jg`, `tr`, `tr_lce` (not installed, or not for this device).\n" in text
    assert "- Not measured yet, in whole or in part: `fla-weight-dtype`.\n" in text
    # A difference within a tenth gets no line.
    memory = Table("lce-memory-x", "v", (8.0,), {"to": (100.0,)})
    assert published.differences(DOCUMENTS["logsumexp"], memory, {"to": [109.0], "published to": [100.0]}) == []


# ------------------------------------------------------------------------------------------------------ measured tables

NUMBERS = {"to": (1.0, 2.0), "fails": (3.0, 4.0), "tr": (5.0, 6.0)}
TOY = Document(
    "toy", "EPYC or Xeon", {"to": "peer", "fails": "fails", "tr": "- no reason"}, {"": "noise"},
    [Table(f"toy-{quantity}-{mode}-dim16-fp32", "n", (8.0, 64.0), NUMBERS)
     for mode in ("fwd", "bwd") for quantity in ("speed", "memory")],
    toy(EAVES, PEER, FAILS_AT_64),
)  # fmt: skip


@pytest.fixture
def measured_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the documents by the toy alone, and records which of its rows are measured."""
    monkeypatch.setattr(published, "documents", lambda: {"toy": TOY})
    rows: list[str] = []
    measure = Harness.measure
    monkeypatch.setattr(Harness, "measure", lambda self, row, *rest: rows.append(f"{row.mode} {row.shape['n']}")
                        or measure(self, row, *rest))  # fmt: skip
    monkeypatch.setattr(ColdTimer, "warm_up", lambda self, milliseconds: None)
    return rows


def test_a_run_says_how_long_it_takes_prints_the_tables_and_goes_on_where_the_last_was_stopped(
    tmp_path: Path, measured_rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["published", *QUICK[:4], "--results", str(tmp_path)]
    assert main(command) == 0
    folder, out = tmp_path / DEVICE, capsys.readouterr().out
    assert re.match(r"# .*: 4 of 4 rows, about \d+ minutes, into ", out)
    assert measured_rows == ["fwd 8", "fwd 64", "bwd 8", "bwd 64"]
    assert [each[:2] for each in drawn(out)] == [(f"{table.title}:", ["n", "eaves", "limit", "to", "fails"])
                                                 for table in TOY.tables]  # fmt: skip
    assert "- Left out: `tr` (no reason).\n" in out and "- -1 of `fails`: `64 is too many`\n" in out
    assert [float(line.split()[-1]) for line in out.splitlines() if line.startswith("1  64.0 ")] == [-1.0] * 4
    assert out.endswith((folder / "published.md").read_text())
    lines = list(csv.DictReader((folder / "published.csv").open()))
    assert len(lines) == 4 * 4 * 2
    assert lines[7] == {"title": TOY.tables[0].title, "size": "64", "column": "fails", "number": "-1.0"}

    path = folder / "toy_accumulate.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"rows": [row for row in content["rows"] if row["shape"]["n"] == 8]}))
    assert main(command) == 0
    assert measured_rows[4:] == ["fwd 64", "bwd 64"]
    assert main(command) == 0
    assert "0 of 4 rows" in capsys.readouterr().out and len(measured_rows) == 6


def test_the_files_of_another_build_are_not_mixed_with_new_rows(
    tmp_path: Path, measured_rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["published", *QUICK[:4], "--results", str(tmp_path)]
    assert main(command) == 0
    path = tmp_path / DEVICE / "toy_accumulate.json"
    path.write_text(before := json.dumps(json.loads(path.read_text()) | {"commit": "another"}))
    assert main(command) == 2
    assert "was written by another build, device or package; expected another folder" in capsys.readouterr().err
    assert path.read_text() == before


def test_on_the_same_card_the_published_columns_stand_behind(tmp_path: Path, measured_rows: list[str]) -> None:
    (columns, *_) = published.columns_of(TOY, {"eaves": "eaves"}, [], "an EPYC or Xeon of 2 threads")
    assert columns == {"eaves": [None, None]} | {f"published {column}": NUMBERS[column] for column in NUMBERS}
    assert published.digits([None, 1.5, -1.0]) == ["-", "1.5", "-1.0"] and published.digits([None]) == ["-"]
    with pytest.raises(InvalidArgument, match="has no result file of the protocol accumulate"):
        draw([TOY], tmp_path)


def test_an_unknown_document_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["published", "lse"]) == 2
    assert 'there is no document "lse", expected one of: linear_cross_entropy, cross_entropy' in capsys.readouterr().err
