"""eaves.hf: the operators that a patched model calls, and operations of an architecture on its logits."""

import gc
import math
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import eaves.hf
from eaves._autograd.linear_cross_entropy import OF_HEAD, OF_HIDDEN
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall
from eaves.hf.deferred_logits import DeferredLogits
from hf_models import (
    FEATURES,
    FLOAT32_TOLERANCE,
    LENGTH,
    OF_TINY_MODELS,
    VOCABULARY,
    assert_same_step,
    batch,
    distance,
    gradients_asked_for,
    operator_calls,
    peft_model,
    refuse_logits,
    step,
    tiny_model,
    transformers,
)

pytestmark = OF_TINY_MODELS


def test_a_frozen_head_has_no_gradient_and_no_product_for_one() -> None:
    model = peft_model(target_modules=["q_proj", "v_proj"], init_lora_weights=False).train()
    expected = step(model)
    assert eaves.hf.patch(model) is model
    assert gradients_asked_for(lambda: step(model)) == [("forward_backward", OF_HIDDEN)]
    actual = step(model)
    assert actual.output.logits is None and model.get_base_model().lm_head.weight.grad is None
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    eaves.hf.unpatch(model)
    assert step(model).output.logits is not None


@pytest.mark.parametrize(
    ("frozen", "dtype", "asked"),
    [("model", torch.float32, OF_HEAD), ("lm_head", torch.float32, OF_HIDDEN), ("lm_head", torch.bfloat16, OF_HIDDEN)],
)
def test_frozen_parameters_take_no_product(frozen: str, dtype: torch.dtype, asked: int) -> None:
    model = eaves.hf.patch(tiny_model().to(dtype))
    getattr(model, frozen).requires_grad_(False)
    ((name, found),) = gradients_asked_for(lambda: step(model))
    assert (name, found & (OF_HIDDEN | OF_HEAD)) == ("forward_backward", asked)


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
    model = eaves.hf.patch(tiny_model(), skip_ignored=skip_ignored)
    ((_, arguments, _),) = operator_calls(lambda: step(model))
    assert arguments[-4] is skip_ignored  # before workspace_limit, outputs and gradients


# The dtypes of the model, of patch's option, and of the sum over chunks.
@pytest.mark.parametrize(
    ("dtype", "option", "of_sum"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
    ],
)
def test_the_operator_is_told_the_dtype_of_the_heads_gradient(
    dtype: torch.dtype, option: torch.dtype | None, of_sum: torch.dtype
) -> None:
    model = eaves.hf.patch(tiny_model().to(dtype), grad_weight_dtype=option)
    ((_, _, results),) = operator_calls(lambda: step(model))
    weight = model.lm_head.weight
    assert [each.dtype for each in results if each.shape == weight.shape] == [of_sum] and weight.grad.dtype == dtype


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


# Operations of an architecture on its logits


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
    """A function of logits that changes a scaled copy of them by `operation(copy, other)`, in place."""

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
    "a bias": lambda logits: logits + torch.linspace(-1, 1, VOCABULARY),
    "a bias of rows": lambda logits: (logits.float() + torch.linspace(-1, 1, VOCABULARY)[None]).contiguous() * 1,
    "rows": lambda logits: (logits.view(-1, logits.size(-1)) * 2).reshape(-1, VOCABULARY).float(),
    "another dtype": lambda logits: logits.float().contiguous().to(torch.float32).to(torch.float64),
}


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a bias and a factor": lambda logits: (logits + torch.linspace(-1, 1, VOCABULARY)) * 2,
    "a bias behind a factor": lambda logits: 2 * logits + torch.linspace(-1, 1, VOCABULARY),
    "two biases": lambda logits: logits + torch.linspace(-1, 1, VOCABULARY) + torch.linspace(2, 1, VOCABULARY),
    "a bias and a soft cap": lambda logits: (logits + torch.linspace(-1, 1, VOCABULARY)).tanh(),
    "a number that is added": lambda logits: logits.view(-1, VOCABULARY) + torch.ones(()),
    "other rows": lambda logits: logits.view(LENGTH, 2, VOCABULARY) * 2,
    "rows of other classes": lambda logits: (2 * logits.view(VOCABULARY, -1)).T,
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
    with pytest.warns(
        UserWarning, match=r"uses the logits for more than the loss \(.+\), so eaves computes all logits"
    ):
        actual, expected, is_computed = deferred(written)
    torch.testing.assert_close(actual, expected, rtol=FLOAT32_TOLERANCE, atol=0, equal_nan=True)
    assert is_computed


def test_every_in_place_operator_of_a_tensor_is_one_here() -> None:
    names = [name for name in dir(Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(Tensor)]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(DeferredLogits, name)] == ["__idiv__"]  # of Python 2


def test_logits_made_of_others_that_were_written_to_are_refused() -> None:
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="were overwritten before"):
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
    """Hooks that halve the head's result or gradient; each leaves alone anything but a tensor."""

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
        with pytest.warns(UserWarning, match=r"\(a hook of the head\), so eaves computes all logits"):
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
