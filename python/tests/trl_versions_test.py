"""eaves.trl with the installed TRL, whose functions have other arguments in other versions: log-probabilities and the
loss of SFTTrainer against the formula in float64 and against TRL's own functions, a trainer's steps, the recipe.
tools/test_integrations runs it with each version."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import each
from hf_models import tiny_model
from integrations import run_recipe
from log_prob_test import by_the_formula, rows_and_head
from pairwise import pairwise

pytest.importorskip("trl")
pytest.importorskip("trl.trainer.utils")

from trl.trainer import utils

from trainers_test import arguments_of, sft, tokenizer, words

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

TAKES = set(inspect.signature(utils._ChunkedLogProbFunction.forward).parameters)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # theirs rounds logits to the dtype of hidden


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.trl.uninstall()


def differentiated(call: Any, *leaves: Tensor) -> tuple[Any, list[Tensor]]:
    """What the call returns of copies of the leaves, its first result's gradients."""
    copies = [each.detach().clone().requires_grad_() for each in leaves]
    found = call(*copies)
    found[0].backward(torch.linspace(-1, 2, found[0].numel(), device=found[0].device).view_as(found[0]))
    return found, [each.grad for each in copies]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def of_trl(targets: Tensor, *options: Any) -> Any:
    """TRL's function of hidden states, head and perhaps bias."""

    def call(*given: Tensor) -> Any:
        bias = [*given[2:], None][:1] if "bias" in TAKES else []
        temperature, softcap, scale = options
        return utils._ChunkedLogProbFunction.apply(*given[:2], *bias, targets, temperature, 64, softcap, scale)

    return call


def formula(targets: Tensor, temperature: float, softcap: float | None, scale: float) -> Any:
    def call(*given: Tensor) -> Any:
        logits = given[0] @ given[1].T + (given[2] if len(given) > 2 else 0)
        log_prob = by_the_formula(logits, targets, temperature, softcap, scale)
        logits = logits * scale if softcap is None else softcap * torch.tanh(logits * scale / softcap)
        return log_prob, torch.distributions.Categorical(logits=logits / temperature).entropy()

    return call


@each("dtype", (torch.float32, torch.bfloat16))
def test_log_probabilities_with_the_arguments_of_this_version(dtype: torch.dtype, device: torch.device) -> None:
    for has_bias, *options in pairwise((False, True), (1.0, 0.7), (None, 3.0), (1.0, 0.25)):
        hidden, head, targets = rows_and_head((37,), 131, dtype, device)
        bias = torch.linspace(-1, 1, 131, device=device).to(dtype) if has_bias and "bias" in TAKES else None
        leaves = [hidden, head] if bias is None else [hidden, head, bias]
        exact, exact_gradients = differentiated(formula(targets, *options), *(each.double() for each in leaves))
        theirs, _ = differentiated(of_trl(targets, *options), *leaves)
        with eaves.trl.install():
            found, gradients = differentiated(of_trl(targets, *options), *leaves)
        assert len(found) == len(theirs) == (5 if "outputs" in TAKES else 2)
        for ours, wanted, other in zip(found[:2], exact, theirs[:2]):
            torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert_near(gradients, exact_gradients, 1e-4 if dtype == torch.float32 else 2e-2)


def test_the_entropy_has_a_gradient() -> None:
    """Up to 1.12 theirs has none, without a word."""
    hidden, head, targets = rows_and_head((5,), 33, torch.float32, torch.device("cpu"))
    hidden.requires_grad_()
    with eaves.trl.install():
        entropy = of_trl(targets, 1.0, None, 1.0)(hidden, head)[1]
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    exact = torch.distributions.Categorical(logits=hidden @ head.T).entropy()
    torch.testing.assert_close(found, torch.autograd.grad(exact.sum(), hidden)[0])


def of_sft(module: Any, options: dict[str, Any]) -> Any:
    """SFTTrainer's loss of hidden states, head and perhaps bias."""
    return lambda hidden, head, bias=None: module._chunked_cross_entropy_loss(
        hidden, head, 16, lm_head_bias=bias, **options
    )


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_loss_of_sft_up_to_1_14(dtype: torch.dtype, device: torch.device) -> None:
    module = pytest.importorskip("trl.trainer.sft_trainer")
    if not hasattr(module, "_chunked_cross_entropy_loss"):
        pytest.skip("this TRL takes log-probabilities, not logits")
    for has_bias, softcap, scale, number, is_shifted, is_ignored in pairwise(
        (False, True), (None, 3.0), (1.0, 0.25), (None, 7, torch.tensor(7)), (False, True), (False, True)
    ):
        hidden, head, labels = rows_and_head((2, 19), 131, dtype, device)
        labels[:, ::3] = -100
        labels = torch.full_like(labels, -100) if is_ignored else labels
        leaves = [hidden, head, *([torch.linspace(-1, 1, 131, device=device).to(dtype)] if has_bias else [])]
        options: dict[str, Any] = {
            "shift_labels" if is_shifted else "labels": labels, "num_items_in_batch": number, "logit_scale": scale,
            "final_logit_softcapping": softcap,
        }  # fmt: skip

        expected, expected_gradients = differentiated(of_sft(module, options), *leaves)
        with eaves.trl.install():
            found, gradients = differentiated(of_sft(module, options), *leaves)
        assert found[3] == expected[3] and found[1].dtype == expected[1].dtype
        assert abs(found[1] - expected[1]) <= (0 if dtype == torch.float32 else 2)
        for ours, theirs in zip(found[:3:2], expected[:3:2]):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert ours.dtype == theirs.dtype
        assert_near(gradients, expected_gradients, 0.2 * TOLERANCE[dtype])


@each("name", ("head", "labels"))
def test_what_the_loss_of_sft_refuses(name: str) -> None:
    module = pytest.importorskip("trl.trainer.sft_trainer")
    if not hasattr(module, "_chunked_cross_entropy_loss"):
        pytest.skip("this TRL takes log-probabilities, not logits")
    hidden, head, labels = rows_and_head((2, 5), 33, torch.float32, torch.device("cpu"))
    with eaves.trl.install():
        if name == "labels":
            with pytest.raises(ValueError, match="labels"):
                module._chunked_cross_entropy_loss(hidden, head, 16)
        else:
            head.ds_id = 3  # type: ignore[attr-defined]
            with pytest.raises(NotImplementedError, match="ZeRO-3"):
                module._chunked_cross_entropy_loss(hidden, head, 16, labels=labels)


def test_sft_takes_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = eaves.trl.linear_cross_entropy
    monkeypatch.setattr(eaves.trl, "linear_cross_entropy", lambda *a, **k: calls.append(1) or original(*a, **k))

    def logs() -> list[dict[str, float]]:
        torch.manual_seed(11)
        trainer = sft(tmp_path, None)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    expected = logs()
    assert not calls
    with eaves.trl.install():
        found = logs()
    assert calls and len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected):
        for key in {"loss", "grad_norm", "entropy", "mean_token_accuracy"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=2e-4), key


def test_the_recipe(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    names = run_recipe(
        "TRL", model=tiny_model("llama"), arguments=arguments_of(trl.SFTConfig, tmp_path), tokenizer=tokenizer(),
        dataset=datasets.Dataset.from_dict({"text": [words(9, i) for i in range(8)]}),
    )  # fmt: skip
    assert names["trainer"].state.global_step == 2 and not eaves.trl.is_active()
