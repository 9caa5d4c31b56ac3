"""eaves.hf: a patched model as an object that is copied, saved, compiled, trained and unpatched; and refusals."""

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves.hf
from eaves._autograd.linear_cross_entropy import OF_HEAD, OF_HIDDEN
from hf_models import (
    FLOAT32_TOLERANCE,
    LENGTH,
    METRICS,
    OF_TINY_MODELS,
    VOCABULARY,
    assert_metrics,
    assert_same_step,
    batch,
    gradients_asked_for,
    refuse_logits,
    step,
    tiny_model,
    transformers,
)

pytestmark = OF_TINY_MODELS


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


def test_blocks_nest_and_leave_a_patched_model_with_its_options() -> None:
    model = tiny_model()

    def way() -> str:
        ((name, _),) = gradients_asked_for(lambda: step(model))
        return name

    with eaves.hf.patched(model, algorithm="recompute") as same:
        assert same is model and type(model) is not transformers.LlamaForCausalLM
        with eaves.hf.patched(model, algorithm="speed", skip_logits=False):
            assert step(model).output.logits is not None
        assert way() == "backward"
        with pytest.raises(KeyError), eaves.hf.patched(model, algorithm="speed"):
            assert way() == "forward_backward"
            raise KeyError
        assert way() == "backward"
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear
    eaves.hf.patch(model, algorithm="recompute")
    with eaves.hf.patched(model):
        assert way() == "forward_backward"
    assert way() == "backward"


def test_a_block_tells_what_happened_in_it() -> None:
    model = tiny_model()
    with pytest.raises(KeyError), eaves.hf.patched(model):
        model.__class__ = type("Sharded", (type(model),), {})  # unpatch refuses this class, as after fully_shard
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
    # The state of a process that compiles before it has called the model.
    eaves.hf.outputs._make_output_class.cache_clear()
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


def test_a_head_that_was_resized_is_taken_by_the_next_call() -> None:
    model = eaves.hf.patch(tiny_model())
    heads = [model.lm_head]
    model.resize_token_embeddings(VOCABULARY + 3)
    heads.append(model.lm_head)
    with refuse_logits():
        assert step(model).output.logits is None
    assert type(heads[0]) is torch.nn.Linear and type(heads[1]) is not torch.nn.Linear
    eaves.hf.unpatch(model)
    assert type(heads[1]) is torch.nn.Linear


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


def test_data_parallel_takes_a_patched_model(process_group: None) -> None:
    expected = step(tiny_model("qwen2"))
    wrapped = torch.nn.parallel.DistributedDataParallel(eaves.hf.patch(tiny_model("qwen2")))
    actual = step(wrapped)
    of_the_model = {name.removeprefix("module."): gradient for name, gradient in actual.gradients.items()}
    assert actual.output.logits is None
    assert_same_step(actual._replace(gradients=of_the_model), expected, FLOAT32_TOLERANCE)


def changed(change: Callable[[Any], object]) -> Any:
    model = tiny_model()
    change(model)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no model of transformers": (
        lambda: torch.nn.Linear(2, 2), TypeError, r"model is a Linear, expected a transformers.PreTrainedModel"
    ),
    "compiled": (lambda: torch.compile(tiny_model()), TypeError, "patch it before torch.compile"),
    "another loss": (
        lambda: changed(lambda model: setattr(model, "loss_function", lambda logits, **_: logits.sum())),
        NotImplementedError, "the loss of this .* is <lambda>, expected ForCausalLMLoss"
    ),
    "a classifier": (
        lambda: transformers.LlamaForSequenceClassification(tiny_model().config), NotImplementedError,
        "is ForSequenceClassificationLoss, expected ForCausalLMLoss",
    ),
    "no head": (lambda: tiny_model().model, NotImplementedError, "this LlamaModel has no head"),
    "no labels": (
        lambda: type("Unlabelled", (transformers.LlamaForCausalLM,), {"forward": lambda self: 0})(tiny_model().config),
        NotImplementedError, "the forward of this Unlabelled takes no labels",
    ),
    "a forward of the instance": (
        lambda: changed(lambda model: setattr(model, "forward", model.forward)), NotImplementedError,
        "the forward of this LlamaForCausalLM was replaced"
    ),
    "a head's forward of the instance": (
        lambda: changed(lambda model: setattr(model.lm_head, "forward", model.lm_head.forward)), NotImplementedError,
        "the forward of this Llama.*'s head was replaced"
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
