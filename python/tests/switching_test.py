"""docs/switching.md and README.md, in the examples that replace another library's line: every line of eaves runs with
its arguments, and returns the result of PyTorch's line above it."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import eaves

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "switching.md", ROOT / "README.md"]


def pairs() -> Iterator[Any]:
    """(line of the other library, line of eaves): in every block of Python they stand below each other. Models are
    patched by other tests."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            try:
                calls = [ast.unparse(statement) for statement in ast.parse(block).body]
            except (SyntaxError, IndentationError):
                continue  # a part of an example, which other tests run
            for before, after in itertools.pairwise(calls):
                is_patch = after.startswith("eaves.hf")
                if after.startswith("eaves.") and not is_patch and not before.startswith("eaves."):
                    yield pytest.param(before, after, id=f"{page.stem}: {before[:60]}")


def names() -> dict[str, Any]:
    """The names in the lines: 6 rows or 2 sequences of 5 tokens, 8 features, 11 classes."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 11)
    head = linear.weight.detach()
    return {
        "torch": torch,
        "F": F,
        "eaves": eaves,
        "logits": torch.randn(6, 11).requires_grad_() * 1,  # not a leaf, so that a call may write over it
        "logits_ncd": torch.randn(2, 11, 5),
        "target": torch.tensor([0, 3, -100, 10, 7, 7]),
        "target_nd": torch.randint(0, 11, (2, 5)),
        "x": torch.randn(6, 8),
        "y": torch.randn(6, 7),
        "teacher": torch.randn(11, 7),
        "hidden": torch.randn(2, 5, 8),
        "labels": torch.randint(0, 11, (2, 5)),
        "head": head,
        "weight": head,
        "tokens": torch.randint(0, 11, (2, 5)),
        "temperature": 0.7,
        "w": torch.rand(11) + 0.5,
        "b": linear.bias.detach(),
        "bias": linear.bias.detach(),
        "linear": linear,
        "n": torch.tensor(8.0),
        "q": torch.randn(2, 12, 4, 8),
        "p": torch.randn(2, 4, 14, 8),
        "theta": torch.rand(4, 8),
    }


@pytest.mark.parametrize(("before", "after"), list(pairs()))
def test_what_takes_the_place_runs_and_gives_what_pytorch_gives(before: str, after: str) -> None:
    result = eval(after, names())
    for each in result if isinstance(result, tuple) else (result,):
        assert each is None or torch.isfinite(each).all()
    is_pytorch = before.startswith(("F.", "torch."))
    if is_pytorch and all(hasattr(F, name) for name in re.findall(r"\bF\.(\w+)", before)):
        torch.testing.assert_close(result, eval(before, names()), rtol=1e-5, atol=1e-5)


def test_every_library_is_there() -> None:
    befores = " ".join(parameter.values[0] for parameter in pairs())
    for name in (
        "F.cross_entropy",
        "F.linear_cross_entropy",
        "Liger",
        "shift=True",
        "Fused",
        "quack",
        "ChunkedLogProbFunction",
        "selective_log_softmax",
        "LigerFusedLinearJSD",
        "generalized_jsd_loss",
        "verl",
        "lrpe_cosine_md",
    ):
        assert name in befores
