"""`python benchmarks doors`: what trainers gain, on the CPU with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import page
from bench.doors import FILE, TOLERANCE, answer, disagreement, section, table
from bench.operators import OPERATORS
from bench.program import main
from bench_toy import PROGRAM


def row(door: str, loss: str, first_loss: float) -> dict[str, Any]:
    return {"door": door, "loss": loss, "ms": 10.0, "ms_min": 9.0, "ms_max": 10.5, "tokens_per_second": 12345.6,
            "peak_mib": 2**10, "first_loss": first_loss}  # fmt: skip


ROWS = [
    row("trainer", "transformers", 12.0),
    row("trainer", "eaves.hf.install()", 12.0 * (1 + 0.9 * TOLERANCE)),
    {"door": "fla", "loss": "FLA", "skipped": "no module named `fla`"},
]


def test_a_model_trains_with_each_loss_or_the_line_says_why_not(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    output = tmp_path / FILE
    command = [sys.executable, PROGRAM, "doors", "trainer", "axolotl", "fla", "--device", "cpu", "--steps", "2",
               "--seconds", "600"]  # fmt: skip
    run = subprocess.run([*command, "--json", output], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(output.read_text())
    assert found["sizes"]["layers"] == 1 and "transformers" in found["versions"]
    *measured, fla, fla_with_eaves = found["rows"]
    assert [each["loss"] for each in measured] == [
        "transformers", "eaves.hf.install()", "transformers", "eaves.hf.patch(model)",
    ]  # fmt: skip
    for each in measured:
        assert 0 < each["ms_min"] <= each["ms"] <= each["ms_max"]
        assert each["tokens_per_second"] == pytest.approx(1e3 * 2 * 16 / each["ms"])
        assert each["first_loss"] == pytest.approx(measured[0]["first_loss"], rel=TOLERANCE)
        # Wrong gradients would lead elsewhere.
        assert each["later_loss"] == pytest.approx(measured[0]["later_loss"], rel=TOLERANCE)
    if importlib.util.find_spec("fla") is None:
        assert "fla" in fla["skipped"] and "fla" in fla_with_eaves["skipped"]
    assert "\n".join(table(found["rows"])) in run.stdout


def test_a_loss_that_is_not_the_first_lines_is_named() -> None:
    assert disagreement(ROWS) == "" and disagreement(ROWS[2:]) == ""
    wrong = row("axolotl", "eaves.hf.patch(model)", 12.0 * (1 + 1.1 * TOLERANCE))
    said = disagreement([*ROWS, wrong])
    assert said == "doors: the loss of the first step is 12.0066 (axolotl, eaves.hf.patch(model)), expected 12.0000"


def test_a_process_that_dies_or_hangs_is_a_line_that_says_so() -> None:
    killed = []
    process = SimpleNamespace(join=lambda timeout: None, kill=lambda: killed.append(True), exitcode=-9)
    ours, theirs = multiprocessing.Pipe()
    assert answer(process, ours, 0.01) == {"skipped": "it took more than 0.01 s"} and killed
    theirs.close()
    for is_turn in (False, True):
        assert answer(process, ours, 0.01, is_turn) == {"skipped": "its process ended with exit code -9"}


def test_a_page_shows_the_lines_of_the_result_file(tmp_path: Path) -> None:
    assert section(tmp_path) == []
    found = {"rows": ROWS, "sizes": {"hidden": 32}, "versions": {"torch": "2.11"}, "date": "2026-11-29T08:00:00Z",
             "commit": "0123456789abcdef"}  # fmt: skip
    (tmp_path / FILE).write_text(json.dumps(found))
    lines = section(tmp_path)
    assert "| Trainer | eaves.hf.install() | 12300 | 1024 | 12.0054 |" in lines
    assert "- `FusedLinearCrossEntropyLoss`, FLA: `no module named 'fla'`" in lines
    assert any(line.startswith("10% of the median.") for line in lines)
    assert "Commit 0123456789ab, 2026-11-29, torch 2.11." in lines
    assert "\n".join(lines) in page.texts(page.Folder(tmp_path, OPERATORS))[page.PAGE]


def test_arguments_that_are_wrong_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doors", "window"]) == 2
    assert 'there is no door "window", expected one of: trainer, liger' in capsys.readouterr().err
    assert main(["doors", "--steps", "0"]) == 2
    assert "--steps: is 0, expected 1 or more" in capsys.readouterr().err
