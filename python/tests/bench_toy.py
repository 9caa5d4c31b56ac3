"""What the tests of `python -m eaves.bench` measure: a small operator, good and bad providers, made-up tables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eaves.bench import run, timing
from eaves.bench.benchmark import Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.harness import LIMIT, Harness, HarnessOptions, Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import MeasuredTable
from eaves.bench.timing import Column, Timing

DIM = 16  # rows of x in the toy operator
CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--repetitions", "2", "--warm-up-ms", "0"]
TOY = ["toy", *QUICK]


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last cache of 64 KiB: reading real ones is most of a test's time. And a machine that is never busy."""
    monkeypatch.setattr(run, "busy_share", lambda: 0.0)
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
    options = HarnessOptions(CPU, Protocol(protocol), repetitions=3)
    return Harness(options).measure(mode, toy_row(mode, n), providers, providers[0])


# Tables that nobody measured.


def measured_table(*columns: dict[str, Column], mode: Mode = "fwd") -> MeasuredTable:
    rows = [toy_row(mode, n) for n in (1024, 131072)][: len(columns)]
    names = [name for name in columns[0] if name != LIMIT]
    table = Table("toy", mode, "dim16-fp32", "n", "fp32", rows)
    return MeasuredTable(table, names, [Measurement(each) for each in columns])


def column(ms: float, peak_mib: float = 0.0, host_ms: float | None = None) -> Column:
    return Column("", Timing(ms, ms, ms, 2), host_ms, int(peak_mib * 2**20))
