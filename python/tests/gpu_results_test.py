"""tools/gpu_results: a finding of a test or a sanitizer fails it; hazards in the kernels of cuBLAS are only counted."""

import os
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_results"
PASSED = "[  PASSED  ] 3 tests.\n"
THEIRS = "accesses with hazards in kernels of cuBLAS:"


def races(*accesses: str, errors: int | None = None) -> str:
    """The output of racecheck for races, each between two accesses."""
    pairs = list(zip(accesses[::2], accesses[1::2], strict=True))
    lines = [
        f"========= Error: Race reported between Read access at {read}+0xb20\n"
        f"=========     and Write access at {write}+0x2f00 [240 hazards]\n========= "
        for read, write in pairs
    ]
    errors = len(pairs) if errors is None else errors
    return "\n".join(
        [*lines, f"========= RACECHECK SUMMARY: {errors} hazards displayed ({errors} errors, 0 warnings)\n"]
    )


@pytest.mark.parametrize(
    ("tool", "printed", "status", "line"),
    [
        ("racecheck", PASSED + races(), 0, f"{THEIRS} 0, of 1 processes"),
        ("racecheck", PASSED + races("nvjet_a", "nvjet_b"), 0, f"{THEIRS} 2, of 1 processes"),
        ("racecheck", PASSED + races("eaves::a", "nvjet_a"), 1, "FAILED: Error: Race reported between Read access at"),
        ("racecheck", PASSED + races("nvjet_a", "eaves::a"), 1, "FAILED: and Write access at eaves::a"),
        ("racecheck", PASSED + races("nvjet_a", "nvjet_b", errors=2), 1, "FAILED: 2 hazards, two accesses each"),
        ("racecheck", PASSED + "========= Error: Barrier error\n" + races(), 1, "FAILED: Error: Barrier error"),
        ("racecheck", races(), 1, f"{THEIRS} 0, of 1 processes"),  # no test ran
        ("memcheck", PASSED + "========= ERROR SUMMARY: 0 errors\n", 0, "ERROR SUMMARY: 0 errors, of 1 processes"),
        ("memcheck", PASSED + "========= ERROR SUMMARY: 2 errors\n", 1, "ERROR SUMMARY: 2 errors, of 1 processes"),
        ("tests", PASSED, 0, "PASSED: 3 tests"),
        ("tests", PASSED + "[  FAILED  ] A.B (3 ms)\n", 1, "[  FAILED  ] A.B"),
    ],
)  # fmt: skip
def test_what_is_found_fails(tool: str, printed: str, status: int, line: str, tmp_path: Path) -> None:
    (tmp_path / "printed").write_text(printed)
    report = f"cat {tmp_path}/printed"
    programs = {"eaves": "echo info", "eaves_tests": report, "compute-sanitizer": report, "nproc": "echo 1"}
    for program, command in programs.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run(
        [TOOL, tmp_path, tmp_path / "results", tool], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stdout + result.stderr
    assert line in (tmp_path / "results" / f"{tool}.txt").read_text()
