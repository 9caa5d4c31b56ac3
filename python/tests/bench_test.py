"""Tests of `python -m eaves.bench`: small operators made for the purpose, a few repetitions, no claim about speed."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eaves.bench import memory, timing
from eaves.bench.__main__ import main, parse_bytes
from eaves.bench.benchmark import Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.harness import LIMIT, Column, Harness, HarnessOptions, Measurement
from eaves.bench.logsumexp import OPERATOR as LOGSUMEXP
from eaves.bench.protocol import Protocol
from eaves.bench.report import MeasuredTable, text_table
from eaves.bench.timing import Timer, Timing

DIM = 16  # rows of x in the toy operator
QUICK = ["--device", "cpu", "--repetitions", "2", "--warm-up-ms", "0"]


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last cache of 64 KiB: reading real ones is most of a test's time."""
    monkeypatch.setattr(timing, "last_cache_bytes", lambda device: 2**16)


# A toy: out = sum of exp(x) over the last axis, x [DIM, n] in float32, n = 8 and 64.


def exp_sum(x: Tensor) -> Tensor:
    return x.exp().sum(-1)


class Eaves(Provider):
    name = "eaves"

    def forward(self, row: Row) -> Forward:
        return exp_sum


class Peer(Provider):
    name = "peer"

    def forward(self, row: Row) -> Forward:
        return exp_sum


class Missing(Provider):
    name = "missing"

    def load(self) -> None:
        raise ImportError("No module named 'missing'")

    def forward(self, row: Row) -> Forward:
        raise AssertionError("a missing provider is not asked")


class FailsAt64(Provider):
    name = "fails"

    def forward(self, row: Row) -> Forward:
        def forward(x: Tensor) -> Tensor:
            if row.axis_value == 64:
                raise RuntimeError("64 is too many\nand this is the second line")
            return exp_sum(x)

        return forward


class FailsInTheEnd(Provider):
    """Not in the comparison nor in the memory's calls, but while it is timed."""

    name = "late"

    def forward(self, row: Row) -> Forward:
        calls = 0

        def forward(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise torch.OutOfMemoryError("tried to allocate")
            return exp_sum(x)

        return forward


class WrongOut(Provider):
    name = "wrong"

    def forward(self, row: Row) -> Forward:
        return lambda x: exp_sum(x) * 1.01


class WrongGradient(Provider):
    name = "wrong"

    def forward(self, row: Row) -> Forward:
        return lambda x: x.detach().exp().sum(-1) + (x - x.detach()).sum(-1)


class NanOut(Provider):
    name = "wrong"

    def forward(self, row: Row) -> Forward:
        return lambda x: exp_sum(x) * float("nan")


def toy_row(mode: Mode, n: int, options: dict[str, object] | None = None) -> Row:
    def make_inputs(device: torch.device, seed: int) -> Inputs:
        x = normal([DIM, n], torch.float32, device, seed).requires_grad_()
        return Inputs((x,), normal([DIM], torch.float32, device, seed + 1))

    x_bytes, out_bytes = 4 * DIM * n, 4 * DIM
    moved = (x_bytes, out_bytes, 0) if mode == "fwd" else (x_bytes + out_bytes, x_bytes, x_bytes)
    return Row(n, {"dim": DIM, "n": n}, options or {}, *moved, make_inputs)


def toy(*providers: Provider, name: str = "toy", modes: tuple[Mode, ...] = ("fwd", "bwd")) -> Operator:
    def tables(request: Request) -> list[Table]:
        return [Table(name, mode, "dim16-fp32", "n", "fp32", [toy_row(mode, n) for n in (8, 64)]) for mode in modes]

    return Operator(name, providers, tables)


def measure_one(mode: Mode, n: int, *providers: Provider, protocol: str = "autograd") -> Measurement:
    options = HarnessOptions(torch.device("cpu"), Protocol(protocol), repetitions=3)
    return Harness(options).measure(mode, toy_row(mode, n), providers, providers[0])


def rows_of(path: Path, **wanted: object) -> list[dict[str, object]]:
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


# ------------------------------------------------------------------------------------------------------------ tables


def measured_table(*columns: dict[str, Column], mode: Mode = "fwd") -> MeasuredTable:
    rows = [toy_row(mode, n) for n in (1024, 131072)][: len(columns)]
    names = [name for name in columns[0] if name != LIMIT]
    table = Table("toy", mode, "dim16-fp32", "n", "fp32", rows)
    return MeasuredTable(table, names, [Measurement(each) for each in columns])


def column(ms: float, peak_mib: float = 0.0, host_ms: float | None = None) -> Column:
    return Column("", Timing(ms, ms, ms, 2), host_ms, int(peak_mib * 2**20))


def test_a_table_has_the_published_layout() -> None:
    measured = measured_table(
        {"eaves": column(0.1), "torch": column(0.4), "torch.compile": column(0.3), LIMIT: column(0.08)},
        {"eaves": column(12.5), "torch": column(25), "torch.compile": column(100), LIMIT: column(10)},
    )
    assert text_table(measured, "speed") == (
        "toy-speed-fwd-dim16-fp32:\n"
        "          n      eaves      torch  torch.compile      limit  eaves / limit  best peer / eaves\n"
        "0    1024.0   0.100000   0.400000       0.300000   0.080000          1.250              3.000\n"
        "1  131072.0  12.500000  25.000000     100.000000  10.000000          1.250              2.000\n"
    )


def test_the_memory_table_is_in_mib() -> None:
    measured = measured_table({"eaves": column(1, 8), "torch": column(1, 16.25), LIMIT: column(1, 8)}, mode="bwd")
    assert text_table(measured, "memory") == (
        "toy-memory-bwd-dim16-fp32:\n"
        "        n     eaves      torch     limit  eaves / limit  best peer / eaves\n"
        "0  1024.0  8.000000  16.250000  8.000000          1.000              2.031\n"
    )


def test_the_host_table_has_no_limit() -> None:
    measured = measured_table({"eaves": column(1, 1, 0.02), "torch": column(1, 1, 0.05), LIMIT: column(1, 1, 0.01)})
    assert text_table(measured, "host") == (
        "toy-host-fwd-dim16-fp32:\n"
        "        n     eaves     torch  best peer / eaves\n"
        "0  1024.0  0.020000  0.050000              2.500\n"
    )


def test_a_skipped_column_is_nan_and_its_reason_ends_the_row() -> None:
    measured = measured_table({"eaves": column(1), "torch": Column("no compiler"), LIMIT: column(1)})
    row = text_table(measured, "speed").splitlines()[2]
    assert row == "0  1024.0  1.000000    NaN  1.000000          1.000                NaN  torch: no compiler"


def test_rows_with_options_name_what_the_first_column_does_not() -> None:
    table = Table("toy", "fwd", "layouts-fp32", "n", "fp32", [toy_row("fwd", 8, {"axes": [0]})])
    measured = MeasuredTable(table, ["eaves"], [Measurement({"eaves": column(1), LIMIT: column(1)})])
    assert text_table(measured, "speed").splitlines()[2].endswith("1.000  dim=16 axes=[0]")


def test_an_unsteady_row_says_so() -> None:
    unsteady = Column("", Timing(5.0, 1.0, 6.0, 2), None, 0)
    measured = measured_table({"eaves": unsteady, LIMIT: column(1)})
    assert "unsteady, fastest eaves 1.000: is the machine busy?" in text_table(measured, "speed")


# ------------------------------------------------------------------------------------------------------- measurement


def test_a_timing_is_the_median_with_the_extremes() -> None:
    assert Timing.of([3.0, 1.0, 20.0]) == Timing(3.0, 1.0, 20.0, 3)
    assert Timing.of([3.0, 1.0, 20.0, 4.0]) == Timing(3.5, 1.0, 20.0, 4)


def test_calls_take_turns_and_each_finds_the_cache_flushed_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    flush = ("bytes read", 2 * 2**16, "written", 0)

    def stream_bytes(source: Tensor, destination: Tensor, read_bytes: int, write_bytes: int) -> None:
        events.append(("bytes read", read_bytes, "written", write_bytes))

    monkeypatch.setattr(timing, "stream_bytes", stream_bytes)
    timer = Timer(torch.device("cpu"))
    sets = ["first", "second"]
    calls = {name: [lambda name=name, each=each: events.append((name, each)) for each in sets] for name in ("a", "b")}
    timed = timer.time(calls, 2)
    once = [[flush, ("a", each), flush, ("b", each)] for each in sets]
    # Three calls to warm up and one that says how long it takes come before the two that count.
    assert events == once[0] + once[1] + once[0] + once[0] + once[0] + once[1]
    assert timed["a"].timing is not None and timed["a"].timing.repetitions == 2


def test_a_row_has_every_provider_and_the_limit() -> None:
    measurement = measure_one("bwd", 64, Eaves(), Peer())
    assert list(measurement.columns) == ["eaves", "peer", "limit"]
    for each in measurement.columns.values():
        assert each.skipped == ""
        assert each.timing is not None and each.timing.repetitions == 3
        assert 0 < each.timing.min_ms <= each.timing.median_ms <= each.timing.max_ms


def test_forward_and_backward_together_is_a_mode_too() -> None:
    measurement = measure_one("fwd+bwd", 64, Eaves())
    assert measurement.columns["eaves"].timing is not None


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_wrong_out_is_reported_and_not_timed(mode: Mode) -> None:
    measurement = measure_one(mode, 64, Eaves(), WrongOut())
    assert measurement.columns["wrong"].skipped.startswith("wrong result: out is off by")
    assert measurement.columns["wrong"].timing is None
    assert measurement.columns["eaves"].timing is not None


def test_a_wrong_gradient_is_reported_and_not_timed() -> None:
    assert measure_one("fwd", 64, Eaves(), WrongGradient()).columns["wrong"].skipped == ""
    measurement = measure_one("bwd", 64, Eaves(), WrongGradient())
    assert measurement.columns["wrong"].skipped.startswith("wrong result: gradient 0 is off by")
    assert measurement.columns["wrong"].timing is None


def test_nan_is_a_wrong_result() -> None:
    assert "off by nan" in measure_one("fwd", 64, Eaves(), NanOut()).columns["wrong"].skipped


def test_a_provider_that_fails_gives_a_reason_and_the_others_go_on() -> None:
    measurement = measure_one("fwd", 64, Eaves(), FailsAt64(), Peer())
    assert measurement.columns["fails"] == Column("64 is too many")
    assert measurement.columns["peer"].timing is not None


def test_a_provider_that_runs_out_of_memory_while_it_is_timed_is_left_there() -> None:
    measurement = measure_one("fwd", 64, Eaves(), FailsInTheEnd(), Peer())
    assert measurement.columns["late"].skipped == "does not fit in memory"
    assert measurement.columns["late"].timing is None
    assert measurement.columns["peer"].timing is not None


# ---------------------------------------------------------------------------------------------------------- protocols


def backward_gradient(protocol: Protocol, calls: int) -> tuple[Tensor | None, Tensor]:
    """What .grad is after so many calls, and the gradient of one."""
    inputs = toy_row("bwd", 8).make_inputs(torch.device("cpu"), 1)
    (x,) = inputs.arguments
    call = protocol.make_call("bwd", exp_sum, inputs)
    for _ in range(calls):
        call()
    return x.grad, (inputs.grad_out[:, None] * x.exp()).detach()


def test_the_seed_protocol_accumulates() -> None:
    accumulated, gradient = backward_gradient(Protocol("seed"), 3)
    assert accumulated is not None
    torch.testing.assert_close(accumulated, 3 * gradient)


def test_the_autograd_protocol_leaves_no_gradient_behind() -> None:
    accumulated, _ = backward_gradient(Protocol("autograd"), 3)
    assert accumulated is None


def test_the_limit_of_the_seed_protocol_streams_the_accumulation_too() -> None:
    row = toy_row("bwd", 64)
    x_bytes, rows_bytes = 4 * DIM * 64, 4 * DIM
    assert Protocol("autograd").moved(row) == (x_bytes + rows_bytes, x_bytes)
    assert Protocol("seed").moved(row) == (x_bytes + rows_bytes + 2 * x_bytes, 2 * x_bytes)
    assert Protocol("seed").moved(toy_row("fwd", 64)) == Protocol("autograd").moved(toy_row("fwd", 64))


# ------------------------------------------------------------------------------------------------------------- memory

N = 4096  # so that x has 256 KiB, and DIM outputs are 64 bytes: what an allocator rounds up is far less than 1 %


@pytest.mark.parametrize(
    ("mode", "protocol", "tensors"),
    [
        ("fwd", "autograd", 2),  # x, exp(x)
        ("bwd", "autograd", 3),  # x, exp(x), the gradient
        ("bwd", "seed", 4),  # and the one it is added to
    ],
)
def test_the_peak_is_what_is_alive(device: torch.device, mode: Mode, protocol: str, tensors: int) -> None:
    row = toy_row(mode, N)
    inputs = row.make_inputs(device, 1)
    held = torch.ones(2**20, device=device)  # the benchmark's own buffers are no part of it
    peak = memory.peak_bytes(mode, lambda: Protocol(protocol).make_call(mode, exp_sum, inputs), inputs)
    assert peak == pytest.approx(tensors * 4 * DIM * N, rel=0.01)
    del held


# -------------------------------------------------------------------------------------------------------- the program


def test_the_program_prints_speed_and_memory_of_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK, [toy(Eaves(), Peer())]) == 0
    out, err = capsys.readouterr()
    titles = [line for line in out.splitlines() if line.endswith(":")]
    assert titles == [f"toy-{kind}-{mode}-dim16-fp32:" for kind in ("speed", "memory") for mode in ("fwd", "bwd")]
    assert err == ""  # no progress bar where nobody looks


def test_a_provider_that_is_missing_is_named_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    operators = [toy(Eaves(), Missing(), name="toy"), toy(Eaves(), Missing(), name="other")]
    assert main(QUICK, operators) == 0
    out, err = capsys.readouterr()
    assert err == "# missing is left out: No module named 'missing'\n"
    assert "missing" not in out


def test_chosen_providers_are_compared_with_eaves_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--provider", "wrong"], [toy(Eaves(), Peer(), WrongOut(), modes=("fwd",))]) == 0
    out, _ = capsys.readouterr()
    assert "wrong: wrong result: out is off by" in out
    assert "peer" not in out.replace("best peer", "")
    assert "n  wrong" in out  # and eaves itself has no column


def test_a_failing_provider_is_skipped_in_the_result_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*QUICK, "--json", str(path)], [toy(Eaves(), FailsAt64(), modes=("fwd",))]) == 0
    fine, failed = rows_of(path, provider="fails")
    assert fine["ms"] is not None
    assert (failed["ms"], failed["skipped"]) == (None, "64 is too many")


def test_the_result_file_has_the_schema_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*QUICK, "--protocol", "seed", "--json", str(path)], [toy(Eaves())]) == 0
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


def test_a_run_that_ends_early_leaves_the_old_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    assert main([*QUICK, "--max-bytes", "1", "--json", str(path)], [toy(Eaves())]) == 2
    assert capsys.readouterr().err == "eaves.bench: --max-bytes: 1 leaves out every row, expected more\n"
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_rows_beyond_max_bytes_are_left_out_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--max-bytes", "1K"], [toy(Eaves(), modes=("fwd",))]) == 0
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
        (["--threads", "-1"], "--threads: is -1, expected 0 to 4096"),
        (["--json", "no/such/folder/result.json"], '--json: "no/such/folder/result.json" cannot be written'),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", *argv], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.startswith("eaves.bench: ") and err.count("\n") == 1
    assert out == ""


def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"], [toy(Eaves())]) == 2
    assert "--device: is cuda, but PyTorch sees no GPU here" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- plots


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_plots_are_png_files_of_a_readable_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--plot", str(tmp_path / "new" / "plots")], [toy(Eaves(), Peer(), FailsAt64())]) == 0
    files = sorted((tmp_path / "new" / "plots").iterdir())
    titles = [f"toy-{kind}-{mode}-dim16-fp32.png" for kind in ("memory", "speed") for mode in ("bwd", "fwd")]
    assert [path.name for path in files] == titles
    for path in files:
        assert png_size(path) == (1600, 900)


def test_one_length_is_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--max-bytes", "1K", "--plot", str(tmp_path)], [toy(Eaves(), modes=("fwd",))]) == 0
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_plots_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eaves.bench.plot", raising=False)
    monkeypatch.delattr("eaves.bench.plot", raising=False)
    assert main([*QUICK, "--plot", str(tmp_path)], [toy(Eaves())]) == 2
    out, err = capsys.readouterr()
    assert err == "eaves.bench: --plot: matplotlib is not installed, expected it: pip install eaves[bench]\n"
    assert out == ""


# ----------------------------------------------------------------------------------------------------------- logsumexp


def test_logsumexp_has_the_rows_and_the_bytes_of_the_program() -> None:
    """`eaves bench` wrote the file; GB/s by ms are the bytes of a row."""
    results = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/logsumexp.json"
    of_program = {
        json.dumps([row["mode"], row["dtype"], row["shape"], row["options"]]): row["gbps"] * row["ms"] * 1e6
        for row in json.loads(results.read_text())["rows"]
    }
    tables = LOGSUMEXP.tables(Request("quick", torch.device("cuda"), "bf16", has_dtype=False))
    here = {
        json.dumps([table.mode, table.dtype, dict(row.shape), dict(row.options)]): row.read_bytes + row.write_bytes
        for table in tables
        for row in table.rows
    }
    # A case that is new has not been measured by the program yet.
    both = of_program.keys() & here.keys()
    assert len(both) >= 28
    assert {case: here[case] for case in both} == pytest.approx({case: of_program[case] for case in both})


def test_the_seed_sweep_is_the_published_lengths() -> None:
    tables = LOGSUMEXP.tables(Request("seed", torch.device("cpu"), "bf16", has_dtype=False))
    assert [(table.mode, table.title_suffix) for table in tables] == [
        ("fwd", "batch4-dim1024-bf16"),
        ("bwd", "batch4-dim1024-bf16"),
    ]
    assert all([row.axis_value for row in table.rows] == [1024 << i for i in range(8)] for table in tables)


def test_logsumexp_is_measured_side_by_side(tmp_path: Path) -> None:
    """The only test that compiles: rows up to 1 MiB, so one length backward and one forward more."""
    path = tmp_path / "result.json"
    assert main(["logsumexp", *QUICK, "--dtype", "bf16", "--max-bytes", "1100K", "--json", str(path)]) == 0
    for mode, lengths in (("fwd", [1024, 2048]), ("bwd", [1024])):
        for provider in ("eaves", "torch", "torch.compile", "limit"):
            measured = [row for row in rows_of(path, mode=mode, provider=provider) if row["ms"] is not None]
            assert [row["shape"]["n"] for row in measured] == lengths, provider


# ------------------------------------------------------------------------------------------------------------ on a GPU


def test_a_gpu_has_the_table_host(cuda: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    argv = ["--device", "cuda", "--repetitions", "5", "--warm-up-ms", "0", "--json", str(path)]
    assert main(argv, [toy(Eaves(), Peer())]) == 0
    assert "toy-host-bwd-dim16-fp32:" in capsys.readouterr().out
    assert all(0 < row["host_ms"] < 10 for row in rows_of(path, provider="peer"))


def test_on_a_gpu_the_host_is_not_in_the_time_of_a_call(cuda: torch.device) -> None:
    """A kernel of 10 us behind a call that keeps Python busy for 2 ms."""

    class Slow(Provider):
        name = "eaves"

        def forward(self, row: Row) -> Forward:
            def forward(x: Tensor) -> Tensor:
                end = timing.now_ms() + 2
                while timing.now_ms() < end:
                    pass
                return exp_sum(x)

            return forward

    options = HarnessOptions(cuda, Protocol("autograd"), repetitions=10)
    measured = Harness(options).measure("fwd", toy_row("fwd", 64), [Slow()], Slow()).columns["eaves"]
    assert measured.timing is not None and measured.timing.median_ms < 0.5
    assert measured.host_ms is not None and measured.host_ms > 2
