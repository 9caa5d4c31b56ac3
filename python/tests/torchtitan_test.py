"""eaves.torchtitan: the loss beside torchtitan's own chunked loss and the formula, the head in pieces, and steps of
torchtitan's trainer (torchtitan_jobs.py)."""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from eaves import _info
from eaves._replacement import INTEGRATIONS
from integrations import installed, run_recipe
from pairwise import pairwise
from ranks import Ranks

pytest.importorskip("torchtitan.components.loss")

from torch.distributed.fsdp import DataParallelMeshDims  # torchtitan's PyTorch has it, older ones do not
from torchtitan.components import loss as losses
from torchtitan.config import CompileConfig, Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend

import torchtitan_jobs
from eaves.torchtitan import FusedLoss, fused_loss, is_active

ROWS, LENGTH, FEATURES, CLASSES = 2, 16, 12, 40
LINE = "eaves.torchtitan.fused_loss"


class Job(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        loss: Any = field(default_factory=losses.ChunkedLossWrapper.Config)
        override: OverrideConfig = field(default_factory=OverrideConfig)


def ours(head: torch.nn.Module, **options: Any) -> FusedLoss:
    """The loss that torchtitan builds, with options of the line."""
    job = Job.Config(override=OverrideConfig(imports=[(LINE, options)]))
    apply_overrides(job.override, job)
    loss: FusedLoss = job.loss.build(compile_config=CompileConfig(enable=True))
    loss.set_lm_head(head)
    return loss


def theirs(head: torch.nn.Module) -> Any:
    loss = losses.ChunkedLossWrapper.Config().build()
    loss.set_lm_head(head)
    return loss


def problem(dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """A head, hidden states and labels."""
    torch.manual_seed(0)
    head = torch.nn.Linear(FEATURES, CLASSES, bias=bias, dtype=dtype)
    hidden = torch.randn(ROWS, LENGTH, FEATURES, dtype=dtype, requires_grad=True)
    labels = torch.randint(CLASSES, (ROWS, LENGTH))
    labels[0, :5] = -100
    return head, hidden, labels


def step(loss: Any, head: torch.nn.Module, hidden: Tensor, labels: Tensor, tokens: Any) -> dict[str, Tensor]:
    """The loss and the gradients, by name."""
    hidden = hidden.detach().clone().requires_grad_()
    head.zero_grad()
    found, metrics = loss(hidden, labels, tokens, positions=torch.zeros_like(labels))
    assert metrics == {}
    found.backward()
    gradients = {name: each.grad.clone() for name, each in head.named_parameters() if each.grad is not None}
    assert hidden.grad is not None
    return {"loss": found.detach(), "hidden": hidden.grad, **gradients}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype, name
        distance = (found[name].double() - each.double()).norm()
        assert distance <= tolerance * each.double().norm(), (name, distance, each.norm())


# ------------------------------------------------------------------------------------------------------------ numbers


def test_torchtitan_gets_the_loss_and_the_gradients_of_its_own_wrapper() -> None:
    for dtype, bias, is_frozen, divisor in pairwise(
        (torch.float32, torch.bfloat16), (False, True), (False, True), (None, torch.tensor(27), torch.tensor(99.0))
    ):
        head, hidden, labels = problem(dtype, bias)
        head.requires_grad_(not is_frozen)
        expected = step(theirs(head), head, hidden, labels, divisor)
        found = step(ours(head), head, hidden, labels, divisor)
        # Theirs rounds logits to bfloat16, and a gradient of the head for each chunk.
        assert_close(found, expected, 2e-6 if dtype == torch.float32 else 2e-2)


def test_z_loss_is_that_of_the_formula_and_follows_the_upstream_gradient() -> None:
    head, hidden, labels = problem(torch.float64)
    found = step(lambda *a, **k: (3 * ours(head, z_loss=0.01)(*a, **k)[0], {}), head, hidden, labels, torch.tensor(27))

    def formula(hidden: Tensor, labels: Tensor, tokens: Tensor, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits, counts = head(hidden).flatten(0, 1), labels.flatten() != -100
        z_loss = 0.01 * (logits.logsumexp(-1).square() * counts).sum()
        return 3 * (functional.cross_entropy(logits, labels.flatten(), reduction="sum") + z_loss) / tokens, {}

    assert_close(found, step(formula, head, hidden, labels, torch.tensor(27)), 1e-12)


def test_the_soft_cap_of_a_head_is_taken() -> None:
    torchtitan_jobs.stub_imports()
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    for multiplier, cap in ((0.5, None), (3.0, 2.0)):
        config = SoftCappedLinear.Config(
            in_features=FEATURES, out_features=CLASSES, output_multiplier=multiplier, output_soft_cap_temp=cap
        )
        head, hidden, labels = config.build(), *problem()[1:]
        expected = step(theirs(head), head, hidden, labels, torch.tensor(27))
        assert_close(step(ours(head), head, hidden, labels, torch.tensor(27)), expected, 2e-6)


def test_without_a_label_that_counts_loss_and_gradients_are_0() -> None:
    head, hidden, labels = problem()
    found = step(ours(head), head, hidden, torch.full_like(labels, -100), torch.tensor(0))
    assert all((each == 0).all() for each in found.values())


def test_a_validation_gets_the_loss_of_any_length_without_a_gradient() -> None:
    head, hidden, labels = problem()
    with torch.no_grad():
        found, _ = ours(head)(hidden[:, :7], labels[:, :7], torch.tensor(9))
    expected = functional.cross_entropy(head(hidden)[:, :7].flatten(0, 1), labels[:, :7].flatten(), reduction="sum") / 9
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_the_head_is_as_it_was_behind_a_call_and_an_error() -> None:
    head, hidden, labels = problem()
    loss = ours(head)
    loss(hidden, labels)
    assert "forward" not in vars(head)
    head.forward = replaced = lambda hidden: hidden
    with pytest.raises(ValueError, match="target has shape"):
        loss(hidden, labels[:, :3])
    assert vars(head)["forward"] is replaced


# ------------------------------------------------------------------------------------------------- the configuration


def test_the_recipe_puts_the_loss_into_the_configuration() -> None:
    config = run_recipe("torchtitan", config=Job.Config())["config"]
    (line,) = apply_overrides(config.override, config)
    assert line.startswith(f"[Override] {LINE}: loss ChunkedLossWrapper.Config -> FusedLoss.Config")
    assert isinstance(config.loss, FusedLoss.Config)
    assert (config.loss.z_loss, config.loss.num_chunks) == (1e-4, 8)


def test_another_loss_wrapper_or_head_is_refused_by_name() -> None:
    class Wrapper(losses.ChunkedLossWrapper):
        @dataclass(kw_only=True, slots=True)
        class Config(losses.ChunkedLossWrapper.Config):
            pass

    class Head(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(
        NotImplementedError, match=r"the loss is a .*Wrapper.Config, expected ChunkedLossWrapper.Config"
    ):
        fused_loss(Wrapper.Config())
    with pytest.raises(NotImplementedError, match=r"the loss is a MSELoss.Config, expected CrossEntropyLoss.Config"):
        fused_loss(losses.ChunkedLossWrapper.Config(loss_fn=losses.MSELoss.Config()))
    with pytest.raises(ValueError, match="algorithm is 'fast'"):
        fused_loss(losses.ChunkedLossWrapper.Config(), algorithm="fast")
    with pytest.raises(ValueError, match="z_loss is -1"):
        fused_loss(losses.ChunkedLossWrapper.Config(), z_loss=-1)
    with pytest.raises(NotImplementedError, match="lm_head is a Head with a forward of its own"):
        ours(Head(FEATURES, CLASSES))
    head = torch.nn.Linear(FEATURES, CLASSES)
    vars(head)["forward"] = lambda input: 2 * functional.linear(input, head.weight)
    with pytest.raises(NotImplementedError, match="lm_head is a Linear with a forward of its own"):
        ours(head)
    with pytest.raises(RuntimeError, match="no head is known"):
        fused_loss(losses.ChunkedLossWrapper.Config()).build()(*problem()[1:])


def test_info_says_whether_a_loss_is_alive() -> None:
    integration = INTEGRATIONS["torchtitan"]
    assert integration.is_known() and not is_active()
    loss = ours(problem()[0])
    assert is_active() and "active in this process" in _info.text(_info.collect())
    loss = copy.deepcopy(loss)
    assert is_active()
    del loss
    assert not is_active() and f"active if the configuration names {LINE}" in _info.text(_info.collect())
    with installed("0.4.0"), pytest.raises(RuntimeError, match=r"torchtitan has version 0.4.0, expected 0.3.x"):
        integration.check_version()


# -------------------------------------------------------------------------------------------------------------- ranks


class Model(torch.nn.Module):
    """Some of torchtitan's decoder: a norm and a head, which fully_shard cuts together."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.norm, self.lm_head = torch.nn.RMSNorm(FEATURES), head

    def forward(self, hidden: Any) -> Any:
        return self.norm(hidden)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@functools.cache
def mesh_of(ranks_of_rows: int) -> DeviceMesh:
    """One for a process: DTensors keep the first of equal meshes, and fully_shard wants the same object."""
    return init_device_mesh("cpu", (ranks_of_rows, 2 // ranks_of_rows), mesh_dim_names=("dp_shard", "tp"))


def full_dtensor(
    group: distributed.ProcessGroup, ranks_of_rows: int, is_fully_sharded: bool, is_ours: bool
) -> dict[str, Tensor]:
    """A step with all tensors on one mesh, as parallelism.spmd_backend "full_dtensor" has them."""
    set_spmd_backend("full_dtensor")
    mesh, (head, hidden, labels) = mesh_of(ranks_of_rows), problem()
    model, is_cut = Model(head), ranks_of_rows == 1
    head.weight = torch.nn.Parameter(
        distribute_tensor(head.weight.detach(), mesh, (Replicate(), Shard(0) if is_cut else Replicate()))
    )
    model.norm.weight = torch.nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh, (Replicate(),) * 2))
    for modules in ([model.norm, head], model) if is_fully_sharded else ():
        fully_shard(modules, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp_shard"))
    if is_fully_sharded:
        head.set_gradient_divide_factor(1.0)
        head.set_force_sum_reduction_for_comms(True)
    rows = (Shard(0), Replicate())
    given = distribute_tensor(hidden.detach(), mesh, rows).requires_grad_()
    loss, _ = (ours if is_ours else theirs)(head)(model(given), distribute_tensor(labels, mesh, rows), torch.tensor(27))
    if is_fully_sharded:
        # An event of an eager step would stop the capture of a CUDA graph.
        assert head._get_fsdp_state()._comm_ctx.all_gather_state is None
    loss.backward()
    local = loss.to_local() if isinstance(loss, DTensor) else loss
    assert head.weight.grad is not None and model.norm.weight.grad is not None
    return {
        "loss": local.detach().clone(),
        "hidden": whole(given.grad),
        "head": whole(head.weight.grad),
        "norm": whole(model.norm.weight.grad),
    }


@pytest.mark.parametrize(("ranks_of_rows", "is_fully_sharded"), ((1, True), (2, True), (2, False)))
def test_a_head_on_the_mesh_of_all_axes(ranks_of_rows: int, is_fully_sharded: bool, two_cpu_ranks: Ranks) -> None:
    ours, theirs = (
        two_cpu_ranks.run(full_dtensor, ranks_of_rows, is_fully_sharded, is_ours) for is_ours in (True, False)
    )
    for found, exact in zip(ours, theirs, strict=True):
        assert_close(found, exact, 2e-6)


def spmd_types(group: distributed.ProcessGroup, is_ours: bool) -> dict[str, Tensor]:
    """A step with a vocabulary in pieces that no tensor names. PyTorch 2.13 cannot cut such a head further."""
    set_spmd_backend("spmd_types")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    head, hidden, labels = problem()
    head.weight = torch.nn.Parameter(head.weight.detach().chunk(2)[group.rank()])
    if is_ours:
        loss: Any = ours(head)
    else:
        inner = losses.CrossEntropyLoss.Config(global_vocab_size=CLASSES)
        loss = losses.ChunkedLossWrapper.Config(loss_fn=inner).build()
        loss.set_lm_head(head)
    with set_current_spmd_mesh(mesh):
        return step(loss, head, hidden, labels, torch.tensor(27))


def test_a_vocabulary_in_pieces_gives_each_rank_its_part_of_the_gradient(two_cpu_ranks: Ranks) -> None:
    for found, exact in zip(two_cpu_ranks.run(spmd_types, True), two_cpu_ranks.run(spmd_types, False), strict=True):
        assert_close(found, exact, 2e-6)


@pytest.mark.parametrize("ranks_of_vocabulary", ("1", "2"))
def test_torchtitans_trainer_takes_the_same_steps(ranks_of_vocabulary: str, two_cpu_ranks: Ranks) -> None:
    layout = ["--parallelism.spmd_backend", "partial_dtensor"]
    layout += ["--parallelism.tensor_parallel_degree", ranks_of_vocabulary]
    expected = two_cpu_ranks.run(torchtitan_jobs.train, layout)
    found = two_cpu_ranks.run(torchtitan_jobs.train, [*layout, "--override.imports", LINE])
    assert (expected[0][0], found[0][0]) == ("ChunkedLossWrapper", "FusedLoss")
    for (_, steps, parameters), (_, exact_steps, exact) in zip(found, expected, strict=True):
        assert len(steps) == 3 and steps == pytest.approx(exact_steps, rel=2e-6)
        assert_close(parameters, exact, 1e-5)
