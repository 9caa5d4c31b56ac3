"""Failures of other implementations of cross entropy, each as a test that would find it here.

They are from the issue trackers of training libraries; the shapes are those at which they were seen.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_within
from cross_entropy_test import each, probabilities_of, targets_of
from layouts import random_tensor


def gradient(input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    leaf = input.detach().requires_grad_()
    loss = eaves.cross_entropy(leaf, target, weight, **options)
    return torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]


@each("dtype", FLOATING_POINT)
def test_the_gradient_of_a_learnt_target_does_not_cancel(dtype: torch.dtype, device: torch.device) -> None:
    # p - 1 with p rounded to 16 bits, or to float32, is 0 long before the target is learnt.
    for margin in (4.0, 8.0, 12.0, 14.0):
        logits = torch.zeros(3, 100, dtype=dtype, device=device)
        logits[:, 42] = margin
        target = torch.full((3,), 42, device=device)
        grad = gradient(logits, target, reduction="sum")
        rest = 99 * math.exp(-margin)
        exact = -rest / (1 + rest)
        assert (grad[:, 42] < 0).all(), f"{dtype} margin {margin}"
        assert_within(grad, CrossEntropyOracle(logits, target, reduction="sum").gradient(dtype))
        # And it is what the other classes give up.
        assert abs(grad[0, 42].item() - exact) <= 2 ** -(8 if dtype == torch.bfloat16 else 10) * abs(exact) + 1e-6


def test_padded_columns_of_the_vocabulary_do_not_enter_the_sum(device: torch.device) -> None:
    # 50257 classes in rows of 50304, as padded heads give them; what is in the padding must not matter.
    for dtype in (torch.bfloat16, torch.float32):
        wide = torch.full((3, 50304), 1e4, dtype=dtype, device=device)
        logits = wide[:, :50257]
        logits.copy_(random_tensor((3, 50257), dtype, device))
        target = torch.tensor([0, 50256, 77], device=device)
        for padding in (1e4, math.nan):
            wide[:, 50257:] = padding
            oracle = CrossEntropyOracle(logits, target)
            assert_within(eaves.cross_entropy(logits, target), oracle.loss)
            assert_within(gradient(logits, target), oracle.gradient(dtype))


@each("dtype", [torch.int32, torch.int64])
def test_targets_that_are_not_aligned_to_16_bytes(dtype: torch.dtype, device: torch.device) -> None:
    # labels[:, 1:] of a sequence, for every shift.
    tokens = torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    for shift in range(1, 9):
        target = tokens[:, shift:]
        logits = random_tensor((*target.shape, 50), torch.bfloat16, device)
        assert_within(eaves.cross_entropy(logits, target), CrossEntropyOracle(logits, target).loss)
        flat = tokens.view(-1)[shift : shift + 7]
        assert_within(eaves.cross_entropy(logits[0, :7], flat), CrossEntropyOracle(logits[0, :7], flat).loss)


def test_logits_that_are_not_aligned_to_16_bytes(device: torch.device) -> None:
    storage = random_tensor((8 * 1001,), torch.bfloat16, device)
    for shift in range(1, 9):
        logits = storage[shift : shift + 7 * 1001].view(7, 1001)
        target = targets_of(logits)
        oracle = CrossEntropyOracle(logits, target)
        assert_within(eaves.cross_entropy(logits, target), oracle.loss)
        assert_within(gradient(logits, target), oracle.gradient(torch.bfloat16))


def test_an_upstream_gradient_of_stride_0(device: torch.device) -> None:
    # As .sum() and .mean() of the rows' losses hand down: one number, that is read for every row.
    for dtype in FLOATING_POINT:
        logits = random_tensor((3, 5, 33), dtype, device).requires_grad_()
        target = targets_of(logits)
        loss = eaves.cross_entropy(logits, target, reduction="none")
        for grad_loss in (torch.full((), 2.5), torch.tensor([[1.0], [2.0], [3.0]]), torch.arange(5.0)):
            expanded = grad_loss.to(device, loss.dtype).expand(3, 5)
            assert 0 in expanded.stride()
            (grad,) = torch.autograd.grad(loss, logits, expanded, retain_graph=True)
            oracle = CrossEntropyOracle(logits, target, reduction="none")
            assert_within(grad, oracle.gradient(dtype, expanded))


def test_no_class_weight_is_read_at_ignore_index(device: torch.device) -> None:
    # weight[-100] is in front of the weights, weight[V] behind them; NaN on both sides and in a class that is ignored.
    storage = torch.full((300,), math.nan, device=device)
    weight = storage[120:130]
    weight.copy_(torch.linspace(0.5, 2, 10))
    logits = random_tensor((6, 10), torch.float32, device)
    target = torch.tensor([1, -100, 3, -100, 9, 0], device=device)
    for reduction in ("none", "sum", "mean"):
        oracle = CrossEntropyOracle(logits, target, weight, reduction=reduction)
        assert_within(eaves.cross_entropy(logits, target, weight, reduction=reduction), oracle.loss)
        assert_within(gradient(logits, target, weight, reduction=reduction), oracle.gradient(torch.float32))
        assert not gradient(logits, target, weight, reduction=reduction)[[1, 3]].any()
    behind = torch.where(target == -100, 10, target)
    assert_within(
        eaves.cross_entropy(logits, behind, weight, ignore_index=10), CrossEntropyOracle(logits, target, weight).loss
    )
    weight[4] = math.nan  # of no target, but for that which is ignored
    poisoned = torch.where(target == -100, 4, target)
    assert eaves.cross_entropy(logits, poisoned, weight, ignore_index=4).isfinite()


def test_the_mean_where_every_row_is_ignored(device: torch.device) -> None:
    for weight in (None, torch.ones(10, device=device)):
        for smoothing in (0.0, 0.1):
            logits = random_tensor((6, 10), torch.float32, device).requires_grad_()
            target = torch.full((6,), -100, device=device)
            loss = eaves.cross_entropy(logits, target, weight, label_smoothing=smoothing)
            loss.backward()
            assert loss.item() == 0.0 and not logits.grad.any()
            # In place too: the logits become their gradient, 0.
            work = logits * 1
            loss = eaves.cross_entropy(work, target, weight, label_smoothing=smoothing, inplace_backward=True)
            assert loss.item() == 0.0 and not torch.autograd.grad(loss, work)[0].any()


def test_gradients_are_not_scaled_twice_by_a_second_backward(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_tensor((6, 10), dtype, device).requires_grad_()
        target = targets_of(logits)
        loss = eaves.cross_entropy(logits, target)
        scale = torch.tensor(1024.0, device=device)
        first, second = (torch.autograd.grad(loss, logits, scale, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert_within(first, CrossEntropyOracle(logits, target).gradient(dtype, 1024.0))
        (loss * 1024.0).backward(retain_graph=True)
        (loss * 1024.0).backward()
        torch.testing.assert_close(logits.grad, first + second)


def test_logits_are_not_modified_unless_asked_for(device: torch.device) -> None:
    logits = random_tensor((6, 10), torch.float32, device).requires_grad_()
    before, version = logits.detach().clone(), logits._version
    eaves.cross_entropy(logits, targets_of(logits)).backward()
    assert torch.equal(logits.detach(), before) and logits._version == version


@pytest.mark.parametrize("classes", [128256])
def test_more_elements_than_an_int32_counts(classes: int, cuda: torch.device) -> None:
    # 2^31 elements and a few rows: those behind it are read and written where they are.
    rows = 2**31 // classes + 8
    needed = 2 * rows * classes * 2 + 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device=cuda)
    logits[-4:] = random_tensor((4, classes), torch.bfloat16, cuda)
    target = torch.arange(rows, device=cuda) % classes
    target[-1] = classes - 1
    last, last_target = logits[-4:].clone(), target[-4:].clone()
    loss = eaves.cross_entropy(logits, target, reduction="none")
    oracle = CrossEntropyOracle(last, last_target, reduction="none")
    assert_within(loss[-4:], oracle.loss)
    torch.testing.assert_close(loss[:-4], torch.full_like(loss[:-4], math.log(classes)))
    grad = gradient(logits, target, reduction="none")
    assert_within(grad[-4:], oracle.gradient(torch.bfloat16))
    assert (grad[0, 1:] == grad[rows // 2, -1]).all()


def test_a_row_does_not_depend_on_how_many_others_there_are(device: torch.device) -> None:
    # Bit for bit, and from run to run: no choice by timing, no atomics.
    for classes in (1000, 50257):
        logits = random_tensor((33, classes), torch.bfloat16, device)
        target = targets_of(logits)
        expected = eaves.cross_entropy(logits, target, reduction="none")
        expected_grad = gradient(logits, target, reduction="sum")
        for _ in range(3):
            assert torch.equal(eaves.cross_entropy(logits, target, reduction="none"), expected)
            assert torch.equal(gradient(logits, target, reduction="sum"), expected_grad)
        assert torch.equal(eaves.cross_entropy(logits, target), eaves.cross_entropy(logits, target))
        if device.type == "cpu":  # a GPU cuts long rows into pieces, as many as it has rows too few for
            for rows in (1, 2, 7, 32):
                assert torch.equal(eaves.cross_entropy(logits[:rows], target[:rows], reduction="none"), expected[:rows])
                grad = gradient(logits[:rows], target[:rows], reduction="sum")
                assert torch.equal(grad, expected_grad[:rows])


@each("dtype", FLOATING_POINT)
def test_a_block_of_minus_infinity_at_the_start_of_a_row(dtype: torch.dtype, device: torch.device) -> None:
    # exp(-inf - -inf) of a block whose maximum is -inf is NaN, and stays.
    for start in (1, 64, 1024, 5000):
        logits = random_tensor((4, 6001), dtype, device)
        logits[:, :start] = -math.inf
        target = torch.tensor([start, 6000, start + 5, 5999], device=device)
        oracle = CrossEntropyOracle(logits, target)
        out = eaves.cross_entropy(logits, target, outputs=("entropy", "lse"))
        assert_within(out.loss, oracle.loss)
        assert_within(out.entropy, oracle.bounds()["entropy"])
        assert_within(gradient(logits, target), oracle.gradient(dtype))


@each("classes", [50257, 129920, 151665])  # GPT-2, and vocabularies of current models that are multiples of nothing
def test_vocabularies_that_are_multiples_of_nothing(classes: int, device: torch.device) -> None:
    for dtype, options in ((torch.bfloat16, {"label_smoothing": 0.1, "z_loss": 1e-4}), (torch.float32, {})):
        logits = random_tensor((3, classes), dtype, device, 2.0)
        logits[1, -1] = 30.0  # the last class carries the sum
        target = torch.tensor([classes - 1, 5, 0], device=device)
        oracle = CrossEntropyOracle(logits, target, **options)
        out = eaves.cross_entropy(logits, target, outputs="argmax", **options)
        assert_within(out.loss, oracle.loss)
        assert torch.equal(out.argmax.cpu(), oracle.argmax)
        assert_within(gradient(logits, target, **options), oracle.gradient(dtype))
    soft = probabilities_of(logits)
    assert_within(eaves.cross_entropy(logits, soft), CrossEntropyOracle(logits, soft).loss)
