"""Tests of the program `python -m eaves.bench`: arguments, what it prints, result files. No claim about speed."""

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

from bench_toy import (  # noqa: F401
    CPU,
    DIM,
    EAVES,
    MISSING,
    PEER,
    QUICK,
    TOY,
    WRONG,
    provider,
    small_flush,
    toy,
)
from eaves.bench import results, run, tables, timing
from eaves.bench.__main__ import main, parse_bytes, parse_shape
from eaves.bench.benchmark import Operator, Request
from eaves.bench.operators import OPERATORS


@pytest.fixture(autouse=True)
def never_unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a busy machine are in no summary."""
    monkeypatch.setattr(tables, "UNSTEADY", math.inf)


def rows_of(path: Path, **wanted: object) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


# ----------------------------------------------------------------------------------------------------- what it measures


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
    summary = out.splitlines()[-8:]
    assert any(line.startswith("toy, forward, 2 rows: eaves takes") for line in summary)
    assert "times the limit" in out and "times the memory of eaves" in " ".join(summary)
    assert max(map(len, out.splitlines())) <= 80
    assert err == ""  # no progress where stderr is no terminal


def test_a_terminal_gets_the_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(TOY, [toy(EAVES)]) == 0
    out, err = capsys.readouterr()
    assert "0 of 4 rows, toy fwd [16, 8]" in err and "3 of 4 rows, toy bwd [16, 64]" in err and "rows, toy" not in out


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
    for name, short in (("fp32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp64")):
        assert asked("--dtype", name) == [Request("quick", "cpu", short, has_dtype=True)]


def test_an_operator_without_rows_in_a_sweep_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, plain = tmp_path / "result.json", toy(EAVES, modes=("fwd",))
    without = Operator("without", plain.providers, lambda request: [], (), plain.row_of_shape)
    argv = [*QUICK, "--sweep", "published", "--json", str(path)]
    assert main(["without", "toy", *argv], [without, plain]) == 0
    assert "# --sweep published has no rows of without\n" in capsys.readouterr().out
    assert {row["op"] for row in rows_of(path)} == {"toy"}
    assert main(["without", *argv], [without, plain]) == 2
    assert "--sweep: published has no rows of what is named, expected another sweep" in capsys.readouterr().err


def test_the_threads_are_those_of_all_and_in_the_result_file(tmp_path: Path, cpu_threads: None) -> None:
    torch.set_num_threads(2)
    seen = set()
    counts = provider("eaves", lambda x: seen.add(torch.get_num_threads()) or x.exp().sum(-1))
    path = tmp_path / "result.json"
    assert main([*TOY, "--threads", "1", "--json", str(path)], [toy(counts, modes=("fwd",))]) == 0
    assert seen == {1} and json.loads(path.read_text())["threads"] == 1


def test_a_busy_machine_is_said_once_before_all_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, count in ((0.42, 1), (0.2, 0)):
        monkeypatch.setattr(run, "busy_share", lambda share=share: share)
        assert main(TOY, [toy(EAVES, modes=("fwd",))]) == 0
        out = capsys.readouterr().out
        assert out.count("# the machine is busy: others take 42 % of its cores' time") == count
        assert out.startswith("# the machine is busy") == bool(count)


def test_the_clocks_get_the_warm_up_before_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_ups: list[float] = []
    monkeypatch.setattr(timing.Timer, "warm_up", lambda timer, ms: warm_ups.append(ms))
    assert main(["toy", "--device", "cpu", "--repetitions", "1", "--warm-up-ms", "30"], [toy(EAVES)]) == 0
    assert warm_ups == [30.0, 30.0]


def test_what_is_named_is_measured_once_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    operators = [toy(EAVES, PEER, name=name, modes=("fwd",)) for name in ("a", "b", "c")]
    argv = ["c", "a", "c", *QUICK, "--provider", "peer", "--provider", "peer", "--json", str(path)]
    assert main(argv, operators) == 0
    found = [(row["op"], row["shape"]["n"], row["provider"]) for row in rows_of(path)]
    assert found == [(op, n, name) for op in ("c", "a") for n in (8, 64) for name in ("peer", "limit")]


def test_a_provider_that_is_missing_is_named_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu = provider("on-gpu", needs_gpu=True)
    operators = [toy(EAVES, MISSING, on_gpu, name=name, modes=("fwd",)) for name in ("toy", "other")]
    assert main(["toy", "other", *QUICK], operators) == 0
    out, err = capsys.readouterr()
    assert err == "# missing is left out: No module named 'no_such_module'\n# on-gpu is left out: needs a GPU\n"
    assert "missing" not in out and "on-gpu" not in out


def test_chosen_providers_are_compared_with_eaves_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    argv = [*TOY, "--provider", "wrong", "--json", str(path)]
    assert main(argv, [toy(EAVES, PEER, WRONG, modes=("fwd",))]) == 0
    assert {row["provider"] for row in rows_of(path)} == {"wrong", "limit"}
    assert all(row["skipped"].startswith("wrong result: out is off by") for row in rows_of(path, provider="wrong"))


def test_who_lacks_something_in_every_row_of_a_table_is_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    lacks = provider("lacks", lacks=lambda row: "a backward" if row.mode == "bwd" or row.shape["n"] > 8 else "")
    assert main([*TOY, "--json", str(path)], [toy(EAVES, lacks)]) == 0
    first, second = rows_of(path, provider="lacks")
    assert first["ms"] is not None and (second["mode"], second["skipped"]) == ("fwd", "not supported: a backward")


def test_the_result_file_has_the_schema_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*TOY, "--protocol", "accumulate", "--json", str(path)], [toy(EAVES)]) == 0
    result = json.loads(path.read_text())
    assert list(result) == "schema device cuda driver cpu_level threads commit date protocol versions rows".split()
    assert (result["schema"], result["protocol"], result["cuda"]) == (1, "accumulate", None)
    assert {"eaves", "python", "torch"} <= result["versions"].keys()
    assert result["rows"][0]["shape"] == {"dim": DIM, "n": 8}
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_system_that_fails_is_exit_code_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    assert main([*TOY, "--json", str(tmp_path / "result.json")], [toy(EAVES, modes=("fwd",))]) == 1
    assert capsys.readouterr().err == "eaves.bench: [Errno 28] No space left on device\n"
    assert list(tmp_path.iterdir()) == []


_MAIN = """
import sys
from bench_toy import EAVES, toy
from eaves.bench.__main__ import main
sys.exit(main(sys.argv[1:], [toy(EAVES)]))
"""


@pytest.mark.parametrize("words", [["--help"], [*TOY, "--shape", "rows=16,n=8"], TOY, [*TOY, "--json"]])
def test_a_reader_that_leaves_is_no_failure_and_keeps_no_file_from_being_written(
    words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    words = [*words, str(path)] if words[-1] == "--json" else words
    reader, lost = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, code, said in (
            (lost, 0, ""),
            (full, 1, "eaves.bench: standard output cannot be written: No space left on device\n"),
        ):
            result = subprocess.run(
                [sys.executable, "-c", _MAIN, *words],
                stdout=output, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent, check=False,
            )  # fmt: skip
            assert (result.returncode, result.stderr) == (code, said)
            assert path.exists() == ("--json" in words)
            path.unlink(missing_ok=True)
    os.close(lost)


def test_a_file_that_may_not_be_written_is_refused_before_and_a_link_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("old")
    kept.chmod(0o444)
    for path, why in (
        (kept, "cannot be written: Permission denied"),
        ("/dev/null", "exists and is not a regular file"),
    ):
        assert main([*TOY, "--json", str(path)], [toy(EAVES)]) == 2
        out, err = capsys.readouterr()
        assert (out, err) == ("", f'eaves.bench: --json: "{path}" {why}\n')
    assert kept.read_text() == "old"
    link.symlink_to("result.json")
    for _ in range(2):  # the file is not there, and is
        assert main([*TOY, "--json", str(link)], [toy(EAVES, modes=("fwd",))]) == 0
        assert link.is_symlink() and len(rows_of(tmp_path / "result.json", provider="eaves")) == 2


def test_rows_beyond_max_bytes_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    assert main([*TOY, "--max-bytes", "1", "--json", str(path)], [toy(EAVES)]) == 2
    out, err = capsys.readouterr()
    least = 4 * DIM * 8 + 4 * DIM
    assert err == f"eaves.bench: --max-bytes: 1 leaves out every row, expected {least} or more\n"
    assert out == "" and path.read_text() == "old"  # which was found out before anything was measured
    assert main([*TOY, "--max-bytes", "1K", "--json", str(path)], [toy(EAVES, modes=("fwd",))]) == 0
    assert {row["shape"]["n"] for row in rows_of(path)} == {8}
    assert "# --max-bytes leaves out 1 of 2 rows" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ one shape


def test_a_shape_of_ones_own_is_one_table_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    argv = [*TOY, "--shape", "rows=16,n=100", "--json", str(path)]
    assert main(argv, [toy(EAVES, PEER, MISSING)]) == 0
    assert [row["provider"] for row in rows_of(path, mode="fwd+bwd")] == ["eaves", "peer", "limit"]
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("toy, forward and backward: n 100, dim 16, fp32")
    assert lines[begin + 2].split() == ["provider", "ms", "MiB", "x", "eaves"]
    table = [line.split() for line in lines[begin + 3 : begin + 6]]
    assert [line[0] for line in table] == ["eaves", "peer", "limit"] and table[0][3] == "1.00"
    assert any("The best peer takes" in line for line in lines[begin + 6 :])
    assert max(map(len, lines)) <= 80


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


def test_logsumexp_and_linear_cross_entropy_are_measured_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """With torch.compile, which is most of the time."""
    for argv in (["logsumexp", "--shape", "rows=64,n=1000"], ["linear_cross_entropy", "--shape", "rows=32,dim=8,v=99"]):
        assert main([*argv, *QUICK]) == 0
        out = capsys.readouterr().out
        found = [line.split() for line in out.splitlines()]
        measured = {line[0] for line in found if len(line) == 4 and line[1][:1].isdigit()}
        assert {"eaves", "torch", "torch.compile", "limit"} <= measured, out


# ------------------------------------------------------------------------------------------------------ what is refused


def test_bytes_may_have_a_unit() -> None:
    assert [parse_bytes(text) for text in ("4096", "8K", "64M", "2G", "1T")] == [4096, 2**13, 2**26, 2**31, 2**40]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nonsense"], 'there is no operator "nonsense", expected one of: toy'),
        (["--provider", "other"], '--provider: there is no provider "other", expected one of: eaves'),
        (["--max-bytes", "1X"], '--max-bytes: is "1X", expected a number of bytes such as 4096, 64M or 2G'),
        (["--repetitions", "0"], "--repetitions: is 0, expected 1 to 100000"),
        (["--warm-up-ms", "-1"], "--warm-up-ms: is -1.0, expected 0 to 60000"),
        (["--threads", "100000"], f"--threads: is 100000, expected 0 to {os.cpu_count()}"),
        (["--dtype", "int8"], '--dtype: is "int8", expected one of: bf16, fp16, fp32, fp64, bfloat16, float16'),
        (["--json", ""], "--json: is empty, expected the name of a file"),
        (["--json", "new/"], '--json: "new/" is a folder, expected the name of a file'),
        (["--json", "."], '--json: "." is a folder, expected the name of a file'),
        (["--plot", ""], "--plot: is empty, expected the name of a folder"),
        (["--results", ""], "--results: is empty, expected the name of a folder"),
        (["--page", ""], "--page: is empty, expected the name of a folder"),
        (["--json", "no/such/folder/a.json"], '--json: "no/such/folder/a.json" cannot be written'),
        (["--unknown"], "--unknown"),
        (["--json", "a.json", "--results", "b"], "--json: the folder of --results has what it writes, expected one of"),
        (["--replace"], "--replace: is for the result files of a folder, expected --results beside it"),
        (["--page", "."], "--page: measures nothing, expected nothing beside it, but there is the operator toy"),
        (["--shape", "rows=8,n=8", "--plot", "a"], "--shape: is one row in one table, but there is --plot"),
        (["--shape", "rows=8"], '--shape: is "rows=8", expected rows=..,n=.. of toy, positive numbers'),
        (["--shape", "rows=8,n=0"], '--shape: is "rows=8,n=0", expected'),
        (["--shape", "rows=8,n=8,n=9"], '--shape: is "rows=8,n=8,n=9", expected'),
        (["--shape", "rows=8,n=many"], '--shape: is "rows=8,n=many", expected'),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--page" in argv else ["--device", "cpu"]
    assert main(["toy", *argv, *device], [toy(EAVES)]) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.startswith("eaves.bench: ") and err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--json", "a.json"], "--json: expected the names of the operators beside it"),
        (["--shape", "rows=1,n=1"], "--shape: is of one operator, expected its name"),
        (["--page", "none"], 'has no result file, expected such as first_autograd.json'),
        (["--page", "none", "--dtype", "fp32"], "--page: measures nothing, expected nothing beside it"),
    ],
)  # fmt: skip
def test_so_is_one_without_an_operator(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, [toy(EAVES, name="first"), toy(EAVES, name="second")]) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"], [toy(EAVES)]) == 2
    assert "--device: is cuda, but PyTorch sees no GPU here" in capsys.readouterr().err


def test_the_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("device", "is_gpu", "folder"),
    [
        ("NVIDIA H200", True, "nvidia-h200"),
        ("AMD EPYC 7B13 64-Core Processor (2 threads)", False, "amd-epyc-7b13"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics (8 threads)", False, "amd-ryzen-7-7840u"),
        ("AMD Ryzen 7 5800H with Radeon Graphics (8 threads)", False, "amd-ryzen-7-5800h"),
        ("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz (2 threads)", False, "intel-xeon-e5-2686-v4"),
        ("CPU (1 thread)", False, "cpu"),
    ],
)
def test_the_folder_has_the_name_of_the_device(device: str, is_gpu: bool, folder: str) -> None:
    assert results.folder_name(device, is_gpu) == folder
