"""The blocks of docs/recipes.md run, each by itself, with the names that the page begins with and the models that it
takes as given."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import eaves

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCKS = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
V, D = 131, 32


def names(block: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    body, head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)
    teacher_body, teacher_head = torch.nn.Embedding(V, 2 * D), torch.nn.Linear(2 * D, V, bias=False)
    labels = torch.randint(4, V, (3, 2, 9))
    labels[..., :3] = -100
    found: dict[str, Any] = {
        "torch": torch, "eaves": eaves, "V": V, "D": D, "body": body, "head": head,
        "teacher_body": teacher_body, "teacher_head": teacher_head,
        "batches": [(torch.randint(4, V, (2, 9)), each) for each in labels],
        "optimizer": torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1.0),
    }  # fmt: skip
    if "llama" in block:
        from hf_models import tiny_model
        from trainers_test import arguments_of, tokenizer, words

        found |= {name: pytest.importorskip(name) for name in ("transformers", "peft", "trl", "datasets")}
        found["llama"], found["tokenizer"] = tiny_model("llama"), tokenizer()
        found["training_arguments"] = arguments_of(found["transformers"].TrainingArguments, folder)
        found["sft_arguments"] = arguments_of(found["trl"].SFTConfig, folder)
        texts = found["datasets"].Dataset.from_dict({"text": [words(9, i) for i in range(8)]})
        found["dataset"] = texts
        if "teacher_llama" in block:
            from distillation_trainers_test import distillation_of, gkd_of, teacher

            found |= {"teacher_llama": teacher("llama"), **distillation_of(folder), **gkd_of(folder)}
        if "transformers.Trainer" in block:
            found["dataset"] = [{"input_ids": torch.arange(4, 13), "labels": torch.arange(4, 13)} for _ in range(8)]
    return found


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_the_recipe_runs(title: str, block: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = names(block, tmp_path)
    if "mesh" in block:
        request.getfixturevalue("process_group")
        given["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    before = given["head"].weight.detach().clone()
    exec(compile(block, f"{PAGE.name}: {title}", "exec"), given)
    if "optimizer.step" in block:
        assert not torch.equal(whole(given["head"].weight), before)
    if "MetricsTrainer" in block:
        entries = [entry for entry in given["trainer"].state.log_history if "loss" in entry]
        assert entries and all(0 <= entry["accuracy"] <= 1 and 0 < entry["entropy"] < math.log(V) for entry in entries)
    if "main_grad" in block:
        assert given["main_grad"].abs().sum() > 0
    if ".backward()" in block and "embedding" not in block:
        assert whole(given["body"].weight.grad).abs().sum() > 0
    if title.startswith("Retrieval: doc") or "false_negatives" in given:
        wanted, logits = given["own"], (given["queries"] @ given["texts"].T).double()
        masked = given.get("false_negatives")
        if masked is None:  # the first occurrence of each document
            masked = (given["ids"][:, None] == given["ids"]).triu(1).any(0)
            assert masked.any()
            wanted = given["first"][wanted]
        expected = torch.nn.functional.cross_entropy(logits.masked_fill(masked, -math.inf), wanted)
        torch.testing.assert_close(given["loss"].double(), expected, rtol=1e-6, atol=1e-6)
    if "ratio" in given:
        assert given["ratio"].shape == (2, 8) and (given["ratio"][:, :2] == 1).all()


def test_there_are_recipes() -> None:
    assert len(BLOCKS) == len(re.findall("^```python$", PAGE.read_text(), re.MULTILINE)) >= 6
