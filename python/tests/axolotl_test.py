"""eaves.axolotl with Axolotl's plugin list, its validation of configurations and its trainer. Axolotl's model loader
needs GPU packages, so these tests call the hooks in the loader's order: adapters, post_model_load, the trainer."""

import contextlib
import gc
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import eaves
from cross_entropy_test import each
from eaves._replacement import INTEGRATIONS
from hf_models import (
    BATCH,
    FLOAT32_TOLERANCE,
    LENGTH,
    assert_same_step,
    batch,
    peft_model,
    refuse_logits,
    step,
    tiny_model,
    transformers,
)
from integrations import StandIns, installed, recipe

if INTEGRATIONS["axolotl"].version() is None:
    pytest.skip("axolotl is not installed", allow_module_level=True)

yaml = pytest.importorskip("yaml")
PluginManager = importlib.import_module("axolotl.integrations.base").PluginManager
config = importlib.import_module("axolotl.utils.config")
DictDefault = importlib.import_module("axolotl.utils.dict").DictDefault
datasets = importlib.import_module("datasets")
with StandIns("numba"):  # which packs samples into sequences
    trainers = importlib.import_module("axolotl.core.trainers.base")
    training_args = importlib.import_module("axolotl.core.training_args")

PLUGIN = "eaves.axolotl.EavesPlugin"
CONFIGURATION: dict[str, Any] = {
    "base_model": "tiny", "datasets": [{"path": "rows", "type": "alpaca"}], "sequence_len": 32, "micro_batch_size": 1,
    "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    PluginManager.get_instance().plugins.clear()
    gc.collect()  # trainers hold models


def checked(*plugins: str, **settings: Any) -> Any:
    """Returns the configuration as Axolotl's command line makes it: plugins are loaded and settings are checked."""
    configuration = DictDefault({**CONFIGURATION, "plugins": [PLUGIN, *plugins], **settings})
    config.prepare_plugins(configuration)
    return config.validate_config(configuration)


def loaded(model: Any, **settings: Any) -> Any:
    """Returns the model after Axolotl's post_model_load hook."""
    PluginManager.get_instance().post_model_load(checked(**settings), model)
    return model


@each("adapter", (False, True))
@each("is_checkpointed", (False, True))
def test_a_model_of_axolotl_takes_the_same_steps_without_logits(adapter: bool, is_checkpointed: bool) -> None:
    def made() -> Any:
        return peft_model(target_modules=["q_proj", "down_proj"]) if adapter else tiny_model()

    def trained(model: Any) -> Any:
        if is_checkpointed:  # as the trainer does after the hook
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return step(model)

    expected = trained(made())
    model = loaded(made())
    with refuse_logits():
        found = trained(model)
    assert_same_step(found, expected, FLOAT32_TOLERANCE)


def rows_with_labels(*numbers: int) -> Any:
    """A data set whose rows have these numbers of labels."""
    columns = {name: tensor[0].tolist() for name, tensor in batch().items()}
    labels = columns.pop("labels")
    rows = [{**columns, "labels": [-100] * (len(labels) - number) + labels[-number:]} for number in numbers]
    return datasets.Dataset.from_list(rows).with_format("torch")


def test_axolotls_trainer_logs_the_same_losses(tmp_path: Path) -> None:
    def losses(model: Any) -> list[float]:
        arguments = training_args.AxolotlTrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, seed=7,
        )  # fmt: skip
        # Micro-batches have different numbers of labels, so that a mean of means is wrong.
        data = rows_with_labels(10, 2, 5, 1)
        trainer = trainers.AxolotlTrainer(model, arguments, train_dataset=data, eval_dataset=data)
        accepts.append(trainer.model_accepts_loss_kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PluginManager.get_instance().post_trainer_create(None, trainer)
        trainer.train()
        trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*trained, trainer.evaluate()["eval_loss"]]

    accepts: list[bool] = []
    expected = losses(tiny_model())
    with refuse_logits():
        found = losses(loaded(tiny_model()))
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-4)
    assert accepts[0] == accepts[1]


def test_the_recipe_is_a_configuration_that_axolotl_takes() -> None:
    settings = yaml.safe_load(recipe("Axolotl", "yaml"))
    configuration = checked(**settings)
    assert configuration.plugins == [PLUGIN]
    model = loaded(tiny_model(), **settings)
    assert model._eaves_options["algorithm"] == settings["eaves_algorithm"]
    plain = eaves.hf.patch(tiny_model())
    model = loaded(tiny_model())
    assert model._eaves_options == plain._eaves_options  # no settings: patch's defaults
    options = {"skip_ignored": False, "workspace_bytes": 1 << 20}
    model = loaded(tiny_model(), **{f"eaves_{name}": value for name, value in options.items()})
    assert options.items() <= model._eaves_options.items()


@each(
    "settings",
    (
        {"chunked_cross_entropy": True},
        {"flash_attn_cross_entropy": True},
        {"orpo_alpha": 0.1},
        {"rl": "dpo"},
        {"rl": "grpo"},
        {"use_dft": True},
        {"use_eaft": True},
    ),
)
def test_another_loss_is_refused_by_its_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"eaves\.axolotl: {next(iter(settings))} is .*without eaves"):
        checked(**settings)


def test_losses_of_other_plugins_are_refused() -> None:
    # The plugins themselves need packages that are not installed; their settings classes, with the defaults, are
    # enough.
    arguments = importlib.import_module("axolotl.integrations.liger.args").LigerArgs
    with pytest.raises(ValueError, match="liger_fused_linear_cross_entropy is True"):
        checked("axolotl.integrations.liger.LigerPlugin", liger_fused_linear_cross_entropy=True)
    assert "liger_cross_entropy" in arguments.model_fields
    configuration = checked("axolotl.integrations.liger.LigerPlugin", liger_rms_norm=True)
    assert configuration.liger_rms_norm is True
    for name in ("cut_cross_entropy", "diffusion", "diffusion_decision", "diffusion_lm", "kd_trainer"):
        both = type("Both", (eaves.axolotl.EavesArgs,), {"__annotations__": {name: Any}})
        with pytest.raises(ValueError, match=f"{name} is True"):
            both(**{name: True})
        assert getattr(both(**{name: False}), name) is False


def test_settings_that_eaves_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="eaves_algorithm"):
        checked(eaves_algorithm="fast")
    with pytest.raises(ValueError, match="eaves_workspace_bytes"):
        checked(eaves_workspace_bytes="much")


def test_a_model_that_eaves_does_not_take_is_an_error() -> None:
    configuration = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(NotImplementedError, match="ForSequenceClassification"):
        loaded(transformers.LlamaForSequenceClassification(configuration))


def test_a_trainer_with_another_loss_is_told(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)

    class Theirs(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    checked()
    manager = PluginManager.get_instance()
    with pytest.warns(UserWarning, match=r"axolotl_test\..*Theirs\.compute_loss.*may not call eaves"):
        manager.post_trainer_create(None, Theirs(tiny_model(), arguments))
    trainer = transformers.Trainer(tiny_model(), arguments, compute_loss_func=lambda *_, **__: torch.zeros(()))
    with pytest.warns(UserWarning, match="compute_loss_func"):
        manager.post_trainer_create(None, trainer)


def test_it_is_active_as_long_as_a_model_is_patched() -> None:
    integration = INTEGRATIONS["axolotl"]
    assert not integration.is_active()
    model = loaded(peft_model())
    assert integration.is_active() and eaves.axolotl.is_active()
    eaves.hf.unpatch(model)
    assert not integration.is_active()
    assert step(model).output.logits.shape[:2] == (BATCH, LENGTH)


@each("reason", ("unknown", "absent", "broken"))
def test_a_plugin_that_cannot_be_imported_stops_the_run(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl up to 0.20 prints an ImportError of a plugin and trains without it."""
    monkeypatch.delitem(sys.modules, "eaves.axolotl", raising=False)
    version, sentence = {
        "unknown": ("0.18.0", r"axolotl has version 0\.18\.0, expected 0\.19\.x or 0\.20\.x or 0\.21\.x"),
        "absent": (None, r"needs axolotl 0\.19\.x .*, which is not installed"),
        "broken": ("0.19.0", r"eaves\.axolotl cannot be imported: .*eaves\.hf"),
    }[reason]
    if reason == "broken":
        monkeypatch.setitem(sys.modules, "eaves.hf", None)
    with installed(version), pytest.raises(RuntimeError, match=sentence):
        config.prepare_plugins(DictDefault({"plugins": [PLUGIN]}))


def test_without_eaves_the_run_stops_from_axolotl_0_21_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "eaves.axolotl", raising=False)
    monkeypatch.setitem(sys.modules, "eaves", None)
    ends_run = INTEGRATIONS["axolotl"].series() not in ("0.19", "0.20")
    with pytest.raises(ImportError, match="eaves") if ends_run else contextlib.nullcontext():
        config.prepare_plugins(DictDefault({"plugins": [PLUGIN]}))
    assert ends_run or "Error: No module named 'eaves" in capsys.readouterr().out
