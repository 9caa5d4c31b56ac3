"""A vocabulary in shards: statistics, merge and gradient are the loss and the gradient of the whole, in one process and
over torch.distributed."""

import itertools
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_agree, assert_within
from cross_entropy_test import OPTIONS, REDUCTIONS, each, probabilities_of, targets_of
from layouts import random_tensor
from pairwise import pairwise
from refusals import assert_refused_by

CLASSES = 130
CUTS = (0, 1, 33, 97, 130)  # a shard of one class, and others of different sizes


def shard_options(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def through_shards(
    logits: Tensor, target: Tensor, weight: Tensor | None, cuts: Sequence[int], grad_loss: Tensor | None, **options: Any
) -> tuple[eaves.CrossEntropyMerged, Tensor]:
    """The merged outputs, and the gradients of the shards side by side."""
    of_shard = shard_options(options, "ignore_index", "label_smoothing", "softcap", "scale", "class_dim")
    of_merge = shard_options(options, "ignore_index", "label_smoothing", "reduction", "z_loss", "normalizer")
    of_gradient = shard_options(options, *of_shard, "reduction", "z_loss")
    axis = options.get("class_dim", -1)
    classes = cuts[-1]
    is_soft = target.is_floating_point()
    shards = [
        (
            logits.narrow(axis, low, high - low),
            target.narrow(axis, low, high - low) if is_soft else target,
            None if weight is None else weight[low:high],
            low,
        )
        for low, high in itertools.pairwise(cuts)
    ]
    statistics = [
        eaves.cross_entropy_shard(x, t, w, first_class=low, classes=classes, **of_shard) for x, t, w, low in shards
    ]
    merged = eaves.cross_entropy_merge(
        torch.stack(statistics), None if is_soft else target, classes=classes, has_weight=weight is not None, **of_merge
    )
    upstream = torch.ones_like(merged.loss) if grad_loss is None else grad_loss
    gradients = [
        eaves.cross_entropy_shard_gradient(upstream, x, t, merged, w, first_class=low, classes=classes, **of_gradient)
        for x, t, w, low in shards
    ]
    return merged, torch.cat(gradients, axis)


@each("options", [{}, *OPTIONS])
def test_shards_are_the_whole(options: dict[str, Any], device: torch.device) -> None:
    layouts = (((4, 3, CLASSES), -1), ((4, CLASSES, 3), 1))
    kinds = (targets_of, probabilities_of)
    for dtype, (shape, class_dim), targets, is_weighted, reduction in pairwise(
        FLOATING_POINT, layouts, kinds, (False, True), REDUCTIONS
    ):
        logits = random_tensor(shape, dtype, device, 3.0)
        target = targets(logits, class_dim)
        weight = torch.linspace(0, 2, CLASSES, device=device).to(dtype) if is_weighted else None
        named = {"class_dim": class_dim, "reduction": reduction, **options}
        oracle = CrossEntropyOracle(logits, target, weight, **named)
        grad_loss = torch.full_like(oracle.loss.exact, 1.5, device=device).to(oracle.result_dtype)
        merged, gradient = through_shards(logits, target, weight, CUTS, grad_loss, **named)
        bounds = {name: bound for name, bound in oracle.bounds().items() if name in merged._fields}
        assert len(bounds) == 4
        for name, bound in bounds.items():
            assert_within(getattr(merged, name), bound, f"{name} {dtype} {named}")
        assert torch.equal(merged.argmax.cpu(), oracle.argmax)
        assert_within(gradient, oracle.gradient(dtype, 1.5), f"{dtype} {named}")


def test_a_row_whose_classes_in_a_shard_are_minus_infinity_merges(device: torch.device) -> None:
    # As padded vocabularies are: a shard of nothing but padding.
    logits = random_tensor((5, CLASSES), torch.float32, device)
    logits[:, 97:] = -torch.inf
    target = torch.arange(5, device=device)
    oracle = CrossEntropyOracle(logits[:, :97], target)
    merged, gradient = through_shards(logits, target, None, CUTS, None)
    assert_within(merged.loss, oracle.loss)
    assert_within(gradient[:, :97], oracle.gradient(torch.float32))
    assert not gradient[:, 97:].any()


def test_the_normalizer_goes_to_the_merge(device: torch.device) -> None:
    logits = random_tensor((5, CLASSES), torch.float32, device)
    target = targets_of(logits)
    merged, gradient = through_shards(logits, target, None, CUTS, None, normalizer=7.0)
    oracle = CrossEntropyOracle(logits, target, normalizer=7.0)
    assert_within(merged.loss, oracle.loss)
    assert_within(gradient, oracle.gradient(torch.float32))


def test_what_shards_refuse(device: torch.device) -> None:
    logits, target = random_tensor((5, 10), torch.float32, device), torch.arange(5, device=device)
    shard = {"first_class": 10, "classes": 30}

    def refused(kind: type[Exception], sentence: str, *arguments: Any, **named: Any) -> None:
        assert_refused_by(eaves.cross_entropy_shard, "cross_entropy", kind, sentence, *arguments, **{**shard, **named})

    refused(ValueError, r"classes 25 to 25 \+ 10, expected a part of 30", logits, target, first_class=25)
    refused(ValueError, r"classes -1 to", logits, target, first_class=-1)
    refused(ValueError, r"expected \[5, 10\] for probabilities", logits, logits[:, 1:])
    refused(ValueError, r"weight has shape \[30\], expected \[10\]", logits, target, torch.ones(30, device=device))
    refused(NotImplementedError, r"no autograd", logits.detach().requires_grad_(), target)
    statistics = eaves.cross_entropy_shard(logits, target, **shard)

    def merge_refused(sentence: str, statistics: Tensor, **named: Any) -> None:
        assert_refused_by(
            eaves.cross_entropy_merge, "cross_entropy", ValueError, sentence, statistics, target, classes=30, **named
        )

    sentence = r"statistics has shape \[5, 10\], expected \[5, 5, 10\] \(of each shard, for each row\)"
    merge_refused(sentence, statistics)
    merge_refused(r"statistics has dtype bfloat16, expected", statistics[None].bfloat16())
    merge_refused(r"only the mean divides", statistics[None], reduction="sum", normalizer=2.0)


# ------------------------------------------------------------------------------------------------- torch.distributed


class ShardedCrossEntropy(torch.autograd.Function):
    """The example of the documentation."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, rank: int, ranks: int, group: Any) -> Tensor:
        shard = {"first_class": rank * logits.shape[-1], "classes": ranks * logits.shape[-1]}
        own = eaves.cross_entropy_shard(logits, target, **shard)
        gathered = own.new_empty(ranks, *own.shape)
        torch.distributed.all_gather(list(gathered), own, group=group)
        merged = eaves.cross_entropy_merge(gathered, target, classes=shard["classes"])
        ctx.save_for_backward(logits, target, *merged)
        ctx.shard = shard
        return merged.loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, *merged = ctx.saved_tensors
        merged = eaves.CrossEntropyMerged(*merged)
        grad = eaves.cross_entropy_shard_gradient(grad_loss, logits, target, merged, **ctx.shard)
        return grad, None, None, None, None


def run_rank(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("localhost", port, ranks, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    logits = random_tensor((6, 40), torch.float32)
    target = targets_of(logits)
    whole = logits.clone().requires_grad_()
    expected = eaves.cross_entropy(whole, target)
    expected.backward()
    assert whole.grad is not None
    columns = slice(rank * 20, rank * 20 + 20)
    own = logits[:, columns].clone().requires_grad_()
    loss = ShardedCrossEntropy.apply(own, target, rank, ranks, None)
    loss.backward()
    assert_agree(loss.detach(), expected.detach())
    assert own.grad is not None
    assert_agree(own.grad, whole.grad[:, columns])
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_loss_and_each_its_gradient() -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (2, port), nprocs=2)


def test_tensors_of_two_devices_are_refused(device: torch.device) -> None:
    logits, target = torch.zeros(3, 4, device=device), torch.tensor([0, 1, 3], device=device)
    weight, one = torch.ones(4, device=device), torch.ones((), device=device)
    shard: dict[str, Any] = {"first_class": 0, "classes": 4}
    statistics = eaves.cross_entropy_shard(logits, target, weight, **shard)
    merged = eaves.cross_entropy_merge(statistics[None], target, classes=4, has_weight=True)
    with pytest.raises(ValueError, match=r"^cross_entropy: target is on meta, expected .* \(as input\)$"):
        eaves.cross_entropy_shard(logits, target.to("meta"), weight, **shard)
    with pytest.raises(ValueError, match=r"^cross_entropy: weight is on meta, expected .* \(as input\)$"):
        eaves.cross_entropy_shard(logits, target, weight.to("meta"), **shard)
    with pytest.raises(ValueError, match=r"^cross_entropy: target is on meta, expected .* \(as statistics\)$"):
        eaves.cross_entropy_merge(statistics[None], target.to("meta"), classes=4)
    with pytest.raises(ValueError, match=r"^cross_entropy: grad_loss is on meta, expected .* \(as input\)$"):
        eaves.cross_entropy_shard_gradient(one.to("meta"), logits, target, merged, weight, **shard)
    for name in ("lse", "target_mass", "divisor"):
        moved = merged._replace(**{name: getattr(merged, name).to("meta")})
        with pytest.raises(ValueError, match=rf"^cross_entropy: merged\.{name} is on meta, expected .* \(as input\)$"):
            eaves.cross_entropy_shard_gradient(one, logits, target, moved, weight, **shard)
