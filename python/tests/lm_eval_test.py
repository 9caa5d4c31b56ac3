"""eaves.lm_eval: log-likelihoods and greedy answers are those of lm-eval's HFLM, which computes all logits."""

import copy
import gc
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import eaves
from cross_entropy_test import each
from eaves._replacement import INTEGRATIONS
from hf_models import VOCABULARY, tiny_model
from integrations import run_recipe

pytest.importorskip("lm_eval")
huggingface = import_module("lm_eval.models.huggingface")

from trainers_test import tokenizer, words  # noqa: E402


def requests_of(model: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Choices behind one context, one token and several; a context that is too long; the model's own answer."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    found: list[Any] = []
    for length in (1, 5, 9, 30):
        context = tokens(length)
        found += [((f"{length}", f"{i}"), context, [i]) for i in (4, 5, 6)]
        found += [((f"{length}", "two"), context[:-1] or [4], [context[-1], 7]), (None, context, tokens(4))]
        with torch.no_grad():
            likeliest = model(torch.tensor([context])).logits[0, -1].argmax().item()
        found.append(((f"{length}", "greedy"), context, [likeliest]))
    return found


def answers(kind: Any, model: Any, **options: Any) -> Any:
    # With the cache theirs takes another position's logits for the shorter of two continuations with the same inputs.
    options["logits_cache"] = False
    evaluated = kind(pretrained=model, tokenizer=tokenizer(), device="cpu", max_length=16, **options)
    return evaluated._loglikelihood_tokens(requests_of(model), disable_tqdm=True)


@each("name", ("llama", "gemma2", "gpt2", "granite"))
def test_answers_are_theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = eaves.lm_eval.linear_cross_entropy
    monkeypatch.setattr(
        eaves.lm_eval, "linear_cross_entropy", lambda x, *a, **k: rows.append(len(x)) or original(x, *a, **k)
    )
    model = tiny_model(name).eval()
    for options in ({"batch_size": 1}, {"batch_size": 5}, {"batch_size": 64}, {"batch_size": "auto"}):
        expected = answers(huggingface.HFLM, model, **options)
        rows.clear()
        found = answers(eaves.lm_eval.HFLM, model, **options)
        assert sum(rows) == sum(len(continuation) for *_, continuation in requests_of(model))
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert 3 <= sum(greedy for _, greedy in found) < len(found)
        assert [log_prob for log_prob, _ in found] == pytest.approx([log_prob for log_prob, _ in expected], rel=1e-5)


@each("is_mixed", (False, True))
def test_16_bits_are_multiplied_in_float32(is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"mixed_precision_dtype": "bfloat16"} if is_mixed else {}
    model = tiny_model().eval().to(torch.float32 if is_mixed else torch.bfloat16)
    found = answers(eaves.lm_eval.HFLM, model, **options)
    weight = model.lm_head.weight.bfloat16().double()
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: hidden.bfloat16().double() @ weight.T)
    exact = answers(huggingface.HFLM, model, **options)
    assert [log_prob for log_prob, _ in found] == pytest.approx([log_prob for log_prob, _ in exact], rel=1e-5)


def test_a_head_that_is_no_product_is_theirs_and_told() -> None:
    model = tiny_model().eval()
    model.lm_head.register_forward_hook(lambda module, arguments, output: 2 * output)
    with pytest.warns(UserWarning, match="eaves does not take the head"):
        found = answers(eaves.lm_eval.HFLM, model)
    assert found == answers(huggingface.HFLM, model)


def test_a_bias_that_the_model_adds_counts() -> None:
    model = tiny_model().eval()
    bias, forward = torch.linspace(-3, 3, VOCABULARY), model.forward

    def biased(*arguments: Any, **options: Any) -> Any:
        outputs = forward(*arguments, **options)
        outputs.logits = outputs.logits + bias
        return outputs

    model.forward = biased
    found, expected = (answers(kind, model) for kind in (eaves.lm_eval.HFLM, huggingface.HFLM))
    assert [log_prob for log_prob, _ in found] == pytest.approx([log_prob for log_prob, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_recipe_runs(tmp_path: Path) -> None:
    model = tiny_model().eval()
    found = run_recipe("lm-eval", model=model, tokenizer=tokenizer(), questions=[(words(3, 1), " w5"), ("w4", " w6")])
    assert len(found["answers"]) == 2 and all(log_prob < 0 for log_prob, _ in found["answers"])
    integration = INTEGRATIONS["lm_eval"]
    assert integration.is_known() and integration.is_active()
    evaluated = copy.copy(found.pop("evaluated"))
    gc.collect()
    assert integration.is_active()
    del evaluated
    gc.collect()
    assert not integration.is_active()
