"""`python benchmarks jax`: the head from JAX, here on the CPU, with few and small rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
from bench.jax import PUBLISHED, bars
from bench_toy import PROGRAM


def run(*words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # whatever else the machine has: bars are for GPUs
    command = [sys.executable, PROGRAM, "jax", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_it_measures_every_contestant_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "jax.json"
    result = run("--shape", "64x32x256", "--repetitions", 2, "--json", path)
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    rows = {row["provider"]: row for row in report["rows"]}
    measured = {"eaves", "eaves-recompute", "eaves-dv", "jax", "jax-chunks", "products", "torch"}
    assert measured <= {name for name, row in rows.items() if row.get("repetitions") == 2}
    assert "ms" in rows["tokamax-xla"] or "tokamax" in rows["tokamax-xla"]["skipped"]
    # All logits are in float32, and their gradient in 16 bits.
    assert rows["jax"]["memory_bytes"] >= 64 * 256 * 4
    assert {"jax", "jaxlib", "eaves"} <= set(report["versions"])
    assert set(report["host_us"]) == {"eaves", "jax"} and min(report["host_us"].values()) > 0
    assert [bar["holds"] for bar in report["bars"][:3]] == [None] * 3, "bars are of the published shapes"


def test_without_a_gpu_the_published_shapes_are_refused() -> None:
    result = run()
    assert result.returncode == 2 and "expected --quick or --shape" in result.stderr


def test_bars_are_ratios_of_what_was_measured() -> None:
    rows = [
        {"shape": str(PUBLISHED[0]), "provider": name, "ms": ms, "memory_bytes": memory}
        for name, ms, memory in (("eaves", 100.0, 3), ("products", 92.0, 9), ("jax", 150.0, 10))
    ]
    found = bars(rows, {"eaves": 5.0, "jax": 4.0})
    assert [bar["value"] for bar in found] == [100 / 92, 0.3, None, 1.25]
    assert [bar["holds"] for bar in found] == [True, True, None, False]
