"""eaves.cross_entropy of logits with classes cut over ranks, against the float64 oracle of the whole, with gloo on the
CPU. linear_cross_entropy_ranks_refusals_test.py tests how ranks agree."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_agree, assert_within
from cross_entropy_test import OPTIONS, REDUCTIONS, each, every_output, probabilities_of, targets_of, upstream_of
from layouts import random_tensor
from pairwise import pairwise
from ranks import Ranks, here

CLASSES = 129


def own_classes(group: distributed.ProcessGroup) -> slice:
    """The classes of this rank. The sizes differ; the second rank has none."""
    sizes = [60, 0, 13, 56][: group.size()]
    sizes[-1] = CLASSES - sum(sizes[:-1])
    return slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))


def part_of(tensor: Tensor, class_dim: int, own: slice) -> Tensor:
    return tensor.movedim(class_dim, -1)[..., own].movedim(-1, class_dim)


def on_a_rank(
    group: distributed.ProcessGroup,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    class_dim: int,
    asked: dict[str, tuple[str, ...]],
    options: dict[str, Any],
) -> tuple[dict[str, Tensor], Tensor]:
    """The outputs, and this rank's gradient for upstream gradients of loss, lse and entropy."""
    own = own_classes(group)
    leaf = part_of(logits, class_dim, own).clone().requires_grad_()
    if target.is_floating_point():
        target = part_of(target, class_dim, own)
    out = eaves.cross_entropy(
        leaf * 1, target, None if weight is None else weight[own], class_dim=class_dim, group=group, **asked,
        **options,
    )  # fmt: skip
    found = out._asdict()
    names = ("loss",) if options["inplace_backward"] else ("loss", "lse", "entropy")
    torch.autograd.backward([found[name] for name in names], [upstream_of(name, found[name]) for name in names])
    assert leaf.grad is not None
    return {name: each.detach() for name, each in found.items()}, leaf.grad


@each("options", OPTIONS)
def test_every_option_matches_the_oracle(options: dict[str, Any], ranks: Ranks) -> None:
    combinations = pairwise(
        (1, 2, 4), FLOATING_POINT, (((6, 5, 129), -1), ((6, 129, 5), 1)), (targets_of, probabilities_of), REDUCTIONS,
        (False, True), (False, True), (False, True),
    )  # fmt: skip
    for count, dtype, (shape, class_dim), targets, reduction, is_weighted, is_in_place, has_row_weight in combinations:
        logits = random_tensor(shape, dtype, here(), 4.0)
        target = targets(logits, class_dim)
        weight = torch.linspace(0, 2, CLASSES).to(dtype) if is_weighted else None
        row_weight = torch.linspace(0, 3, 30).view(6, 5) if has_row_weight else None
        named: dict[str, Any] = {"reduction": reduction, "row_weight": row_weight, **options}
        oracle = CrossEntropyOracle(logits, target, weight, class_dim=class_dim, **named)
        asked = every_output(target, weight, **options)
        given = {**named, "inplace_backward": is_in_place}
        what = f"{count} ranks {given}"
        results = ranks.run(on_a_rank, logits, target, weight, class_dim, asked, given, ranks=count)
        outputs, gradients = zip(*results, strict=True)
        for name, found in outputs[0].items():
            assert all(torch.equal(found, each[name]) for each in outputs[1:]), f"{name} {what}"
            counts = oracle.counts
            if is_in_place and found.shape == counts.shape:  # 0 for ignored rows, as without a group
                found = found.where(counts, 0)
            if name == "argmax":
                assert torch.equal(found, oracle.argmax.where(counts, 0) if is_in_place else oracle.argmax), what
            else:
                bound = oracle.bounds()[name]
                if is_in_place and found.shape == counts.shape:
                    bound = bound._replace(exact=torch.where(counts, bound.exact, 0.0))
                assert_within(found, bound, f"{name} {what}")
        upstreams = [
            upstream_of(name, outputs[0][name]) for name in ("loss", "lse", "entropy")[: 1 if is_in_place else 3]
        ]
        assert_within(torch.cat(gradients, class_dim), oracle.gradient(dtype, *upstreams), what)


def learned(group: distributed.ProcessGroup, is_in_place: bool) -> None:
    own = own_classes(group)
    logits = torch.zeros(1, CLASSES, dtype=torch.float64)
    logits[0, 3] = 18.0
    exact = torch.softmax(logits, -1)[0, 3] - 1
    leaf = logits[:, own].float().to(here()).requires_grad_()
    target = torch.tensor([3]).to(here())
    eaves.cross_entropy(leaf * 1, target, group=group, inplace_backward=is_in_place).backward()
    if own.start <= 3 < own.stop:
        assert leaf.grad is not None
        # Ranks exchange float32 sums, which near 1 have an error of two steps.
        assert float(leaf.grad[0, 3]) == pytest.approx(float(exact), rel=0, abs=2**-22)
        assert leaf.grad[0, 3] <= 0


@each("is_in_place", (False, True))
def test_a_learned_class_has_its_gradient(is_in_place: bool, ranks: Ranks) -> None:
    ranks.run(learned, is_in_place)


def padded(group: distributed.ProcessGroup, is_in_place: bool, is_soft: bool) -> None:
    logits = random_tensor((6, CLASSES), torch.float64, here())
    target = torch.tensor([0, 69, 3, -100, 13, 61]).to(here())
    if is_soft:
        target = probabilities_of(logits)
        target[:, 70:] = torch.nan
    weight = torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype, device=here())
    logits[:, 70:], weight[70:] = torch.nan, torch.nan
    whole = logits[:, :70].clone().requires_grad_()
    expected = eaves.cross_entropy(whole, target[:, :70] if is_soft else target, weight[:70])
    expected.backward()
    own = own_classes(group)
    ways: list[tuple[slice, dict[str, Any]]] = [
        (own, {"group": group}),
        (own, {"group": eaves.Shard(group, own.start)}),
        (slice(None), {}),
    ]
    for classes, named in ways:
        leaf = logits[:, classes].clone().requires_grad_()
        given = target[:, classes] if is_soft else target
        loss = eaves.cross_entropy(leaf * 1, given, weight[classes], classes=70, inplace_backward=is_in_place, **named)
        loss.backward()
        assert_agree(loss, expected)
        grad = torch.cat([whole.grad, logits.new_zeros(6, CLASSES - 70)], 1)
        assert_agree(leaf.grad, grad[:, own] if named else grad)


@each("is_in_place", (False, True))
@each("is_soft", (False, True))
def test_classes_of_padding_are_neither_read_nor_counted(is_soft: bool, is_in_place: bool, ranks: Ranks) -> None:
    ranks.run(padded, is_in_place, is_soft)


def resized(group: distributed.ProcessGroup) -> None:
    for classes in (CLASSES, CLASSES - 9):
        whole = random_tensor((6, classes), torch.float64, here()).requires_grad_()
        target = torch.tensor([0, 69, 3, -100, 13, 61]).to(here())
        own = slice(0, 10) if group.rank() == 0 else slice(10, classes)
        part = whole[:, own].detach().clone().requires_grad_()
        axis = -1 if group.rank() == 0 else 1  # the same one
        expected, loss = (
            eaves.cross_entropy(whole, target),
            eaves.cross_entropy(part, target, class_dim=axis, group=group),
        )
        torch.autograd.backward([expected, loss])
        assert_agree(loss, expected)
        assert_agree(part.grad, whole.grad[:, own])


def test_another_rank_may_have_other_classes_than_before(ranks: Ranks) -> None:
    ranks.run(resized, ranks=2)


def of_dtensor(group: distributed.ProcessGroup) -> None:
    logits = random_tensor((6, CLASSES), torch.float64, here())
    mesh = DeviceMesh.from_group(group, "cpu")
    for targets in (probabilities_of, targets_of):
        target = targets(logits)
        whole = logits.clone().requires_grad_()
        expected = eaves.cross_entropy(whole, target)
        expected.backward()
        cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        given = [target]
        if target.is_floating_point():
            placed = [distribute_tensor(target, mesh, [placement]) for placement in (Shard(1), Replicate())]
            given = [*placed, placed[0].to_local()]
        for of_rows in given:
            cut.grad = None
            loss = eaves.cross_entropy(cut, of_rows)
            loss.backward()
            assert_agree(loss, expected)
            assert_agree(cut.grad.full_tensor(), whole.grad)
        rows = distribute_tensor(probabilities_of(logits), mesh, [Shard(0)])
        with pytest.raises(NotImplementedError, match="expected its classes whole, or cut as the head's"):
            eaves.cross_entropy(cut, rows)
    other_mesh = init_device_mesh("cpu", (group.size(), 1))
    with pytest.raises(NotImplementedError, match="target is a DTensor on the mesh"):
        eaves.cross_entropy(cut, distribute_tensor(targets_of(logits), other_mesh, [Replicate(), Replicate()]))
    # Classes on axis 1, as torch has them.
    images = random_tensor((4, CLASSES, 5), torch.float64, here())
    of_images = targets_of(images, 1)
    loss = eaves.cross_entropy(distribute_tensor(images, mesh, [Shard(1)]), of_images)
    assert_agree(loss, eaves.cross_entropy(images, of_images))
    with pytest.raises(NotImplementedError, match="expected classes that are cut over a mesh of one axis"):
        eaves.cross_entropy(distribute_tensor(logits, cut.device_mesh, [Shard(0)]), target)


def test_a_dtensor_says_which_group(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(of_dtensor)


def of_dtensor_in_place(group: distributed.ProcessGroup) -> None:
    logits = random_tensor((6, CLASSES), torch.float64, here())
    cut = distribute_tensor(logits, DeviceMesh.from_group(group, "cpu"), [Shard(1)]).requires_grad_()
    for of_rows in (targets_of(logits), targets_of(logits).unsqueeze(-1)):
        function = eaves.log_prob if of_rows.dim() == 2 else eaves.cross_entropy
        with pytest.raises(NotImplementedError, match="inplace_backward would write over this rank's part"):
            function(cut.tanh(), of_rows, inplace_backward=True)


def test_in_place_does_not_go_with_a_dtensor(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(of_dtensor_in_place)


def wrong_axis(group: distributed.ProcessGroup, is_cut: bool) -> None:
    logits = random_tensor((8, 8, 8), torch.float64, here())
    target = targets_of(logits)
    if is_cut:
        cut = distribute_tensor(logits, DeviceMesh.from_group(group, "cpu"), [Shard(2)])
        eaves.cross_entropy(cut, target, class_dim=0 if group.rank() == 1 else -1)
    else:
        eaves.cross_entropy(logits, target, class_dim=1 if group.rank() == 1 else -1, group=group)


@each("is_cut", (False, True))
def test_ranks_have_their_classes_on_one_axis(is_cut: bool, cpu_ranks: Ranks) -> None:
    message = "expected classes that are cut over" if is_cut else "differ in class_dim"
    for _, text in cpu_ranks.refusals(wrong_axis, is_cut):
        assert message in text


def wrong_target(group: distributed.ProcessGroup, is_cut: bool) -> None:
    logits = random_tensor((6, CLASSES), torch.float64, here())
    target = probabilities_of(logits) if group.rank() == 1 else targets_of(logits)
    if is_cut:
        eaves.cross_entropy(distribute_tensor(logits, DeviceMesh.from_group(group, "cpu"), [Shard(1)]), target)
    else:
        own = own_classes(group)
        eaves.cross_entropy(logits[:, own], target[:, own] if target.dim() == 2 else target, group=group)


@each("is_cut", (False, True))
def test_a_wrong_target_of_one_rank_is_an_error_on_all(is_cut: bool, cpu_ranks: Ranks) -> None:
    expected = "target has shape" if is_cut else "differ in the kind of target: classes and probabilities"
    for rank, (kind, message) in enumerate(cpu_ranks.refusals(wrong_target, is_cut)):
        assert kind == "ValueError" and expected in message
        assert not is_cut or rank == 1 or "rank 1 of the group" in message


def as_of_a_head(group: distributed.ProcessGroup) -> None:
    logits, tokens = random_tensor((6, CLASSES), torch.float64, here()), torch.zeros(6, dtype=torch.int64).to(here())
    for named in ({"sequence_parallel": True}, {"reduce_input_grad": False}, {"reduce_dtype": torch.float64}):
        shard = eaves.Shard(group, **named)
        for function, target in (
            (eaves.cross_entropy, tokens), (eaves.log_prob, tokens), (eaves.log_prob, tokens.unsqueeze(1)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="and reduce_dtype of a Shard need a head"):
                function(logits, target, group=shard)


def test_what_a_shard_says_of_a_head_is_refused(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(as_of_a_head, ranks=2)


def compiled(group: distributed.ProcessGroup, is_soft: bool) -> None:
    logits = random_tensor((6, CLASSES), torch.float64, here())
    own = own_classes(group)
    target = probabilities_of(logits)[:, own] if is_soft else targets_of(logits)
    found = []
    for wrap in (lambda function: function, lambda function: torch.compile(function, fullgraph=True, backend="eager")):
        leaf = logits[:, own].clone().requires_grad_()

        def loss_of(logits: Tensor) -> Tensor:
            return eaves.cross_entropy(logits * 2, target, group=group)

        loss = wrap(loss_of)(leaf)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    for eager, of_graph in zip(*found):
        assert torch.equal(eager, of_graph)


@each("is_soft", (False, True))
def test_it_compiles_without_a_graph_break(is_soft: bool, ranks: Ranks) -> None:
    ranks.run(compiled, is_soft, ranks=2)


def test_what_needs_a_group_says_so() -> None:
    logits = random_tensor((6, CLASSES), torch.float32, here())
    with pytest.raises(TypeError, match=r"'first_class'; pass group=eaves\.Shard\(group, first_class=\.\.\.\)$"):
        eaves.cross_entropy(logits, targets_of(logits), first_class=0)
    with pytest.raises(ValueError, match="group is a Shard without a group, and no tensor is a DTensor"):
        eaves.cross_entropy(logits, targets_of(logits), group=eaves.Shard(first_class=0))
    with pytest.raises(ValueError, match=f"classes is {CLASSES + 1}, expected"):
        eaves.cross_entropy(logits, targets_of(logits), classes=CLASSES + 1)
    for group in (3, eaves.Shard(3)):
        with pytest.raises(TypeError, match=r"group is a int, expected a torch\.distributed\.ProcessGroup"):
            eaves.cross_entropy(logits, targets_of(logits), group=group)
