"""Tests of how `python -m eaves.bench` measures: times, memory, the comparison, the protocols, the providers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench_toy import (  # noqa: F401
    CPU,
    DIM,
    Eaves,
    FailsAt64,
    FailsInTheEnd,
    NanOut,
    Peer,
    WrongGradient,
    WrongOut,
    exp_sum,
    measure_one,
    small_flush,
    toy_row,
)
from eaves.bench import device as bench_device
from eaves.bench import harness, memory, timing, verify
from eaves.bench.benchmark import Forward, Mode, Provider, Request, Row
from eaves.bench.harness import Harness, HarnessOptions
from eaves.bench.logsumexp import OPERATOR as LOGSUMEXP
from eaves.bench.protocol import Call, Protocol
from eaves.bench.timing import Column, Timer, Timing


def test_a_timing_is_the_median_with_the_extremes() -> None:
    assert Timing.of([3.0, 1.0, 20.0]) == Timing(3.0, 1.0, 20.0, 3)
    assert Timing.of([3.0, 1.0, 20.0, 4.0]) == Timing(3.5, 1.0, 20.0, 4)


class Clock:
    """A clock that only calls move: what a timing has to be is known to the last digit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flush_ms: float = 0.0) -> None:
        self.ms = 0.0
        for module in (timing, bench_device):
            monkeypatch.setattr(module, "now_ms", lambda: self.ms)
        monkeypatch.setattr(timing, "stream_bytes", lambda *arguments: self.advance(flush_ms))

    def advance(self, ms: float) -> None:
        self.ms += ms


def test_a_stopwatch_on_a_cpu_shows_what_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.advance(100)
    stopwatch = bench_device.Stopwatch(CPU)
    stopwatch.start()
    clock.advance(7)
    stopwatch.stop()
    clock.advance(20)
    assert stopwatch.elapsed_ms() == 7


def test_every_contestant_gets_its_own_time_without_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, flush_ms=1000)
    # Four calls to warm up come first; the times of the five that count are 1, 2, 3, 4 and 10 times as long.
    factors = {name: iter([50, 50, 50, 50, 4, 2, 10, 1, 3]) for name in "abc"}
    unit = {"a": 1.0, "b": 8.0, "c": 64.0}
    calls = {name: [Call(lambda name=name: clock.advance(unit[name] * next(factors[name])))] for name in "abc"}
    timed = Timer(CPU).time(calls, 5)
    assert {name: each.timing for name, each in timed.items()} == {
        name: Timing(median_ms=3 * each, min_ms=each, max_ms=10 * each, repetitions=5) for name, each in unit.items()
    }


def test_slow_contestants_get_fewer_repetitions_but_five(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for call_ms, repetitions in ((10, 30), (50, 20), (700, 5)):  # a second for each contestant
        timed = Timer(CPU).time({"a": [Call(lambda call_ms=call_ms: clock.advance(call_ms))]}, 30)
        assert timed["a"].timing is not None and timed["a"].timing.repetitions == repetitions


def test_warming_up_lasts_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, flush_ms=1)
    timer = Timer(CPU)
    timer.warm_up(0)
    assert clock.ms == 0
    timer.warm_up(25)
    assert clock.ms == 30  # ten flushes at a time


def test_the_flush_is_larger_than_the_last_cache() -> None:
    free = 2**40
    assert timing.flush_bytes(False, 2**20, free) == 2**21
    assert timing.flush_bytes(True, 2**20, free) == 2**28
    assert timing.flush_bytes(True, 50 * 2**20, free) == 2**28
    assert timing.flush_bytes(True, 2**27, free) == 2**29
    assert timing.flush_bytes(True, 2**27, 2**24) == 2**22  # where memory is short, a quarter of it


def test_the_last_cache_is_that_of_the_highest_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, level, size in (
        ("index0", 1, "32K"),
        ("index2", 2, "1024K"),
        ("index3", 3, "16384K"),
        ("index1", 1, "48K"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "level").write_text(f"{level}\n")
        (tmp_path / name / "size").write_text(f"{size}\n")
    monkeypatch.setattr(bench_device, "_CACHES", tmp_path)
    assert bench_device.last_cache_bytes(CPU) == 16 * 2**20
    monkeypatch.setattr(bench_device, "_CACHES", tmp_path / "none")
    assert bench_device.last_cache_bytes(CPU) == 32 * 2**20


def test_calls_take_turns_and_each_finds_the_cache_flushed_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    flush = ("bytes read", 2 * 2**16, "written", 0)

    def stream_bytes(source: Tensor, destination: Tensor, read_bytes: int, write_bytes: int) -> None:
        events.append(("bytes read", read_bytes, "written", write_bytes))

    monkeypatch.setattr(timing, "stream_bytes", stream_bytes)
    timer = Timer(CPU)
    sets = ["first", "second"]
    calls = {
        name: [Call(lambda name=name, each=each: events.append((name, each))) for each in sets] for name in ("a", "b")
    }
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


class Recorder(Provider):
    """Keeps the x of every forward."""

    name = "eaves"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, row: Row) -> Forward:
        def forward(x: Tensor) -> Tensor:
            self.seen.append(x)
            return exp_sum(x)

        return forward


@pytest.mark.parametrize(("cache_bytes", "sets"), [(512, 1), (1024, 2), (2048, 3), (2**16, 4)])
@pytest.mark.parametrize("protocol", ["autograd", "seed"])
def test_the_limit_streams_the_bytes_of_the_row_once_in_each_repetition(
    monkeypatch: pytest.MonkeyPatch, cache_bytes: int, sets: int, protocol: str
) -> None:
    """A set of this row has 1152 bytes: x and grad_out, and as many of the limit. Where it is smaller than two caches,
    there are as many as these hold, from two to four."""
    streamed: list[tuple[Tensor, Tensor, int, int]] = []
    monkeypatch.setattr(harness, "last_cache_bytes", lambda device: cache_bytes)
    monkeypatch.setattr(harness, "stream_bytes", lambda *arguments: streamed.append(arguments))
    recorder = Recorder()
    options = HarnessOptions(CPU, Protocol(protocol), repetitions=6)
    row = toy_row("fwd", 8)
    Harness(options).measure("fwd", row, [recorder], recorder)
    # On every set before anything is timed, at least three times; once to see how long it takes; six times.
    timed = max(3, sets) + 1 + 6
    assert len(streamed) == timed
    assert {(read, write) for _, _, read, write in streamed} == {(row.read_bytes, row.write_bytes)}
    for source, destination, read, write in streamed:
        assert source.nbytes >= read and destination.nbytes >= write
    assert len({source.data_ptr() for source, *_ in streamed}) == sets
    assert len({destination.data_ptr() for _, destination, *_ in streamed}) == sets
    # The provider, too, calls once in turn, after one call for the comparison and two for the memory.
    xs = [x.data_ptr() for x in recorder.seen[3:]]
    assert len(xs) == timed and len(set(xs)) == sets
    assert xs[-6:] == [xs[index % sets] for index in range(6)]


def test_the_limit_of_an_accumulating_backward_streams_the_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = []
    monkeypatch.setattr(harness, "stream_bytes", lambda source, destination, *moved: streamed.append(moved))
    row = toy_row("bwd", 64)
    Harness(HarnessOptions(CPU, Protocol("seed"), repetitions=2)).measure("bwd", row, [Eaves()], Eaves())
    assert set(streamed) == {(row.read_bytes + 2 * row.gradient_bytes, row.write_bytes + row.gradient_bytes)}


def test_a_timed_backward_runs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "last_cache_bytes", lambda device: 0)  # one set
    for mode, forwards in (("bwd", 3), ("fwd+bwd", 2 + 1 + 3 + 1 + 9)):
        recorder = Recorder()
        options = HarnessOptions(CPU, Protocol("autograd"), repetitions=9)
        Harness(options).measure(mode, toy_row(mode, 8), [recorder], recorder)
        # One to compare, one for the memory (two where every call has one), and one for the set.
        assert len(recorder.seen) == forwards, mode


def test_a_row_that_does_not_fit_is_left_out_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    row = toy_row("fwd", 64)
    needed = 3 * (row.read_bytes + row.write_bytes)  # inputs and outputs, as much between them, the limit's buffers
    free = needed - 1
    monkeypatch.setattr(harness, "free_memory_bytes", lambda device: free)
    recorder = Recorder()
    tight = Harness(HarnessOptions(CPU, Protocol("autograd"), repetitions=2))
    assert tight.measure("fwd", row, [recorder], recorder).skipped.startswith("does not fit in memory: needs")
    assert recorder.seen == []
    free = needed
    assert tight.measure("fwd", row, [recorder], recorder).skipped == ""


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


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float32, 1e-3), (torch.float64, 1e-6)],
)
def test_a_result_may_be_off_by_as_much_as_its_dtype_rounds(dtype: torch.dtype, tolerance: float) -> None:
    expected = verify.Results("eaves", {"out": torch.tensor([1.0, -8.0, 3.0], dtype=dtype)})
    for part, is_wrong in ((0.5, False), (1.5, True)):
        moved = torch.tensor([0.0, 0.0, 8.0 * part * tolerance], dtype=dtype)  # of the largest value, which is 8
        actual = verify.Results("peer", {"out": expected.tensors["out"] + moved})
        assert bool(verify.difference(actual, expected)) == is_wrong


class RoundsToBfloat16(Provider):
    """As PyTorch's own losses do where eaves keeps float32."""

    name = "rounds"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def forward(self, row: Row) -> Forward:
        return lambda x: (exp_sum(x) * self._factor).bfloat16()


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("protocol", ["autograd", "seed"])
def test_a_peer_may_return_another_dtype_but_not_other_values(mode: Mode, protocol: str) -> None:
    rounded = measure_one(mode, 64, Eaves(), RoundsToBfloat16(1.0), protocol=protocol).columns["rounds"]
    assert rounded.skipped == "" and rounded.timing is not None
    wrong = measure_one(mode, 64, Eaves(), RoundsToBfloat16(1.3), protocol=protocol).columns["rounds"]
    assert wrong.skipped.startswith("wrong result: out is off by")


def test_another_shape_is_a_wrong_result() -> None:
    expected = verify.Results("eaves", {"out": torch.ones(4)})
    assert verify.difference(verify.Results("peer", {"out": torch.ones(4, 1)}), expected) == (
        "wrong result: out is [4, 1], eaves's is [4]"
    )


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


# ------------------------------------------------------------------------------------------------------------ protocols


def backward_gradient(protocol: Protocol, calls: int) -> tuple[Tensor | None, Tensor]:
    """What .grad is after so many calls, and the gradient of one."""
    inputs = toy_row("bwd", 8).make_inputs(CPU, 1)
    (x,) = inputs.arguments
    call = protocol.make_call("bwd", exp_sum, inputs)
    for _ in range(calls):
        call.run()
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


# --------------------------------------------------------------------------------------------------------------- memory


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


@pytest.mark.parametrize("protocol", ["autograd", "seed"])
def test_the_columns_have_the_peak_of_the_provider_and_the_least_that_there_is(protocol: str) -> None:
    x_bytes, out_bytes = 4 * DIM * N, 4 * DIM
    forward = measure_one("fwd", N, Eaves(), Peer(), protocol=protocol).columns
    assert forward["limit"].peak_bytes == x_bytes + out_bytes
    for name in ("eaves", "peer"):
        assert forward[name].peak_bytes == pytest.approx(2 * x_bytes, rel=0.01)
    backward = measure_one("bwd", N, Eaves(), Peer(), protocol=protocol).columns
    accumulated = x_bytes if protocol == "seed" else 0
    assert backward["limit"].peak_bytes == 2 * x_bytes + out_bytes + accumulated
    for name in ("eaves", "peer"):
        assert backward[name].peak_bytes == pytest.approx(3 * x_bytes + accumulated, rel=0.01)


# ------------------------------------------------------------------------------------------------------------ logsumexp


class Functions(TorchFunctionMode):
    """Every function of torch that is called, with its first argument and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, object, object]] = []

    def __torch_function__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        self.calls.append((function, arguments[0] if arguments else None, result))
        return result


def logsumexp_provider(name: str) -> Provider:
    (provider,) = [each for each in LOGSUMEXP.providers if each.name == name]
    return provider


def logsumexp_row() -> Row:
    return LOGSUMEXP.tables(Request("quick", CPU, "fp32", has_dtype=True))[0].rows[0]


def test_torch_is_one_call_of_its_logsumexp_and_nothing_else() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    with Functions() as functions:
        out = logsumexp_provider("torch").forward(logsumexp_row())(x)
    ((function, argument, result),) = functions.calls
    assert function is torch.logsumexp and argument is x and result is out


def test_eaves_is_one_call_of_its_logsumexp_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []

    def logsumexp(x: Tensor, axis: int) -> Tensor:
        results.append((x, axis, torch.empty(0)))
        return results[-1][2]

    x = torch.randn(2, 3, 8, requires_grad=True)
    monkeypatch.setattr("eaves.logsumexp", logsumexp)
    forward = logsumexp_provider("eaves").forward(logsumexp_row())
    monkeypatch.setattr(torch, "empty", torch.Tensor)  # the one function of torch that this test calls
    with Functions() as functions:
        out = forward(x)
    assert functions.calls == []
    ((argument, axis, result),) = results
    assert argument is x and axis == -1 and result is out


def test_torch_compile_compiles_what_torch_calls_anew_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    def compile(function: Forward, **options: object) -> str:
        events.append(("compile", options))
        x = torch.randn(3, 8)
        with Functions() as functions:
            function(x)
        assert [call[:2] for call in functions.calls] == [(torch.logsumexp, x)]
        return "compiled"

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))
    provider = logsumexp_provider("torch.compile")
    assert [provider.forward(logsumexp_row()) for _ in range(2)] == ["compiled"] * 2
    assert events == 2 * ["reset", ("compile", {"fullgraph": True, "dynamic": False})]


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
    tables = LOGSUMEXP.tables(Request("seed", CPU, "bf16", has_dtype=False))
    assert [(table.mode, table.title_suffix) for table in tables] == [
        ("fwd", "batch4-dim1024-bf16"),
        ("bwd", "batch4-dim1024-bf16"),
    ]
    assert all([row.axis_value for row in table.rows] == [1024 << i for i in range(8)] for table in tables)


# ------------------------------------------------------------------------------------------------------------- on a GPU


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
