"""The program that measures the head from JAX: it runs on the CPU, with few and small rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
from eaves.bench.jax import CURVE, PUBLISHED, bars, draw


def test_it_measures_every_contestant_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "jax.json"
    program = [sys.executable, "-m", "eaves.bench.jax", "--shape", "64x32x256", "--repetitions", "2", "--json", path]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # whatever else the machine has: bars are for GPUs
    run = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    report = json.loads(path.read_text())
    rows = {row["provider"]: row for row in report["rows"]}
    measured = {"eaves", "eaves-recompute", "eaves-dv", "jax", "jax-chunks", "products", "torch"}
    assert measured <= {name for name, row in rows.items() if "ms" in row}
    assert "ms" in rows["tokamax-xla"] or "tokamax" in rows["tokamax-xla"]["skipped"]
    # Of all logits in float32, and of their gradient in 16 bits.
    assert rows["jax"]["memory_bytes"] >= 64 * 256 * 4
    assert {"jax", "jaxlib", "eaves"} <= set(report["versions"])
    assert set(report["host_us"]) == {"eaves", "jax"}
    assert [bar["holds"] for bar in report["bars"][:3]] == [None] * 3, "bars are of the published shapes"


def test_bars_are_ratios_of_what_was_measured() -> None:
    rows = [
        {"shape": str(PUBLISHED[0]), "provider": name, "ms": ms, "memory_bytes": memory}
        for name, ms, memory in (("eaves", 100.0, 3), ("products", 92.0, 9), ("jax", 150.0, 10))
    ]
    found = bars(rows, {"eaves": 5.0, "jax": 4.0})
    assert [bar["value"] for bar in found] == [100 / 92, 0.3, None, 1.25]
    assert [bar["holds"] for bar in found] == [True, True, None, False]


def test_curves_are_of_the_shapes_that_differ_in_classes_alone(tmp_path: Path) -> None:
    axes = pytest.importorskip("matplotlib.axes", reason="matplotlib is not installed")
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axes.Axes, "plot", lambda self, x, y, **named: drawn.append((x, y)))
        patch.setattr(figure.Figure, "legend", lambda self, **named: None)
        rows = [
            {"shape": str(each), "provider": "eaves", "ms": float(each.classes), "memory_bytes": each.classes * 2**20}
            for each in PUBLISHED + CURVE
        ]
        draw(tmp_path / "jax.png", [*rows, {"shape": str(PUBLISHED[0]), "provider": "jax", "skipped": "no room"}], "")
    classes = [4096, 16384, 32768, 65536, 131072]
    assert drawn == [(classes, classes), (classes, classes)]
    assert (tmp_path / "jax.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_the_published_shapes_are_refused() -> None:
    program = [sys.executable, "-m", "eaves.bench.jax"]
    run = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert run.returncode == 2 and "expected --quick or --shape" in run.stderr


def test_a_shape_that_is_none_is_refused() -> None:
    program = [sys.executable, "-m", "eaves.bench.jax", "--shape", "64x32"]
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 2 and "expected rows, features and classes" in run.stderr


def test_a_file_in_no_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for name in ("json", "plot"):
        program = [sys.executable, "-m", "eaves.bench.jax", "--quick", f"--{name}", tmp_path / "nowhere" / "file"]
        run = subprocess.run(program, capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (2, "") and f"--{name}: " in run.stderr
