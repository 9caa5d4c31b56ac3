"""eaves.megatron in Megatron-Core's GPTModel, against the model's own loss; its head over ranks, against the whole."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import eaves
import eaves.megatron
from comparison import assert_agree
from cross_entropy_test import each
from integrations import run_recipe
from ranks import Ranks

pytest.importorskip("megatron", reason="Megatron-Core is not installed")

from megatron_modules import config_of, import_megatron, tiny_gpt

V, BATCH, LENGTH = 96, 2, 12
pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core's own


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.megatron.uninstall()
    if distributed.is_initialized():
        import_megatron().parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, V, (BATCH, LENGTH))
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        "attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH).tril() < 0.5,
        "labels": tokens.roll(-1, 1),
        "loss_mask": (torch.rand(BATCH, LENGTH) < 0.8).float(),
    }


def step(model: Any, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses where the mask counts, and all gradients of their mean."""
    model.zero_grad()
    loss = model(**given, **options)
    assert loss.shape == (BATCH, LENGTH) and loss.dtype == torch.float32
    mask = given["loss_mask"]
    ((loss * mask).sum() / mask.sum()).backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return (loss * mask).detach(), gradients


@each("tied", (False, True))
@each("options", ({}, {"use_mup": True, "mup_output_mult": 0.5}))
def test_the_model_takes_the_same_step(tied: bool, options: dict[str, Any]) -> None:
    model, given = tiny_gpt(V, tied=tied, **options), batch()
    expected, wanted = step(model, given)
    logits = model.output_layer.forward
    model.output_layer.forward = None  # a call of it, for logits, would raise
    with eaves.megatron.install():
        assert eaves.megatron.is_active()
        loss, gradients = step(model, given)
    assert not eaves.megatron.is_active()
    through_hook, _ = step(model, given, output_processor=eaves.megatron.output_processor)
    model.output_layer.forward = logits
    for found in (loss, through_hook):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == wanted.keys()
    masked = model(**given, output_processor=eaves.megatron.output_processor)[given["loss_mask"] == 0]
    assert len(masked) and not masked.any()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_without_labels_and_with_a_hook_of_the_caller_nothing_changes() -> None:
    model, given = tiny_gpt(V, use_mup=True, mup_output_mult=0.5), batch()
    del given["labels"], given["loss_mask"]
    expected = model(**given)
    signature = inspect.signature(model.forward)
    with eaves.megatron.install():
        assert inspect.signature(model.forward) == signature
        assert torch.equal(model(**given), expected)
        assert model(**given, labels=given["input_ids"], output_processor=lambda **_: "theirs") == "theirs"
    assert torch.equal(model(**given, output_processor=eaves.megatron.output_processor), expected)


def test_options_of_the_loss() -> None:
    model, given = tiny_gpt(V), batch()
    core = import_megatron()
    labels = given["labels"].T.contiguous()
    plain = {name: each for name, each in given.items() if name not in ("labels", "loss_mask")}

    def theirs(label_smoothing: float) -> Tensor:
        logits = model(**plain).transpose(0, 1).contiguous()
        loss: Tensor = core.tensor_parallel.vocab_parallel_cross_entropy(logits, labels, label_smoothing)
        return loss.T

    mask = given["loss_mask"]
    for smoothing in (0.0, 0.2):
        with eaves.megatron.install(label_smoothing=smoothing):
            found, _ = step(model, given)
        torch.testing.assert_close(found, (theirs(smoothing) * mask).detach(), rtol=1e-5, atol=1e-6)
    lse = model(**plain).logsumexp(-1).detach()
    with eaves.megatron.install(z_loss=0.1, algorithm="keep"):
        found, _ = step(model, given)
    torch.testing.assert_close(found, ((theirs(0.0) + 0.1 * lse**2) * mask).detach(), rtol=1e-5, atol=1e-5)


def test_a_label_of_minus_100_does_not_count_without_a_loss_mask() -> None:
    model, given = tiny_gpt(V), batch()
    del given["loss_mask"]
    given["labels"][0, 3] = -100
    others = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    others[0, 3] = False
    expected = model(**given)
    assert expected[0, 3] > 0  # Megatron's function takes it for a class of another rank
    found = model(**given, output_processor=eaves.megatron.output_processor)
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-6)
    assert found[0, 3] == 0
    (gradient,) = torch.autograd.grad(found[0, 3], model.output_layer.weight)
    assert not gradient.any()


@each(
    "option",
    (
        {"frobnicate": 1},
        {"reduction": "sum"},
        {"label_smoothing": 1.5},
        {"softcap": -1.0},
        {"z_loss": "much"},
        {"ignore_index": None},
        {"algorithm": "fast"},
        {"keep_bytes": -1},
        {"workspace_bytes": 0.5},
        {"skip_ignored": 2},
    ),
)
def test_install_refuses_an_option_by_its_name(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises((TypeError, ValueError), match=name):
        eaves.megatron.install(**option)
    assert not eaves.megatron.is_active()


def test_log_probabilities_of_labels() -> None:
    model, given = tiny_gpt(V), batch()
    plain = {name: each for name, each in given.items() if name not in ("labels", "loss_mask")}
    expected = (model(**plain) / 0.7).log_softmax(-1)
    ours = {"labels": given["labels"], "output_processor": eaves.megatron.log_prob_processor}
    out = model(**plain, **ours, output_processor_context={"temperature": 0.7, "outputs": "entropy"})
    chosen = expected.gather(-1, given["labels"][..., None])[..., 0]
    torch.testing.assert_close(out.log_prob, chosen, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.entropy, -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-6)
    (wanted,) = torch.autograd.grad(chosen.mean(), model.output_layer.weight)
    alone = model(**plain, **ours, output_processor_context={"temperature": 0.7})
    assert isinstance(alone, Tensor)
    (found,) = torch.autograd.grad(alone.mean(), model.output_layer.weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="needs labels"):
        model(**plain, output_processor=eaves.megatron.log_prob_processor)


@each("tied", (False, True))
def test_the_gradient_of_the_head_is_added_to_main_grad(tied: bool) -> None:
    """The hook is that of Megatron's DistributedDataParallel, which reads main_grad: it must come after the product."""
    model, given = tiny_gpt(V, tied=tied), batch()
    _, wanted = step(model, given)
    weight = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    name = next(name for name, each in model.named_parameters() if each is weight)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    model.output_layer.gradient_accumulation_fusion = True
    seen = []

    def hook(parameter: Tensor) -> None:
        seen.append(parameter.main_grad.clone())
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        _, gradients = step(model, given, output_processor=eaves.megatron.output_processor)
    assert name not in gradients and len(seen) == 2 and weight.grad_added_to_main_grad
    assert not torch.equal(seen[0], torch.ones_like(weight))
    torch.testing.assert_close(weight.main_grad, 1 + 2 * wanted[name], rtol=1e-4, atol=1e-6)


@each("processor", (eaves.megatron.output_processor, eaves.megatron.log_prob_processor))
def test_a_weight_that_a_hook_fills_is_read_behind_the_hook(processor: Any) -> None:
    """As that of Megatron's DistributedDataParallel does with overlap_param_gather."""
    model, given = tiny_gpt(V), batch()
    layer = model.output_layer
    expected, whole = model(**given, output_processor=processor).detach(), layer.weight.detach().clone()
    layer.weight.data.fill_(float("nan"))
    layer.register_forward_pre_hook(lambda *_: (layer.weight.data.copy_(whole), None)[1])
    assert torch.equal(model(**given, output_processor=processor), expected)
    assert "forward" not in vars(layer)


def test_layers_that_are_not_served() -> None:
    model, given = tiny_gpt(V), batch()
    with eaves.megatron.install():
        model.output_layer.gtp_remat_size = 2
        with pytest.raises(NotImplementedError, match="gtp_remat"):
            step(model, given)
        model.output_layer.gtp_remat_size = 1
        model.output_layer.config = copy.copy(model.output_layer.config)
        model.output_layer.config.defer_embedding_wgrad_compute = True
        with pytest.raises(NotImplementedError, match="defer_embedding_wgrad_compute"):
            step(model, given)


def loss_over_ranks(group: distributed.ProcessGroup, is_cut: bool, smoothing: float) -> list[Tensor]:
    """The losses, this rank's gradients of hidden states and of its piece of the head, of a ColumnParallelLinear."""
    core = import_megatron()
    config = config_of(sequence_parallel=is_cut, tensor_model_parallel_size=group.size())
    layer = core.tensor_parallel.ColumnParallelLinear(
        32, V, config=config, init_method=torch.nn.init.normal_, bias=False, tp_group=group
    )
    whole, hidden, labels = head_problem()
    rank, ranks = group.rank(), group.size()
    layer.weight.data = whole[rank * V // ranks : (rank + 1) * V // ranks].clone()
    own = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks) if is_cut else slice(None)
    hidden = hidden[own].clone().requires_grad_()
    loss = eaves.megatron.output_processor(
        hidden_states=hidden, output_layer=layer, labels=labels, config=config,
        context={"label_smoothing": smoothing},
    )  # fmt: skip
    (loss * torch.linspace(-1, 1, loss.numel()).view_as(loss)).sum().backward()
    return [loss.detach(), hidden.grad, layer.weight.grad]


def head_problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(V, 32, generator=generator)
    hidden = torch.randn(LENGTH, BATCH, 32, generator=generator)
    return whole, hidden, torch.randint(0, V, (BATCH, LENGTH), generator=generator)


@each("is_cut", (False, True))
@each("smoothing", (0.0, 0.2))
def test_a_vocabulary_over_tensor_parallel_ranks(cpu_ranks: Ranks, is_cut: bool, smoothing: float) -> None:
    whole, hidden, labels = (each.double() if each.is_floating_point() else each for each in head_problem())
    whole.requires_grad_(), hidden.requires_grad_()
    log_probs = (hidden @ whole.T).log_softmax(-1).transpose(0, 1)
    chosen = log_probs.gather(-1, labels[..., None])[..., 0]
    rest = (log_probs.sum(-1) - chosen) / (V - 1)
    expected = -(1 - smoothing) * chosen - smoothing * rest
    (expected * torch.linspace(-1, 1, expected.numel()).view_as(expected)).sum().backward()
    results = cpu_ranks.run(loss_over_ranks, is_cut, smoothing, ranks=2)
    for loss, _, _ in results:
        assert_agree(loss, expected.detach().float())
    of_hidden = [gradient for _, gradient, _ in results]
    if not is_cut:
        assert torch.equal(*of_hidden)
        of_hidden = of_hidden[:1]
    assert_agree(torch.cat(of_hidden), hidden.grad.float())
    assert_agree(torch.cat([gradient for _, _, gradient in results]), whole.grad.float())


def test_the_recipe_runs() -> None:
    model, given = tiny_gpt(V), batch()
    names = run_recipe("Megatron-Core", model=model, **given)
    mask = given["loss_mask"]
    expected = (model(**given) * mask).sum() / mask.sum()
    torch.testing.assert_close(names["loss"], expected)
    assert model.output_layer.weight.grad is not None
    assert names["log_prob"].shape == (BATCH, LENGTH)
