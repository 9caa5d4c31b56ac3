"""eaves.liger behind libraries that call Liger: transformers, LLaMA-Factory, ms-swift, Axolotl, OLMo-core.

Triton's interpreter runs Liger's other kernels without a GPU. If a library's import needs packages of a GPU, the one
module that calls Liger is loaded from its wheel, without the packages around it.
"""

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import eaves
from hf_models import transformers
from integrations import StandIns, run_recipe
from liger_cases import DEVICE, chunked_loss, tensors
from watch import watched

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Liger changes classes of transformers, and cross_entropy of PyTorch."""
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(llama, name, getattr(llama, name))
    monkeypatch.setattr(llama.LlamaForCausalLM, "forward", llama.LlamaForCausalLM.forward)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", torch.nn.functional.cross_entropy)
    yield
    eaves.liger.uninstall()


def llama() -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=37, initializer_range=0.3, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config).to(DEVICE)


IDS = torch.tensor([[3, 5, 8, 13, 21, 34], [1, 4, 9, 16, 25, 36]], device=DEVICE)


def step(model: Any) -> dict[str, Tensor]:
    """The loss, and the gradients of the parameters."""
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def check_step(applied: Any, expected: dict[str, Tensor], operator: str = "linear_cross_entropy") -> None:
    with eaves.liger.install(), watched() as calls:
        found = step(applied)
    assert [name for name, *_ in calls if name.startswith(operator)], [name for name, *_ in calls]
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_that_liger_has_changed() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model, expected = llama(), step(llama())
    _apply_liger_kernel_to_instance(model=model)
    check_step(model, expected)


def test_the_trainer_of_transformers(tmp_path: Any) -> None:
    def losses(**options: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to=[], save_strategy="no", seed=3,
            per_device_train_batch_size=2, learning_rate=0.1, use_cpu=DEVICE.type == "cpu", disable_tqdm=True,
            **options,
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in IDS.cpu().repeat(2, 1)]
        trainer = transformers.Trainer(llama(), arguments, train_dataset=data)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    expected = losses()
    run_recipe("Liger")
    with watched() as calls:
        found = losses(use_liger_kernel=True)
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 2 and found[0] != found[1]
    assert len([name for name, *_ in calls if name.startswith("linear_cross_entropy_forward")]) >= 2, calls


# ------------------------------------------------------------------------------ modules of wheels without their package


def folder_of(package: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a module of a wheel, without the __init__ of the packages around it. Stand-ins are `unused`,
    which it imports and does not use here."""

    def load(package: str, name: str, unused: tuple[str, ...] = ()) -> Any:
        root = folder_of(package)
        for part in [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]:
            around = ModuleType(part)
            around.__path__ = [str(root.joinpath(*part.split(".")))]
            monkeypatch.setitem(sys.modules, part, around)
        monkeypatch.delitem(sys.modules, name, raising=False)
        with StandIns(*unused):
            module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)  # to be taken out again
        return module

    return load


@pytest.mark.parametrize("require_logits", (False, True))
def test_llama_factory(without_packages: Any, require_logits: bool) -> None:
    expected = step(llama())
    module = without_packages("llamafactory", "llamafactory.model.model_utils.liger_kernel", ("llamafactory.extras",))
    arguments = SimpleNamespace(enable_liger_kernel=True)
    module.apply_liger_kernel(llama().config, arguments, is_trainable=True, require_logits=require_logits)
    check_step(llama(), expected, "cross_entropy" if require_logits else "linear_cross_entropy")


def test_the_distillation_of_ms_swift() -> None:
    root = folder_of("ms-swift")
    source = ast.parse((root / "swift/rlhf_trainers/gkd_trainer.py").read_text())
    method = next(each for each in ast.walk(source) if getattr(each, "name", "") == "_compute_liger_loss")
    nothing = contextlib.nullcontext
    names: dict[str, Any] = {
        "torch": torch, "nullcontext": nothing, "is_peft_model": lambda _: False,
        "disable_gradient_checkpointing": lambda *_: nothing(), "get_gather_if_zero3_context": lambda *_, **__: nothing,
    }  # fmt: skip
    exec(compile(ast.Module([method], []), "gkd_trainer.py", "exec"), names)
    loss = chunked_loss.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.3, compiled=False)
    teacher = llama()
    torch.nn.init.normal_(teacher.lm_head.weight)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model), teacher_model=teacher, liger_jsd_loss=loss,
        args=SimpleNamespace(offload_teacher_model=False, gradient_checkpointing_kwargs=None), is_teacher_ds3=False,
    )  # fmt: skip

    def run() -> list[Tensor]:
        student, labels = llama(), IDS.clone()
        labels[0, :3] = -100
        found = names["_compute_liger_loss"](trainer, student, {"input_ids": IDS, "labels": labels}, {"input_ids": IDS})
        found.backward()
        return [found.detach(), student.lm_head.weight.grad, student.model.embed_tokens.weight.grad]

    theirs = run()
    with eaves.liger.install(), mock.patch("eaves.liger.linear_kl_div", wraps=eaves.linear_kl_div) as calls:
        ours = run()
    assert calls.call_count == 1
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def test_axolotl(without_packages: Any) -> None:
    expected = step(llama())
    unused = ("axolotl.integrations.base", "axolotl.model_support", "axolotl.utils.logging")
    module = without_packages("axolotl", "axolotl.integrations.liger.plugin", unused)
    flags = SimpleNamespace(
        model_config_type="llama", liger_fused_linear_cross_entropy=True, liger_rms_norm=True, liger_kernel_impl=None,
        torch_compile=False, liger_cross_entropy=False, liger_use_token_scaling=False, liger_rope=True,
        liger_glu_activation=True, liger_layer_norm=False, liger_rms_norm_gated=False,
    )  # fmt: skip
    module.LigerPlugin().pre_model_load(flags)
    check_step(llama(), expected)


def test_olmo_core_that_was_imported_before(without_packages: Any) -> None:
    module = without_packages("ai2-olmo-core", "olmo_core.nn.functional.cross_entropy_loss")
    rows, head, bias, targets = tensors()
    weight = head.clone().requires_grad_()
    with eaves.liger.install(), watched() as calls:
        loss, z_loss = module.fused_linear_cross_entropy_loss(
            rows, weight, targets, bias=bias, reduction="sum", compute_z_loss=True, accum_dtype=torch.float32
        )
    assert any(name.startswith("linear_cross_entropy") for name, *_ in calls)
    (loss * 0.5).backward()
    exact = head.double().requires_grad_()
    expected, expected_z = module.cross_entropy_loss(
        rows.double() @ exact.T + bias, targets, reduction="sum", compute_z_loss=True
    )
    ((expected + expected_z) * 0.5).backward()
    torch.testing.assert_close(torch.stack([loss, z_loss]), torch.stack([expected + expected_z, expected_z]).float())
    torch.testing.assert_close(weight.grad, exact.grad.float(), rtol=1e-5, atol=1e-6)
