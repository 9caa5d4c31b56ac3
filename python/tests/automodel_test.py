"""eaves.automodel: compared with Automodel's own losses and with the formula, called through Automodel's recipes, and
with a head that FSDP2 shards."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from eaves import _info
from eaves._replacement import INTEGRATIONS
from integrations import PAGE, installed, run_recipe
from pairwise import pairwise
from ranks import Ranks

pytest.importorskip("nemo_automodel.components.loss.linear_ce_base")

from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.loss import LossFromFactoryConfig, build_loss_config
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.mtp import calculate_mtp_loss
from nemo_automodel.components.loss.utils import calculate_loss

from eaves.automodel import LinearCrossEntropy, is_active

SHAPE, FEATURES, CLASSES = (2, 9), 12, 40


def problem(dtype: torch.dtype, ignored: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, labels and the weight of a head."""
    torch.manual_seed(0)
    hidden = torch.randn(*SHAPE, FEATURES, dtype=dtype)
    labels = torch.randint(CLASSES, SHAPE)
    labels[0, :4] = ignored
    return hidden, labels, torch.randn(CLASSES, FEATURES, dtype=dtype)


def step(loss: Any, hidden: Tensor, labels: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss and the gradients of hidden states and weight."""
    given, head = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    found = loss(given, labels, head, **options)
    found.backward(torch.linspace(-1, 2, found.numel()).view_as(found) if found.dim() else None)
    assert given.grad is not None and head.grad is not None
    return found.detach(), given.grad, head.grad


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


# ------------------------------------------------------------------------------------------------------------ numbers


def test_automodel_gets_the_numbers_of_its_chunked_loss() -> None:
    of_labels = torch.linspace(0, 3, 18).view(SHAPE)
    for dtype, (reduction, options), ignored in pairwise(
        (torch.float32, torch.bfloat16),
        (
            ("sum", {}),
            ("sum", {"num_label_tokens": 37}),
            ("sum", {"num_label_tokens": 0}),
            ("sum", {"num_label_tokens": 37, "loss_weights": of_labels}),
            ("sum", {"loss_weights": of_labels}),
            ("mean", {}),
            ("none", {}),
        ),
        (-100, 7),
    ):
        call = problem(dtype, ignored)
        theirs = ChunkedCrossEntropy(chunk_len=5, compile=False, ignore_index=ignored, reduction=reduction)
        expected = step(theirs, *call, **options)
        found = step(LinearCrossEntropy(ignored, reduction=reduction), *call, **options)
        assert_close(found, expected, 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("softcap", (None, 0, 2.0))
def test_soft_cap_and_z_loss_are_those_of_the_formula(softcap: float | None) -> None:
    def formula(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.T).flatten(0, 1)
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        z_loss = logits.logsumexp(-1).square() * (labels.flatten() != -100)
        return functional.cross_entropy(logits, labels.flatten(), reduction="sum") + 0.01 * z_loss.sum()

    call = problem(torch.float64)
    assert_close(step(LinearCrossEntropy(logit_softcapping=softcap, z_loss=0.01), *call), step(formula, *call), 1e-12)


def test_a_head_of_float32_keeps_its_gradient_beside_hidden_states_of_16_bits() -> None:
    hidden, labels, weight = problem(torch.float32)
    exact = step(LinearCrossEntropy(), hidden.bfloat16().float(), labels, weight.bfloat16().float())
    loss, of_hidden, of_weight = step(LinearCrossEntropy(), hidden.bfloat16(), labels, weight)
    assert (of_hidden.dtype, of_weight.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(of_weight, of_weight.bfloat16().float())
    assert_close((loss, of_hidden.float(), of_weight), exact, 1e-2)
    loss, of_hidden, of_weight = step(LinearCrossEntropy(), hidden, labels, weight.bfloat16())
    assert (of_hidden.dtype, of_weight.dtype) == (torch.float32, torch.bfloat16)
    assert_close((loss, of_hidden, of_weight.float()), exact, 2e-2)


# -------------------------------------------------------------------------------------------------------------- recipes


class Model:
    """A model with the two attributes that the recipes read."""

    def __init__(self, weight: Any) -> None:
        self.head = torch.nn.Linear(FEATURES, CLASSES, bias=False)
        self.head.weight = torch.nn.Parameter(weight)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


def test_the_calls_of_a_recipe_give_the_numbers_of_the_loss_of_logits() -> None:
    hidden, labels, weight = problem(torch.float32)
    results = []
    for loss in (run_recipe("NeMo-Automodel")["loss_fn"], MaskedCrossEntropy()):
        model, given = Model(weight.clone()), hidden.clone().requires_grad_()
        common: dict[str, Any] = {"labels": labels, "model": model, "num_label_tokens": 14}
        total = calculate_loss(loss, logits=model.head(given), hidden_states=given, **common)
        total = total + calculate_mtp_loss(loss, mtp_per_depth_h=[given, 2 * given], scaling_factor=0.3, **common)
        # A packed batch has shape [1, tokens].
        packed = given.flatten(0, 1).unsqueeze(0)
        total = total + calculate_loss(
            loss, logits=model.head(packed), hidden_states=packed, **{**common, "labels": labels.flatten()}
        )
        total.backward()
        results.append((total.detach(), given.grad, model.head.weight.grad))
    assert_close(*results, 2e-6)


def test_the_configuration_of_the_page_builds_the_loss() -> None:
    import yaml

    lines = PAGE.read_text().split("## NeMo-Automodel\n")[1].split("```yaml\n")[1].split("```")[0]
    node = ConfigNode(yaml.safe_load(lines)).loss_fn
    arguments = {name: value for name, value in node.to_dict().items() if name != "_target_"}
    assert arguments == {"logit_softcapping": 30.0}
    config = build_loss_config(node._target_, **arguments)
    loss = config.build()
    assert isinstance(config, LossFromFactoryConfig) and isinstance(loss, LinearCrossEntropy)
    assert (loss.logit_softcapping, loss.reduction, loss.ignore_index) == (30.0, "sum", -100)
    assert isinstance(node.instantiate(), LinearCrossEntropy)


def test_an_unknown_option_is_refused_by_name() -> None:
    call = problem(torch.float32)
    with pytest.raises(ValueError, match="reduction is 'batchmean'"):
        LinearCrossEntropy(reduction="batchmean")
    with pytest.raises(ValueError, match="algorithm is 'fast'"):
        LinearCrossEntropy(algorithm="fast")
    with pytest.raises(ValueError, match="z_loss is -1"):
        LinearCrossEntropy(z_loss=-1)
    with pytest.raises(ValueError, match="softcap is -30"):
        LinearCrossEntropy(logit_softcapping=-30.0)
    with pytest.raises(TypeError, match="impl"):
        LinearCrossEntropy(impl="cce")  # an option of FusedLinearCrossEntropy
    for options in ({"num_label_tokens": 3}, {"loss_weights": torch.ones(SHAPE)}):
        with pytest.raises(ValueError, match="reduction is 'mean', but num_label_tokens and loss_weights need 'sum'"):
            LinearCrossEntropy(reduction="mean")(*call, **options)
    with pytest.raises(ValueError, match=r"row_weight has shape \[9\]"):
        LinearCrossEntropy()(*call, loss_weights=torch.ones(9))


def test_info_says_whether_a_loss_is_alive() -> None:
    integration = INTEGRATIONS["automodel"]
    assert integration.is_known() and not is_active()
    loss = LinearCrossEntropy()
    assert is_active()
    loss = copy.deepcopy(loss)
    assert is_active()
    del loss
    name = "active if the configuration names eaves.automodel.LinearCrossEntropy"
    assert not is_active() and name in _info.text(_info.collect())
    with installed("0.8.0"), pytest.raises(RuntimeError, match=r"nemo-automodel has version 0.8.0, expected 0.7.x"):
        integration.check_version()


# --------------------------------------------------------------------------------------------------------------- ranks


def of_cut_head(group: distributed.ProcessGroup, is_gathered_once: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the loss as a recipe does, with this rank's rows; returns the loss and the gradients of hidden states and
    of the whole head."""
    hidden, labels, weight = problem(torch.float32)
    model = Model(weight)
    fully_shard(model.head, mesh=DeviceMesh.from_group(group, "cpu"))
    assert isinstance(model.head.weight, DTensor)
    given = hidden[group.rank()].clone().requires_grad_()
    loss = LinearCrossEntropy()
    arguments: dict[str, Any] = {"num_label_tokens": 14, "grad_reduce_group": group}
    if is_gathered_once:
        found = calculate_loss(loss, labels=labels[group.rank()], model=model, hidden_states=given, **arguments)
    else:
        found = loss(given, labels[group.rank()], model.head.weight, **arguments)
    (found * group.size()).backward()
    gradient = model.head.weight.grad
    assert isinstance(gradient, DTensor) and given.grad is not None
    return found.detach(), given.grad / group.size(), gradient.full_tensor()


@pytest.mark.parametrize("is_gathered_once", (True, False))
def test_a_head_of_fsdp2_gets_the_gradient_of_all_rows(is_gathered_once: bool, two_cpu_ranks: Ranks) -> None:
    loss, of_hidden, of_weight = step(LinearCrossEntropy(), *problem(torch.float32), num_label_tokens=14)
    found = two_cpu_ranks.run(of_cut_head, is_gathered_once)
    torch.testing.assert_close(found[0][0] + found[1][0], loss)
    for rank in (0, 1):
        torch.testing.assert_close(found[rank][1], of_hidden[rank])
        # The recipe multiplies the loss by the number of ranks, and FSDP2 averages the gradients over the ranks.
        torch.testing.assert_close(found[rank][2], of_weight)
    refusals = two_cpu_ranks.refusals(with_another_group)
    assert all(kind == "ValueError" and "requires grad_reduce_group to match" in said for kind, said in refusals)


def with_another_group(group: distributed.ProcessGroup) -> None:
    hidden, labels, _ = problem(torch.float32)
    model = SimpleNamespace(head=torch.nn.Linear(FEATURES, CLASSES, bias=False))
    fully_shard(model.head, mesh=DeviceMesh.from_group(group, "cpu"))
    LinearCrossEntropy()(hidden.requires_grad_(), labels, model.head.weight)
