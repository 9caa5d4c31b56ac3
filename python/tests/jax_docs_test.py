"""The blocks of docs/jax.md run, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import numpy as np  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
# tools/check_docs checks the blocks that quote a file.
BLOCKS = re.findall(r"^```python\n(?!# examples/)(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs_from_top_to_bottom() -> None:
    assert len(BLOCKS) == 7
    names: dict[str, Any] = {}
    losses = []
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
        losses.append(float(names["loss"]))
    assert all(loss == pytest.approx(losses[0], rel=1e-5) for loss in losses)
    assert float(names["same"]) == pytest.approx(losses[0], rel=1e-5)
    grad_hidden, grad_head = names["grads"]
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (grad_head, names["grad_head"])), atol=1e-3)
    assert names["lse"].shape == names["targets"].shape and float(names["accuracy"]) < 0.1
    assert grad_hidden.shape == names["hidden"].shape
    assert 0 < float(names["of_top"]) < float(names["distilled"])  # the hard loss is the same, of fewer classes less


def test_the_page_names_every_function() -> None:
    import eaves.jax

    for name in eaves.jax.__all__:
        if callable(getattr(eaves.jax, name)) and not isinstance(getattr(eaves.jax, name), type):
            assert f"`{name}(" in PAGE.read_text(), name
