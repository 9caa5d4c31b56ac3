"""`eaves bench` and `python benchmarks`: a shape is the same row of both result files, and both know a busy machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import tables
from bench.operators import OPERATORS
from bench.program import parse_shape
from bench_toy import ROOT
from cross_entropy_program_test import PROGRAM


@pytest.mark.parametrize(
    "line",
    [
        "logsumexp rows=3,n=40",
        "cross_entropy rows=3,v=40",
        "linear_cross_entropy v=40,rows=3,dim=8",
        "lrpe_cosine batch=2,grid=4x6,heads=3,dim=8",
    ],
)
def test_a_shape_is_the_same_row_of_the_result_file(line: str, tmp_path: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip(f"the program is not built: {PROGRAM.name} is not there, and EAVES_PROGRAM is not set")
    name, shape = line.split()
    (operator,) = [each for each in OPERATORS if each.name == name]
    case = operator.row_of_shape(parse_shape(shape, operator), "bf16").case
    options = ["--device", "cpu", "--repetitions", "1", "--warm-up-ms", "0", "--json", str(tmp_path / "result.json")]
    subprocess.run([PROGRAM, "bench", name, "--shape", shape, *options], check=True, capture_output=True)
    for row in json.loads((tmp_path / "result.json").read_text())["rows"]:
        assert [row[key] for key in ("op", "dtype", "shape")] == [case[key] for key in ("op", "dtype", "shape")]
        assert all(row["options"].get(key) == case["options"].get(key) for key in ("grid", "data"))


def test_both_programs_leave_out_the_rows_of_a_busy_machine_by_the_same_factor() -> None:
    program = (ROOT / "cli" / "report.cpp").read_text()
    assert f"kUsualFactor = {tables.UNSTEADY};" in program and tables.MOST_ARE_BUSY in program
