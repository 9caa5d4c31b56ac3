"""eaves.trl: numbers, gradients and training steps against the functions of TRL that it replaces, and what is replaced
when."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import each
from hf_models import VOCABULARY, tiny_model
from integrations import installed
from log_prob_test import by_the_formula, rows_and_head
from pairwise import pairwise

pytest.importorskip("trl")
pytest.importorskip("trl.trainer.utils")

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.trl.uninstall()
    eaves.verl.uninstall()


def apply(*arguments: Any) -> tuple[Tensor | None, ...]:
    """As TRL's trainers call it, through the module where they look it up."""
    result: tuple[Tensor | None, ...] = sys.modules["trl.trainer.utils"]._ChunkedLogProbFunction.apply(*arguments)
    return result


# ---------------------------------------------------------------------------------------------- numbers and gradients


def step(
    hidden: Tensor, head: Tensor, arguments: tuple[Any, ...], upstream: Tensor, is_frozen: bool
) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """The outputs, and the gradients of log-probabilities and entropies together."""
    given = [hidden.clone().requires_grad_(), head.clone().requires_grad_(not is_frozen)]
    found = apply(*given, *arguments)
    assert found[0] is not None
    found[0].backward(upstream, retain_graph=found[1] is not None)
    if found[1] is not None:
        found[1].backward(upstream)
    return found, [tensor.grad for tensor in given if tensor.grad is not None]


@each("dtype", (torch.float32, torch.bfloat16))
def test_trl_gets_what_its_own_function_gives(dtype: torch.dtype, device: torch.device) -> None:
    for has_bias, temperature, softcap, scale, is_frozen, outputs in pairwise(
        (False, True), (1.0, 0.7), (None, 3.0), (1.0, 0.25), (False, True), (OUTPUTS, ("log_probs",), ("mean_logits",))
    ):
        hidden, head, targets = rows_and_head((37,), 131, dtype, device)
        bias = torch.linspace(-1, 1, 131, device=device).to(dtype) if has_bias else None
        arguments = (bias, targets, temperature, 64, softcap, scale, outputs)
        call = (hidden, head, arguments, torch.linspace(-1, 2, 37, device=device), is_frozen)
        expected, expected_gradients = step(*call)
        with eaves.trl.install():
            found, gradients = step(*call)
        # Theirs rounds logits to the dtype of hidden.
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None and ours.dtype == torch.bool:
                assert (ours == theirs).float().mean() > 0.9 and ours.any() == theirs.any()
            elif ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert len(gradients) == len(expected_gradients) == (1 if is_frozen else 2)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours.double() - theirs.double()).norm() <= 0.2 * tolerance * theirs.double().norm()


def test_trl_without_rows_and_with_an_fp32_head(device: torch.device) -> None:
    hidden, head, targets = rows_and_head((5,), 33, torch.bfloat16, device)
    arguments = (None, targets, 1.0, 64, None, 1.0, ("entropy",))
    with eaves.trl.install():
        found = apply(hidden[:0], head, None, targets[:0], 1.0, 64, None, 1.0, OUTPUTS)
        assert all(each is not None and each.shape == (0,) for each in found)
        # cast_lm_head_to_fp32: the head stays in bfloat16 and is multiplied in float32.
        weight = head.clone().requires_grad_()
        (log_prob, entropy, *_) = apply(hidden.float(), weight, *arguments)
        assert log_prob is not None and entropy is not None
        torch.testing.assert_close(
            log_prob.detach().double(), by_the_formula(hidden.double() @ head.double().T, targets), rtol=1e-5, atol=1e-5
        )
        log_prob.sum().backward()
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
        # A head that is wider than hidden, without autocast: its gradient is not rounded.
        weight = head.float().requires_grad_()
        (log_prob, *_) = apply(hidden, weight, *arguments)
        assert log_prob is not None
        log_prob.sum().backward()
        assert weight.grad is not None and not torch.equal(weight.grad, weight.grad.bfloat16().float())
        with torch.autocast(device.type, torch.bfloat16):
            (log_prob, *_) = apply(hidden.float(), head.float().requires_grad_(), *arguments)
        assert log_prob is not None and log_prob.dtype == torch.float32


def test_trl_refuses_a_head_in_pieces(any_device: torch.device) -> None:
    hidden, head, targets = rows_and_head((5,), 33, torch.float32, any_device)
    head.ds_id = 3  # type: ignore[attr-defined]
    with eaves.trl.install(), pytest.raises(NotImplementedError, match="ZeRO-3"):
        apply(hidden, head, None, targets, 1.0, 64)


# ---------------------------------------------------------------------------------------------------- training steps


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(4, VOCABULARY, (count,), generator=generator).tolist())


def arguments_of(configuration: Any, folder: Path, **options: Any) -> Any:
    return configuration(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, activation_checkpointing=False, seed=7,
        **options,
    )  # fmt: skip


def saved_model(folder: Path, name: str = "llama") -> str:
    """A place that a trainer loads the policy and its reference from."""
    tiny_model(name).save_pretrained(folder / "model")
    return str(folder / "model")


def grpo(folder: Path, peft_config: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    return GRPOTrainer(
        model=saved_model(folder), reward_funcs=reward, processing_class=tokenizer(), peft_config=peft_config,
        train_dataset=Dataset.from_dict({"prompt": [words(3, i) for i in range(8)]}),
        args=arguments_of(GRPOConfig, folder, num_generations=2, max_completion_length=6, beta=0.1, temperature=0.8),
    )  # fmt: skip


def dpo(folder: Path, peft_config: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    columns = {
        name: [(" " if j else "") + words(4, 10 * i + j) for i in range(8)]
        for j, name in enumerate(("prompt", "chosen", "rejected"))
    }
    return DPOTrainer(
        model=saved_model(folder), processing_class=tokenizer(), peft_config=peft_config,
        train_dataset=Dataset.from_dict(columns), args=arguments_of(DPOConfig, folder, use_weighting=True),
    )  # fmt: skip


def sft(folder: Path, peft_config: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=tiny_model("llama"), processing_class=tokenizer(), peft_config=peft_config,
        train_dataset=Dataset.from_dict({"text": [words(9, i) for i in range(8)]}),
        args=arguments_of(SFTConfig, folder),
    )  # fmt: skip


@each("make", (sft, dpo, grpo))
def test_a_trainer_of_trl_takes_the_same_steps(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    calls = []
    original = eaves.trl.linear_cross_entropy
    monkeypatch.setattr(eaves.trl, "linear_cross_entropy", lambda *a, **k: calls.append(1) or original(*a, **k))

    def logs(lora: bool) -> list[dict[str, float]]:
        torch.manual_seed(11)
        trainer = make(tmp_path, peft.LoraConfig(r=4, target_modules="all-linear") if lora else None)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    for lora in (False, True):
        expected = logs(lora)
        assert not calls
        with eaves.trl.install():
            found = logs(lora)
        assert calls, "eaves was not called"
        calls.clear()
        assert len(found) == len(expected) == 2
        for ours, theirs in zip(found, expected, strict=True):
            compared = {k for k, v in theirs.items() if isinstance(v, float) and "time" not in k and "per_sec" not in k}
            assert {"loss", "entropy"} <= compared and compared <= set(ours)
            for name in compared:
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4, nan_ok=True), f"{name} {lora}"


# --------------------------------------------------------------------------------------------------------- installation


def theirs() -> Any:
    return sys.modules["trl.trainer.utils"]._ChunkedLogProbFunction


def test_install_is_undone_by_uninstall_and_by_the_end_of_a_block() -> None:
    original = theirs()
    assert not eaves.trl.is_active()
    eaves.trl.install()
    ours = theirs()
    assert eaves.trl.is_active() and ours is not original
    with eaves.trl.install(algorithm="recompute"):  # other options, for a while
        assert eaves.trl.is_active() and theirs() is not ours
    assert eaves.trl.is_active() and theirs() is ours
    eaves.trl.uninstall()
    assert not eaves.trl.is_active() and theirs() is original
    eaves.trl.uninstall()  # nothing to undo
    with pytest.raises(ZeroDivisionError), eaves.trl.install():
        raise ZeroDivisionError
    assert theirs() is original
    for name in ("trl.kernels", "trl.kernels.chunked_logprob"):
        assert sys.modules[name].ChunkedLogProbFunction is original


@each(
    "place",
    (("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"), ("trl.trainer.utils", "_ChunkedLogProbFunction")),
)
def test_what_somebody_else_has_replaced_is_left_and_told(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = sys.modules[place[0]], place[1]
    original, other = getattr(module, name), object()
    eaves.trl.install()
    setattr(module, name, other)
    try:
        assert not eaves.trl.is_active()
        with pytest.raises(RuntimeError, match=r"other code has already replaced .*_ChunkedLogProbFunction"):
            eaves.trl.install()
        eaves.trl.uninstall()
        assert getattr(module, name) is other
        assert sum(theirs() is each_one for each_one in (original, other)) == 1, "eaves is nowhere any more"
    finally:
        setattr(module, name, original)
    with eaves.trl.install():
        assert eaves.trl.is_active()
    assert theirs() is original


def test_the_end_of_a_block_undoes_its_own_install_alone() -> None:
    original = theirs()
    first, second = eaves.trl.install(), eaves.trl.install(algorithm="recompute")
    ours = theirs()
    with first:
        pass
    assert eaves.trl.is_active() and theirs() is ours
    with second:
        pass
    assert not eaves.trl.is_active() and theirs() is original
    with pytest.raises(RuntimeError, match="this install was undone"), first:
        pass
    stale = eaves.trl.install()
    eaves.trl.uninstall()
    eaves.trl.install()
    stale.__exit__()
    assert eaves.trl.is_active()


def test_threads_that_install_and_undo_leave_theirs() -> None:
    original = theirs()

    def install_often() -> None:
        for _ in range(100):
            with eaves.trl.install():
                pass

    threads = [threading.Thread(target=install_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert theirs() is original and not eaves.trl.is_active()


def test_it_can_be_installed_before_trl_is_imported() -> None:
    program = """
import sys, eaves
assert "trl" not in sys.modules and not eaves.trl.is_active()
eaves.trl.install()
import trl.trainer.utils, trl.kernels
assert eaves.trl.is_active()
assert trl.trainer.utils._ChunkedLogProbFunction is trl.kernels.ChunkedLogProbFunction
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_trl_takes_the_options_that_install_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    original = eaves.trl.linear_cross_entropy
    monkeypatch.setattr(eaves.trl, "linear_cross_entropy", lambda *a, **k: given.append(k) or original(*a, **k))
    hidden, head, targets = rows_and_head((5,), 33, torch.float32, torch.device("cpu"))
    with eaves.trl.install():
        apply(hidden, head, None, targets, 1.0, 64, None, 1.0, ("mean_logits", "log_sum_sq_probs"))
    assert [call["workspace_bytes"] for call in given] == [None] and given[0]["algorithm"] == "speed"
    given.clear()
    with eaves.trl.install(algorithm="recompute", workspace_bytes=1 << 20):
        apply(hidden, head, None, targets, 1.0, 64, None, 1.0, ("entropy",))
    assert given[0].items() >= {"algorithm": "recompute", "workspace_bytes": 1 << 20}.items() and len(given) == 1
    assert given[0]["grad_weight_dtype"] == torch.float32
    assert given[0]["outputs"] == ("entropy",)
    with eaves.trl.install():
        apply(hidden.double(), head.double(), None, targets, 1.0, 64)


@each("found", ("trl 99.0", "verl 99.0", "trl 1.160", "verl 0.90.1"))
def test_a_version_that_is_not_known_is_refused(found: str) -> None:
    name, version = found.split()
    module, sentence = getattr(eaves, name), rf"eaves\.{name}: {name} has version {version}, expected .*; nothing was"
    with installed(version), pytest.raises(RuntimeError, match=sentence):
        module.install()
    assert not module.is_active()


def test_a_library_that_is_not_there_is_told() -> None:
    sentence = r"eaves\.verl needs verl 0\.9\.x, which is not installed"
    with installed(None), pytest.raises(ImportError, match=sentence):
        eaves.verl.install()


def test_wrong_options_are_refused_before_anything_is_replaced() -> None:
    for wrong in ({"algorithm": "fast"}, {"workspace_bytes": 0}):
        with pytest.raises(ValueError):
            eaves.trl.install(**wrong)
    assert not eaves.trl.is_active()
