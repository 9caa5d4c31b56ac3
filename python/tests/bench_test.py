"""Tests of the program `python benchmarks`: arguments, printed text, result files. The tests claim nothing about
speed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import page, results, tables
from bench.benchmark import Operator, Request
from bench.operators import OPERATORS
from bench.program import main, parse_shape
from bench_toy import (  # noqa: F401
    CPU,
    DEVICE,
    DIM,
    EAVES,
    MISSING,
    PEER,
    PROGRAM,
    QUICK,
    TOY,
    WRONG,
    exp_sum,
    provider,
    small_flush,
    toy,
)


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws no pages and calls no row busy, because summaries leave out busy rows."""
    monkeypatch.setattr(page, "draw", lambda *arguments: None)
    monkeypatch.setattr(tables, "BUSY", math.inf)


def measured(folder: Path, argv: list[str], *operators: Operator) -> list[dict[str, Any]]:
    """Measures by the protocol autograd and returns the rows of the result files."""
    assert main([*argv, *QUICK, "--protocol", "autograd", "--results", str(folder)], operators) == 0
    files = [folder / DEVICE / f"{operator.name}_autograd.json" for operator in operators]
    return [row for file in files if file.exists() for row in json.loads(file.read_text())["rows"]]


# --------------------------------------------------------------------------------------------------------- measurements


def test_the_program_prints_time_and_memory_of_both_directions_and_ends_with_a_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(TOY, [toy(EAVES, PEER)]) == 0
    out, err = capsys.readouterr()
    titles = [line for line in out.splitlines() if "; " in line and " in " in line]
    assert titles == [
        f"toy, {mode}: dim 16, fp32; {quantity}"
        for quantity in ("time in ms", "peak memory in MiB")
        for mode in ("forward", "backward")
    ]
    summary = " ".join(out.splitlines()[-8:])
    assert "toy, forward, 2 rows: eaves takes" in summary and "times the limit" in summary
    assert "times the memory of eaves" in summary and err == ""


def test_the_operator_gets_the_sweep_and_the_dtype() -> None:
    def asked(*argv: str) -> list[Request]:
        requests = []
        plain = toy(EAVES, modes=("fwd",))
        operator = Operator("toy", plain.providers, lambda request: requests.append(request) or plain.rows(request),
                            (), plain.row_of_shape)  # fmt: skip
        assert main([*TOY, *argv], [operator]) == 0
        return requests

    assert asked() == [Request("quick", "cpu", "bf16", has_dtype=False)]
    assert asked("--sweep", "published") == [Request("published", "cpu", "bf16", has_dtype=False)]
    assert asked("--dtype", "fp32") == [Request("quick", "cpu", "fp32", has_dtype=True)]


def test_an_operator_without_rows_in_a_sweep_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = toy(EAVES, modes=("fwd",))
    without = Operator("without", plain.providers, lambda request: [], (), plain.row_of_shape)
    rows = measured(tmp_path, ["without", "toy", "--sweep", "published"], without, plain)
    assert "# --sweep published has no rows of without\n" in capsys.readouterr().out
    assert {row["op"] for row in rows} == {"toy"}
    assert main(["without", *QUICK], [without, plain]) == 2
    assert "--sweep: quick has no rows of these operators; expected another sweep" in capsys.readouterr().err


def test_named_operators_and_providers_are_measured_once(tmp_path: Path) -> None:
    operators = [toy(EAVES, PEER, name=name, modes=("fwd",)) for name in ("a", "b", "c")]
    rows = measured(tmp_path, ["c", "a", "c", "--provider", "peer", "--provider", "peer"], *operators)
    found = [(row["op"], row["shape"]["n"], row["provider"]) for row in rows]
    assert found == [(op, n, name) for op in ("a", "c") for n in (8, 64) for name in ("peer", "limit")]


def test_a_provider_that_is_missing_is_named_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu = provider("on-gpu", needs_gpu=True)
    operators = [toy(EAVES, MISSING, on_gpu, name=name, modes=("fwd",)) for name in ("toy", "other")]
    assert main(["toy", "other", *QUICK], operators) == 0
    out, err = capsys.readouterr()
    assert err == "# missing is left out: No module named 'no_such_module'\n# on-gpu is left out: needs a GPU\n"
    assert "missing" not in out and "on-gpu" not in out


def test_chosen_providers_are_compared_with_eaves_all_the_same(tmp_path: Path) -> None:
    rows = measured(tmp_path, ["toy", "--provider", "wrong"], toy(EAVES, PEER, WRONG, modes=("fwd",)))
    assert {row["provider"] for row in rows} == {"wrong", "limit"}
    assert all(row["skipped"].startswith("wrong result: out differs") for row in rows if row["provider"] == "wrong")


def test_who_lacks_something_in_every_row_of_a_table_is_not_in_it(tmp_path: Path) -> None:
    lacks = provider("lacks", lacks=lambda row: "a backward" if row.mode == "bwd" or row.shape["n"] > 8 else "")
    first, second = [row for row in measured(tmp_path, ["toy"], toy(EAVES, lacks)) if row["provider"] == "lacks"]
    assert first["ms"] is not None and (second["mode"], second["skipped"]) == ("fwd", "not supported: a backward")


def test_the_result_file_has_the_schema_of_the_program(tmp_path: Path) -> None:
    assert main([*TOY, "--protocol", "accumulate", "--results", str(tmp_path)], [toy(EAVES)]) == 0
    assert [each.name for each in (tmp_path / DEVICE).iterdir()] == ["toy_accumulate.json"]
    result = json.loads((tmp_path / DEVICE / "toy_accumulate.json").read_text())
    keys = "schema device cuda driver cpu_level threads commit date protocol versions left_out rows".split()
    assert list(result) == keys
    assert (result["schema"], result["protocol"], result["cuda"]) == (1, "accumulate", None)
    assert {"eaves", "python", "torch"} <= result["versions"].keys()
    row, *_ = result["rows"]
    keys = "op mode dtype shape options provider ms ms_min ms_max peak_mib gbps repetitions".split()
    assert list(row) == keys and row["shape"] == {"dim": DIM, "n": 8}


def test_a_run_that_is_stopped_keeps_the_finished_rows_and_the_file_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops_at_64(x: Tensor) -> Tensor:
        if x.shape[1] == 64:
            raise KeyboardInterrupt
        return exp_sum(x)

    arguments = [*TOY, "--protocol", "autograd", "--results", str(tmp_path)]
    assert main(arguments, [toy(EAVES)]) == 0
    before = (tmp_path / DEVICE / "toy_autograd.json").read_bytes()
    assert main(arguments, [toy(provider("eaves", stops_at_64))]) == 130
    assert capsys.readouterr().err.startswith("python benchmarks: stopped; --results keeps the finished rows in")
    assert (tmp_path / DEVICE / "toy_autograd.json").read_bytes() == before
    rows = json.loads((tmp_path / DEVICE / "toy_autograd.partial.json").read_text())["rows"]
    assert [(row["shape"]["n"], row["provider"]) for row in rows] == [(8, "eaves"), (8, "limit")]
    assert main(arguments, [toy(EAVES)]) == 0
    assert not list(tmp_path.rglob("*.partial.json"))


def test_a_system_that_fails_is_exit_code_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    assert main([*TOY, "--results", str(tmp_path)], [toy(EAVES, modes=("fwd",))]) == 1
    assert capsys.readouterr().err == "python benchmarks: [Errno 28] No space left on device\n"
    assert list((tmp_path / DEVICE).iterdir()) == []


def test_a_reader_that_leaves_is_no_failure_and_a_full_disk_is() -> None:
    reader, lost = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        said = "python benchmarks: standard output cannot be written: No space left on device\n"
        for output, expected in ((lost, (0, "")), (full, (1, said))):
            command = [sys.executable, PROGRAM, "--help"]
            result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
            assert (result.returncode, result.stderr) == expected
    os.close(lost)


# -------------------------------------------------------------------------------------------------------------- --shape


@pytest.mark.parametrize(
    ("op", "text", "shape", "inputs"),
    [
        ("logsumexp", "rows=4,n=6", {"batch": 4, "n": 6}, [[4, 6]]),
        ("cross_entropy", "v=6,rows=4", {"batch": 4, "v": 6}, [[4, 6], [4]]),
        ("linear_cross_entropy", "rows=4,dim=8,v=6", {"batch": 4, "dim": 8, "v": 6}, [[4, 8], [6, 8], [4]]),
        ("linear_log_prob", "rows=4,dim=8,v=6", {"batch": 4, "dim": 8, "v": 6}, [[4, 8], [6, 8], [4]]),
        ("lrpe_cosine", "batch=2,length=6,heads=3,dim=8", {"batch": 2, "head": 3, "dim": 8, "n": 6},
         [[2, 3, 6, 8], [3, 8]]),
        ("lrpe_cosine", "batch=2,grid=2x3,heads=3,dim=8", {"batch": 2, "head": 3, "dim": 8, "n": 6},
         [[2, 3, 6, 8], [3, 4]]),
    ],
)  # fmt: skip
def test_every_operator_has_shapes(op: str, text: str, shape: dict[str, int], inputs: list[list[int]]) -> None:
    (operator,) = (each for each in OPERATORS if each.name == op)
    row = operator.row_of_shape(parse_shape(text, operator), "fp32")
    assert (row.op, row.mode, row.dtype, dict(row.shape)) == (op, "fwd+bwd", "fp32", shape)
    arguments = row.make_inputs(CPU, 2)
    assert [list(each.shape) for each in arguments.arguments] == inputs
    own = arguments.remade() if row.in_place else arguments
    out = operator.providers[0].forward(row)(*own.arguments)
    assert torch.autograd.grad(out, own.differentiable, own.grad_out)
    assert row.gradient_bytes == sum(each.nbytes for each in arguments.differentiable)


def test_from_any_folder_one_command_measures_a_shape_beside_torch_compile(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "logsumexp", "--shape", "rows=64,n=1000", *QUICK]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names = [line.split()[0] for line in result.stdout.splitlines() if line[:1].isalpha()]
    assert {"eaves", "torch", "torch.compile", "limit"} <= set(names), result.stdout


# ---------------------------------------------------------------------------------------------------- refused arguments


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nonsense"], 'there is no operator "nonsense", expected one of: toy'),
        (["--provider", "other"], '--provider: there is no provider "other", expected one of: eaves'),
        (["--threads", "100000"], f"--threads: is 100000, expected 0 to {os.cpu_count()}"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--results", ""], "--results: is empty, expected the name of a folder"),
        (["--results", "/dev/null/a"], '--results: "/dev/null/a/'),
        (["--treads", "2"], "unknown option --treads; did you mean --threads?"),
        (["--shape", "rows=8,n=8", "--results", "a"], "--shape: measures one operator"),
        (["--shape", "rows=8"], '--shape: is "rows=8", expected rows=..,n=.. with positive numbers for toy'),
        (["--shape", "rows=8,n=8,n=9"], '--shape: is "rows=8,n=8,n=9", expected'),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["toy", *argv, "--device", "cpu"], [toy(EAVES)])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and sentence in err and err.startswith("python benchmarks: ") and err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("device", "is_gpu", "folder"),
    [
        ("NVIDIA H200", True, "nvidia-h200"),
        ("AMD EPYC 7B13 64-Core Processor (2 threads)", False, "amd-epyc-7b13"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics (8 threads)", False, "amd-ryzen-7-7840u"),
        ("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz (2 threads)", False, "intel-xeon-e5-2686-v4"),
        ("CPU (1 thread)", False, "cpu"),
    ],
)
def test_the_folder_has_the_name_of_the_device(device: str, is_gpu: bool, folder: str) -> None:
    assert results.folder_name(device, is_gpu) == folder
