"""Heads that fully_shard has cut over ranks with rows of their own, passed as they are: losses and gradients equal the
module's own product with torch's loss. With gloo on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import eaves
from comparison import assert_agree
from cross_entropy_test import each
from head_ranks import problem_of
from ranks import Ranks

ROWS, FEATURES, CLASSES = 6, 16, 37  # 2 ranks have 19 and 18 classes

Loss = Callable[[Any, Tensor, Tensor], Tensor]  # takes the head, its hidden states and their targets


class Model(torch.nn.Module):
    """A body and a head, and a forward that computes a loss."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(FEATURES, FEATURES)
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.head = torch.nn.Linear(FEATURES, CLASSES, bias=bias)

    def forward(self, x: Tensor, target: Tensor, loss: Loss | None = None) -> Tensor:
        hidden: Tensor = self.norm(self.body(x))
        return hidden if loss is None else loss(self.head, hidden, target)


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[rank] = -100
    return x, target


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


# ---------------------------------------------------------------------------------------------------------- the losses


def tokens_of(target: Tensor) -> Tensor:
    """Three tokens for each row."""
    return torch.stack([target, (target + 5).remainder(CLASSES), torch.full_like(target, -100)], -1)


def temperature_of(target: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, len(target))


def logits_of(head: Any, hidden: Tensor) -> Tensor:
    return head(hidden).float()  # type: ignore[no-any-return]


def torch_log_probs(head: Any, hidden: Tensor, tokens: Tensor, temperature: Tensor | None) -> Tensor:
    logits = logits_of(head, hidden)
    chosen = logits if temperature is None else logits / temperature.unsqueeze(-1)
    found = chosen.log_softmax(-1).gather(-1, tokens.clamp(min=0))
    return -found.masked_fill(tokens == -100, 0).sum()


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "mean": (
        lambda head, hidden, target: eaves.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias),
        lambda head, hidden, target: functional.cross_entropy(logits_of(head, hidden), target),
    ),
    "recompute": (
        lambda head, hidden, target: eaves.linear_cross_entropy(
            hidden, head.weight, target, linear_bias=head.bias, algorithm="recompute", label_smoothing=0.1
        ),
        lambda head, hidden, target: functional.cross_entropy(logits_of(head, hidden), target, label_smoothing=0.1),
    ),
    "none": (
        lambda head, hidden, target: eaves.linear_cross_entropy(
            hidden, head.weight, target, linear_bias=head.bias, reduction="none", outputs="entropy"
        ).loss.sum(),
        lambda head, hidden, target: functional.cross_entropy(logits_of(head, hidden), target, reduction="sum"),
    ),
    "log_prob": (
        lambda head, hidden, target: -eaves.linear_log_prob(hidden, head.weight, target, bias=head.bias).sum(),
        lambda head, hidden, target: functional.cross_entropy(logits_of(head, hidden), target, reduction="sum"),
    ),
    "tokens": (
        lambda head, hidden, target: (
            -eaves.linear_log_prob(hidden, head.weight, tokens_of(target), bias=head.bias).sum()
        ),
        lambda head, hidden, target: torch_log_probs(head, hidden, tokens_of(target), None),
    ),
    "temperature": (
        lambda head, hidden, target: (
            -eaves.linear_log_prob(
                hidden, head.weight, target, bias=head.bias, temperature=temperature_of(target)
            ).sum()
        ),
        lambda head, hidden, target: torch_log_probs(
            head, hidden, target.unsqueeze(-1), temperature_of(target)
        ),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- models


def cut_apart(model: Model, **options: Any) -> Model:
    """The body, the head and the rest in groups of their own."""
    for module in (model.body, model.head, model):
        fully_shard(module, **options)
    return model


def cut_with_the_norm(model: Model, **options: Any) -> Model:
    for module in (model.body, [model.norm, model.head], model):
        fully_shard(module, **options)
    return model


def cut_with_the_rest(model: Model, **options: Any) -> Model:
    for module in (model.body, model):
        fully_shard(module, **options)
    return model


def train(model: Model, loss: Loss, rank: int, is_within: bool, steps: int = 1) -> list[Tensor]:
    losses = []
    for step in range(steps):
        if isinstance(model, torch.distributed.fsdp.FSDPModule):
            model.set_requires_gradient_sync(step == steps - 1)
        x, target = batch(rank, step)
        found = model(x, target, loss) if is_within else loss(model.head, model(x, target), target)
        found.backward()
        losses.append(found.detach())
    return losses


def compare(
    group: distributed.ProcessGroup,
    names: tuple[str, ...],
    cut: Callable[..., Model],
    is_within: bool,
    options: dict[str, Any],
    tolerance: float,
    bias: bool = True,
    divisor: float | None = None,
    steps: int = 1,
) -> None:
    if "mesh" not in options:
        options = {**options, "mesh": DeviceMesh.from_group(group, "cpu")}
    for name in names:
        of_eaves, of_torch = LOSSES[name]
        found, expected = cut(Model(bias), **options), cut(Model(bias), **options)
        if divisor is not None:
            for model in (found, expected):
                model.head.set_force_sum_reduction_for_comms(True)  # gloo divides by nothing but the ranks
                model.head.set_gradient_divide_factor(divisor)
        for _ in range(2):  # a second step finds the modules as they were
            rank = group.rank()
            losses = train(found, of_eaves, rank, is_within, steps), train(expected, of_torch, rank, True, steps)
            torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
            ours, theirs = gradients(found), gradients(expected)
            assert ours.keys() == theirs.keys() and "head.weight" in ours
            for key in ours:
                torch.testing.assert_close(ours[key], theirs[key], rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")
            for model in (found, expected):
                model.zero_grad()


@each("is_within", (True, False))
@each("cut", (cut_apart, cut_with_the_norm, cut_with_the_rest))
def test_a_head_of_fully_shard_is_gathered_and_its_gradient_reduced(
    cut: Callable[..., Model], is_within: bool, cpu_ranks: Ranks
) -> None:
    cpu_ranks.run(compare, tuple(LOSSES), cut, is_within, {}, 2e-6, ranks=2)


def test_the_head_stays_whole_where_the_module_says_so(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(compare, ("mean", "tokens"), cut_apart, True, {"reshard_after_forward": False}, 2e-6, ranks=2)


def test_the_head_is_cut_over_fewer_ranks_between_forward_and_backward(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(compare, ("mean", "tokens"), cut_apart, True, {"reshard_after_forward": 2}, 2e-6)


def checkpointed(group: distributed.ProcessGroup) -> None:
    of_eaves, of_torch = LOSSES["recompute"]
    mesh = DeviceMesh.from_group(group, "cpu")
    found, expected = (cut_apart(Model(), mesh=mesh) for _ in range(2))

    def loss(head: Any, hidden: Tensor, target: Tensor) -> Tensor:
        again: Any = checkpoint(lambda hidden: of_eaves(head, hidden, target), hidden, use_reentrant=False)
        return again  # type: ignore[no-any-return]

    train(found, loss, group.rank(), True)
    train(expected, of_torch, group.rank(), True)
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=2e-6, atol=2e-6)


def test_the_call_is_computed_again_in_a_checkpoint(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(checkpointed, ranks=2)


def test_the_divisor_and_the_accumulation_of_the_module_hold(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(compare, ("mean", "recompute"), cut_apart, True, {}, 2e-6, False, 3.0, 2, ranks=2)


def test_the_mixed_precision_of_the_module_holds(cpu_ranks: Ranks) -> None:
    # torch's logits are rounded to bfloat16. eaves rounds neither the logits nor the loss, for any output_dtype.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    cpu_ranks.run(compare, ("mean", "tokens"), cut_apart, True, {"mp_policy": policy}, 3e-2, ranks=2)
    cpu_ranks.run(rounded, policy, ranks=2)


def rounded(group: distributed.ProcessGroup, policy: Any) -> None:
    model = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    (loss,) = train(model, LOSSES["mean"][0], group.rank(), False)
    assert loss.dtype == torch.float32 and model.head.weight.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ larger meshes


def on_a_mesh_of_two(group: distributed.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(group, ("mean", "tokens"), cut_apart, True, {"mesh": mesh}, 2e-6)


def test_replicas_of_the_pieces_are_averaged_too(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(on_a_mesh_of_two)


def with_tensor_parallel(group: distributed.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = mesh.get_local_rank("dp")
    for name in ("mean", "log_prob", "tokens"):
        of_eaves, of_torch = LOSSES[name]
        expected = []
        for rank in range(2):
            one = Model()
            train(one, of_torch, rank, True)
            expected.append(gradients(one))
        model = Model()
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
        cut_apart(model, mesh=mesh["dp"])
        train(model, of_eaves, own, True)
        for key, grad in gradients(model).items():
            torch.testing.assert_close(grad, (expected[0][key] + expected[1][key]) / 2, rtol=2e-6, atol=2e-6)


def test_a_head_of_tensor_parallel_is_gathered_to_its_piece(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(with_tensor_parallel)


# -------------------------------------------------------------------------------------------------------- distillation


def distilled(group: distributed.ProcessGroup, divergence: str, reduction: str, are_both: bool) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    found, expected = cut_apart(Model(bias=True), mesh=mesh), Model(bias=True)
    teachers = [Model(bias=True).requires_grad_(False) for _ in range(2)]
    for each_teacher in teachers:
        torch.nn.init.normal_(each_teacher.head.weight, generator=torch.Generator().manual_seed(1))
    if are_both:
        cut_apart(teachers[0], mesh=mesh)
    x, target = batch(group.rank())
    for model, teacher in ((found, teachers[0]), (expected, teachers[1])):
        with torch.no_grad():
            of_teacher = teacher(x, target)
        loss = eaves.linear_kl_div(
            model(x, target), model.head.weight, of_teacher, teacher.head.weight, targets=target,
            bias=model.head.bias, teacher_bias=teacher.head.bias, divergence=divergence, reduction=reduction,
        )  # fmt: skip
        loss.mean().backward()
    for parameter in expected.parameters():
        distributed.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
    ours, theirs = gradients(found), gradients(expected)
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=2e-6, atol=2e-6)
    assert all(each.grad is None for each in teachers[0].parameters())


@each("are_both", (True, False))
@each(("divergence", "reduction"), (("forward", "mean"), ("jsd", "none")))
def test_heads_of_student_and_teacher_are_gathered(
    divergence: str, reduction: str, are_both: bool, cpu_ranks: Ranks
) -> None:
    cpu_ranks.run(distilled, divergence, reduction, are_both, ranks=2)


# ---------------------------------------------------------------------------------------------------------- edge cases


def without_gradients(group: distributed.ProcessGroup) -> None:
    model = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    x, target = batch(group.rank())
    with torch.no_grad():
        hidden = model(x, target)
        weight = model.head.weight
        assert isinstance(weight, DTensor)
        loss = eaves.linear_cross_entropy(hidden, weight, target)
        torch.testing.assert_close(loss, functional.cross_entropy(model.head(hidden), target))
    assert model.head.weight is weight  # in pieces again


def test_the_head_is_in_pieces_again_after_the_call(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(without_gradients, ranks=2)


def wrong(group: distributed.ProcessGroup) -> None:
    model = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    x, target = batch(group.rank())
    hidden = model(x, target)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"target has shape \[5\], expected \[6\]"):
            eaves.linear_cross_entropy(hidden, model.head.weight, target[1:])
        with pytest.raises(ValueError, match="group is a Shard, but fully_shard has cut the head"):
            shard = eaves.Shard(reduce_input_grad=False)
            eaves.linear_cross_entropy(hidden, model.head.weight, target, group=shard)
        with pytest.raises(ValueError, match=r"tokens has shape \[5\]"):
            eaves.linear_log_prob(hidden, model.head.weight, target[1:])
    with pytest.raises(NotImplementedError, match=r"fully_shard .* does not work inside of torch\.vmap"):
        torch.vmap(lambda x: eaves.linear_cross_entropy(x, model.head.weight, target))(hidden[None])
    # A tensor computed from a parameter is no parameter: it would be taken for a piece of tensor parallelism.
    teacher = hidden.detach(), torch.ones(CLASSES, FEATURES)
    for derived in (model.head.weight.detach(), model.head.weight * 2):
        for function, *rest in (
            (eaves.linear_cross_entropy, target),
            (eaves.linear_log_prob, target),
            (eaves.linear_log_prob, target.unsqueeze(-1)),
            (eaves.linear_kl_div, *teacher),
        ):
            with pytest.raises(NotImplementedError, match=r"on a mesh of fully_shard, .*Pass the parameter itself"):
                function(hidden, derived, *rest)
    loss = eaves.linear_cross_entropy(hidden, model.head.weight, target)
    loss.backward()
    assert model.head.weight.grad is not None


def test_what_is_wrong_leaves_the_module_as_it_was(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(wrong, ranks=2)


def with_the_pieces(group: distributed.ProcessGroup) -> None:
    """All ranks' rows, and no rank gathers the head: sequence_parallel says that they are rows of one call."""
    model = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    one = Model()
    batches = [batch(rank) for rank in range(group.size())]
    x, target = (torch.cat(each) for each in zip(*batches))
    functional.cross_entropy(one(x, target, lambda head, hidden, _: head(hidden)), target).backward()
    own, _ = batches[group.rank()]
    shard = eaves.Shard(sequence_parallel=True)
    eaves.linear_cross_entropy(model(own, target), model.head.weight, target, group=shard).backward()
    torch.testing.assert_close(whole(model.head.weight.grad), one.head.weight.grad, rtol=2e-6, atol=2e-6)


def test_ranks_that_put_their_rows_together_keep_the_pieces(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(with_the_pieces, ranks=2)


def beside_tensor_parallel(group: distributed.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    other = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    model, (x, target) = Model(), batch(0)
    hidden, weight = model(x, target).detach(), model.head.weight
    expected = functional.cross_entropy(functional.linear(hidden, weight), target)
    cut = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))

    def loss_of(hidden: Tensor, head: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(hidden, head, target)  # type: ignore[no-any-return]

    torch.testing.assert_close(loss_of(hidden, cut), expected)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, cut), expected)
    # A head that fully_shard has cut breaks the graph.
    found = torch.compile(loss_of, backend="aot_eager")(hidden, other.head.weight)
    torch.testing.assert_close(found, expected)


def test_a_head_of_tensor_parallel_is_told_from_it(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(beside_tensor_parallel, ranks=2)


def where_it_cannot_be_told(group: distributed.ProcessGroup) -> None:
    model = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    x, target = batch(group.rank())
    hidden = model(x, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.distributed._composable_state, "_module_state_mapping")  # like a later PyTorch
        with pytest.raises(
            NotImplementedError,
            match=r"Pass the parameter itself, or gather the tensor with linear_weight\.full_tensor\(",
        ):
            eaves.linear_cross_entropy(hidden, model.head.weight, target)
    gathered = model.head.weight.full_tensor(grad_placements=[Partial("avg")])
    eaves.linear_cross_entropy(hidden, gathered, target).backward()
    expected = cut_apart(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    train(expected, LOSSES["mean"][1], group.rank(), True)
    torch.testing.assert_close(whole(model.head.weight.grad), whole(expected.head.weight.grad), rtol=2e-6, atol=2e-6)


def test_what_cannot_be_told_is_refused(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(where_it_cannot_be_told, ranks=2)


def gathered_by_the_caller(group: distributed.ProcessGroup) -> None:
    x, head, target, _ = problem_of(group)
    body = torch.eye(16, dtype=x.dtype) + 0.1
    whole = [body.clone().requires_grad_(), head.clone().requires_grad_()]
    eaves.linear_cross_entropy(x @ whole[0], whole[1], target).backward()
    model = torch.nn.ParameterList([head.clone()])
    part = torch.nn.Linear(16, 16, bias=False, dtype=x.dtype)
    part.weight.data.copy_(body.t())
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = slice(group.rank() * 12, (group.rank() + 1) * 12)
    gathered = model[0].full_tensor(grad_placements=[Partial("avg")])
    eaves.linear_cross_entropy(part(x[own]), gathered, target[own]).backward()
    assert_agree(part.weight.grad.full_tensor().t(), whole[0].grad)
    assert_agree(model[0].grad.full_tensor(), whole[1].grad)


def test_a_head_that_the_caller_gathers_has_the_mean_as_its_gradient(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(gathered_by_the_caller, ranks=2)
