"""Tests of the program `python -m eaves.bench`: arguments, output, result files. No claim about speed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench_toy import (  # noqa: F401
    CPU,
    DIM,
    QUICK,
    TOY,
    Eaves,
    FailsAt64,
    Missing,
    Peer,
    WrongOut,
    exp_sum,
    measured_table,
    small_flush,
    toy,
)
from eaves.bench import device, results, run, timing
from eaves.bench.__main__ import main
from eaves.bench.arguments import parse_bytes
from eaves.bench.benchmark import Forward, Operator, Request, Row, Table
from eaves.bench.harness import LIMIT
from eaves.bench.protocol import Protocol
from eaves.bench.timing import Column, Timing


def rows_of(path: Path, **wanted: object) -> list[dict[str, object]]:
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_the_program_prints_speed_and_memory_of_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TOY, [toy(Eaves(), Peer())]) == 0
    out, err = capsys.readouterr()
    titles = [line for line in out.splitlines() if line.endswith(":")]
    assert titles == [f"toy-{kind}-{mode}-dim16-fp32:" for kind in ("speed", "memory") for mode in ("fwd", "bwd")]
    assert err == ""  # no progress bar where nobody looks


def test_a_terminal_gets_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(TOY, [toy(Eaves())]) == 0
    out, err = capsys.readouterr()
    assert "toy fwd n=8:   0%" in err and "0/4" in err
    assert "toy bwd n=64:" in err and "3/4" in err
    assert "n=8" not in out


def asked_of_an_operator(*argv: str) -> list[Request]:
    requests = []
    operator = toy(Eaves(), modes=("fwd",))

    def tables(request: Request) -> list[Table]:
        requests.append(request)
        return operator.tables(request)

    assert main([*TOY, *argv], [Operator("toy", operator.providers, tables)]) == 0
    return requests


def test_the_operator_gets_the_sweep_and_the_dtype() -> None:
    assert asked_of_an_operator() == [Request("quick", CPU, "bf16", has_dtype=False)]
    assert asked_of_an_operator("--sweep", "quick", "--dtype", "bf16") == [
        Request("quick", CPU, "bf16", has_dtype=True)
    ]
    assert asked_of_an_operator("--sweep", "seed") == [Request("seed", CPU, "bf16", has_dtype=False)]


@pytest.mark.parametrize(
    ("dtype", "short"),
    [("fp32", "fp32"), ("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp64")],
)
def test_a_dtype_may_have_its_long_name(dtype: str, short: str) -> None:
    assert asked_of_an_operator("--dtype", dtype) == [Request("quick", CPU, short, has_dtype=True)]


def test_the_threads_are_those_of_everybody_and_in_the_result_file(tmp_path: Path, cpu_threads: None) -> None:
    torch.set_num_threads(2)
    seen = set()

    class Counts(Eaves):
        def forward(self, row: Row) -> Forward:
            seen.add(torch.get_num_threads())
            return exp_sum

    path = tmp_path / "result.json"
    assert main([*TOY, "--threads", "1", "--json", str(path)], [toy(Counts(), modes=("fwd",))]) == 0
    assert seen == {1}
    assert json.loads(path.read_text())["threads"] == 1


def test_a_busy_machine_is_said_once_before_everything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "busy_share", lambda: 0.42)
    assert main([*QUICK, "--results", str(tmp_path)], [toy(Eaves(), modes=("fwd",))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# the machine is busy: others take 42 % of its cores' time; expect longer times than on a ")
    assert out.count("is busy") == 1
    monkeypatch.setattr(run, "busy_share", lambda: 0.2)
    assert main(TOY, [toy(Eaves(), modes=("fwd",))]) == 0
    assert "is busy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1", "cpu  110 0 55 875 60 0 0 0 9 0\ncpu0 2", 0.15),
        ("cpu  100 0 50 800 50 0 0 0 0 0\n", "cpu  100 0 50 800 50 0 0 0 0 0\n", 0.0),
        ("", "", 0.0),  # where there is no such file
    ],
)
def test_the_share_of_others_is_what_the_cores_did_meanwhile(
    before: str, after: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter([before, after])
    monkeypatch.setattr(device, "_read", lambda path: next(texts))
    assert device.busy_share() == pytest.approx(share)


def test_the_clocks_get_the_warm_up_before_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_ups: list[float] = []
    monkeypatch.setattr(timing.Timer, "warm_up", lambda timer, ms: warm_ups.append(ms))
    assert main(["toy", "--device", "cpu", "--repetitions", "1", "--warm-up-ms", "30"], [toy(Eaves())]) == 0
    assert warm_ups == [30.0, 30.0]


def test_what_is_named_twice_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    argv = ["toy", "toy", *QUICK, "--provider", "peer", "--provider", "peer", "--json", str(path)]
    assert main(argv, [toy(Eaves(), Peer(), modes=("fwd",))]) == 0
    assert [(row["shape"]["n"], row["provider"]) for row in rows_of(path)] == [
        (8, "peer"),
        (8, "limit"),
        (64, "peer"),
        (64, "limit"),
    ]


def test_operators_come_in_the_order_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    operators = [toy(Eaves(), name=name, modes=("fwd",)) for name in ("a", "b", "c")]
    assert main(["c", "a", *QUICK], operators) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if "-speed-" in line]
    assert titles == [f"{name}-speed-fwd-dim16-fp32:" for name in ("c", "a")]


def test_a_provider_that_is_missing_is_named_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    operators = [toy(Eaves(), Missing(), name="toy"), toy(Eaves(), Missing(), name="other")]
    assert main(["toy", "other", *QUICK], operators) == 0
    out, err = capsys.readouterr()
    assert err == "# missing is left out: No module named 'missing'\n"
    assert "missing" not in out


def test_chosen_providers_are_compared_with_eaves_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TOY, "--provider", "wrong"], [toy(Eaves(), Peer(), WrongOut(), modes=("fwd",))]) == 0
    out, _ = capsys.readouterr()
    assert "wrong: wrong result: out is off by" in out
    assert "peer" not in out.replace("best peer", "")
    assert "n  wrong" in out  # and eaves itself has no column


def test_a_failing_provider_is_skipped_in_the_result_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*TOY, "--json", str(path)], [toy(Eaves(), FailsAt64(), modes=("fwd",))]) == 0
    fine, failed = rows_of(path, provider="fails")
    assert fine["ms"] is not None
    assert (failed["ms"], failed["skipped"]) == (None, "64 is too many")


def test_the_result_file_has_the_schema_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*TOY, "--protocol", "seed", "--json", str(path)], [toy(Eaves())]) == 0
    result = json.loads(path.read_text())
    head = "schema device cuda driver cpu_level threads commit date protocol versions rows".split()
    assert list(result) == head
    assert (result["schema"], result["protocol"], result["cuda"]) == (1, "seed", None)
    assert {"eaves", "python", "torch"} <= result["versions"].keys()
    row = result["rows"][0]
    keys = "op mode dtype shape options provider ms ms_min ms_max peak_mib gbps repetitions".split()
    assert list(row) == keys
    assert (row["op"], row["mode"], row["shape"], row["repetitions"]) == ("toy", "fwd", {"dim": DIM, "n": 8}, 2)
    moved = 4 * DIM * 8 + 4 * DIM
    assert row["gbps"] == pytest.approx(moved / (row["ms"] * 1e6))
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_result_file_has_the_numbers_that_were_measured() -> None:
    measured = measured_table(
        {
            "eaves": Column("", Timing(2.0, 1.0, 4.0, 7), 0.5, 3 * 2**20),
            "torch": Column("no compiler"),
            LIMIT: Column("", Timing(0.25, 0.125, 8.0, 9), None, 2**19),
        }
    )
    moved = 4 * DIM * 1024 + 4 * DIM
    entry = {"op": "toy", "mode": "fwd", "dtype": "fp32", "shape": {"dim": DIM, "n": 1024}, "options": {}}
    rows = results.result([measured], CPU, Protocol("autograd"), {})["rows"]
    eaves = {"ms": 2.0, "ms_min": 1.0, "ms_max": 4.0, "host_ms": 0.5, "peak_mib": 3.0, "gbps": moved / 2e6}
    limit = {"ms": 0.25, "ms_min": 0.125, "ms_max": 8.0, "peak_mib": 0.5, "gbps": moved / 0.25e6}
    assert rows == [
        entry | {"provider": "eaves"} | eaves | {"repetitions": 7},
        entry | {"provider": "torch", "ms": None, "skipped": "no compiler"},
        entry | {"provider": "limit"} | limit | {"repetitions": 9},
    ]


def test_a_system_that_fails_is_exit_code_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: str, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    argv = [*TOY, "--json", str(tmp_path / "result.json")]
    assert main(argv, [toy(Eaves(), modes=("fwd",))]) == 1
    assert capsys.readouterr().err == "eaves.bench: [Errno 28] No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_early_leaves_the_old_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    assert main([*TOY, "--max-bytes", "1", "--json", str(path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    least = 4 * DIM * 8 + 4 * DIM
    assert err == f"eaves.bench: --max-bytes: 1 leaves out every row, expected {least} or more\n"
    assert out == ""  # nothing was measured to find that out
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_rows_beyond_max_bytes_are_left_out_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TOY, "--max-bytes", "1K"], [toy(Eaves(), modes=("fwd",))]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index("toy-speed-fwd-dim16-fp32:") + 2 :]
    assert "left out" not in rows[0]
    assert rows[1] == "1  64.0  left out: moves 4160 bytes, more than the 1024 of --max-bytes"


def test_bytes_may_have_a_unit() -> None:
    assert [parse_bytes(text) for text in ("4096", "8K", "64M", "2G", "1T")] == [4096, 2**13, 2**26, 2**31, 2**40]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nonsense"], 'there is no operator "nonsense", expected one of: toy'),
        (["--provider", "nobody"], '--provider: there is no provider "nobody", expected one of: eaves'),
        (["--max-bytes", "1X"], '--max-bytes: is "1X", expected a number of bytes such as 4096, 64M or 2G'),
        (["--repetitions", "0"], "--repetitions: is 0, expected 1 to 100000"),
        (["--warm-up-ms", "-1"], "--warm-up-ms: is -1.0, expected 0 to 60000"),
        (["--threads", "-1"], f"--threads: is -1, expected 0 to {os.cpu_count()}"),
        (["--threads", "100000"], f"--threads: is 100000, expected 0 to {os.cpu_count()}"),
        (["--dtype", "int8"], '--dtype: is "int8", expected one of: bf16, fp16, fp32, fp64, bfloat16, float16'),
        (["--json", ""], "--json: is empty, expected the name of a file"),
        (["--json", "new/"], '--json: "new/" is a folder, expected the name of a file'),
        (["--json", "."], '--json: "." is a folder, expected the name of a file'),
        (["--plot", ""], "--plot: is empty, expected the name of a folder"),
        (["--json", "no/such/folder/result.json"], '--json: "no/such/folder/result.json" cannot be written'),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", *argv, "--device", "cpu"], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.startswith("eaves.bench: ") and err.count("\n") == 1
    assert out == ""


def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"], [toy(Eaves())]) == 2
    assert "--device: is cuda, but PyTorch sees no GPU here" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ logsumexp


def test_logsumexp_is_measured_side_by_side(tmp_path: Path) -> None:
    """The only test that compiles: rows up to 1 MiB, so one length backward and one forward more."""
    path = tmp_path / "result.json"
    assert main(["logsumexp", *QUICK, "--dtype", "bf16", "--max-bytes", "1100K", "--json", str(path)]) == 0
    for mode, lengths in (("fwd", [1024, 2048]), ("bwd", [1024])):
        for provider in ("eaves", "torch", "torch.compile", "limit"):
            measured = [row for row in rows_of(path, mode=mode, provider=provider) if row["ms"] is not None]
            assert [row["shape"]["n"] for row in measured] == lengths, provider


# ------------------------------------------------------------------------------------------------------------- on a GPU


def test_a_gpu_has_the_table_host(cuda: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    argv = ["toy", "--device", "cuda", "--repetitions", "5", "--warm-up-ms", "0", "--json", str(path)]
    assert main(argv, [toy(Eaves(), Peer())]) == 0
    assert "toy-host-bwd-dim16-fp32:" in capsys.readouterr().out
    assert all(0 < row["host_ms"] < 10 for row in rows_of(path, provider="peer"))
