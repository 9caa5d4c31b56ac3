"""A head and its loss from JAX, forward and backward: eaves beside plain JAX with all the logits, a scan in chunks,
tokamax's XLA implementation where that is installed, the three matrix products alone as JAX runs them, and eaves from
PyTorch where that has the same device. And what a small jitted call costs the host.

    python -m eaves.bench.jax --json jax.json --plot jax.png

Each contestant is one compiled program. They take turns, each time another one first. A time is that of the clock, from
the call until its results are there, because JAX has streams of its own on which PyTorch's events see nothing: of calls
that take milliseconds. Each call that is timed follows one of its own that is not: how fast a GPU runs depends on the
power that it has just drawn, and neighbours in the turn draw more and less.
Memory is what XLA plans for the program beside its arguments (temporary buffers, eaves' scratch memory among them, and
results); of PyTorch the peak of its allocator beside the arguments. Of a GPU's memory JAX takes three quarters when it
starts, its default: what it takes piece by piece is soon in pieces too small for all the logits. The exit status
is 1 where a bar does not hold; bars are for GPUs, and for the published shapes.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import eaves.jax
from eaves._output import say
from eaves.jax._library import system

_WARM_UP_CALLS = 3
_DEVIATION = 1.3  # of the logits
_CHUNK_ROWS = 2048


class Shape(NamedTuple):
    rows: int
    features: int
    classes: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


PUBLISHED = (Shape(32768, 2560, 128256), Shape(12288, 4096, 131072))
CURVE = tuple(Shape(12288, 4096, classes) for classes in (4096, 16384, 32768, 65536))
"""Measured too, for the curves: smaller vocabularies of the second published shape."""
QUICK = (Shape(512, 64, 1024),)

Loss = Callable[..., jax.Array]
"""Of hidden [rows, features], head [classes, features] or [features, classes], labels [rows]."""

# ---------------------------------------------------------------------------------------------------------- contestants


def _all_logits(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (hidden @ head.T).astype(jnp.float32)  # as models do: the backward's products are of the inputs' dtype
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    mean: jax.Array = (jax.nn.logsumexp(logits, -1) - picked).mean()
    return mean


def _in_chunks(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """Chunks of rows, each computed again in the backward."""
    rows = min(_CHUNK_ROWS, len(labels))

    @jax.checkpoint
    def chunk(total: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _all_logits(each[0], head, each[1]) * rows, None

    chunks = (hidden.reshape(-1, rows, hidden.shape[1]), labels.reshape(-1, rows))
    total: jax.Array = jax.lax.scan(chunk, jnp.zeros(()), chunks)[0]
    return total / len(labels)


def _tokamax() -> Loss:
    function = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    return lambda hidden, head, labels: function(hidden, labels, head, reduction="mean", implementation="xla")


def _losses() -> dict[str, tuple[Callable[[], Loss], bool]]:
    """By name what makes each loss, and whether its head lies [features, classes]."""
    ours: Any = eaves.jax.linear_cross_entropy
    return {
        "eaves": (lambda: ours, False),
        "eaves-recompute": (lambda: functools.partial(ours, algorithm="recompute"), False),
        "eaves-dv": (lambda: functools.partial(ours, head_layout="dv"), True),
        "jax": (lambda: _all_logits, False),
        "jax-chunks": (lambda: _in_chunks, False),
        "tokamax-xla": (_tokamax, True),
    }


def _products(hidden: jax.Array, head: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
    """The logits, and both products with their gradient."""
    return hidden @ head.T, gradient @ head, gradient.T @ hidden


@jax.jit
def _gradient(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """That of the logits, of the mean: how fast a product is depends on its data."""

    def of_chunk(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = jnp.einsum("nd,vd->nv", each[0], head, preferred_element_type=jnp.float32)
        p = jax.nn.softmax(logits) - jax.nn.one_hot(each[1], len(head))
        return (p / len(labels)).astype(hidden.dtype)

    rows = min(_CHUNK_ROWS, len(labels))
    chunks = (hidden.reshape(-1, rows, hidden.shape[1]), labels.reshape(-1, rows))
    gradient: jax.Array = jax.lax.map(of_chunk, chunks).reshape(len(labels), len(head))
    return gradient


class Contestant(NamedTuple):
    run: Callable[[], Any]
    """Returns when its results are there."""
    memory_bytes: int


def _compiled(function: Any, *arrays: jax.Array) -> Contestant:
    program = jax.jit(function).lower(*arrays).compile()
    plan: Any = program.memory_analysis()
    memory = plan.temp_size_in_bytes + plan.output_size_in_bytes
    return Contestant(lambda: jax.block_until_ready(program(*arrays)), memory)


def _from_torch(shape: Shape, on_gpu: bool) -> Contestant:
    torch: Any = importlib.import_module("torch")
    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    head_tensors = importlib.import_module("eaves.bench.head").head_tensors
    peak_of_call = importlib.import_module("eaves.bench.memory").peak_of_call
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
    return Contestant(run, peak_of_call(run, device))


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(shape: Shape, repetitions: int) -> list[dict[str, Any]]:
    """A row for each contestant."""
    keys = jax.random.split(jax.random.key(1), 3)
    hidden = jax.random.normal(keys[0], shape[:2], jnp.bfloat16) * (_DEVIATION / shape.features**0.5)
    head = jax.random.normal(keys[1], (shape.classes, shape.features), jnp.bfloat16)
    labels = jax.random.randint(keys[2], shape[:1], 0, shape.classes)
    on_gpu = jax.devices()[0].platform == "gpu"

    makers: dict[str, Callable[[], Contestant]] = {}
    for name, (make, is_turned) in _losses().items():

        def maker(make: Any = make, is_turned: bool = is_turned) -> Contestant:
            step = jax.value_and_grad(make(), (0, 1))
            return _compiled(step, hidden, head.T if is_turned else head, labels)

        makers[name] = maker
    makers["torch"] = lambda: _from_torch(shape, on_gpu)

    makers["products"] = lambda: _compiled(_products, hidden, head, _gradient(hidden, head, labels))
    rows: list[dict[str, Any]] = []
    contestants: dict[str, Contestant] = {}
    for name, make_contestant in makers.items():
        try:
            contestants[name] = make_contestant()
            for _ in range(_WARM_UP_CALLS):
                contestants[name].run()
        except Exception as error:  # another library's code: whatever it raises, the others go on
            contestants.pop(name, None)
            rows.append({"shape": str(shape), "provider": name, "skipped": str(error).split("\n")[0] or repr(error)})
    times: dict[str, list[float]] = {name: [] for name in contestants}
    turn = list(contestants.items())
    for _ in range(repetitions):
        turn.append(turn.pop(0))
        for name, contestant in turn:
            contestant.run()
            begin = time.perf_counter()
            contestant.run()
            times[name].append((time.perf_counter() - begin) * 1e3)
    for name, contestant in contestants.items():
        took = times[name]
        rows.append({
            "shape": str(shape), "provider": name, "ms": statistics.median(took), "ms_min": min(took),
            "ms_max": max(took), "repetitions": repetitions, "memory_bytes": contestant.memory_bytes,
        })  # fmt: skip
    return rows


def measure_host() -> dict[str, float]:
    """Microseconds of a jitted call of a small operator, the least of rounds that take turns."""
    x = jnp.zeros((2, 3))
    functions = {
        "eaves": jax.jit(lambda x: eaves.jax.logsumexp(x, -1)),
        "jax": jax.jit(lambda x: jax.nn.logsumexp(x, -1)),
    }
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(20):
        for name, function in functions.items():
            jax.block_until_ready(function(x))
            begin = time.perf_counter()
            for _ in range(100):
                out = function(x)
            best[name] = min(best[name], (time.perf_counter() - begin) * 1e4)
            jax.block_until_ready(out)
    return best


def bars(rows: Sequence[Mapping[str, Any]], host_us: Mapping[str, float]) -> list[dict[str, Any]]:
    """What should hold on a GPU, and does it; None where something was not measured."""
    measured = {(row["shape"], row["provider"]): row for row in rows if "ms" in row}

    def ratio(shape: Shape, name: str, other: str, key: str) -> float | None:
        one, two = measured.get((str(shape), name)), measured.get((str(shape), other))
        return None if one is None or two is None else one[key] / two[key]

    many_rows, many_features = PUBLISHED
    # Two measurements of the same function differ by up to a twentieth on the host.
    found = [
        ("time over that of the three products", many_rows, ratio(many_rows, "eaves", "products", "ms"), 1.10),
        ("memory over that of all logits", many_rows, ratio(many_rows, "eaves", "jax", "memory_bytes"), 1 / 3),
        ("time over that from PyTorch", many_features, ratio(many_features, "eaves", "torch", "ms"), 1.03),
        ("host time of a small call over that of JAX", "logsumexp 2x3", host_us["eaves"] / host_us["jax"], 1.05),
    ]
    return [
        {"what": what, "shape": str(shape), "value": value, "at_most": limit, "holds": value and value <= limit}
        for what, shape, value, limit in found
    ]


def draw(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Time and memory over the number of classes, a panel each, of the rows and features that most shapes have."""
    measured = [(Shape(*map(int, row["shape"].split("x"))), row) for row in rows if "ms" in row]
    heads = [shape[:2] for shape in dict.fromkeys(shape for shape, _ in measured)]
    head = max(heads, key=heads.count, default=(0, 0))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(row["provider"] for _, row in measured):
        of_name = [(s.classes, row) for s, row in measured if s[:2] == head and row["provider"] == name]
        of_name.sort(key=lambda each: each[0])
        classes = [each for each, _ in of_name]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "--" if name == "products" else "-"}
        panels[0].plot(classes, [row["ms"] for _, row in of_name], label=name, **style)
        panels[1].plot(classes, [row["memory_bytes"] / 2**20 for _, row in of_name], **style)
    for panel, quantity in zip(panels, ("ms", "MiB beside the arguments")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("classes")
        panel.set_ylabel(quantity)
        panel.grid(color="#DDDDDD")
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{head[0]} rows of {head[1]} features, forward and backward\n{title}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _versions() -> dict[str, str]:
    found = {"eaves": eaves.jax.__version__}
    for package in ("jax", "jaxlib", "torch", "tokamax"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _shape(text: str) -> Shape:
    try:
        shape = Shape(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"is {text}, expected rows, features and classes as 512x64x1024") from None
    return shape


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eaves.bench.jax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=_shape, action="append", help="rows x features x classes; may be repeated")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]} instead of all others")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the curves; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed, expected it: pip install eaves[bench]")
    if not (arguments.shape or arguments.quick) and jax.default_backend() != "gpu":
        parser.error("JAX has no GPU, which the published shapes are for: expected --quick or --shape")
    for name in ("json", "plot"):
        path = getattr(arguments, name)
        if path and not os.access(path.resolve().parent, os.W_OK):
            parser.error(f'--{name}: "{path}" cannot be written, expected a folder that is there and may be written')
    rows = []
    say(f"{'shape':<20} {'provider':<16} {'ms':>10} {'MiB':>10}")
    for shape in arguments.shape or (QUICK if arguments.quick else PUBLISHED + CURVE):
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
    if arguments.json:
        report = {
            "schema": 1, "device": device.device_kind, "commit": system()["commit"],
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "versions": _versions(), "rows": rows,
            "host_us": host_us, "bars": found,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        versions = _versions()
        draw(arguments.plot, rows, f"{device.device_kind}, eaves {versions['eaves']}, jax {versions['jax']}")
    return int(device.platform == "gpu" and any(bar["holds"] is False for bar in found))


if __name__ == "__main__":
    raise SystemExit(main())
