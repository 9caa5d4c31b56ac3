"""Tests of how `python -m eaves.bench` measures calls that overwrite their inputs, and providers that cannot do all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_toy import CPU, DIM, TOY, Eaves, Missing, Peer, exp_sum, small_flush, toy, toy_row  # noqa: F401
from eaves.bench import device as bench_device
from eaves.bench import harness, memory, timing, verify
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Forward, Inputs, Mode, Operator, Provider, Request, Row, Table
from eaves.bench.harness import Harness, HarnessOptions, Measurement
from eaves.bench.protocol import Call, Protocol
from eaves.bench.timing import Timer


def in_place_row(n: int) -> Row:
    return replace(toy_row("fwd+bwd", n), in_place=True)


class ExpSumInPlace(torch.autograd.Function):
    """The toy operator, its gradient written over x in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = x.detach().exp_()
        return ctx.gradient.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return ctx.gradient.mul_(grad_outputs[0][:, None])


def exp_sum_in_place(x: Tensor) -> Tensor:
    return ExpSumInPlace.apply(x)  # type: ignore[no-untyped-call]


class InPlace(Provider):
    name = "in-place"

    def __init__(self, forward: Forward = exp_sum_in_place) -> None:
        self._forward = forward

    def forward(self, row: Row) -> Forward:
        return self._forward


def measure(row: Row, *providers: Provider, protocol: str = "autograd") -> Measurement:
    options = HarnessOptions(CPU, Protocol(protocol), repetitions=3)
    return Harness(options).measure("fwd+bwd", row, providers, providers[0])


# --------------------------------------------------------------------------------------------------------------- inputs


def test_remade_inputs_are_copies_of_what_has_a_gradient() -> None:
    x, targets = torch.randn(2, 3, requires_grad=True), torch.tensor([1, 2])
    inputs = Inputs((x, targets), torch.ones(2))
    own = inputs.remade()
    assert own.arguments[1] is targets and own.grad_out is inputs.grad_out
    (copy,) = own.differentiable
    assert copy.data_ptr() != x.data_ptr() and torch.equal(copy, x)
    assert not copy.is_leaf  # which may be written to: the next line would raise
    copy.mul_(2)
    (copy * torch.tensor([3.0, 5.0, 7.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[6.0, 10.0, 14.0]] * 2


# ---------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("protocol", ["autograd", "seed"])
def test_every_call_in_place_finds_the_original_inputs(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr(harness, "last_cache_bytes", lambda device: 0)  # one set
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return exp_sum_in_place(x)

    row = in_place_row(8)
    assert measure(row, InPlace(forward), protocol=protocol).columns["in-place"].skipped == ""
    (x,) = row.make_inputs(CPU, 2).arguments
    assert len(seen) == 1 + 2 + 3 + 1 + 3  # compared, memory, warm-up, one to see how long it takes, timed
    assert all(torch.equal(each, x) for each in seen)


def test_in_place_the_gradient_goes_where_the_protocol_says() -> None:
    inputs = in_place_row(8).make_inputs(CPU, 1)
    (x,) = inputs.arguments
    gradient = (inputs.grad_out[:, None] * x.exp()).detach()
    for protocol, accumulated in (("autograd", None), ("seed", 3 * gradient)):
        for forward in (exp_sum, exp_sum_in_place):
            inputs.clear_gradients()
            call = Protocol(protocol).make_call("fwd+bwd", forward, inputs, in_place=True)
            for _ in range(3):
                call.prepare()
                call.run()
            if accumulated is None:
                assert x.grad is None
            else:
                torch.testing.assert_close(x.grad, accumulated)


def test_in_place_a_gradient_is_converted_to_the_dtype_of_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []
    monkeypatch.setattr(torch.autograd, "grad", lambda out, inputs, grad_out, **_: received.append(grad_out))
    inputs = in_place_row(8).make_inputs(CPU, 1)
    call = Protocol("autograd").make_call("fwd+bwd", lambda x: exp_sum(x).bfloat16(), inputs, in_place=True)
    for _ in range(2):
        call.prepare()
        call.run()
    assert received[0].dtype == torch.bfloat16 and received[1] is received[0]


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_only_both_directions_together_are_in_place(mode: Mode) -> None:
    with pytest.raises(ValueError, match=f"the mode is {mode}, expected fwd"):
        Protocol("autograd").make_call(mode, exp_sum, in_place_row(8).make_inputs(CPU, 1), in_place=True)


def test_what_a_call_prepares_comes_before_the_flush_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    now = 0.0

    def spend(name: str, ms: float) -> Callable[[], None]:
        def function(*_: object) -> None:
            nonlocal now
            events.append(name)
            now += ms

        return function

    for module in (timing, bench_device):
        monkeypatch.setattr(module, "now_ms", lambda: now)
    monkeypatch.setattr(timing, "stream_bytes", spend("flush", 100))
    timed = Timer(CPU).time({"a": [Call(spend("run", 1), spend("prepare", 10))]}, 2)
    assert events == ["prepare", "flush", "run"] * 6  # three to warm up, one to see how long it takes, two timed
    assert timed["a"].timing is not None and timed["a"].timing.max_ms == 1


def test_what_cannot_be_prepared_is_the_reason_in_the_column() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    def run() -> None:
        raise AssertionError("of a call that was not prepared")

    timed = Timer(CPU).time({"bad": [Call(run, fail)], "good": [Call(lambda: None)]}, 2)
    assert timed["bad"].skipped == "does not fit in memory" and timed["bad"].timing is None
    assert timed["good"].timing is not None


# --------------------------------------------------------------------------------------------------------------- memory


N = 4096  # so that x has 256 KiB, and DIM outputs are 64 bytes: what an allocator rounds up is far less than 1 %


@pytest.mark.parametrize(
    ("forward", "protocol", "tensors"),
    [
        (exp_sum_in_place, "autograd", 1),  # x, which becomes the gradient
        (exp_sum_in_place, "seed", 2),  # and the gradient it is added to
        (exp_sum, "autograd", 3),  # x, exp(x), the gradient
        (exp_sum, "seed", 4),
    ],
)
def test_in_place_the_peak_has_the_inputs_once(
    device: torch.device, forward: Forward, protocol: str, tensors: int
) -> None:
    row = in_place_row(N)
    inputs = row.make_inputs(device, 1)

    def make_call() -> Call:
        return Protocol(protocol).make_call("fwd+bwd", forward, inputs, in_place=True)

    peak = memory.peak_bytes("fwd+bwd", make_call, inputs, in_place=True)
    assert peak == pytest.approx(tensors * 4 * DIM * N, rel=0.01)


def test_in_place_the_least_memory_has_no_gradient_of_its_own() -> None:
    row, x_bytes, out_bytes = in_place_row(N), 4 * DIM * N, 4 * DIM
    assert Protocol("autograd").least_peak_bytes(row) == x_bytes + out_bytes
    assert Protocol("seed").least_peak_bytes(row) == 2 * x_bytes + out_bytes
    limit = measure(row, InPlace()).columns["limit"]
    assert limit.peak_bytes == x_bytes + out_bytes


# ----------------------------------------------------------------------------------------------------------- comparison


def test_results_in_place_are_compared_like_others() -> None:
    def wrong(x: Tensor) -> Tensor:
        return exp_sum_in_place(x + 0.1)

    columns = measure(in_place_row(64), Eaves(), InPlace()).columns
    assert columns["eaves"].timing is not None and columns["in-place"].timing is not None
    columns = measure(in_place_row(64), Eaves(), InPlace(wrong)).columns
    assert columns["in-place"].skipped.startswith("wrong result: out is off by")
    assert columns["eaves"].timing is not None


def test_a_gradient_with_only_its_largest_elements_is_a_wrong_result() -> None:
    """As of a loss: -1 at the target, and as much in all, each far below any tolerance, in the other classes."""
    wanted = torch.full((4, 1025), 2.0**-10, dtype=torch.bfloat16)
    wanted[:, 7] = -1
    expected = verify.Results("eaves", {"gradient 0": wanted})
    assert verify.difference(verify.Results("peer", {"gradient 0": wanted * 1.05}), expected) == ""
    found = wanted.where(wanted < 0, 0)
    assert verify.difference(verify.Results("peer", {"gradient 0": found}), expected) == (
        "wrong result: gradient 0 is off by 4 from eaves's in all, which is 8 in all"
    )


# ------------------------------------------------------------------------------------------------ what a provider lacks


class Lacks(Provider):
    """What is longer than 8, or everything."""

    name = "lacks"

    def __init__(self, longest: int = 8) -> None:
        self._longest = longest

    def lacks(self, row: Row) -> str:
        return "long rows" if row.axis_value > self._longest else ""

    def forward(self, row: Row) -> Forward:
        assert row.axis_value <= self._longest
        return exp_sum


def test_what_a_provider_lacks_in_a_row_is_the_reason_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*TOY, "--json", str(path)], [toy(Eaves(), Lacks(), modes=("fwd",))]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row["provider"] == "lacks"]
    assert rows[0]["ms"] is not None
    assert (rows[1]["ms"], rows[1]["skipped"]) == (None, "not supported: long rows")


def test_who_lacks_something_in_every_row_has_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TOY, [toy(Eaves(), Lacks(0), Peer(), modes=("fwd",))]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("n ")]
    assert [head[:4] for head in heads] == [["n", "eaves", "peer", "limit"]] * 2


def test_a_table_in_which_nobody_chosen_can_do_anything_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def tables(request: Request) -> list[Table]:
        return [Table("toy", "fwd", suffix, "n", "fp32", [toy_row("fwd", n)]) for suffix, n in (("a", 8), ("b", 64))]

    assert main([*TOY, "--provider", "lacks"], [Operator("toy", [Eaves(), Lacks()], tables)]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":")]
    assert titles == ["toy-speed-fwd-a:", "toy-memory-fwd-a:"]


def test_a_provider_for_another_device_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    class NeedsGpu(Missing):
        device_types = ("cuda",)

    assert main(TOY, [toy(Eaves(), NeedsGpu(), modes=("fwd",))]) == 0
    out, err = capsys.readouterr()
    assert err == "# missing is left out: needs a GPU\n"
    assert "missing" not in out
