"""eaves.hf: patched models of transformers against the same models before.

Models are tiny and made of configurations; nothing is downloaded. What they are is in hf_models.py.
"""

import copy
import dataclasses
import gc
import inspect
import itertools
import math
import operator
import os
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import eaves.hf  # noqa: E402
from cuda_test import LONG_CYCLES  # noqa: E402
from eaves._autograd.linear_cross_entropy import OF_HEAD, OF_HIDDEN  # noqa: E402
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall  # noqa: E402
from eaves.hf.deferred_logits import DeferredLogits  # noqa: E402
from hf_models import (  # noqa: E402
    ARCHITECTURES,
    FEATURES,
    LENGTH,
    VOCABULARY,
    Watch,
    assert_same_step,
    batch,
    distance,
    refuse_logits,
    refuse_waiting,
    step,
    tiny_model,
)

METRICS = ("accuracy", "entropy")

# Loss and gradients of a patched model in float32, in parts of the largest element of each.
FLOAT32_TOLERANCE = 1e-5

# The same on a GPU, where sums have another order; with 16 bits the model's logits are rounded and ours are not, which
# on the CPU moves an element by up to 0.028.
GPU_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.06}

# What reaches the loss beside labels. None of the numbers is the number of labels, so that one that is lost shows.
LOSS_ARGUMENTS: dict[str, dict[str, Any]] = {
    "a number of items": {"num_items_in_batch": 29},
    "a tensor of items": {"num_items_in_batch": torch.tensor(29)},
    "shifted labels": {"shift_labels": torch.roll(batch()["labels"], -2, 1)},
    "another ignored label": {"ignore_index": int(batch()["labels"][0, 6])},
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A model that computes its logits after all says so, and here that is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="eaves.hf")
        yield


@pytest.fixture(autouse=True)
def one_thread(cpu_threads: None) -> None:
    """The tensors are tiny: threads would wait for each other longer than they compute."""
    torch.set_num_threads(1)


# Values


# Each architecture, and what reaches the loss with one of them.
@pytest.mark.parametrize(
    ("name", "arguments"),
    [*itertools.product(ARCHITECTURES, [{}]), *itertools.product(["llama"], LOSS_ARGUMENTS.values())],
    ids=[*ARCHITECTURES, *LOSS_ARGUMENTS],
)
def test_loss_and_every_gradient_are_those_of_the_model(name: str, arguments: dict[str, Any]) -> None:
    if "ignore_index" in arguments:  # -100 is no class then
        arguments = {**arguments, "labels": batch()["labels"].clamp(min=arguments["ignore_index"])}
    model = tiny_model(name)
    expected = step(model, **arguments)
    assert not torch.isclose(expected.loss, step(model, labels=batch()["input_ids"]).loss, rtol=1e-3)
    eaves.hf.patch(model)
    with refuse_logits():
        actual = step(model, **arguments)
    assert actual.output.logits is None
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    with_logits = step(model, skip_logits=False, **arguments)
    assert torch.equal(with_logits.output.logits, expected.output.logits)
    assert_same_step(with_logits, expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("metrics", [(), METRICS], ids=["", "metrics"])
def test_a_mixture_of_experts_keeps_the_loss_of_its_router(metrics: tuple[str, ...]) -> None:
    model = tiny_model("mixtral")
    arguments: dict[str, Any] = {"shift_labels": torch.roll(batch()["labels"], -2, 1)}
    expected = step(model, **arguments)
    coefficient = model.config.router_aux_loss_coef
    assert coefficient * expected.output.aux_loss > 0.1 * expected.loss
    eaves.hf.patch(model, metrics=metrics)
    actual = step(model, **arguments)
    torch.testing.assert_close(actual.output.aux_loss, expected.output.aux_loss)
    torch.testing.assert_close(actual.output.router_logits, expected.output.router_logits)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    without = model(**batch(), **arguments, output_router_logits=False).loss
    torch.testing.assert_close(without + coefficient * expected.output.aux_loss, expected.loss)


def test_evaluation_and_calls_without_labels_return_logits_as_before() -> None:
    model = tiny_model()
    tokens = batch()["input_ids"]
    in_training, in_evaluation = model(tokens), model.eval()(**batch())
    eaves.hf.patch(model)
    actual = model(**batch())
    assert torch.equal(actual.logits, in_evaluation.logits)
    torch.testing.assert_close(actual.loss, in_evaluation.loss)
    assert model(**batch(), skip_logits=True).logits is None
    actual = model.train()(tokens)
    assert torch.equal(actual.logits, in_training.logits) and actual.loss is None


@pytest.mark.parametrize("keep", [5, torch.tensor([1, 4, 6])], ids=["last", "some"])
def test_labels_of_the_logits_that_are_kept(keep: Any) -> None:
    model = tiny_model()
    labels = batch()["labels"][:, -5:] if isinstance(keep, int) else batch()["labels"][:, keep]
    expected = step(model, labels=labels, logits_to_keep=keep)
    eaves.hf.patch(model)
    assert_same_step(step(model, labels=labels, logits_to_keep=keep), expected, FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match="target has shape"):
        model(**batch(), logits_to_keep=keep)


def test_labels_by_position_and_results_as_a_tuple() -> None:
    model = tiny_model("gpt2")
    tokens, labels = batch()["input_ids"], batch()["labels"]
    place = list(inspect.signature(model.forward).parameters).index("labels")
    expected = model(tokens, *[None] * (place - 1), labels, return_dict=False)
    eaves.hf.patch(model)
    actual = model(tokens, *[None] * (place - 1), labels, return_dict=False)
    torch.testing.assert_close(actual[0], expected[0])
    assert len(actual) == len(expected) - 1 and not isinstance(actual[1], (Tensor, DeferredLogits))


@dataclasses.dataclass
class Lost:
    """An output that has no logits under that name."""

    loss: Tensor
    scores: Any


# Of each: what a forward makes of loss and logits, and whether a result has no logits and all else.
RESULTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], bool]]] = {
    "a dict": (
        lambda loss, logits: {"loss": loss, "logits": logits, "other": 3},
        lambda result: result["logits"] is None and result["other"] == 3,
    ),
    "a dict of the loss": (lambda loss, _: {"loss": loss}, lambda result: len(result) == 1),
    "a tensor": (lambda loss, _: loss, lambda result: result.shape == ()),
    "another name": (Lost, lambda result: result.scores is None),
    "no logits": (lambda loss, _: Lost(loss, 3), lambda result: bool(result.scores == 3)),
    "an object": (lambda loss, _: types.SimpleNamespace(loss=loss), lambda result: len(vars(result)) == 1),
    "a tuple": (lambda loss, logits: (loss, logits, 3), lambda result: len(result) == 2 and result[1] == 3),
}


@pytest.mark.parametrize(("made", "is_right"), RESULTS.values(), ids=RESULTS)
def test_a_forward_may_return_what_it_likes(made: Callable[[Any, Any], Any], is_right: Callable[[Any], bool]) -> None:
    class Model(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return made(self.loss_function(logits, labels, self.config.vocab_size), logits)

    torch.manual_seed(3)
    model = Model(tiny_model().config).train()
    expected = model(**batch())
    eaves.hf.patch(model)
    actual = model(**batch())
    assert type(actual) is type(expected) and is_right(actual)

    def loss_of(result: Any) -> Any:
        if isinstance(result, dict):
            return result["loss"]
        return result[0] if isinstance(result, tuple) else getattr(result, "loss", result)

    torch.testing.assert_close(loss_of(actual), loss_of(expected))


@pytest.mark.parametrize("is_changed", [False, True], ids=["as they are", "changed"])
def test_logits_that_had_to_be_computed_are_left_out_everywhere(is_changed: bool) -> None:
    model = eaves.hf.patch(tiny_model("gpt2"))
    if is_changed:
        model.lm_head.register_forward_hook(lambda _, __, logits: logits.clamp(max=0.5))
    else:
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    with pytest.warns(UserWarning, match="all of them are computed"):
        assert model(**batch()).logits is None
    with pytest.warns(UserWarning, match="all of them are computed"):
        results = model(**batch(), return_dict=False)
    assert not any(isinstance(each, (Tensor, DeferredLogits)) for each in results[1:])


def test_autocast_is_that_of_a_linear() -> None:
    model = tiny_model()
    exact = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = step(model)
        eaves.hf.patch(model)
        ours = step(model)
    for name, gradient in exact.gradients.items():
        assert distance(ours.gradients[name], gradient) <= 1.2 * distance(theirs.gradients[name], gradient), name


def test_cut_rows_need_a_group_or_a_dtensor() -> None:
    model = eaves.hf.patch(tiny_model(), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"eaves\.hf: patch\(\) got sequence_parallel=True without a group"):
        step(model)


def test_gradient_checkpointing_changes_nothing() -> None:
    model = tiny_model()
    expected = step(model)
    eaves.hf.patch(model).gradient_checkpointing_enable()
    assert_same_step(step(model), expected, FLOAT32_TOLERANCE)


# What is computed, and what is not


def test_a_tensor_as_large_as_the_logits_is_found() -> None:
    with pytest.raises(AssertionError, match=rf"gives \[.*{VOCABULARY}\]"), refuse_logits():
        step(tiny_model())


@pytest.mark.parametrize("skip_logits", [True, False])
def test_neither_the_number_of_items_nor_a_metric_is_waited_for(skip_logits: bool) -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    items = torch.tensor(29)
    with pytest.raises(AssertionError, match="a number is read"), refuse_waiting():
        items.item()
    with refuse_waiting():
        step(model, num_items_in_batch=items, skip_logits=skip_logits)


# Metrics


def batch_with_hits(model: Any) -> dict[str, Tensor]:
    """The batch, every other label the class of the model's largest logit."""
    given = batch()
    with torch.no_grad():
        likely = model(given["input_ids"]).logits.argmax(-1)
    counts = given["labels"] != -100
    counts[:, ::2] = False
    given["labels"][:, 1:] = likely[:, :-1].where(counts[:, 1:], given["labels"][:, 1:])
    return given


def metrics_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The oracle, in float64."""
    logits, labels = logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten()
    counts = labels != -100
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return {
        "accuracy": (logits.argmax(-1) == labels)[counts].double().mean().item(),
        "entropy": entropy[counts].mean().item(),
    }


def assert_metrics(output: Any, expected: dict[str, float]) -> None:
    for name, number in expected.items():
        metric = getattr(output, name)
        assert metric.shape == () and metric.dtype == torch.float32 and not metric.requires_grad
        assert metric.item() == pytest.approx(number, rel=FLOAT32_TOLERANCE), name


# A bias, a soft cap and a scale change both metrics' logits.
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2", "cohere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_metrics_are_those_of_the_logits(name: str, dtype: torch.dtype) -> None:
    model = eaves.hf.patch(tiny_model(name).to(dtype), metrics=METRICS)
    given = batch_with_hits(model)
    expected = metrics_of(model(given["input_ids"]).logits, given["labels"])
    assert 0.2 < expected["accuracy"] < 0.8 and expected["entropy"] > 0.5
    with refuse_logits():
        without = model(**given)
    assert without.logits is None
    assert_metrics(without, expected)
    assert_metrics(model(**given, num_items_in_batch=29), expected)  # divides the loss alone
    assert_metrics(model(**given, skip_logits=False), expected)
    assert_metrics(model.eval()(**given), expected)


@pytest.mark.parametrize("metrics", [[], ["accuracy"], ["entropy"], METRICS], ids=str)
def test_metrics_change_neither_loss_nor_gradients_nor_the_way(metrics: Any) -> None:
    expected = step(eaves.hf.patch(tiny_model()))
    model = eaves.hf.patch(tiny_model(), metrics=metrics)
    assert gradients_asked_for(lambda: step(model)) == [("forward_backward", OF_HIDDEN | OF_HEAD)]
    actual = step(model)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    assert_same_step(step(model, skip_logits=False), expected, FLOAT32_TOLERANCE)
    assert {name for name in METRICS if getattr(actual.output, name, None) is not None} == set(metrics)


@pytest.mark.parametrize("skip_logits", [True, False])
def test_without_labels_that_count_loss_gradients_and_metrics_are_0(skip_logits: bool) -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    nothing = step(model, labels=torch.full((2, LENGTH), -100), skip_logits=skip_logits)
    assert nothing.loss == 0 and nothing.output.accuracy == 0 and nothing.output.entropy == 0
    assert all(gradient.count_nonzero() == 0 for gradient in nothing.gradients.values())


def test_metrics_leave_out_another_ignored_label() -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    given = batch_with_hits(model)
    expected = metrics_of(model(given["input_ids"]).logits, given["labels"])
    given["labels"] = given["labels"].where(given["labels"] != -100, 0).to(torch.int32)  # 0 is padding, no token
    for skip_logits in (True, False):
        assert_metrics(model(**given, ignore_index=0, skip_logits=skip_logits), expected)


def test_outputs_without_labels_or_metrics_are_of_the_models_class() -> None:
    model = tiny_model()
    original = type(model(**batch()))
    assert type(eaves.hf.patch(model)(**batch())) is original
    eaves.hf.patch(model, metrics=METRICS)
    assert type(model(batch()["input_ids"])) is original
    assert isinstance(model(**batch()), original)
    with eaves.hf.patched(model):
        assert type(model(**batch())) is original
    assert model(**batch()).entropy > 0


# What makes an output anew: accelerate's mixed precision, DataParallel's gather, hooks of DistributedDataParallel and
# fully_shard, and a process that sends it.
REMADE: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda output: type(output)(dict(output.items())),
    "pairs": lambda output: type(output)((name, output[name]) for name in output),
    "a tree": lambda output: torch.utils._pytree.tree_map(lambda each: each, output),
    "a pickle": lambda output: pickle.loads(pickle.dumps(output)),
    "a copy": copy.copy,
}


@pytest.mark.parametrize("remade", REMADE.values(), ids=REMADE)
def test_metrics_outlive_what_makes_an_output_anew(remade: Callable[[Any], Any]) -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    with torch.no_grad():
        output = model(**batch(), use_cache=False)
    twin = remade(output)
    assert type(twin) is type(output) and list(twin) == ["loss", *METRICS]
    assert [twin.accuracy, twin.entropy] == [output.accuracy, output.entropy]


@pytest.mark.parametrize("way", ["a copy", "a pickle"])
def test_metrics_beside_logits_in_evaluation_are_no_items(way: str) -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        expected = model(**batch())
        output = eaves.hf.patch(model, metrics=METRICS)(**batch())
        assert list(eaves.hf.patch(model, skip_logits=True, metrics=METRICS)(**batch(), use_cache=False)) == [
            "loss", *METRICS
        ]  # fmt: skip
    for each in (output, REMADE[way](output)):
        assert list(each) == list(expected) and len(each.to_tuple()) == len(expected.to_tuple())
        assert torch.equal(each[1], expected.logits) and each.entropy > 0


@pytest.mark.parametrize("skip_logits", [True, False])
def test_a_tuple_has_no_metrics(skip_logits: bool) -> None:
    model = eaves.hf.patch(tiny_model("gpt2"))
    expected = model(**batch(), return_dict=False, skip_logits=skip_logits)
    eaves.hf.patch(model, metrics=METRICS)
    actual = model(**batch(), return_dict=False, skip_logits=skip_logits)
    assert type(actual) is tuple and len(actual) == len(expected) and torch.equal(actual[0], expected[0])


def test_metrics_of_another_loss_are_none() -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    output = model(**batch(), skip_logits=False)
    assert output.accuracy is None and output.entropy is None and "entropy" not in output


def test_a_call_within_a_call_has_metrics_of_its_own() -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS)
    expected = model(**batch()).entropy
    others = batch()["labels"].roll(1, 0)
    inner: list[Any] = []

    def hook(*_: Any) -> None:
        handle.remove()
        inner.append(model(batch()["input_ids"], labels=others).entropy)

    handle = model.lm_head.register_forward_pre_hook(hook)
    assert model(**batch()).entropy == expected and inner[0] != expected


# Calls


def gradients_asked_for(run: Callable[[], object]) -> list[tuple[str, int]]:
    """Of each call of an operator of linear_cross_entropy, its name and the gradients that it was asked for."""
    asked = []

    def note(name: str, arguments: tuple[Any, ...], _: list[Tensor]) -> None:
        if name.startswith("eaves.linear_cross_entropy") and "backward" in name:
            asked.append((name.split(".")[1].removeprefix("linear_cross_entropy_"), arguments[-1]))

    with Watch(note):
        run()
    return asked


def test_a_frozen_head_has_no_gradient_and_no_product_for_one() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    configuration = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), configuration).train()
    expected = step(model)
    assert eaves.hf.patch(model) is model
    assert gradients_asked_for(lambda: step(model)) == [("forward_backward", OF_HIDDEN)]
    actual = step(model)
    assert actual.output.logits is None and model.get_base_model().lm_head.weight.grad is None
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    eaves.hf.unpatch(model)
    assert step(model).output.logits is not None


def test_a_frozen_body_has_a_gradient_of_the_head_alone() -> None:
    model = eaves.hf.patch(tiny_model())
    model.model.requires_grad_(False)
    assert gradients_asked_for(lambda: step(model)) == [("forward_backward", OF_HEAD)]


def test_options_reach_the_operator_and_a_second_patch_changes_them() -> None:
    model = tiny_model()
    expected = step(model)
    patched_class = type(eaves.hf.patch(model, algorithm="recompute"))
    assert gradients_asked_for(lambda: step(model)) == [("backward", OF_HIDDEN | OF_HEAD)]
    eaves.hf.patch(model, algorithm="speed")
    assert type(model) is patched_class
    assert gradients_asked_for(lambda: step(model)) == [("forward_backward", OF_HIDDEN | OF_HEAD)]
    assert_same_step(step(model), expected, FLOAT32_TOLERANCE)


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"algorithm": "nonsense"}, ValueError),
    ({"algorithm": None}, TypeError),
    ({"workspace_bytes": -1}, ValueError),
    ({"skip_ignored": 1}, TypeError),
    ({"grad_weight_dtype": "float32"}, TypeError),
    ({"grad_weight_dtype": torch.int32}, ValueError),
    ({"skip_logits": 1}, TypeError),
    ({"metrics": "accuracy"}, TypeError),
    ({"metrics": None}, TypeError),
    ({"group": 3}, TypeError),
    ({"metrics": ("accuracy", "perplexity")}, ValueError),
]


@pytest.mark.parametrize(("options", "error"), WRONG_OPTIONS, ids=str)
def test_options_are_checked_before_anything_changes(options: dict[str, Any], error: type[Exception]) -> None:
    model = tiny_model()
    with pytest.raises(error, match=next(iter(options))):
        eaves.hf.patch(model, **options)
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear
    eaves.hf.patch(model, algorithm="recompute")
    with pytest.raises(error, match=next(iter(options))):
        eaves.hf.patch(model, **options)
    assert gradients_asked_for(lambda: step(model)) == [("backward", OF_HIDDEN | OF_HEAD)]


def test_patch_says_whether_calls_that_do_not_say_skip_the_logits() -> None:
    model = eaves.hf.patch(tiny_model(), skip_logits=False)
    assert model(**batch()).logits is not None and model(**batch(), skip_logits=True).logits is None
    eaves.hf.patch(model, skip_logits=True).eval()
    assert model(**batch()).logits is None and model(**batch(), skip_logits=False).logits is not None
    assert model(batch()["input_ids"]).logits is not None
    eaves.hf.patch(model)
    assert model(**batch()).logits is not None and model.train()(**batch()).logits is None


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_the_operator_is_told_whether_to_leave_out_ignored_rows(skip_ignored: bool) -> None:
    told = []

    def note(name: str, arguments: tuple[Any, ...], _: list[Tensor]) -> None:
        if name.startswith("eaves.linear_cross_entropy_forward_backward"):
            told.append(arguments[-4])  # before workspace_limit, outputs and gradients

    model = eaves.hf.patch(tiny_model(), skip_ignored=skip_ignored)
    with Watch(note):
        step(model)
    assert told == [skip_ignored]


def test_the_operator_is_told_the_dtype_of_the_heads_gradient() -> None:
    dtypes = []

    def note(name: str, _: tuple[Any, ...], outputs: list[Tensor]) -> None:
        if name.startswith("eaves.linear_cross_entropy_forward_backward"):
            dtypes.extend(each.dtype for each in outputs if each.shape == shape)

    model = tiny_model().bfloat16()
    shape = model.lm_head.weight.shape
    for dtype in (None, torch.float32, torch.bfloat16):
        with Watch(note):
            gradient = step(eaves.hf.patch(model, grad_weight_dtype=dtype)).gradients["lm_head.weight"]
        assert gradient.dtype == torch.bfloat16
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]
    for dtype in (torch.float32, torch.float64):
        with Watch(note):
            step(eaves.hf.patch(tiny_model().to(dtype)))
    assert dtypes[3:] == [torch.float32, torch.float64]


def test_the_gradient_of_a_frozen_head_is_not_summed() -> None:
    model = eaves.hf.patch(tiny_model().bfloat16())
    model.lm_head.requires_grad_(False)
    ((_, asked),) = gradients_asked_for(lambda: step(model))
    assert asked & (OF_HIDDEN | OF_HEAD) == OF_HIDDEN


@pytest.mark.parametrize("fails", [False, True], ids=["call", "exception"])
def test_hidden_states_are_not_kept(fails: bool) -> None:
    model = eaves.hf.patch(tiny_model())
    hidden: list[weakref.ref[Tensor]] = []
    model.model.register_forward_hook(lambda *arguments: hidden.append(weakref.ref(arguments[-1].last_hidden_state)))
    gc.collect()
    gc.disable()  # nothing may need it
    try:
        if fails:
            with pytest.raises(ValueError, match=f"is {VOCABULARY}, expected 0 to"):
                model(**{**batch(), "labels": torch.full((2, LENGTH), VOCABULARY)})
        else:
            step(model)
        model.zero_grad()
        assert hidden[0]() is None
    finally:
        gc.enable()
    assert model.lm_head(torch.zeros(1, FEATURES)).shape == (1, VOCABULARY)


# On a GPU


def on(device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_a_step_on_a_gpu_is_that_of_the_model(
    name: str, skip_ignored: bool, dtype: torch.dtype, cuda: torch.device
) -> None:
    model = tiny_model(name).to(cuda, dtype)
    expected = step(model, **on(cuda))
    eaves.hf.patch(model, skip_ignored=skip_ignored)
    actual = step(model, **on(cuda))
    assert actual.output.logits is None
    assert_same_step(actual, expected, GPU_TOLERANCES[dtype])


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_metrics_on_a_gpu_are_those_of_the_logits(skip_ignored: bool, cuda: torch.device) -> None:
    model = eaves.hf.patch(tiny_model().to(cuda), skip_ignored=skip_ignored, metrics=METRICS)
    given = {name: tensor.to(cuda) for name, tensor in batch_with_hits(tiny_model()).items()}
    for skip_logits in (True, False):
        output = model(**given, skip_logits=skip_logits)
        expected = metrics_of(model(given["input_ids"]).logits, given["labels"])
        assert output.accuracy.item() == pytest.approx(expected["accuracy"])
        assert output.entropy.item() == pytest.approx(expected["entropy"], rel=GPU_TOLERANCES[torch.float32])


def test_a_step_on_a_gpu_waits_for_the_number_of_labels_alone(cuda: torch.device) -> None:
    model = tiny_model().to(cuda)
    arguments = {**on(cuda), "num_items_in_batch": torch.tensor(29, device=cuda)}

    def waits(sync_debug_mode: str) -> bool:
        step(model, **arguments)  # loads kernels and libraries, and fills the allocator's cache
        torch.cuda.synchronize()
        slept = torch.cuda.Event()
        torch.cuda._sleep(LONG_CYCLES)
        slept.record()
        torch.cuda.set_sync_debug_mode(sync_debug_mode)
        try:
            step(model, **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return slept.query()

    assert not waits("error")  # the model itself
    eaves.hf.patch(model, skip_ignored=False, metrics=METRICS)
    assert not waits("error")
    eaves.hf.patch(model, skip_ignored=True)
    assert waits("default")


# What an architecture does to its logits


def deferred(written: Callable[[Any], Any]) -> tuple[Tensor, Tensor, bool]:
    """Losses with logits that `written` changes as a model's forward would, with DeferredLogits and with a tensor, and
    whether the first were computed."""
    torch.manual_seed(11)
    head, hidden = torch.nn.Linear(FEATURES, VOCABULARY), torch.randn(2, LENGTH, FEATURES, dtype=torch.float32)
    labels = batch()["labels"]
    logits = written(DeferredLogits(head, hidden))
    is_deferred = isinstance(logits, DeferredLogits) and logits.is_deferred
    options: dict[str, Any] = {"skip_ignored": True}
    loss = eaves.hf.loss.causal_lm_loss
    return (
        loss(options, logits, labels, VOCABULARY),
        loss(options, written(head(hidden)), labels, VOCABULARY),
        not is_deferred,
    )


def write(logits: Any) -> Any:
    logits[..., 5:9] = -1e4
    return logits


def write_to_a_source(logits: Any) -> Any:
    capped = logits.float()
    logits[..., 5:9] = -1e4
    return capped


def in_place(operation: Callable[[Any, Any], Any], other: Any) -> Callable[[Any], Any]:
    """What a helper does to the logits that it was given, whose result nobody takes."""

    def written(logits: Any) -> Any:
        capped = logits * 2
        assert operation(capped, other) is capped
        return capped

    return written


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "+=": in_place(operator.iadd, torch.linspace(-1, 1, VOCABULARY)),
    "-=": in_place(operator.isub, torch.linspace(-1, 1, VOCABULARY)),
    "*=": in_place(operator.imul, 0.25),
    "/=": in_place(operator.itruediv, 4.0),
    "//=": in_place(operator.ifloordiv, 0.5),
    "%=": in_place(operator.imod, 0.5),
    "**=": in_place(operator.ipow, 2),
}

KNOWN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda logits: logits,
    "a factor": lambda logits: 3.5 * logits * 2,
    "a divisor": lambda logits: logits / 0.125,
    "a number of numpy": lambda logits: np.float64(2.0) * logits * np.float64(0.5),
    "a soft cap": lambda logits: 2.0 * torch.tanh(logits / 2.0),
    "a factor, a soft cap and a factor": lambda logits: torch.nn.functional.tanh(5 * logits / 0.7) * 0.7 / 0.3,
    "a tanh": lambda logits: logits.tanh(),
    "another dtype": lambda logits: logits.float().contiguous().to(torch.float32).to(torch.float64),
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a bias": lambda logits: logits + torch.linspace(-1, 1, VOCABULARY),
    "a bias in front": lambda logits: torch.linspace(-1, 1, VOCABULARY) + 2 * logits,
    "a factor of each class": lambda logits: logits * torch.linspace(0, 1, VOCABULARY),
    "a tensor's factor": lambda logits: torch.tensor(3.0) * logits,
    "a number of numpy with 32 bits": lambda logits: np.float32(2.0) * logits,
    "a number of numpy that is added": lambda logits: (np.float64(2.0) + logits) * 2,
    "a negative factor": lambda logits: logits * -2,
    "an infinite factor": lambda logits: logits * math.inf,
    "a divisor of 0": lambda logits: logits / 0,
    "a factor of 0": lambda logits: logits * 0,
    "two tanh": lambda logits: (logits.tanh() * 3).tanh(),
    "a square": lambda logits: logits**2,
    "a function": lambda logits: torch.nn.functional.relu(logits),
    "a method": lambda logits: logits.clamp(max=0.5),
    "some classes": lambda logits: torch.cat([logits[..., :-8], torch.full((2, LENGTH, 8), -1e4)], -1),
    "classes that are written to": write,
    "integers": lambda logits: (4 * logits).to(torch.int32) * 0.25,
    "a norm": lambda logits: logits - logits.logsumexp(-1, keepdim=True) * 0.5,
    "a comparison": lambda logits: torch.where(logits > 0.5, 0.5, logits.float() * 2),
    "an equality": lambda logits: (logits == logits) * 1.0 * logits * 2,
}


@pytest.mark.parametrize("written", KNOWN.values(), ids=KNOWN)
def test_factors_and_a_soft_cap_are_computed_without_logits(written: Callable[[Any], Any]) -> None:
    actual, expected, is_computed = deferred(written)
    torch.testing.assert_close(actual, expected, rtol=FLOAT32_TOLERANCE, atol=0, check_dtype=False)
    assert not is_computed


@pytest.mark.parametrize("written", [*UNKNOWN.values(), *IN_PLACE.values()], ids=[*UNKNOWN, *IN_PLACE])
def test_whatever_else_is_done_to_logits_is_done_to_a_tensor_and_said(written: Callable[[Any], Any]) -> None:
    with pytest.warns(UserWarning, match=r"uses the logits for more than the loss \(.+\): all of them are computed"):
        actual, expected, is_computed = deferred(written)
    torch.testing.assert_close(actual, expected, rtol=FLOAT32_TOLERANCE, atol=0, equal_nan=True)
    assert is_computed


def test_every_in_place_operator_of_a_tensor_is_one_here() -> None:
    names = [name for name in dir(Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(Tensor)]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(DeferredLogits, name)] == ["__idiv__"]  # of Python 2


def test_logits_made_of_others_that_were_written_to_are_refused() -> None:
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="were written to before"):
        deferred(write_to_a_source)


def test_a_vocabulary_of_another_size_is_refused_as_before() -> None:
    model = tiny_model()
    model.config.vocab_size = 2 * VOCABULARY  # the logits have as many elements as half the rows would
    with pytest.raises(ValueError, match="batch_size"):
        model(**batch())
    eaves.hf.patch(model)
    with pytest.warns(UserWarning, match="a vocabulary of another size"), pytest.raises(ValueError, match="target has"):
        model(**batch())


def test_the_number_of_items_goes_to_the_device_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def note(call: LinearCrossEntropyCall) -> Tensor:
        given.update(call._asdict())
        return call.hidden.sum()

    monkeypatch.setattr(eaves.hf.loss, "loss_of_head", note)
    logits = DeferredLogits(torch.nn.Linear(2, 3, device="meta"), torch.zeros(1, 4, 2, device="meta"))
    labels = torch.zeros(1, 4, dtype=torch.int64)
    eaves.hf.loss.causal_lm_loss({}, logits, labels, 3, num_items_in_batch=torch.tensor(3))
    assert given["normalizer"].device == given["targets"].device == torch.device("meta")


class _Hooks:
    """Ways to halve what the head gives, or what it gets, of which none touches what is no tensor."""

    @staticmethod
    def result(module: Any, _: Any, output: Any) -> Any:
        return output / 2 if isinstance(output, Tensor) and output.shape[-1] == VOCABULARY else None

    @staticmethod
    def in_place(module: Any, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[-1] == VOCABULARY:
            output /= 2.0

    @staticmethod
    def gradient(module: Any, of_input: Any, of_output: Any) -> Any:
        return tuple(each / 2 for each in of_input)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "of the head": lambda head: head.register_forward_hook(_Hooks.result),
    "of the head, in place": lambda head: head.register_forward_hook(_Hooks.in_place),
    "of every module": lambda _: torch.nn.modules.module.register_module_forward_hook(_Hooks.result),
    "of the head's gradient": lambda head: head.register_full_backward_hook(_Hooks.gradient),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_looks_for_a_tensor_gets_one(register: Callable[[Any], Any]) -> None:
    model = tiny_model()
    without = step(model)
    handle = register(model.lm_head)
    try:
        expected = step(model)
        assert distance(expected.gradients["model.norm.weight"], without.gradients["model.norm.weight"]) > 0.1
        eaves.hf.patch(model)
        with pytest.warns(UserWarning, match=r"\(a hook of the head\): all of them are computed"):
            actual = step(model)
    finally:
        handle.remove()
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)


def test_a_hook_of_what_the_head_gets_costs_no_logits() -> None:
    model = tiny_model()
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,))
    expected = step(model)
    eaves.hf.patch(model)
    with refuse_logits():
        actual = step(model)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("in_a_thread", [False, True], ids=["within", "in another thread"])
def test_a_call_during_a_training_call_has_logits(in_a_thread: bool) -> None:
    model = tiny_model()
    tokens = batch()["input_ids"]
    logits = model(tokens).logits
    expected = step(model)
    eaves.hf.patch(model)
    seen: list[Any] = []

    def evaluate() -> None:
        handle.remove()
        for options in ({}, {"labels": batch()["labels"], "skip_logits": False}):
            seen.append(model(tokens, **options).logits)
        seen.append(model.lm_head(torch.zeros(1, FEATURES)) if in_a_thread else logits)

    def hook(*_: Any) -> None:
        if not in_a_thread:
            return evaluate()
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    handle = model.lm_head.register_forward_pre_hook(hook)
    assert_same_step(step(model), expected, FLOAT32_TOLERANCE)
    assert [type(each) for each in seen] == [Tensor] * 3
    assert torch.equal(seen[0], logits) and torch.equal(seen[1], logits)
    with refuse_logits():
        step(model)


def test_a_model_with_a_loss_of_its_own_trains_as_before() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": FEATURES, "d_kv": 16, "d_ff": 40, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    ).train()
    expected = step(model)
    eaves.hf.patch(model)
    with pytest.warns(UserWarning, match="all of them are computed"):
        actual = step(model)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)


def test_a_loss_that_is_set_after_patch_is_used() -> None:
    model = eaves.hf.patch(tiny_model())
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    with pytest.warns(UserWarning, match=r"\(square\)"):
        assert model(**batch()).loss > 0


# The model as an object


def test_generation_is_the_same_token_by_token() -> None:
    model = tiny_model("gemma2")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = batch()["input_ids"]
    for mode in (model.eval, model.train):
        mode()
        expected = model.generate(tokens, **options)
        assert expected.shape == (2, LENGTH + 12)
        with eaves.hf.patched(model):
            assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])  # a head of its own, a tied one, another body
def test_unpatch_restores_everything(name: str) -> None:
    model = tiny_model(name)
    head = model.get_output_embeddings()

    def state() -> list[Any]:
        held = [(type(each), dict(vars(each))) for each in (model, head)]
        return [*held, dict(vars(type(model))), model.forward, model.loss_function, inspect.signature(model.forward)]

    before = state()
    eaves.hf.patch(model)
    assert model.loss_function is not before[4] and inspect.signature(model.forward) == before[5]
    step(model)
    assert eaves.hf.unpatch(model) is model
    model.zero_grad()
    assert state() == before


def test_a_block_unpatches_after_an_exception() -> None:
    model = tiny_model()
    before = type(model)
    with pytest.raises(KeyError), eaves.hf.patched(model, algorithm="recompute") as same:
        assert same is model and type(model) is not before
        raise KeyError
    assert type(model) is before and type(model.lm_head) is torch.nn.Linear


def test_blocks_nest_and_leave_a_patched_model_with_its_options() -> None:
    model = tiny_model()

    def way() -> str:
        ((name, _),) = gradients_asked_for(lambda: step(model))
        return name

    with eaves.hf.patched(model, algorithm="recompute"):
        with eaves.hf.patched(model, algorithm="speed", skip_logits=False):
            assert step(model).output.logits is not None
        assert way() == "backward"
        with pytest.raises(KeyError), eaves.hf.patched(model, algorithm="speed"):
            assert way() == "forward_backward"
            raise KeyError
        assert way() == "backward"
    assert type(model) is transformers.LlamaForCausalLM
    eaves.hf.patch(model, algorithm="recompute")
    with eaves.hf.patched(model):
        assert way() == "forward_backward"
    assert way() == "backward"


def test_a_block_tells_what_happened_in_it() -> None:
    model = tiny_model()
    with pytest.raises(KeyError), eaves.hf.patched(model):
        model.__class__ = type("Sharded", (type(model),), {})  # which unpatch refuses, as after fully_shard
        raise KeyError
    model = tiny_model()
    with pytest.raises(ValueError, match="class was changed to Sharded"), eaves.hf.patched(model):
        model.__class__ = type("Sharded", (type(model),), {})
    model = tiny_model()
    with eaves.hf.patched(model):
        eaves.hf.unpatch(model)
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("is_patched_again", [False, True])
def test_a_head_that_was_replaced_is_what_it_was_before(is_patched_again: bool) -> None:
    model = tiny_model()
    heads = [eaves.hf.patch(model).lm_head]
    model.resize_token_embeddings(VOCABULARY + 3)
    heads.append(model.lm_head)
    if is_patched_again:
        eaves.hf.patch(model)
        assert type(heads[0]) is torch.nn.Linear
    eaves.hf.unpatch(model)
    assert heads[0] is not heads[1] and [type(head) for head in heads] == [torch.nn.Linear] * 2


def test_models_that_share_a_head_are_unpatched_one_by_one() -> None:
    first, second = tiny_model(), tiny_model()
    second.lm_head = first.lm_head
    expected = step(second)
    eaves.hf.patch(first)
    eaves.hf.patch(second)
    twin = copy.deepcopy(first)
    eaves.hf.unpatch(twin)
    assert type(twin.lm_head) is torch.nn.Linear
    eaves.hf.unpatch(first)
    actual = step(second)
    assert actual.output.logits is None
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    assert first(**batch()).logits is not None
    eaves.hf.unpatch(second)
    assert type(first.lm_head) is torch.nn.Linear


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_patched_and_has_its_own_parameters(copied: Callable[[Any], Any]) -> None:
    model = eaves.hf.patch(tiny_model("qwen2"), algorithm="recompute")
    expected = step(model)
    twin = copied(model)
    assert type(twin) is type(model) and twin.lm_head.weight is twin.model.embed_tokens.weight
    assert gradients_asked_for(lambda: step(twin)) == [("backward", OF_HIDDEN | OF_HEAD)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_step(step(twin), expected, FLOAT32_TOLERANCE)
    assert type(eaves.hf.unpatch(twin)) is transformers.Qwen2ForCausalLM


def test_a_patched_model_is_saved_as_what_it_was(tmp_path: Path) -> None:
    model = eaves.hf.patch(tiny_model())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert_same_step(step(loaded.train()), step(model), FLOAT32_TOLERANCE)


def test_compiled_it_is_one_graph_with_metrics(fresh_compiler: None) -> None:
    expected = step(tiny_model("gemma2"))
    of_metrics = eaves.hf.patch(tiny_model("gemma2"), metrics=METRICS)(**batch())
    numbers = {name: getattr(of_metrics, name).item() for name in METRICS}
    # As in a process that compiles before it has called the model.
    eaves.hf.outputs._make_class_with_metrics.cache_clear()
    model = eaves.hf.patch(tiny_model("gemma2"), metrics=METRICS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        output = compiled(**batch())
        output.loss.backward()
        assert output.logits is None and {*METRICS} <= set(output)
        assert_metrics(output, numbers)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same_step(expected._replace(loss=output.loss.detach(), gradients=gradients), expected, FLOAT32_TOLERANCE)
    model.eval()
    output = compiled(**batch())
    assert isinstance(output.logits, Tensor) and not {*METRICS} & set(output)
    assert_metrics(output, numbers)


def test_a_head_that_was_resized_has_to_be_patched_again() -> None:
    model = eaves.hf.patch(tiny_model())
    model.resize_token_embeddings(VOCABULARY + 3)
    with pytest.raises(RuntimeError, match=r"another than at patch .* call patch again"):
        model(**batch())
    eaves.hf.patch(model)
    with refuse_logits():
        step(model)


def test_compiled_it_may_be_called_in_another_thread_first(fresh_compiler: None) -> None:
    model = tiny_model()
    expected = model(**batch()).loss
    compiled = torch.compile(eaves.hf.patch(model), backend="eager", fullgraph=True)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(compiled, **batch()).result()
    second = compiled(**batch())
    assert first.logits is None and second.logits is None
    torch.testing.assert_close([first.loss, second.loss], [expected, expected])
    tokens = batch()["input_ids"]
    assert isinstance(compiled(tokens).logits, Tensor) and isinstance(model(tokens).logits, Tensor)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """One process: what is of interest are the classes and hooks that wrappers give a model."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_of_torch_distributed_take_a_patched_model(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    expected = step(tiny_model("qwen2"))
    wrapped = DistributedDataParallel(eaves.hf.patch(tiny_model("qwen2")))
    actual = step(wrapped)
    of_the_model = {name.removeprefix("module."): gradient for name, gradient in actual.gradients.items()}
    assert actual.output.logits is None
    assert_same_step(actual._replace(gradients=of_the_model), expected, FLOAT32_TOLERANCE)

    sharded = eaves.hf.patch(tiny_model("qwen2"))
    mesh = init_device_mesh("cpu", (1,))  # or a machine with a GPU shards there
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    actual = step(sharded)
    whole = {name: gradient.full_tensor() for name, gradient in actual.gradients.items()}
    assert actual.output.logits is None
    assert_same_step(actual._replace(gradients=whole), expected, FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match=r"class was changed to FSDPQwen2ForCausalLM after patch"):
        eaves.hf.unpatch(sharded)


def losses_of_trainer(model: Any, folder: Path, **options: Any) -> list[float]:
    rows = torch.randint(3, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = rows.where(torch.arange(LENGTH) >= torch.arange(16).remainder(8)[:, None], -100)  # a mean of means is off
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        compute_metrics=lambda results: {"largest": float(abs(results.predictions).max())},
    )
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    return [*losses, evaluated["eval_loss"], evaluated["eval_largest"]]


@pytest.mark.parametrize("metrics", [(), METRICS], ids=["", "metrics"])
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_trainer_gives_the_same_losses(
    options: dict[str, Any], metrics: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = losses_of_trainer(tiny_model(), tmp_path, **options)
    assert len(expected) == 6 and expected[3] < expected[0]
    model = eaves.hf.patch(tiny_model(), metrics=metrics)
    calls = []
    unwatched: Any = eaves.hf.loss.loss_of_head

    def watched(call: LinearCrossEntropyCall) -> Any:
        calls.append(call)
        return unwatched(call)

    monkeypatch.setattr(eaves.hf.loss, "loss_of_head", watched)
    # Steps of Adam take small gradients for as large as others, so that rounding grows.
    actual = losses_of_trainer(model, tmp_path, **options)
    assert actual == pytest.approx(expected, rel=0.02 if options else 1e-4)
    assert len(calls) == 8  # micro-batches; the others are of the evaluation
    eaves.hf.unpatch(model)  # accelerate has left its wrapper of the forward there
    assert model.train()(**batch()).logits is not None


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_metrics_reach_trainer(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    compute_loss = transformers.Trainer.compute_loss
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def noted(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = compute_loss(self, model, inputs, return_outputs=True, **options)
        seen[model.training].append((outputs.accuracy, outputs.entropy))
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", noted)
    losses_of_trainer(eaves.hf.patch(tiny_model(), metrics=METRICS), tmp_path, **options)
    assert len(seen[True]) == 8  # micro-batches
    for accuracy, entropy in seen[True]:
        assert 0 <= accuracy <= 1 and 0 < entropy < math.log(VOCABULARY)
    # Beside logits: accelerate makes the output anew, of its items.
    assert [metric is None for metrics in seen[False] for metric in metrics] == [bool(options)] * 2


# Refusals


def with_lora_on_the_head() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["lm_head"]))


def with_a_head_that_is_saved() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )


def with_another_loss() -> Any:
    model = tiny_model()
    model.loss_function = lambda logits, **_: logits.sum()
    return model


def classifier() -> Any:
    return transformers.LlamaForSequenceClassification(tiny_model().config)


def without_a_head() -> Any:
    return tiny_model().model


def without_labels() -> Any:
    class Unlabelled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return super().forward(*arguments, **options)

    return Unlabelled(tiny_model().config)


def with_another_forward(of_the_head: bool) -> Any:
    model = tiny_model()
    changed = model.lm_head if of_the_head else model
    changed.forward = changed.forward
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no model of transformers": (
        lambda: torch.nn.Linear(2, 2), TypeError, r"model is a Linear, expected a transformers.PreTrainedModel"
    ),
    "compiled": (lambda: torch.compile(tiny_model()), TypeError, "patch it before torch.compile"),
    "LoRA on the head": (
        with_lora_on_the_head, NotImplementedError, r"the head of this Llama\w+ is a peft\..*, expected a torch.nn.L"
    ),
    "a head in modules_to_save": (
        with_a_head_that_is_saved, NotImplementedError, r"is a ModulesToSaveWrapper of PEFT \(modules_to_save\)"
    ),
    "another loss": (
        with_another_loss, NotImplementedError, "the loss of this .* is <lambda>, expected ForCausalLMLoss"
    ),
    "a classifier": (classifier, NotImplementedError, "is ForSequenceClassificationLoss, expected ForCausalLMLoss"),
    "no head": (without_a_head, NotImplementedError, "this LlamaModel has no head"),
    "no labels": (without_labels, NotImplementedError, "the forward of this Unlabelled takes no labels"),
    "a forward of the instance": (
        lambda: with_another_forward(False), NotImplementedError, "the forward of this LlamaForCausalLM was replaced"
    ),
    "a head's forward of the instance": (
        lambda: with_another_forward(True), NotImplementedError, "the forward of this Llama.*'s head was replaced"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_is_refused_and_left_as_it_is(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    model = make()
    modules = [(type(each), dict(vars(each))) for each in model.modules()]
    with pytest.raises(error, match=message) as caught:
        eaves.hf.patch(model)
    assert str(caught.value).startswith("patch: ") and "\n" not in str(caught.value)
    assert [(type(each), dict(vars(each))) for each in model.modules()] == modules


def test_what_is_not_patched_is_not_unpatched() -> None:
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not patched"):
        eaves.hf.unpatch(tiny_model())


def test_skipped_logits_without_labels_are_refused() -> None:
    model = eaves.hf.patch(tiny_model())
    with pytest.raises(ValueError, match="skip_logits is True, but there are no labels"):
        model(batch()["input_ids"], skip_logits=True)


def test_transformers_is_imported_by_patch_alone() -> None:
    program = "import sys, eaves, eaves.hf; print('transformers' in sys.modules); sys.modules['transformers'] = None\n"
    program += "try: eaves.hf.patch(None)\nexcept ImportError as error: print(error)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    is_imported, message = result.stdout.splitlines()
    assert is_imported == "False" and message.startswith("eaves.hf needs transformers (pip install eaves[hf]): ")
