"""The blocks of docs/huggingface.md run, and every block of Python in the documentation has a test that runs it."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# A block that begins with the name of a file is a quotation, which tools/check_docs compares.
BLOCK = re.compile(r"^```python\n(?!# [\w./-]+\.\w+\n)(.*?)^```", re.MULTILINE | re.DOTALL)
RUN_BY = {
    "README.md": "switching_test",
    "docs/huggingface.md": "docs_test",
    "docs/jax.md": "jax_docs_test",
    "docs/quickstart.md": "quickstart_test",
    "docs/recipes.md": "recipes_test",
    "docs/switching.md": "switching_test",
    "docs/trainers.md": "integrations",
}


def test_every_page_with_python_has_a_test() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if BLOCK.search(page.read_text())} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / "python/tests" / f"{test}.py").read_text()


def test_the_blocks_about_hugging_face_run() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import eaves.hf
    from hf_models import VOCABULARY, tiny_model

    accumulated, metrics = BLOCK.findall((ROOT / "docs/huggingface.md").read_text())
    model = eaves.hf.patch(tiny_model("llama"))
    tokens = torch.randint(4, VOCABULARY, (2, 2, 9))  # two micro-batches
    labels = tokens.clone()
    labels[0, :, :5] = -100  # fewer labels than in the other
    exec(accumulated, {"model": model, "tokens": tokens, "labels": labels})
    found = model.get_output_embeddings().weight.grad
    model.zero_grad()
    model(input_ids=tokens.flatten(0, 1), labels=labels.flatten(0, 1)).loss.backward()
    torch.testing.assert_close(found, model.get_output_embeddings().weight.grad, rtol=1e-4, atol=1e-6)

    names = {"eaves": eaves, "model": model, "batch": tokens[0], "target": labels[0]}
    exec(metrics, names)
    assert 0 <= names["output"].accuracy.item() <= 1 and names["output"].entropy.item() > 0
