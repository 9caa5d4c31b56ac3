"""eaves.hf: masked language models and encoder-decoders, many of which compute the loss in their own forward; label
smoothing and z-loss; the name of a loss; outputs without logits."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves.hf
from cross_entropy_test import each
from hf_models import (
    FEATURES,
    FLOAT32_TOLERANCE,
    LENGTH,
    METRICS,
    OF_TINY_MODELS,
    VOCABULARY,
    Step,
    assert_metrics,
    assert_same_step,
    batch,
    refuse_logits,
    step,
    tiny_model,
    transformers,
)

pytestmark = OF_TINY_MODELS

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": FEATURES, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BERT = {**_ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MODERN = {
    **_ENCODER,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 3,
    "sep_token_id": 4,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": FEATURES, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": FEATURES, "d_kv": 16, "d_ff": 40, "num_layers": 1, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip

# class, configuration, the reason for it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _BERT),  # a tied decoder with a bias in a prediction head, and a loss of its own
    "roberta": ("RobertaForMaskedLM", _BERT),  # another head
    "distilbert": (  # the loss is a module of the model
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": FEATURES, "hidden_dim": 40, "n_layers": 1, "n_heads": 2, "dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    "modernbert": ("ModernBertForMaskedLM", _MODERN),  # loss_function is ForMaskedLMLoss
    "sparse": ("ModernBertForMaskedLM", {**_MODERN, "sparse_prediction": True}),  # leaves out rows before the head
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),  # adds a bias for each class
    "marian": ("MarianMTModel", _BART),
}  # fmt: skip


def model_of(name: str) -> Any:
    """A model with the same weights each time, in training mode."""
    torch.manual_seed(3)
    family, options = MODELS[name]
    configuration = getattr(transformers, family).config_class(**options)
    model = getattr(transformers, family)(configuration).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if name == "t5" else 4).add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


@each("name", tuple(MODELS))
def test_loss_and_gradients_are_those_of_the_model(name: str) -> None:
    model = model_of(name)
    expected = step(model)
    in_evaluation = model.eval()(**batch())
    eaves.hf.patch(model.train())
    with refuse_logits():
        actual = step(model)
    assert "logits" not in actual.output
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
    with_logits = step(model, skip_logits=False)
    torch.testing.assert_close(with_logits.output.logits, expected.output.logits)
    assert_same_step(with_logits, expected, FLOAT32_TOLERANCE)
    again = model.eval()(**batch())
    assert type(again) is type(in_evaluation) and type(again.logits) is Tensor
    torch.testing.assert_close((again.loss, again.logits), (in_evaluation.loss, in_evaluation.logits))
    as_tuple = model(**batch(), return_dict=False)
    torch.testing.assert_close(as_tuple[:2], (in_evaluation.loss, in_evaluation.logits))
    eaves.hf.unpatch(model.train())
    assert_same_step(step(model), expected, FLOAT32_TOLERANCE)


def loss_of_logits(
    logits: Tensor, labels: Tensor, is_shifted: bool, label_smoothing: float, z_loss: float, items: float | None
) -> Tensor:
    """The exact loss, from the model's own logits."""
    logits = logits[:, :-1] if is_shifted else logits
    labels = (labels[:, 1:] if is_shifted else labels).flatten()
    logits = logits.flatten(0, -2).double()[labels != -100]
    labels = labels[labels != -100]
    rows = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    return (rows + z_loss * logits.logsumexp(-1).square()).sum() / (items or len(labels))


@each("name", ("llama", "bert", "modernbert", "t5", "bart"))
@each("skip_logits", (True, False))
def test_label_smoothing_z_loss_and_items_are_of_every_loss(name: str, skip_logits: bool) -> None:
    model = model_of(name) if name in MODELS else tiny_model(name)
    cases: list[tuple[dict[str, float], Any]] = [({"label_smoothing": 0.1}, None), ({"z_loss": 0.01}, None)]
    if "kwargs" in inspect.signature(model.forward).parameters:  # from transformers 5 on, all have it
        cases += [({"z_loss": 0.01}, 29), ({}, torch.tensor(29))]
    for options, items in cases:
        model.zero_grad()
        numbers = {"label_smoothing": 0.0, "z_loss": 0.0, **options}
        output = model(**batch())
        loss = loss_of_logits(output.logits, batch()["labels"], name == "llama", items=items, **numbers)
        loss.backward()
        gradients = {each: p.grad.clone() for each, p in model.named_parameters() if p.grad is not None}
        expected = Step(output, loss.detach(), gradients)
        assert items is None or abs(loss - output.loss) > 0.01
        arguments = {} if items is None else {"num_items_in_batch": items}
        with eaves.hf.patched(model, **options):
            assert_same_step(step(model, skip_logits=skip_logits, **arguments), expected, FLOAT32_TOLERANCE)


def test_a_loss_without_the_options_is_an_error() -> None:
    model = model_of("bert")
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, logits: logits.clamp(max=0.5))  # gets a tensor
    eaves.hf.patch(model, z_loss=0.1)
    with (
        pytest.warns(UserWarning, match="a hook of the head"),
        pytest.raises(NotImplementedError, match="this BertForMaskedLM computed its loss without eaves"),
    ):
        model(**batch())
    handle.remove()
    assert model(**batch()).loss > 0
    assert model(batch()["input_ids"]).logits is not None


@each("name", ("bert", "t5"))
def test_metrics_are_those_of_the_logits(name: str) -> None:
    model = eaves.hf.patch(model_of(name).eval(), metrics=METRICS)
    logits = model(**batch(), skip_logits=False).logits
    labels = batch()["labels"]
    counts = labels != -100
    labels[counts & (torch.arange(LENGTH) % 2 == 0)] = logits.argmax(-1)[counts & (torch.arange(LENGTH) % 2 == 0)]
    logits = model(**{**batch(), "labels": labels}, skip_logits=False).logits  # an encoder-decoder reads the labels
    entropy = torch.distributions.Categorical(logits=logits.double()).entropy()[counts].mean().item()
    accuracy = (logits.argmax(-1) == labels)[counts].double().mean().item()
    for skip_logits in (True, False):
        output = model(**{**batch(), "labels": labels}, skip_logits=skip_logits)
        assert_metrics(output, {"accuracy": accuracy, "entropy": entropy})


# Losses of a forward that ask for more than a mean: all logits are computed.
OTHER_LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a sum": lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, reduction="sum"),
    "a weight": lambda logits, labels: torch.nn.CrossEntropyLoss(torch.linspace(0.5, 2, VOCABULARY))(logits, labels),
    "smoothed": lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1),
    "probabilities": lambda logits, labels: torch.nn.functional.cross_entropy(
        logits, torch.nn.functional.one_hot(labels.clamp(min=0), VOCABULARY).float()
    ),
}


@pytest.mark.parametrize("loss_of", OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_a_loss_that_asks_for_more_is_that_of_the_model(loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    class Model(transformers.BertForMaskedLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.cls(self.bert(input_ids).last_hidden_state)
            loss = loss_of(logits.view(-1, self.config.vocab_size), labels.view(-1))
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    torch.manual_seed(3)
    model = Model(transformers.BertConfig(**_BERT)).train()
    expected = step(model)
    eaves.hf.patch(model)
    with pytest.warns(UserWarning, match=r"\(cross_entropy\), so eaves computes all logits"):
        assert_same_step(step(model), expected, FLOAT32_TOLERANCE)


def test_compiled_it_skips_the_logits(fresh_compiler: None) -> None:
    expected = step(model_of("bart"))
    model = eaves.hf.patch(model_of("bart"))
    compiled = torch.compile(model, backend="eager")  # torch.nn.CrossEntropyLoss ends a graph
    output = compiled(**batch())
    output.loss.backward()
    assert "logits" not in output
    gradients = {each: p.grad for each, p in model.named_parameters() if p.grad is not None}
    assert_same_step(Step(output, output.loss.detach(), gradients), expected, FLOAT32_TOLERANCE)


@each("name", ("llama", "modernbert"))
def test_the_loss_has_the_name_of_theirs_and_its_number_of_items(name: str) -> None:
    model = model_of(name) if name in MODELS else tiny_model(name)
    expected = model.loss_function
    found = eaves.hf.patch(model).loss_function
    assert found.__name__ == expected.__name__
    of_theirs, of_ours = (list(inspect.signature(each).parameters) for each in (expected, found))
    assert of_theirs[:4] == of_ours[:4] and of_ours[3] == "num_items_in_batch"


def test_fully_shard_gets_the_head_back_from_an_evaluation(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = model_of("t5")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    eaves.hf.patch(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for module in (model.lm_head, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = step(model).loss
    for skip_logits in (False, True):
        with torch.no_grad():
            model.eval()(**batch(), skip_logits=skip_logits)
        assert isinstance(model.lm_head.weight, torch.distributed.tensor.DTensor)
    optimizer.step()
    assert model.train()(**batch()).loss < before  # the loss of the new weights


# ---------------------------------------------------------------------------------------------------- missing logits


def test_who_reads_logits_that_were_skipped_is_told_the_way_out() -> None:
    model = eaves.hf.patch(tiny_model(), metrics=("accuracy",))
    for metrics in (("accuracy",), ()):
        output = eaves.hf.patch(model, metrics=metrics)(**batch(), use_cache=False)
        with pytest.warns(UserWarning, match=r"pass skip_logits=False to eaves\.hf\.patch") as caught:
            assert output.logits is None
        assert [each.filename for each in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert output.loss > 0 and output.get("logits") is None and list(output) == ["loss", *metrics]
            assert len(output.to_tuple()) == len(list(output.items())) == 1 + len(metrics)
            for twin in (copy.copy(output), type(output)(dict(output.items()))):
                assert twin.logits is None and list(twin) == list(output)
            with torch.no_grad():
                without_gradient = model(**batch(), use_cache=False)
            twin = pickle.loads(pickle.dumps(without_gradient))
            assert type(twin) is type(output) and twin.loss == without_gradient.loss and list(twin) == list(output)
            assert model(**batch(), skip_logits=False).logits is not None
            output.logits = torch.ones(2)
            assert output.logits.sum() == 2


@each("skip_logits", (True, False))
def test_a_decoder_that_does_not_shift_its_labels_divides_by_their_number(skip_logits: bool) -> None:
    """Trainer's number leaves out the first label of each sequence, but this loss counts it."""
    torch.manual_seed(3)
    model = transformers.BartForCausalLM(transformers.BartConfig(**_BART)).train()
    tokens = batch()["input_ids"]
    sample = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}  # the first labels count
    items = (sample["labels"][:, 1:] != -100).sum()
    with_items = {"num_items_in_batch": items} if "kwargs" in inspect.signature(model.forward).parameters else {}
    expected = model(**sample, **with_items).loss
    eaves.hf.patch(model)
    torch.testing.assert_close(model(**sample, **with_items, skip_logits=skip_logits).loss, expected)
