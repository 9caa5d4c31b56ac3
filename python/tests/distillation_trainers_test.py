"""eaves.trl with the trainers of TRL that distil: DistillationTrainer and GKDTrainer, against TRL's own functions."""

import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from chunked_cases import Watching, heads
from cross_entropy_test import each
from hf_models import VOCABULARY, tiny_model
from pairwise import pairwise

pytest.importorskip("trl")
pytest.importorskip("trl.trainer.utils")

import eaves.hf.distillation
from trainers_test import arguments_of, saved_model, tokenizer, words

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.trl.uninstall()


# ------------------------------------------------------------------------------------------------------- the function

COUNTS = torch.tensor([True, False, True, True, True, False, True, True, True] * 4 + [False])


def loss_of(student: list[Any], teacher: list[Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As DistillationTrainer calls it: hidden states [1, N, D], heads and biases of both, and the rest by name."""
    module = pytest.importorskip("trl.trainer.distillation_trainer", reason="the trainer exists from TRL 1.10 on")
    chunk = {} if version("trl") >= "1.15" else {"chunk_size": 16}
    (hidden, head, bias), (teacher_hidden, teacher_head, teacher_bias) = student, teacher
    options.setdefault("completion_mask", COUNTS[: len(hidden)].to(hidden.device))
    options["completion_mask"] = options["completion_mask"].unsqueeze(0)
    result: tuple[Tensor, Tensor, Tensor] = module._chunked_divergence_loss(
        hidden.unsqueeze(0), teacher_hidden.unsqueeze(0), head, teacher_head, student_lm_head_bias=bias,
        teacher_lm_head_bias=teacher_bias, **{"beta": 0.5} | chunk | options,
    )  # fmt: skip
    return result


def step(student: list[Any], teacher: list[Any], **options: Any) -> tuple[Tensor, ...]:
    """Loss, entropies, the number of rows, and the gradients of hidden states, head and bias."""
    leaves = [each if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in student]
    loss, entropy, count = loss_of(leaves, teacher, **options)
    (loss * 1.5).backward()
    gradients = [each.grad for each in leaves if each is not None and each.grad is not None]
    return loss.detach(), entropy.detach(), count, *gradients


@each("dtype", (torch.float32, torch.bfloat16))
def test_trl_gets_the_divergence_of_its_own_function(dtype: torch.dtype, device: torch.device) -> None:
    for beta, temperature, scale, softcap, has_bias, is_frozen, number in pairwise(
        (0.0, 0.3, 1.0), (1.0, 0.7), (1.0, 0.25), (None, 3.0), (False, True), (False, True), (None, 7, torch.tensor(7))
    ):
        hidden, head, *teacher = heads(dtype, device, (37,), classes=131)
        biases = [torch.linspace(-1, 1, 131, device=device).to(dtype) * sign if has_bias else None for sign in (1, -1)]
        if biases[0] is not None:
            biases[0].requires_grad_(not is_frozen)
        call = ([hidden.requires_grad_(), head.requires_grad_(not is_frozen), biases[0]], [*teacher, biases[1]])
        options = {
            "beta": beta, "temperature": temperature, "student_logit_scale": scale, "num_items_in_batch": number,
            "student_final_logit_softcapping": softcap, "teacher_logit_scale": 2 * scale,
            "teacher_final_logit_softcapping": softcap,
        }  # fmt: skip
        expected = step(*call, **options)
        with eaves.trl.install():
            found = step(*call, **options)
        # Up to 1.15 theirs rounds logits to the dtype of hidden.
        tolerance = 1e-4 if dtype == torch.float32 else 4e-2
        assert found[2] == expected[2]
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(found[3:], expected[3:], strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def test_a_step_takes_four_products(device: torch.device) -> None:
    def products(is_frozen: bool) -> int:
        hidden, head, *teacher = heads(torch.float32, device, (15,))
        student = [hidden.requires_grad_(), head.requires_grad_(not is_frozen), None]
        with eaves.trl.install(), Watching() as watching:
            step(student, [*teacher, None])
        return watching.products

    assert [products(False), products(True)] == [4, 3]


def test_no_rows_other_dtypes_and_a_head_in_pieces(any_device: torch.device) -> None:
    hidden, head, teacher_hidden, teacher_head = heads(torch.bfloat16, any_device, (5,))
    nothing = torch.zeros(5, dtype=torch.bool, device=any_device)
    with eaves.trl.install():
        student, teacher = [hidden.requires_grad_(), head.requires_grad_(), None], [teacher_hidden, teacher_head, None]
        loss, entropy, count, *gradients = step(student, teacher, completion_mask=nothing)
        assert (loss, entropy, count) == (0, 0, 0) and len(gradients) == 2 and not any(each.any() for each in gradients)
        # The master copies of heads under mixed precision.
        weight = head.detach().float().requires_grad_()
        loss_of([hidden, weight, None], [teacher_hidden.float(), teacher_head, None], beta=1.0)[0].backward()
        assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.any()
        teacher_head.ds_id = 3  # type: ignore[attr-defined]
        with pytest.raises(NotImplementedError, match="ZeRO-3"):
            loss_of(student, teacher)


# --------------------------------------------------------------------------------------------------------- the trainers


def teacher(name: str) -> Any:
    model = tiny_model(name)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    return model


def distillation_of(folder: Path) -> dict[str, Any]:
    """The arguments and the data of a DistillationTrainer."""
    from datasets import Dataset
    from trl import DistillationConfig

    options = {"max_completion_length": 6, "beta": 0.3, "temperature": 0.8}
    return {
        "distillation_arguments": arguments_of(DistillationConfig, folder, **options),
        "prompts": Dataset.from_dict({"prompt": [words(3, i) for i in range(8)]}),
    }


def gkd_of(folder: Path) -> dict[str, Any]:
    """The arguments, the data and the tokenizer of a GKDTrainer."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig

    of_chat = tokenizer()
    of_chat.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    messages = [
        [{"role": "user", "content": words(4 + i % 3, i)}, {"role": "assistant", "content": words(5, 100 + i)}]
        for i in range(8)
    ]
    options = {"lmbda": 0.0, "beta": 0.3, "max_length": 32, "max_new_tokens": 4}
    return {
        "gkd_arguments": arguments_of(GKDConfig, folder, **options),
        "messages": Dataset.from_dict({"messages": messages}),
        "tokenizer": of_chat,
    }


def distillation(folder: Path, peft_config: Any, name: str) -> Any:
    from trl import DistillationTrainer

    given = distillation_of(folder)
    return DistillationTrainer(
        model=saved_model(folder, name), teacher_model=teacher(name), processing_class=tokenizer(),
        peft_config=peft_config, train_dataset=given["prompts"], args=given["distillation_arguments"],
    )  # fmt: skip


def gkd(folder: Path, peft_config: Any, name: str) -> Any:
    from trl.experimental.gkd import GKDTrainer

    given = gkd_of(folder)
    return GKDTrainer(
        model=tiny_model(name), teacher_model=teacher(name), processing_class=given["tokenizer"],
        peft_config=peft_config, train_dataset=given["messages"], args=given["gkd_arguments"],
    )  # fmt: skip


@each(("make", "name"), ((distillation, "gemma2"), (gkd, "llama"), (gkd, "granite")))
def test_a_trainer_takes_the_same_steps(make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    calls = []
    for module in (eaves.trl, eaves.hf.distillation):
        original = module.linear_kl_div
        monkeypatch.setattr(
            module, "linear_kl_div", lambda *a, original=original, **k: calls.append(1) or original(*a, **k)
        )

    def logs(lora: bool) -> list[dict[str, float]]:
        torch.manual_seed(11)
        config = peft.LoraConfig(r=4, target_modules="all-linear") if lora else None
        trainer = make(tmp_path, config, name)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    for lora in (False, True):
        expected = logs(lora)
        assert not calls
        with eaves.trl.install():
            found = logs(lora)
        assert len(calls) == 2, "eaves was not called once for each step"
        calls.clear()
        assert len(found) == len(expected) == 2
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs["loss"] > 0
            for key in {"loss", "grad_norm", "entropy"} & set(theirs):
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=2e-4), f"{key} {lora}"


LEAST_LOGITS = 4 * 9 * VOCABULARY  # a batch of 4, with at least 4 and 5 words


def compute_loss(trainer: Any, **options: Any) -> tuple[Any, Tensor]:
    """The loss of a batch, and the gradient of the student's head."""
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.zero_grad()
    result = trainer.compute_loss(trainer.model, inputs, **options)
    (result[0] if isinstance(result, tuple) else result).backward()
    return result, trainer.model.get_output_embeddings().weight.grad.clone()


def test_gkd_holds_no_logits(tmp_path: Path) -> None:
    trainer = gkd(tmp_path, None, "gemma2")
    with eaves.trl.install(workspace_bytes=1), Watching() as watching:
        compute_loss(trainer)
    assert watching.largest < LEAST_LOGITS
    assert "forward" not in vars(trainer.model.get_output_embeddings())


@each("number", (None, 7, torch.tensor(7)))
def test_gkd_divides_by_the_number_of_items(number: Any, tmp_path: Path) -> None:
    trainer = gkd(tmp_path, None, "llama")
    expected, exact = compute_loss(trainer, num_items_in_batch=number)
    with eaves.trl.install():
        found, grad = compute_loss(trainer, num_items_in_batch=number)
        (with_outputs, outputs), _ = compute_loss(trainer, num_items_in_batch=number, return_outputs=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad, exact, rtol=1e-3, atol=1e-6)
    assert with_outputs == found and outputs.logits is None


def test_gkd_under_the_mixed_precision_of_accelerate(tmp_path: Path) -> None:
    """Its wrapper of a forward asks the outputs for their dtype."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    trainer = gkd(tmp_path, None, "gemma2")
    for model in (trainer.model, trainer.teacher_model):
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    with torch.autocast("cpu", torch.bfloat16):
        expected, exact = compute_loss(trainer)
        with eaves.trl.install(workspace_bytes=1), Watching() as watching:
            found, grad = compute_loss(trainer)
    assert found.dtype == torch.float32 and watching.largest < LEAST_LOGITS
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-3)
    assert (grad - exact).norm() <= 5e-2 * exact.norm()


def hooked(trainer: Any) -> None:
    trainer.model.get_output_embeddings().register_forward_hook(lambda module, arguments, output: output * 2)


def quantised(trainer: Any) -> None:
    """A head of another class, which multiplies by more than its weight."""

    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    trainer.teacher_model.get_output_embeddings().__class__ = Doubled


def with_metrics(trainer: Any) -> None:
    trainer.compute_metrics = lambda prediction: {}


def with_liger(trainer: Any) -> None:
    trainer.use_liger_gkd_loss = True  # of TRL up to 1.13, whose method asks for it


@each("change", (hooked, quantised, with_metrics, with_liger))
def test_gkd_keeps_the_loss_of_trl(change: Any, tmp_path: Path) -> None:
    trainer = gkd(tmp_path, None, "llama")
    change(trainer)
    (expected, outputs), exact = compute_loss(trainer, return_outputs=True)
    with eaves.trl.install(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found, of_ours), grad = compute_loss(trainer, return_outputs=True)
    said = [str(each.message) for each in caught if "this GKDTrainer keeps its own loss" in str(each.message)]
    reason = "use_liger_kernel" if change is with_liger else "the head of a model"
    assert len(said) == (change is not with_metrics) and all(reason in each for each in said)
    assert torch.equal(found, expected) and torch.equal(grad, exact)
    assert torch.equal(of_ours.logits, outputs.logits)


def test_gkd_of_a_model_that_uses_its_logits_for_more(tmp_path: Path) -> None:
    trainer = gkd(tmp_path, None, "llama")
    forward = type(trainer.model).forward

    def doubled(*arguments: Any, **keywords: Any) -> Any:
        output = forward(trainer.teacher_model, *arguments, **keywords)
        output.logits = output.logits.roll(1, -1)
        return output

    trainer.teacher_model.forward = doubled
    expected, exact = compute_loss(trainer)
    with eaves.trl.install(), pytest.warns(UserWarning, match="the model uses the logits for more than the loss"):
        found, grad = compute_loss(trainer)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, exact)


def test_the_method_of_gkd_is_given_back() -> None:
    with eaves.trl.install():
        trainer = sys.modules["trl.experimental.gkd.gkd_trainer"].GKDTrainer
        ours = trainer.compute_loss
        assert ours.__module__ == "eaves.hf.distillation"
        with eaves.trl.install(workspace_bytes=1 << 20):
            assert trainer.compute_loss is not ours
        assert trainer.compute_loss is ours
    assert trainer.compute_loss.__module__ == trainer.__module__ and not eaves.trl.is_active()
    original = trainer.compute_loss
    eaves.trl.install()
    trainer.compute_loss = original
    try:
        assert not eaves.trl.is_active()
    finally:
        eaves.trl.uninstall()
    assert trainer.compute_loss is original
