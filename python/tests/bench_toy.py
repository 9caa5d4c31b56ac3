"""Material for the tests of `python benchmarks`: a small operator, good and bad providers, and made-up lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import harness, results, timing
from bench.benchmark import Forward, Inputs, Mode, Operator, Provider, Row, normal
from bench.device import device_name
from bench.harness import Entry, Harness

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks"
DIM = 16  # rows of x in the toy operator
CPU = torch.device("cpu")
DEVICE = results.folder_name(device_name(CPU), is_gpu=False)
QUICK = ["--device", "cpu", "--repetitions", "2", "--warm-up-ms", "0"]
TOY = ["toy", *QUICK]


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the last-level cache to 64 KiB and skips garbage collection: flushing real caches and collecting before each
    row would take most of a test's time."""
    monkeypatch.setattr(timing, "last_cache_bytes", lambda device: 2**16)
    monkeypatch.setattr(harness.gc, "collect", lambda *generation: 0)


# The toy operator: out = sum of exp(x) over the last axis, x [DIM, n] in float32, n = 8 and 64.


def exp_sum(x: Tensor) -> Tensor:
    return x.exp().sum(-1)


def provider(name: str, forward: Forward = exp_sum, **fields: Any) -> Provider:
    return Provider(name, "torch", lambda module, row: forward, **fields)


EAVES, PEER = provider("eaves"), provider("peer")
MISSING = Provider("missing", "no_such_module", lambda module, row: exp_sum)
WRONG = provider("wrong", lambda x: exp_sum(x) * 1.01)


def _fails_at_64(x: Tensor) -> Tensor:
    if x.shape[1] == 64:
        raise RuntimeError("64 is too many\nand this is the second line")
    return exp_sum(x)


FAILS_AT_64 = provider("fails", _fails_at_64)


def toy_row(mode: Mode, n: int, op: str = "toy", **options: Any) -> Row:
    def make_inputs(device: torch.device, seed: int) -> Inputs:
        x = normal([DIM, n], torch.float32, device, seed).requires_grad_()
        return Inputs((x,), normal([DIM], torch.float32, device, seed + 1))

    x_bytes, out_bytes = 4 * DIM * n, 4 * DIM
    moved = (x_bytes, out_bytes, 0) if mode == "fwd" else (x_bytes + out_bytes, x_bytes, x_bytes)
    return Row(op, mode, "fp32", {"dim": DIM, "n": n}, *moved, make_inputs, options)


def toy(*providers: Provider, name: str = "toy", modes: tuple[Mode, ...] = ("fwd", "bwd")) -> Operator:
    return Operator(
        name,
        providers,
        lambda request: [toy_row(mode, n, name) for mode in modes for n in (8, 64)],
        ("rows,n",),
        lambda shape, dtype: toy_row("fwd+bwd", shape["n"], name),
    )


def measure_one(row: Row, *providers: Provider, protocol: str = "autograd") -> dict[str, Entry]:
    entries = Harness(CPU, protocol, repetitions=3).measure(row, providers, providers[0])
    return {entry["provider"]: entry for entry in entries}


# Made-up lines, not measured.


def entries(mode: Mode, n: int, op: str = "toy", options: dict[str, Any] | None = None, **columns: Any) -> list[Entry]:
    """Makes a line for each column: (ms, MiB), or the reason why it has no number."""
    case = {"op": op, "mode": mode, "dtype": "fp32", "shape": {"dim": DIM, "n": n}, "options": options or {}}
    lines = []
    for name, column in columns.items():
        entry = case | {"provider": name.replace("_", "-")}
        if isinstance(column, str):
            lines.append(entry | {"ms": None, "skipped": column})
        else:
            ms, mib = column
            lines.append(entry | {"ms": ms, "ms_min": ms, "ms_max": ms, "peak_mib": mib, "repetitions": 2})
    return lines
