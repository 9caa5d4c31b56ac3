"""Every program and notebook of examples/python runs, and says by its exit status that its result is right. One that
trains for a minute has a test file of its own."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "python"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "train_language_model.py"})
HAS_JAX = importlib.util.find_spec("jax") is not None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    if "jax" in example.stem and not HAS_JAX:
        pytest.skip("JAX is not installed")
    result = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_and_prints_its_saved_lines(notebook: Path) -> None:
    for name in ("matplotlib", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    command = [sys.executable, ROOT / "tools" / "run_notebook", notebook]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outputs = [output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", ())]
    saved = "".join(line for output in outputs for line in output.get("text", ()))
    assert without_numbers(result.stdout) == without_numbers(saved) != "", f"tools/run_notebook --write {notebook}"
    assert any("image/png" in output.get("data", ()) for output in outputs)


def without_numbers(text: str) -> str:
    return re.sub(r"[\d.]+", "0", text)


def test_there_are_examples() -> None:
    assert EXAMPLES and NOTEBOOKS
