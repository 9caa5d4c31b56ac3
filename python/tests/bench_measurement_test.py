"""Tests of how `python benchmarks` measures: times, memory, the comparison, the protocols, and calls in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import device as bench_device
from bench import harness, memory, timing, verify
from bench.benchmark import Mode, Provider, Row, compiled
from bench.calls import PROTOCOLS, Call, least_peak_bytes, make_call, moved
from bench.harness import Harness
from bench.timing import ColdTimer, Timer
from bench_toy import (  # noqa: F401
    CPU,
    DIM,
    EAVES,
    FAILS_AT_64,
    PEER,
    WRONG,
    exp_sum,
    measure_one,
    provider,
    small_flush,
    toy_row,
)

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def in_place_row(n: int) -> Row:
    return toy_row("fwd+bwd", n, in_place=True)


class ExpSumInPlace(torch.autograd.Function):
    """The toy operator with its gradient written over x in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = x.detach().exp_()
        return ctx.gradient.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return ctx.gradient.mul_(grad_outputs[0][:, None])


def exp_sum_in_place(x: Tensor) -> Tensor:
    return ExpSumInPlace.apply(x)  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """A clock that only calls advance, so that a test knows every measured time exactly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flush_ms: float = 0.0) -> None:
        self.ms = 0.0
        self.events: list[object] = []
        for module in (timing, bench_device):
            monkeypatch.setattr(module, "now_ms", lambda: self.ms)
        monkeypatch.setattr(timing, "stream_bytes", lambda *moved: self.spend(("flush", *moved[2:]), flush_ms))

    def spend(self, event: object, ms: float) -> None:
        self.events.append(event)
        self.ms += ms

    def call(self, name: object, ms: float, prepare: bool = False) -> Call:
        run: Callable[[], None] = lambda: self.spend(name, ms)  # noqa: E731
        return Call(run, lambda: self.spend("prepare", 10)) if prepare else Call(run)


def cells(timer: Timer, calls: Any, repetitions: int) -> dict[str, timing.Cell]:
    return {name: contestant.cell() for name, contestant in timer.time(calls, repetitions).items()}


def test_every_contestant_gets_its_own_time_without_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, flush_ms=1000)
    # Four warm-up calls come first, and one uncounted call comes before each timed call. The timed calls take 1, 2, 3,
    # 4 and 10 times the unit.
    factors = {name: iter([50, 50, 50, 50, 50, 4, 50, 2, 50, 10, 50, 1, 50, 3]) for name in "abc"}
    unit = {"a": 1.0, "b": 8.0, "c": 64.0}
    calls = {name: [Call(lambda name=name: clock.spend(name, unit[name] * next(factors[name])))] for name in "abc"}
    assert cells(ColdTimer(CPU), calls, 5) == {
        name: {"ms": 3 * each, "ms_min": each, "ms_max": 10 * each, "repetitions": 5} for name, each in unit.items()
    }


def test_calls_take_turns_and_each_finds_the_cache_flushed_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {name: [clock.call((name, each), 0) for each in ("first", "second")] for name in ("a", "b")}
    assert cells(ColdTimer(CPU), calls, 2)["a"]["repetitions"] == 2
    flush = ("flush", 2 * 2**16, 0)
    once = [[flush, ("a", each), flush, ("b", each)] for each in ("first", "second")]
    timed = [
        [("a", before), flush, ("a", each), ("b", before), flush, ("b", each)]
        for before, each in (("second", "first"), ("first", "second"))
    ]
    # Three warm-up repetitions and one that estimates the duration come before the two timed ones. An uncounted call
    # comes before each timed call.
    assert clock.events == once[0] + once[1] + once[0] + once[0] + timed[0] + timed[1]


def test_what_a_call_prepares_comes_before_the_flush_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, flush_ms=100)
    timed = cells(ColdTimer(CPU), {"a": [clock.call("run", 1, prepare=True)]}, 2)
    once = ["prepare", "flush", "run"]
    events = [each[0] if isinstance(each, tuple) else each for each in clock.events]
    assert events == once * 4 + (["prepare", "run"] + once) * 2
    assert timed["a"]["ms_max"] == 1


def test_slow_contestants_get_fewer_repetitions_but_five(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for call_ms, repetitions in ((10, 30), (50, 20), (700, 5)):  # the limit is one second for each contestant
        assert cells(ColdTimer(CPU), {"a": [clock.call("a", call_ms)]}, 30)["a"]["repetitions"] == repetitions


def test_the_loop_by_itself_neither_flushes_nor_takes_fewer_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX and ranks use the plain Timer: every rank has to make the same calls, and each call prepares a barrier."""
    clock = Clock(monkeypatch)
    waits: list[float] = []
    timer = Timer(CPU, lambda: waits.append(clock.ms))
    timed = timer.time({"a": [clock.call("a", 700, prepare=True)], "b": [clock.call("b", 1)]}, 30)
    assert timed["a"].times_ms == [700] * 30 and timed["b"].times_ms == [1] * 30
    assert clock.events == ["prepare", "a", "b"] * 33 and len(waits) == 2
    clock.events.clear()
    twice = Timer(CPU, runs_twice=True).time({"a": [clock.call("a", 1)]}, 2)
    assert twice["a"].cell()["repetitions"] == 2 and clock.events == ["a"] * (3 + 2 * 2)


def test_on_a_gpu_the_host_is_not_in_the_time_of_a_call(cuda: torch.device) -> None:
    """Calls a kernel of 10 us through a function that keeps Python busy for 2 ms."""

    def slow(x: Tensor) -> Tensor:
        end = timing.now_ms() + 2
        while timing.now_ms() < end:
            pass
        return exp_sum(x)

    eaves = provider("eaves", slow)
    entry, _ = Harness(cuda, "autograd", repetitions=10).measure(toy_row("fwd", 64), [eaves], eaves)
    assert entry["ms"] < 0.5 and 2 < entry["host_ms"] < 10


@pytest.mark.parametrize("row", [toy_row("fwd", 64), toy_row("bwd", 64), in_place_row(64)])
def test_a_row_in_a_graph_is_a_replay_without_python(cuda: torch.device, row: Row) -> None:
    def slow(x: Tensor) -> Tensor:
        end = timing.now_ms() + 2
        while timing.now_ms() < end:
            pass
        return exp_sum_in_place(x) if row.in_place else exp_sum(x)

    eaves = provider("eaves", slow)
    for entry in Harness(cuda, "autograd", repetitions=10).measure(row.captured(), [eaves], eaves):
        assert 0 < entry["ms"] < 0.5 and entry["host_ms"] < 1
        assert entry["options"]["in_graph"] and "peak_mib" not in entry


def test_a_replay_gets_the_values_that_the_call_before_overwrote(cuda: torch.device) -> None:
    inputs = in_place_row(8).make_inputs(cuda, 1)
    call = make_call("autograd", in_place_row(8).captured(), exp_sum_in_place, inputs)
    for _ in range(3):
        call.prepare()
        (_, (_own, (gradient,))) = call.run()  # type: ignore[misc]
        torch.testing.assert_close(gradient, inputs.grad_out[:, None] * inputs.arguments[0].detach().exp())


def test_an_operator_sees_the_options_of_a_row_in_a_graph_without_the_graph() -> None:
    seen = []
    eaves = Provider("eaves", "bench_toy:exp_sum", lambda function, row: seen.append(row.options) or function)
    row = in_place_row(8).captured()
    assert row.in_graph and row.case["options"] == {"in_place": True, "in_graph": True}
    eaves.forward(row)
    assert seen == [{"in_place": True}] and not row.eager().in_graph


# ---------------------------------------------------------------------------------------------------------------- a row


@pytest.mark.parametrize(("cache_bytes", "sets"), [(512, 1), (1024, 2), (2048, 3), (2**16, 4)])
@each_protocol
def test_the_limit_streams_the_bytes_of_the_row_once_in_each_repetition(
    monkeypatch: pytest.MonkeyPatch, cache_bytes: int, sets: int, protocol: str
) -> None:
    """The buffers of this row take 1152 bytes: x and grad_out, and as many bytes for the limit. If they are smaller
    than two caches, the harness makes as many sets as two caches hold, at least two and at most four."""
    streamed: list[tuple[Tensor, Tensor, int, int]] = []
    seen: list[int] = []
    monkeypatch.setattr(harness, "last_cache_bytes", lambda device: cache_bytes)
    monkeypatch.setattr(harness, "stream_bytes", lambda *arguments: streamed.append(arguments))
    eaves = provider("eaves", lambda x: seen.append(x.data_ptr()) or exp_sum(x))
    row = toy_row("fwd", 8)
    Harness(CPU, protocol, repetitions=6).measure(row, [eaves], eaves)
    # Warm-up covers every set, with at least three calls. One call estimates the duration. Six calls are timed, and
    # each follows a call on the previous set.
    timed = max(3, sets) + 1 + 2 * 6
    assert len(streamed) == timed
    assert {(read, write) for _, _, read, write in streamed} == {(row.read_bytes, row.write_bytes)}
    assert all(source.nbytes >= read and target.nbytes >= write for source, target, read, write in streamed)
    assert len({source.data_ptr() for source, *_ in streamed}) == sets
    assert len({destination.data_ptr() for _, destination, *_ in streamed}) == sets
    # The provider makes the same calls, after one call for the comparison and two for the memory.
    xs = seen[3:]
    assert len(xs) == timed and len(set(xs)) == sets
    assert xs[-12:] == [xs[each % sets] for index in range(6) for each in (index - 1, index)]


def test_a_row_that_does_not_fit_is_left_out_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    row = toy_row("fwd", 64)
    # Inputs and outputs, as many bytes for intermediate tensors, and the limit's buffers.
    needed = 3 * (row.read_bytes + row.write_bytes)
    for free, is_left_out in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(harness, "free_memory_bytes", lambda device, free=free: free)
        for entry in measure_one(row, EAVES).values():
            assert entry.get("skipped", "").startswith("does not fit in memory: needs" if is_left_out else "")
            assert (entry["ms"] is None) == is_left_out


def test_a_provider_that_fails_gives_a_reason_and_the_others_go_on() -> None:
    calls: list[int] = []

    def late(x: Tensor) -> Tensor:
        """Fails while it is timed, after the calls of the comparison and of the memory have passed."""
        calls.append(1)
        if len(calls) > 5:
            raise torch.OutOfMemoryError("tried to allocate")
        return exp_sum(x)

    lacks = provider("lacks", lacks=lambda row: "long rows")
    found = measure_one(toy_row("fwd", 64), EAVES, FAILS_AT_64, provider("late", late), lacks, PEER)
    reasons = {name: entry["skipped"] for name, entry in found.items() if entry["ms"] is None}
    assert reasons == {
        "fails": "64 is too many",
        "late": "does not fit in memory",
        "lacks": "not supported: long rows",
    }
    assert all(found[name]["ms"] for name in ("eaves", "peer", "limit"))


# ----------------------------------------------------------------------------------------------------------- comparison


@pytest.mark.parametrize(
    ("mode", "wrong", "what"),
    [
        ("fwd", WRONG, "wrong result: out differs from eaves by"),
        ("bwd", WRONG, "wrong result: out differs from eaves by"),
        ("bwd", provider("wrong", lambda x: x.detach().exp().sum(-1) + (x - x.detach()).sum(-1)),
         "wrong result: gradient 0 differs from eaves by"),
        ("fwd", provider("wrong", lambda x: exp_sum(x) * float("nan")), "wrong result: out differs from eaves by nan"),
        ("fwd", provider("wrong", lambda x: exp_sum(x)[:, None]), "wrong result: out has shape [16, 1]"),
        ("fwd", provider("wrong", lambda x: (exp_sum(x) * 1.3).bfloat16()), "wrong result: out differs from eaves by"),
        ("bwd", provider("wrong", lambda x: exp_sum(x).bfloat16()), ""),  # the dtype differs, the values do not
    ],
)  # fmt: skip
@each_protocol
def test_a_wrong_result_is_reported_and_not_timed(mode: Mode, wrong: Any, what: str, protocol: str) -> None:
    found = measure_one(toy_row(mode, 64), EAVES, wrong, protocol=protocol)
    assert found["wrong"].get("skipped", "").startswith(what)
    assert (found["wrong"]["ms"] is None) == bool(what) and found["eaves"]["ms"]


def test_a_gradient_with_only_its_largest_elements_is_a_wrong_result() -> None:
    """The gradient of a loss: -1 at the target and, at the other classes, elements that are each far below any
    tolerance but sum to 1."""
    wanted = torch.full((4, 1025), 2.0**-10, dtype=torch.bfloat16)
    wanted[:, 7] = -1
    assert verify.difference({"gradient 0": wanted * 1.05}, {"gradient 0": wanted}) == ""
    assert verify.difference({"gradient 0": wanted.where(wanted < 0, 0)}, {"gradient 0": wanted}) == (
        "wrong result: gradient 0 differs from eaves by 4 in sum, its sum is 8"
    )


# ------------------------------------------------------------------------------------------------------------ protocols


@pytest.mark.parametrize("row", [toy_row("bwd", 8), in_place_row(8)], ids=["bwd", "in place"])
@pytest.mark.parametrize("forward", [exp_sum, exp_sum_in_place])
def test_the_protocol_accumulate_adds_up_and_autograd_leaves_no_gradient_behind(row: Row, forward: Any) -> None:
    if row.mode == "bwd" and forward is exp_sum_in_place:
        # A forward that overwrites a leaf is only for rows in place.
        return
    inputs = row.make_inputs(CPU, 1)
    (x,) = inputs.arguments
    gradient = (inputs.grad_out[:, None] * x.exp()).detach()
    for protocol in PROTOCOLS:
        call = make_call(protocol, row, forward, inputs)
        for _ in range(3):
            call.prepare()
            call.run()
        if protocol == "autograd":
            assert x.grad is None
        else:
            torch.testing.assert_close(x.grad, 3 * gradient)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", ["bwd", "fwd+bwd"])
def test_a_step_frees_its_graph_as_in_training(mode: Mode, protocol: str) -> None:
    outs: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        outs.append(exp_sum(x))
        return outs[-1]

    row = toy_row(mode, 8)
    make_call(protocol, row, forward, row.make_inputs(CPU, 1)).run()
    is_step = (mode, protocol) == ("fwd+bwd", "autograd")
    with pytest.raises(RuntimeError, match="second time") if is_step else contextlib.nullcontext():
        outs[-1].sum().backward()  # type: ignore[no-untyped-call]


def test_a_step_is_compiled_by_itself_whatever_the_caches_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    eager = provider("eaves", exp_sum)
    for mode in ("bwd", "fwd+bwd"):
        torch._dynamo.utils.counters.clear()
        assert measure_one(toy_row(mode, 8), compiled(eager), eager)["torch.compile"]["ms"]
        counted = torch._dynamo.utils.counters
        assert counted["aot_autograd"]["ok"] == 1, "it was compiled"
        assert not counted["inductor"]["fxgraph_cache_hit"] and not counted["aot_autograd"]["autograd_cache_hit"]


def test_the_limit_counts_the_accumulation_too() -> None:
    row, x_bytes, rows_bytes = toy_row("bwd", 64), 4 * DIM * 64, 4 * DIM
    assert moved("autograd", row) == (x_bytes + rows_bytes, x_bytes)
    assert moved("accumulate", row) == (x_bytes + rows_bytes + 2 * x_bytes, 2 * x_bytes)
    assert moved("accumulate", toy_row("fwd", 64)) == moved("autograd", toy_row("fwd", 64))
    for protocol, accumulated in (("autograd", 0), ("accumulate", x_bytes)):
        assert least_peak_bytes(protocol, row) == 2 * x_bytes + rows_bytes + accumulated
        assert least_peak_bytes(protocol, in_place_row(64)) == x_bytes + rows_bytes + accumulated  # one x, the gradient


@each_protocol
def test_every_call_in_place_finds_the_original_inputs(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr(harness, "last_cache_bytes", lambda device: 0)  # one set of buffers
    seen: list[Tensor] = []
    row = in_place_row(8)
    eaves = provider("eaves", lambda x: seen.append(x.detach().clone()) or exp_sum_in_place(x))
    assert measure_one(row, eaves, protocol=protocol)["eaves"]["ms"]
    (x,) = row.make_inputs(CPU, 2).arguments
    # The calls: one for the comparison, two for the memory, three to warm up, one to estimate the duration, and for
    # each of the three timed calls an uncounted one before it.
    assert len(seen) == 1 + 2 + 3 + 1 + 2 * 3
    assert all(torch.equal(each, x) for each in seen)


# --------------------------------------------------------------------------------------------------------------- memory


# x has 256 KiB and the DIM outputs have 64 bytes, so an allocator's rounding stays far below 1 %.
N = 4096


@pytest.mark.parametrize(
    ("row", "forward", "protocol", "tensors"),
    [
        (toy_row("fwd", N), exp_sum, "autograd", 2),  # x, exp(x)
        (toy_row("bwd", N), exp_sum, "autograd", 3),  # x, exp(x), the gradient
        (toy_row("bwd", N), exp_sum, "accumulate", 4),  # x, exp(x), the gradient, the accumulated gradient
        (in_place_row(N), exp_sum_in_place, "autograd", 1),  # x, which the gradient overwrites
        (in_place_row(N), exp_sum_in_place, "accumulate", 2),
        (in_place_row(N), exp_sum, "autograd", 3),
        (in_place_row(N), exp_sum, "accumulate", 4),
    ],
)
def test_the_peak_is_what_is_alive(device: torch.device, row: Row, forward: Any, protocol: str, tensors: int) -> None:
    inputs = row.make_inputs(device, 1)
    held = torch.ones(2**20, device=device)  # the peak excludes the benchmark's own buffers
    peak = memory.peak_bytes(row, lambda: make_call(protocol, row, forward, inputs), inputs)
    assert peak == pytest.approx(tensors * 4 * DIM * N, rel=0.01)
    del held


def test_what_is_freed_meanwhile_leaves_the_peak_as_it_is(cuda: torch.device) -> None:
    """An earlier backward's thread may free its memory a moment later, during the measurement."""
    row = toy_row("bwd", N)
    inputs = row.make_inputs(cuda, 1)
    others = [torch.ones(DIM, N, device=cuda)]

    def make() -> Call:
        others.clear()
        return make_call("accumulate", row, exp_sum, inputs)

    assert memory.peak_bytes(row, make, inputs) == pytest.approx(4 * 4 * DIM * N, rel=0.01)
