"""eaves.hf with transformers' Trainer: a patched model, and eaves.hf.install for users who never hold the model."""

import contextlib
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import eaves.hf
from cross_entropy_test import each
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall
from eaves._replacement import INTEGRATIONS
from hf_losses_test import model_of
from hf_models import LENGTH, METRICS, OF_TINY_MODELS, VOCABULARY, batch, peft_model, refuse_logits, tiny_model
from integrations import installed, run_recipe

from hf_models import transformers  # isort: skip

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = OF_TINY_MODELS


@pytest.fixture(autouse=True)
def precision_of_each_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions keep the mixed precision of a Trainer for the next ones of the process."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def rows(first: int = 0) -> list[dict[str, Any]]:
    """Tokens and labels from the position `first` on, or later."""
    tokens = torch.randint(3, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    # Rows have different numbers of labels, so that a mean of means is wrong.
    labels = tokens.where(torch.arange(LENGTH) >= first + torch.arange(16).remainder(8)[:, None], -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]


def trainer_of(model: Any, folder: Path, first: int = 0, **options: Any) -> Any:
    of_trainer = {name: options.pop(name) for name in list(options) if name in ("compute_metrics", "compute_loss_func")}
    of_trainer |= {"model_init": options.pop("model_init")} if "model_init" in options else {"model": model}
    given: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 4, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=4, **given,
    )  # fmt: skip
    data = rows(first)
    if getattr(model, "config", None) is not None and model.config.is_encoder_decoder:
        data = [{**row, "decoder_input_ids": row["input_ids"].roll(1)} for row in data]
    return transformers.Trainer(args=arguments, train_dataset=data, eval_dataset=data[:4], **of_trainer)


def largest(results: Any) -> dict[str, float]:
    return {"largest": float(abs(results.predictions).max())}


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    evaluated = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, *(evaluated[name] for name in ("eval_loss", "eval_largest") if name in evaluated)]


def is_patched(model: Any) -> bool:
    return hasattr(type(model), "_eaves_class")


@each("metrics", ((), METRICS))
@each("options", ({}, {"bf16": True}))
def test_trainer_gives_the_same_losses_and_the_metrics(
    options: dict[str, Any], metrics: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses_of(trainer_of(tiny_model(), tmp_path, compute_metrics=largest, **options))
    assert len(expected) == 6 and expected[3] < expected[0]
    model = eaves.hf.patch(tiny_model(), metrics=metrics)
    calls = []
    unwatched: Any = eaves.hf.loss.loss_of_head
    compute_loss = transformers.Trainer.compute_loss
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def watched(call: LinearCrossEntropyCall) -> Any:
        calls.append(call)
        return unwatched(call)

    def noted(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = compute_loss(self, model, inputs, return_outputs=True, **options)
        seen[model.training].append([outputs[name] if model.training else getattr(outputs, name) for name in metrics])
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(eaves.hf.loss, "loss_of_head", watched)
    monkeypatch.setattr(transformers.Trainer, "compute_loss", noted)
    # Adam scales small gradients up to the size of others, so rounding errors grow.
    trainer = trainer_of(model, tmp_path, compute_metrics=largest, **options)
    assert trainer.model_accepts_loss_kwargs
    assert losses_of(trainer) == pytest.approx(expected, rel=0.02 if options else 1e-4)
    assert len(calls) == len(seen[True]) == 8  # micro-batches; the other calls belong to the evaluation
    for accuracy, entropy in seen[True] if metrics else []:
        assert 0 <= accuracy <= 1 and 0 < entropy < math.log(VOCABULARY)
    # Beside logits: accelerate rebuilds the output from its items.
    assert [metric is None for each in seen[False] for metric in each] == [bool(options)] * len(metrics)
    eaves.hf.unpatch(model)  # accelerate has left its wrapper of the forward there
    assert model.train()(**batch()).logits is not None


def test_install_patches_the_model_of_every_trainer(tmp_path: Path) -> None:
    expected = losses_of(trainer_of(tiny_model(), tmp_path, compute_metrics=largest))
    theirs = [vars(transformers.Trainer)[name] for name in ("__init__", "prediction_step")]
    assert not eaves.hf.is_active()
    with eaves.hf.install(algorithm="recompute", metrics=("accuracy",)):
        assert eaves.hf.is_active() and INTEGRATIONS["hf"].is_known()
        assert inspect.signature(transformers.Trainer.__init__) == inspect.signature(theirs[0])
        model = tiny_model()
        trainer = trainer_of(model, tmp_path, compute_metrics=largest)
        assert trainer.model is model and is_patched(model)
        assert model._eaves_options["algorithm"] == "recompute" and model._eaves_metrics == ("accuracy",)
    assert not eaves.hf.is_active()
    assert [vars(transformers.Trainer)[name] for name in ("__init__", "prediction_step")] == theirs
    with refuse_logits():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected[:4], rel=1e-4)
    assert not is_patched(trainer_of(tiny_model(), tmp_path).model)


def test_a_model_that_is_patched_keeps_its_options_and_peft_models_are_patched(tmp_path: Path) -> None:
    with eaves.hf.install(algorithm="recompute"):
        model = eaves.hf.patch(tiny_model(), algorithm="speed")
        trainer_of(model, tmp_path)
        assert model._eaves_options["algorithm"] == "speed"
        model = peft_model(target_modules=["q_proj"])
        trainer_of(model, tmp_path)
        assert is_patched(model.get_base_model())


def test_a_model_of_model_init_is_patched_each_time(tmp_path: Path) -> None:
    made: list[Any] = []

    def model_init() -> Any:
        made.append(tiny_model())
        return made[-1]

    with eaves.hf.install():
        trainer = trainer_of(None, tmp_path, model_init=model_init, label_smoothing_factor=0.1)
    with refuse_logits():  # the Trainer outlives the install
        trainer.train()
    assert len(made) == 2 and trainer.model is made[1] and all(map(is_patched, made))
    assert [model._eaves_options["label_smoothing"] for model in made] == [0.1] * 2


@pytest.mark.filterwarnings("default:eaves.hf")
def test_a_model_that_is_refused_trains_as_before_and_a_warning_says_why(tmp_path: Path) -> None:
    classifier = transformers.LlamaForSequenceClassification(tiny_model().config)
    with eaves.hf.install():
        with pytest.warns(UserWarning, match=r"not patched: the loss of this Llama.* is ForSequenceCl") as caught:
            trainer = trainer_of(classifier, tmp_path)
        assert [each.filename for each in caught if "eaves.hf" in str(each.message)] == [__file__]
        assert trainer.model is classifier and not is_patched(classifier)
        with pytest.warns(UserWarning, match="model is a Linear, expected a transformers.PreTrainedModel"):
            trainer_of(torch.nn.Linear(2, 2), tmp_path, remove_unused_columns=False)


@pytest.mark.filterwarnings("default:eaves.hf")
def test_ligers_loss_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with eaves.hf.install():
        trainer = trainer_of(tiny_model(), tmp_path)
        model = tiny_model()
        arguments = trainer.args
        arguments.use_liger_kernel = True
        with pytest.warns(UserWarning, match="use_liger_kernel puts Liger's loss into the model"):
            eaves.hf.trainer.patch_model_of(trainer, model, {})
        assert not is_patched(model)
        arguments.liger_kernel_config = {"fused_linear_cross_entropy": False}
        eaves.hf.trainer.patch_model_of(trainer, model, {})
        assert is_patched(model)


# ---------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation_of_the_loss_alone_skips_the_logits(tmp_path: Path) -> None:
    expected = trainer_of(tiny_model(), tmp_path).evaluate()["eval_loss"]
    with eaves.hf.install():
        trainer = trainer_of(tiny_model(), tmp_path)
        with refuse_logits():
            assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.predict(rows()[:2]).predictions.shape == (2, LENGTH, VOCABULARY)
        trainer = trainer_of(eaves.hf.patch(tiny_model(), skip_logits=False), tmp_path)
        with pytest.raises(AssertionError, match="mm"), refuse_logits():
            trainer.evaluate()
        trainer = trainer_of(
            tiny_model(), tmp_path, compute_loss_func=lambda outputs, labels, **_: outputs.logits.mean()
        )
        assert abs(trainer.evaluate()["eval_loss"] - expected) > 0.1


def test_a_compute_loss_that_takes_the_labels_away_has_logits(tmp_path: Path) -> None:
    class WithOwnLoss(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    def losses() -> list[float]:
        arguments = trainer_of(tiny_model(), tmp_path).args
        return losses_of(WithOwnLoss(model=tiny_model(), args=arguments, train_dataset=rows(), eval_dataset=rows()[:4]))

    expected = losses()
    with eaves.hf.install(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning of training that the labels were taken away
        assert losses() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------- label smoothing


def smoothes_by_items() -> bool:
    """Up to 5.6 LabelSmoother takes the mean of each micro-batch, and Trainer adds the means up."""
    smoother = transformers.trainer_pt_utils.LabelSmoother
    return "num_items_in_batch" in inspect.signature(smoother.__call__).parameters


@each("name", ("llama", "bart"))
def test_label_smoothing_of_trainer_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    steps = 2 if smoothes_by_items() else 1
    options: dict[str, Any] = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": steps}

    def losses() -> list[float]:
        model = model_of(name) if name == "bart" else tiny_model()
        # Older versions count a label in the first position among the items, though nothing predicts it.
        trainer = trainer_of(model, tmp_path, first=1, **options)
        with refuse_logits() if eaves.hf.is_active() else contextlib.nullcontext():
            return losses_of(trainer)

    expected = losses()
    with eaves.hf.install():
        assert losses() == pytest.approx(expected, rel=1e-4)
    options["label_smoothing_factor"] = 0.0
    assert losses() != pytest.approx(expected, rel=1e-2)


def test_label_smoothing_that_contradicts_is_refused(tmp_path: Path) -> None:
    with eaves.hf.install():
        for same in (0.1, 0.0):
            model = eaves.hf.patch(tiny_model(), label_smoothing=same)
            trainer_of(model, tmp_path, label_smoothing_factor=0.1)
            assert model._eaves_options["label_smoothing"] == 0.1
        model = eaves.hf.patch(tiny_model(), label_smoothing=0.2)
        with pytest.raises(ValueError, match=r"label_smoothing_factor is 0\.1, .*label_smoothing=0\.2; pass one"):
            trainer_of(model, tmp_path, label_smoothing_factor=0.1)


def test_label_smoothing_of_a_trainer_is_not_that_of_the_next(tmp_path: Path) -> None:
    with eaves.hf.install():
        for own in (0.0, 0.2):
            model = eaves.hf.patch(tiny_model(), label_smoothing=own)
            for factor in (0.2, 0.1)[: 1 if own else 2]:
                trainer_of(model, tmp_path, label_smoothing_factor=factor)
                assert model._eaves_options["label_smoothing"] == factor
            trainer_of(model, tmp_path)
            assert model._eaves_options["label_smoothing"] == own
        trainer_of(eaves.hf.patch(model, label_smoothing=0), tmp_path, label_smoothing_factor=0.1)
        trainer_of(eaves.hf.patch(model, label_smoothing=0.1), tmp_path)
        assert model._eaves_options["label_smoothing"] == 0.1


def test_without_install_label_smoothing_of_trainer_is_told(tmp_path: Path) -> None:
    trainer = trainer_of(eaves.hf.patch(tiny_model()), tmp_path, label_smoothing_factor=0.1, max_steps=1)
    with pytest.warns(UserWarning, match=r"this LlamaForCausalLM computes all logits.*call eaves\.hf\.install"):
        trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = eaves.hf.patch(tiny_model())
        model(batch()["input_ids"])
        model.eval()(batch()["input_ids"], num_items_in_batch=3)


# ---------------------------------------------------------------------------------------------------- refusals, recipe


def test_wrong_options_and_unknown_versions_are_refused() -> None:
    for wrong, error in (
        ({"algorithm": "fast"}, ValueError), ({"nonsense": 1}, TypeError), ({"metrics": ("x",)}, ValueError),
        ({"label_smoothing": 2}, ValueError), ({"z_loss": -1}, ValueError), ({"skip_logits": 1}, TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match=next(iter(wrong))):
            eaves.hf.install(**wrong)
    for version in ("4.56.2", "6.0.0", "50.1"):
        sentence = rf"eaves\.hf: transformers has version {version}, expected 4\.57\.x or 5\.x"
        with installed(version), pytest.raises(RuntimeError, match=sentence):
            eaves.hf.install()
    assert not eaves.hf.is_active()


def test_the_recipe_runs(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model(), tmp_path)
    model = tiny_model()
    names = run_recipe(
        "transformers", model=model, training_arguments=trainer.args, dataset=rows(), transformers=transformers
    )
    assert is_patched(model) and names["trainer"].state.global_step == 4 and not eaves.hf.is_active()
