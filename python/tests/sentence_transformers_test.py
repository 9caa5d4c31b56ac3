"""eaves.sentence_transformers: loss and gradients are those of the class that it extends, which computes all scores."""

import copy
import gc
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import each
from eaves._replacement import INTEGRATIONS
from integrations import run_recipe
from pairwise import pairwise

st = pytest.importorskip("sentence_transformers")
util = import_module("sentence_transformers.util")
module = import_module("sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking")

SYMMETRIC = ("query_to_doc", "doc_to_query")
FUSED = ((("query_to_doc",), "joint"), (("query_to_doc",), "per_direction"), (SYMMETRIC, "joint"),
         (SYMMETRIC, "per_direction"))  # fmt: skip


def embeddings(columns: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(12, 16, generator=generator).to(dtype).requires_grad_() for _ in range(columns)]


def step(kind: Any, given: list[Tensor], **options: Any) -> list[Tensor]:
    """The loss and the gradients of all columns."""
    loss = kind(None, **options).compute_loss_from_embeddings(given, None)
    (3 * loss).backward()
    return [loss.detach(), *(each.grad for each in given if each.grad is not None)]


def assert_equal(columns: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """To theirs in float64."""
    found = step(eaves.sentence_transformers.MultipleNegativesRankingLoss, embeddings(columns, dtype), **options)
    given = [each.detach().double().requires_grad_() for each in embeddings(columns, dtype)]
    expected = step(module.MultipleNegativesRankingLoss, given, **options)
    assert len(found) == len(expected) == columns + 1
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-6, atol=2e-6)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert (ours.double() - theirs).norm() <= (2**-7 if dtype == torch.bfloat16 else 5e-6) * theirs.norm()


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@each("options", FUSED)
def test_loss_and_gradients_are_theirs(options: Any, no_warning: None) -> None:
    directions, partition = options
    for columns, (similarity, scale), hardness in pairwise(
        (2, 3, 4), ((util.cos_sim, 20.0), (util.dot_score, 0.7), (util.pytorch_cos_sim, 0.7)), (None, "hard_negatives")
    ):
        assert_equal(
            columns, scale=scale, similarity_fct=similarity, directions=directions, partition_mode=partition,
            hardness_mode=hardness,
        )  # fmt: skip


@each("options", FUSED)
def test_embeddings_of_16_bits_have_a_loss_in_float32(options: Any) -> None:
    directions, partition = options
    named = {"similarity_fct": util.dot_score, "scale": 0.7, "directions": directions, "partition_mode": partition}
    assert_equal(3, torch.bfloat16, **named)


@pytest.mark.parametrize(
    "options",
    (
        {"similarity_fct": util.euclidean_sim}, {"directions": ("query_to_doc", "query_to_query")},
        {"directions": (*SYMMETRIC, "doc_to_doc", "query_to_query")},
        {"hardness_mode": "in_batch_negatives", "hardness_strength": 2.0},
    ),
    ids=("distance", "within_queries", "four_directions", "hardness"),  # alike in every process
)  # fmt: skip
def test_what_needs_all_scores_is_theirs_and_told(options: Any) -> None:
    with pytest.warns(UserWarning, match=f"eaves.sentence_transformers: {next(iter(options))} needs all scores"):
        assert_equal(3, **options)


@each("options", FUSED)
def test_documents_of_other_ranks_are_gathered(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (module, util):
        monkeypatch.setattr(owner, "all_gather_with_grad", lambda own: torch.cat([own.detach().flip(0, 1), own]))
        monkeypatch.setattr(owner, "get_rank", lambda: 1)
    directions, partition = options
    assert_equal(6, directions=directions, partition_mode=partition, gather_across_devices=True)


# ------------------------------------------------------------------------------------------------------------- training


def model_and_dataset() -> tuple[Any, Any]:
    tokenizers = pytest.importorskip("tokenizers")
    datasets = pytest.importorskip("datasets")
    static = import_module("sentence_transformers.sentence_transformer.modules").StaticEmbedding
    words = {f"w{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(1)
    model = st.SentenceTransformer(modules=[static(tokenizer, embedding_dim=16)], device="cpu")
    texts = [" ".join(f"w{(7 * i + j) % 64}" for j in range(5)) for i in range(32)]
    return model, datasets.Dataset.from_dict({"anchor": texts[:16], "positive": texts[16:]})


def logs(loss_of: Any, folder: Path, **options: Any) -> tuple[list[float], Any]:
    model, dataset = model_and_dataset()
    loss = loss_of(model, **options)
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        logging_steps=1, save_strategy="no", use_cpu=True, seed=7,
    )  # fmt: skip
    trainer = st.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], loss


def test_a_trainer_takes_the_same_steps(tmp_path: Path) -> None:
    ours, _ = logs(eaves.sentence_transformers.MultipleNegativesRankingLoss, tmp_path)
    theirs, _ = logs(module.MultipleNegativesRankingLoss, tmp_path)
    assert len(ours) == len(theirs) == 2 and ours == pytest.approx(theirs, rel=1e-4)
    scale = torch.nn.Parameter(torch.tensor(20.0))
    learned, loss = logs(eaves.sentence_transformers.MultipleNegativesRankingLoss, tmp_path, scale=scale)
    assert learned[0] == pytest.approx(ours[0], rel=1e-4)
    assert loss.scale is scale and scale.item() != 20.0
    assert loss.get_config_dict()["scale"] == scale.item()


def test_the_recipe_runs(tmp_path: Path) -> None:
    model, dataset = model_and_dataset()
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=8, report_to=[], use_cpu=True
    )
    before = model[0].embedding.weight.detach().clone()
    run_recipe("sentence-transformers", model=model, dataset=dataset, arguments=arguments)
    assert not torch.equal(model[0].embedding.weight, before)


def test_it_is_active_while_there_is_a_loss() -> None:
    integration = INTEGRATIONS["sentence_transformers"]
    gc.collect()
    assert integration.is_known() and not integration.is_active()
    loss = eaves.sentence_transformers.MultipleNegativesRankingLoss(None)
    assert integration.is_active()
    loss = copy.deepcopy(loss)
    gc.collect()
    assert integration.is_active()
    del loss
    gc.collect()
    assert not integration.is_active()
