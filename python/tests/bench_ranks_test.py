"""`python benchmarks ranks`: the cost of ranks, on the CPU with few and small rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.program import main
from bench.ranks import Case, plan
from bench_toy import PROGRAM


def test_it_measures_every_provider_and_plans(tmp_path: Path) -> None:
    output = tmp_path / "new" / "ranks.json"
    program = [sys.executable, PROGRAM, "ranks", "--ranks", "2", "--device", "cpu", "--shape", "64x32x256"]
    run = subprocess.run([*program, "--repetitions", "1", "--json", output], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(output.read_text())
    measured = {(row["operator"], row["data"], row["provider"]) for row in found["rows"] if "ms" in row}
    for data in ("spread", "dense"):
        for provider in ("eaves", "eaves-memory", "eaves-recompute", "torch-loss-parallel"):
            assert ("linear_cross_entropy", data, provider) in measured
        for provider in ("eaves", "eaves-inplace", "torch-loss-parallel"):
            assert ("cross_entropy", data, provider) in measured
    for row in found["rows"]:
        assert "skipped" in row or row["efficiency"] == row["one_rank_ms"] / (2 * row["ms"])
        assert "skipped" in row or 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    gather, reduce = found["collectives"]
    assert gather["bytes"] == 44 * 64 and reduce["bytes"] == 64 * 32 * 2
    assert [each["ranks"] for each in found["plan"]] == [2, 4, 8]
    assert "efficiency" in run.stdout


def test_classes_are_shared_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--ranks", "2", "--device", "cpu", "--shape", "64x32x255"]) == 2
    assert "--shape: has 255 classes, expected a multiple of 2 ranks" in capsys.readouterr().err


def test_the_plan_is_arithmetic() -> None:
    case = Case("linear_cross_entropy", 8192, 4096, 131072, torch.bfloat16, "dense")
    of_eight = plan(case, 40.0, [{"gb_per_s": 100.0}, {"gb_per_s": 200.0}])[-1]
    assert of_eight["gathered_bytes"] == 44 * 7 * 8192 and of_eight["reduced_bytes"] == 2 * 7 * 8192 * 4096 * 2 // 8
    exchange = of_eight["gathered_bytes"] / 100e6 + of_eight["reduced_bytes"] / 200e6
    assert (of_eight["share_ms"], of_eight["collectives_ms"]) == (5.0, pytest.approx(exchange))
    assert of_eight["efficiency_if_nothing_is_hidden"] == pytest.approx(5.0 / (5.0 + exchange))
