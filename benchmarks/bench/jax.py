"""Measures a head and its loss from JAX, forward and backward: eaves, plain JAX with all the logits, a scan in chunks,
tokamax's XLA implementation, the three matrix products alone as JAX runs them, and eaves from PyTorch if PyTorch has
the same device. Also measures the host's time of a small jitted call.

    python benchmarks jax --json jax.json

Each contestant is one compiled program. They take turns, and an untimed call of the same contestant precedes each timed
call, because a GPU's clock depends on the power that it has just drawn. The clock times a call until its results exist,
because PyTorch's events see nothing of JAX's streams. Memory is XLA's plan for temporary buffers (with eaves' scratch
memory) and results, without the arguments; for PyTorch it is the peak of its allocator. JAX takes three quarters of a
GPU's memory at its start, by default, because memory taken piece by piece soon has no room for all the logits. The exit
status is 1 if a bar does not hold; bars are for GPUs and the published shapes.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import functools
import importlib
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

import eaves.jax
from eaves import _info
from eaves._bench import peak_of_call
from eaves._command_line import say

from . import results
from .benchmark import InvalidArgument, reason
from .calls import Call
from .head import DENSE_DEVIATION, Shape, head_tensors, parse_shape
from .timing import Timer

_CHUNK_ROWS = 2048
_SMALL_CALLS = 100

PUBLISHED = (Shape(32768, 2560, 128256), Shape(12288, 4096, 131072))
CURVE = tuple(Shape(12288, 4096, classes) for classes in (4096, 16384, 32768, 65536))
"""Smaller vocabularies of the second published shape, for the picture that `page` draws."""
QUICK = Shape(512, 64, 1024)

Loss = Callable[..., jax.Array]
"""Takes hidden [rows, features], head [classes, features] or [features, classes], labels [rows]."""

Run = Callable[[], object]
"""Returns when its results exist."""

# ---------------------------------------------------------------------------------------------------------- contestants


def _of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)  # as models do: the backward's products are of the inputs' dtype
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    mean: jax.Array = (jax.nn.logsumexp(logits, -1) - picked).mean()
    return mean


def _all_logits(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return _of_logits(hidden @ head.T, labels)


def _in_chunks(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss in chunks of rows; the backward computes their logits again."""
    rows = min(_CHUNK_ROWS, len(labels))
    chunks = (hidden.reshape(-1, rows, hidden.shape[1]), labels.reshape(-1, rows))
    means: jax.Array = jax.lax.map(jax.checkpoint(lambda each: _all_logits(each[0], head, each[1])), chunks)
    return means.mean()


def _tokamax() -> Loss:
    function = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    return lambda hidden, head, labels: function(hidden, labels, head, reduction="mean", implementation="xla")


def _products(hidden: jax.Array, head: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
    """The logits, and both products with their gradient."""
    return hidden @ head.T, gradient @ head, gradient.T @ hidden


@jax.jit
def _gradient(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The gradient of the mean by the logits, for the products, because a product's speed depends on its data."""
    gradient: jax.Array = jax.grad(_of_logits)(hidden @ head.T, labels)
    return gradient


def _compiled(function: Any, *arrays: jax.Array) -> tuple[Run, int]:
    """The program, and the bytes of memory that it needs."""
    program = jax.jit(function).lower(*arrays).compile()
    plan: Any = program.memory_analysis()
    return lambda: jax.block_until_ready(program(*arrays)), plan.temp_size_in_bytes + plan.output_size_in_bytes


def _from_torch(shape: Shape, on_gpu: bool) -> tuple[Run, int]:
    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    hidden, head, labels = head_tensors(*shape, torch.bfloat16, device, 1, True)
    for leaf in (hidden, head):
        leaf.requires_grad_()

    def run() -> None:
        hidden.grad = head.grad = None
        eaves.linear_cross_entropy(hidden, head, labels).backward()
        if on_gpu:
            torch.cuda.synchronize(device)

    run()
    hidden.grad = head.grad = None
    return run, peak_of_call(run, device)


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(shape: Shape, repetitions: int) -> list[dict[str, Any]]:
    """A row for each contestant."""
    keys = jax.random.split(jax.random.key(1), 3)
    hidden = jax.random.normal(keys[0], shape[:2], jnp.bfloat16) * (DENSE_DEVIATION / shape.features**0.5)
    head = jax.random.normal(keys[1], (shape.classes, shape.features), jnp.bfloat16)
    labels = jax.random.randint(keys[2], shape[:1], 0, shape.classes)
    on_gpu = jax.devices()[0].platform == "gpu"

    ours: Any = eaves.jax.linear_cross_entropy

    def of_loss(loss: Loss, head: jax.Array = head) -> tuple[Run, int]:
        return _compiled(jax.value_and_grad(loss, (0, 1)), hidden, head, labels)

    makers: dict[str, Callable[[], tuple[Run, int]]] = {
        "eaves": lambda: of_loss(ours),
        "eaves-recompute": lambda: of_loss(functools.partial(ours, algorithm="recompute")),
        "eaves-dv": lambda: of_loss(functools.partial(ours, head_layout="dv"), head.T),
        "jax": lambda: of_loss(_all_logits),
        "jax-chunks": lambda: of_loss(_in_chunks),
        "tokamax-xla": lambda: of_loss(_tokamax()),
        "torch": lambda: _from_torch(shape, on_gpu),
        "products": lambda: _compiled(_products, hidden, head, _gradient(hidden, head, labels)),
    }
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, list[Call]] = {}
    for name, make in makers.items():
        rows[name] = {"shape": str(shape), "provider": name}
        try:
            run, memory_bytes = make()
            calls[name] = [Call(run)]
            rows[name]["memory_bytes"] = memory_bytes
        except Exception as error:  # another library may raise anything; the others go on
            rows[name]["skipped"] = reason(error)
    for name, contestant in Timer(torch.device("cpu"), runs_twice=True).time(calls, repetitions).items():
        rows[name] |= contestant.cell()
    return list(rows.values())


def measure_host() -> dict[str, float]:
    """Microseconds of a jitted call of a small operator, the least of rounds that take turns."""
    x = jnp.zeros((2, 3))
    ours, theirs = jax.jit(lambda x: eaves.jax.logsumexp(x, -1)), jax.jit(lambda x: jax.nn.logsumexp(x, -1))

    def round_of(function: Callable[[jax.Array], jax.Array]) -> Call:
        def run() -> object:
            for _ in range(_SMALL_CALLS):
                out = function(x)
            return out

        return Call(run, lambda: jax.block_until_ready(function(x)))

    timed = Timer(torch.device("cpu")).time({"eaves": [round_of(ours)], "jax": [round_of(theirs)]}, 20)
    return {name: 1e3 * min(contestant.times_ms) / _SMALL_CALLS for name, contestant in timed.items()}


def bars(rows: Sequence[Mapping[str, Any]], host_us: Mapping[str, float]) -> list[dict[str, Any]]:
    """The aims on a GPU, and whether each holds; None if something was not measured."""
    measured = {(row["shape"], row["provider"]): row for row in rows if "ms" in row}

    def ratio(shape: Shape, other: str, key: str) -> float | None:
        one, two = (measured.get((str(shape), name)) for name in ("eaves", other))
        return None if one is None or two is None else one[key] / two[key]

    many_rows, many_features = PUBLISHED
    # Two measurements of the same function differ by up to a twentieth on the host.
    found = [
        ("time / time of the three products", many_rows, ratio(many_rows, "products", "ms"), 1.10),
        ("memory / memory of all logits", many_rows, ratio(many_rows, "jax", "memory_bytes"), 1 / 3),
        ("time / time of eaves from PyTorch", many_features, ratio(many_features, "torch", "ms"), 1.03),
        ("host time of a small call / host time of JAX", "logsumexp 2x3", host_us["eaves"] / host_us["jax"], 1.05),
    ]
    return [{"what": what, "shape": str(shape), "value": value, "at_most": limit, "holds": value and value <= limit}
            for what, shape, value, limit in found]  # fmt: skip


def main(parser: ArgumentParser, argv: Sequence[str]) -> int:
    parser.add_argument("--shape", type=parse_shape, action="append",
        help="rows x features x classes; repeat it for more shapes")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"measure {QUICK} instead of the published shapes")
    parser.add_argument("--repetitions", type=int, default=10, help="number of repetitions of each row (10)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    arguments = parser.parse_args(argv)
    if not (arguments.shape or arguments.quick) and jax.default_backend() != "gpu":
        raise InvalidArgument("JAX finds no GPU, which the published shapes need; expected --quick or --shape")
    json = arguments.json and results.check_file("--json", arguments.json)
    rows = []
    say(f"{'shape':<20} {'provider':<16} {'ms':>10} {'MiB':>10}")
    for shape in arguments.shape or ([QUICK] if arguments.quick else PUBLISHED + CURVE):
        for row in measure(shape, arguments.repetitions):
            rows.append(row)
            numbers = row.get("skipped") or f"{row['ms']:10.3f} {row['memory_bytes'] / 2**20:10.1f}"
            say(f"{row['shape']:<20} {row['provider']:<16} {numbers}")
    host_us = measure_host()
    say(f"host time of a small call: eaves {host_us['eaves']:.2f} us, jax {host_us['jax']:.2f} us")
    found = bars(rows, host_us)
    for bar in found:
        if bar["value"] is not None:
            say(f"{bar['shape']}: {bar['what']} {bar['value']:.3f}, at most {bar['at_most']:.3f}")
    device = jax.devices()[0]
    versions = results.versions(["jax", "jaxlib", "torch", "tokamax"])
    if json:
        report = {
            "schema": 1, "device": device.device_kind, "commit": _info.extension()["commit"], "date": results.now(),
            "versions": versions, "rows": rows, "host_us": host_us, "bars": found,
        }  # fmt: skip
        results.write(json, report)
    return int(device.platform == "gpu" and any(bar["holds"] is False for bar in found))
