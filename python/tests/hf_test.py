"""eaves.hf: losses, gradients, outputs and metrics of patched models against the same models before."""

import copy
import dataclasses
import inspect
import itertools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves.hf
from cuda_test import LONG_CYCLES
from eaves._autograd.linear_cross_entropy import OF_HEAD, OF_HIDDEN
from eaves.hf.deferred_logits import DeferredLogits
from hf_models import (
    ARCHITECTURES,
    FLOAT32_TOLERANCE,
    LENGTH,
    METRICS,
    OF_TINY_MODELS,
    VOCABULARY,
    assert_metrics,
    assert_same_step,
    batch,
    distance,
    gradients_asked_for,
    refuse_logits,
    refuse_waiting,
    step,
    tiny_model,
    transformers,
)

pytestmark = OF_TINY_MODELS


# The tolerances on a GPU, which sums in another order. In 16 bits the model's logits are rounded and eaves' are not,
# which on the CPU moves an element by up to 0.028.
GPU_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.06}


# Arguments of the loss beside labels. No number equals the number of labels, so that a lost one shows.
LOSS_ARGUMENTS: dict[str, dict[str, Any]] = {
    "a number of items": {"num_items_in_batch": 29},
    "a tensor of items": {"num_items_in_batch": torch.tensor(29)},
    "shifted labels": {"shift_labels": torch.roll(batch()["labels"], -2, 1)},
    "another ignored label": {"ignore_index": int(batch()["labels"][0, 6])},
}


# Values


# Each architecture, and each argument of the loss with one of them.
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


# A forward's result, made from loss and logits, and a check that a result lacks the logits and has all else.
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


@pytest.mark.parametrize(("is_changed", "reason"), [(False, r"square"), (True, "a hook of the head")])
def test_logits_that_had_to_be_computed_are_left_out_everywhere(is_changed: bool, reason: str) -> None:
    model = eaves.hf.patch(tiny_model("gpt2"))
    if is_changed:
        model.lm_head.register_forward_hook(lambda _, __, logits: logits.clamp(max=0.5))
    else:
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    with pytest.warns(UserWarning, match=rf"\({reason}\), so eaves computes all logits"):
        output = model(**batch())
        results = model(**batch(), return_dict=False)
    assert output.logits is None and output.loss > 0
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


# Computed logits and waits


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
    given = {name: tensor.to(model.device) for name, tensor in batch().items()}
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


# A bias, a soft cap and a scale change both metrics' logits.
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2", "cohere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_metrics_are_those_of_the_logits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    model = eaves.hf.patch(tiny_model(name).to(device, dtype), skip_ignored=name != "phi", metrics=METRICS)
    given = batch_with_hits(model)
    tolerance = FLOAT32_TOLERANCE if device.type == "cpu" else GPU_TOLERANCES[torch.float32]
    expected = metrics_of(model(given["input_ids"]).logits, given["labels"])
    assert 0.2 < expected["accuracy"] < 0.8 and expected["entropy"] > 0.5
    with refuse_logits():
        without = model(**given)
    assert without.logits is None
    assert_metrics(without, expected, tolerance)
    assert_metrics(model(**given, num_items_in_batch=29), expected, tolerance)  # divides the loss alone
    assert_metrics(model(**given, skip_logits=False), expected, tolerance)
    assert_metrics(model.eval()(**given), expected, tolerance)


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


def test_outputs_with_logits_and_without_metrics_are_of_the_models_class() -> None:
    model = tiny_model()
    original = type(model(**batch()))
    assert type(eaves.hf.patch(model, skip_logits=False)(**batch())) is original
    eaves.hf.patch(model, metrics=METRICS)
    assert type(model(batch()["input_ids"])) is original
    assert isinstance(model(**batch()), original)
    with eaves.hf.patched(model):
        assert "entropy" not in model(**batch()) and type(model.eval()(**batch())) is original
    assert model(**batch()).entropy > 0


# Ways to rebuild an output: accelerate's mixed precision, DataParallel's gather, hooks of DistributedDataParallel
# and fully_shard, and a process that sends it.
REMADE: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda output: type(output)(dict(output.items())),
    "pairs": lambda output: type(output)((name, output[name]) for name in output),
    "a tree": lambda output: torch.utils._pytree.tree_map(lambda each: each, output),
    "a pickle": lambda output: pickle.loads(pickle.dumps(output)),
    "a copy": copy.copy,
}


@pytest.mark.parametrize("remade", REMADE.values(), ids=REMADE)
def test_metrics_outlive_what_makes_an_output_anew(remade: Callable[[Any], Any]) -> None:
    model = eaves.hf.patch(tiny_model(), metrics=METRICS[::-1])  # the order is always the same
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
