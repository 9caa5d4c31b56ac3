"""`eaves bench` and `python -m eaves.bench`: what both say of a shape, of a row and of a busy machine is the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cross_entropy_program_test import PROGRAM
from eaves import _output
from eaves.bench import run, tables
from eaves.bench.__main__ import parse_shape
from eaves.bench.operators import OPERATORS

CLI = Path(__file__).parents[2] / "cli"


@pytest.mark.parametrize(
    "line",
    [
        "logsumexp rows=3,n=40",
        "cross_entropy rows=3,v=40",
        "linear_cross_entropy v=40,rows=3,dim=8",
        "lrpe_cosine batch=2,length=5,heads=3,dim=8",
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
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    for row in rows:
        for key in ("op", "dtype", "shape"):
            assert row[key] == case[key]
        for key in ("grid", "data"):
            assert row["options"].get(key) == case["options"].get(key)


def test_both_programs_have_the_same_words_and_factors() -> None:
    assert f"kUsualFactor = {tables.UNSTEADY};" in (CLI / "report.cpp").read_text()
    program = "".join((CLI / name).read_text() for name in ("bench.cpp", "report.cpp", "stop.cpp"))
    package = "".join(Path(each.__file__).read_text() for each in (run, tables, _output))
    for words in (
        "stopped; what was measured, ",
        "above, and in no file without --json",
        "stopped before a row was measured; nothing is written",
        "standard output cannot be written",
        tables.MOST_ARE_BUSY,
        " rows left out",
    ):
        assert words in program
        assert words in package
