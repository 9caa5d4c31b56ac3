"""Tests of `python benchmarks --submit`: one file has all that the page of a device needs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import page, tables
from bench.program import main
from bench_toy import DEVICE, EAVES, FAILS_AT_64, MISSING, PEER, QUICK, ROOT, small_flush, toy  # noqa: F401
from eaves import _info

OPERATORS = [toy(EAVES, PEER, MISSING, FAILS_AT_64, name=name) for name in ("first", "second")]
COMMANDS = re.findall(r"^\.venv/bin/python benchmarks (.*--submit.*|page .*my_gpu.*)$",
                      (ROOT / "docs/performance.md").read_text(), re.MULTILINE)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs in an empty folder, with small operators and without the self-test, which takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "OPERATORS", OPERATORS)
    monkeypatch.setattr(_info, "self_test", lambda: ("| cpu | every line | ok |\n", 0))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_commands_of_the_documentation_write_one_file_and_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    submit, draw = map(shlex.split, COMMANDS)
    assert main([*submit, *QUICK], OPERATORS) == 0
    assert main([*draw, "--results", "pages"]) == 0
    assert "left out: No module" in capsys.readouterr().err
    measured, drawn = files_in(Path("build/submit", DEVICE)), files_in(Path("pages", DEVICE))
    assert drawn == measured
    content = json.loads(Path(submit[-1]).read_text())["files"]
    assert content.keys() == {"self_test.txt", "first_autograd.json", "second_autograd.json"}
    assert content["self_test.txt"].startswith("eaves ") and "| every line | ok |" in content["self_test.txt"]
    # The pages have every number of the file, and the reasons of missing numbers.
    pages = (drawn["README.md"] + drawn["details.md"]).decode()
    for name in ("first", "second"):
        file = content[f"{name}_autograd.json"]
        assert file["device"] in pages and file["date"].replace("T", " ").removesuffix("Z") in pages
        assert sum(row["ms"] is not None for row in file["rows"]) == 14  # 4 rows of 4 columns, where one fails twice
        for table in tables.tables(file["rows"]):
            assert "\n".join(tables.markdown(tables.cells(table, "ms"))) in pages
        assert f"- {name}, protocol autograd, missing: `No module named 'no_such_module'`" in pages
    assert "- `fails: 64 is too many (64)`" in pages and "(self_test.txt)" in pages


def test_a_folder_with_other_results_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first", *QUICK, "--submit", "first.json"], OPERATORS) == 0
    assert main(["first", *QUICK, "--submit", "other.json", "--results", "other"], OPERATORS) == 0
    draw = ["page", "--results", "pages"]
    assert main([*draw, "first.json"]) == main([*draw, "first.json"]) == 0
    before = files_in(Path("pages"))
    assert main([*draw, "other.json"]) == 2
    assert f'--results: "pages/{DEVICE}" holds other results, expected another folder\n' in capsys.readouterr().err
    assert files_in(Path("pages")) == before


def test_results_of_another_build_are_left_out() -> None:
    assert main(["first", *QUICK, "--submit", "first.json"], OPERATORS) == 0
    (old,) = Path("build/submit").glob("*/first_autograd.json")
    old.write_text(re.sub('"commit": "[^"]*"', f'"commit": "{"0" * 40}"', old.read_text()))
    assert main(["second", *QUICK, "--submit", "second.json"], OPERATORS) == 0
    assert json.loads(Path("second.json").read_text())["files"].keys() == {"self_test.txt", "second_autograd.json"}


def test_kernels_that_compute_wrong_results_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_info, "self_test", lambda: ("| cpu | a line | differs |\n", 1))
    assert main([*QUICK, "--submit", "file.json"], OPERATORS) == 1
    assert "--submit: 1 lines of the self-test differ, so nothing is measured; " in capsys.readouterr().err
    assert not files_in(Path())


def spoiled(content: Any, **files: Any) -> str:
    return json.dumps({**content, "files": {**content["files"], **files}})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda content: json.dumps(content)[:-100], "was not written by python benchmarks --submit: "),
        (lambda content: json.dumps(content["files"]["first_autograd.json"]), "--submit: it has no 'files'"),
        (lambda content: json.dumps({"files": ["first_autograd.json"]}), "was not written by"),
        (lambda content: json.dumps({"files": {"self_test.txt": "ok"}}), "--submit: it holds self_test.txt"),
        (lambda content: spoiled(content, **{"../README.md": {}}), "first_autograd.json, ../README.md"),
        (lambda content: spoiled(content, **{"self_test.txt": 1}), "was not written by"),
        (lambda content: spoiled(content, **{"first_autograd.json": float("nan")}), "Out of range float values"),
        (lambda content: spoiled(content, **{"first_autograd.json": {"rows": []}}), "is not a result file of this"),
        (lambda content: json.dumps(content).replace('"ms":', '"time":'), "it has no 'ms'"),
        (lambda content: re.sub('"device": "[^"]*"', '"device": 1', json.dumps(content)), "is not a result file"),
        (lambda content: re.sub('"device": "', '"device": "<b>', json.dumps(content)), "is not a name"),
        (lambda content: re.sub('"ms": [0-9.]+', '"ms": "1"', json.dumps(content)), "is of another type"),
        (lambda content: re.sub('"left_out": {[^}]*}', '"left_out": []', json.dumps(content)), "is not a result file"),
        (lambda content: spoiled(content, **{"self_test.txt": "\ud800"}), "was not written by"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(
    spoil: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["first", *QUICK, "--submit", "file.json"], OPERATORS) == 0
    Path("file.json").write_text(spoil(json.loads(Path("file.json").read_text())))
    capsys.readouterr()
    assert main(["page", "file.json", "--results", "pages"]) == 2
    err = capsys.readouterr().err
    assert err.startswith('python benchmarks: "file.json') and reason in err and err.count("\n") == 1, err
    assert not Path("pages").exists()
