"""Failures of other implementations of a fused head, each as a test that would find it here.

They are from the issue trackers of training libraries; the shapes are those at which they were seen. A second backward,
frozen tensors and sums of 16 bits are in linear_cross_entropy_gradient_test.py.
"""

import math

import torch

import eaves
from comparison import FLOATING_POINT, assert_within
from cross_entropy_test import REDUCTIONS, each
from layouts import random_tensor
from linear_cross_entropy_cases import LinearOracle, assert_gradients
from linear_cross_entropy_gradient_test import ALGORITHMS, check, leaves
from linear_cross_entropy_test import problem
from pairwise import pairwise


@each("classes", [50257, 129920, 151665])  # GPT-2, and vocabularies of current models that are multiples of nothing
def test_vocabularies_that_are_multiples_of_nothing(classes: int, device: torch.device) -> None:
    # The odd ones, in 16 bits, are where a vector of classes would begin anywhere.
    x, head, target, _ = problem((3, 20), classes, torch.bfloat16 if classes % 2 else torch.float32, device)
    target[0] = classes - 1  # features that are no multiple of 8, the last class
    check(x, head, target)


def test_logits_are_not_rounded_before_their_softmax(device: torch.device) -> None:
    # Of logits rounded to bfloat16, losses are off by 1e-2 and more at this deviation.
    for deviation in (1.3, 4.0, 20.0):
        x = random_tensor((64, 128), torch.bfloat16, device)
        head = random_tensor((1000, 128), torch.bfloat16, device, deviation / 128**0.5)
        target = torch.arange(64, device=device) * 7
        oracle = LinearOracle(x, head, target, reduction="none")
        loss = eaves.linear_cross_entropy(x, head, target, reduction="none")
        assert_within(loss, oracle.bounds(torch.float32)["loss"])
        check(x, head, target)


@each("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_gradient_of_a_learnt_target_does_not_cancel(dtype: torch.dtype, device: torch.device) -> None:
    # p - 1 of a probability next to 1: rounded to 16 bits p is 1. (In float32 what is left is the rounding of lse.)
    x, head = torch.zeros(2, 4, dtype=dtype, device=device), torch.zeros(5, 4, dtype=dtype, device=device)
    x[:, 0], head[2, 0] = 1.0, 9.0
    target = torch.tensor([2, 2], device=device)
    for algorithm in ALGORITHMS:
        given = leaves(x, head)
        grads = torch.autograd.grad(eaves.linear_cross_entropy(*given, target, algorithm=algorithm), given)
        assert_gradients([*grads, None], LinearOracle(x, head, target).gradients(), dtype)


def test_a_class_weight_at_ignore_index_is_not_read(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    weight = torch.rand(33, device=device)
    check(x, head, target, None, weight)
    target = torch.where(target == -100, 4, target)
    weight[4] = math.nan  # of a class that is ignored
    leaf = x.requires_grad_()
    for algorithm in ALGORITHMS:
        loss = eaves.linear_cross_entropy(leaf, head, target, weight=weight, ignore_index=4, algorithm=algorithm)
        clean = weight.nan_to_num(1.0)
        expected = eaves.linear_cross_entropy(leaf, head, target, weight=clean, ignore_index=4, algorithm=algorithm)
        assert torch.equal(loss, expected)
        grads = [torch.autograd.grad(each_loss, leaf)[0] for each_loss in (loss, expected)]
        assert torch.equal(*grads)


def test_all_rows_ignored_or_none_there(device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x, head, target, bias = problem((9, 24), 33, dtype, device)
        for rows, reduction, algorithm in pairwise((9, 0), REDUCTIONS, ALGORITHMS):
            given = leaves(x[:rows], head, bias)
            loss = eaves.linear_cross_entropy(
                given[0], given[1], torch.full_like(target[:rows], -100), linear_bias=given[2],
                reduction=reduction, algorithm=algorithm,
            )  # fmt: skip
            assert not loss.any()
            for grad, tensor in zip(torch.autograd.grad(loss.sum(), given), given, strict=True):
                assert grad.shape == tensor.shape and not grad.any()


def test_rows_that_are_ignored_may_hold_anything(device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    ignored = target == -100
    exact = LinearOracle(x, head, target, bias).gradients()
    x[ignored] = math.nan
    for algorithm in ALGORITHMS:
        given = leaves(x, head, bias)
        loss = eaves.linear_cross_entropy(
            given[0], given[1], target, linear_bias=given[2], algorithm=algorithm, skip_ignored=True
        )
        assert_gradients(torch.autograd.grad(loss, given), exact, torch.float32)


def test_a_row_does_not_depend_on_how_many_others_there_are(device: torch.device) -> None:
    x, head, target, _ = problem((33, 24), 1000, torch.bfloat16, device)
    expected = eaves.linear_cross_entropy(x, head, target, reduction="none")
    for _ in range(3):
        assert torch.equal(eaves.linear_cross_entropy(x, head, target, reduction="none"), expected)
    for rows in (1, 2, 7, 32):
        part = eaves.linear_cross_entropy(x[:rows], head, target[:rows], reduction="none")
        torch.testing.assert_close(part, expected[:rows])


def test_float16_does_not_underflow_under_a_loss_scale(device: torch.device) -> None:
    # A gradient of a mean over many rows is below the smallest float16; the loss scale comes in time.
    x, head, target, _ = problem((2048, 24), 300, torch.float16, device)
    given = leaves(x, head)
    (eaves.linear_cross_entropy(*given, target) * 2.0**16).backward()
    exact = LinearOracle(x, head, target).gradients(2.0**16)
    assert_gradients([given[0].grad, given[1].grad, None], exact, torch.float16)
