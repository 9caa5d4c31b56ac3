"""Every program of examples/python runs, and says by its exit status that its result is right. One that trains for a
minute has a test file of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "python"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "train_language_model.py"})
HAS_JAX = importlib.util.find_spec("jax") is not None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    if "jax" in example.stem and not HAS_JAX:
        pytest.skip("JAX is not installed")
    result = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES
