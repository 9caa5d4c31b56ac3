"""The batching rules of eaves.linear_cross_entropy: every option under torch.vmap, with and without a gradient, gives
the results of a loop. transforms_test.py checks torch.vmap and torch.func around every operator.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad

import eaves
from comparison import assert_agree
from cross_entropy_test import REDUCTIONS, each, every_output
from cross_entropy_vmap_test import ALL_OPTIONS, assert_is_the_loop
from linear_cross_entropy_test import problem, soft_targets
from pairwise import pairwise


@each("shape", [(4, 8), (4, 3, 8), (4, 2, 3, 8), (4, 0, 8)])
def test_every_option_under_vmap_is_the_loop(shape: tuple[int, ...], any_device: torch.device) -> None:
    for dtype, reduction, is_soft, is_weighted, has_row_weight, options in pairwise(
        (torch.float32, torch.float64), REDUCTIONS, (False, True), (False, True), (False, True), ({}, ALL_OPTIONS)
    ):
        x, head, target, bias = problem(shape, 5, dtype, any_device)
        if target.numel():
            target[1] = -100  # a sample whose rows are all ignored
        target = soft_targets(shape, 5, any_device, dtype) if is_soft else target
        weight = torch.linspace(0.1, 2, 5, device=any_device).to(dtype) if is_weighted else None
        named: dict[str, Any] = {"weight": weight, "reduction": reduction, "linear_bias": bias, **options}

        def outputs(
            x: Tensor, t: Tensor, head: Any = head, named: Any = named, has_row_weight: bool = has_row_weight
        ) -> tuple[Tensor, ...]:
            row_weight = x.detach()[..., 0].abs() if has_row_weight else None
            asked = every_output(t, **named)
            out = eaves.linear_cross_entropy(x, head, t, row_weight=row_weight, **named, **asked)
            return tuple(out)

        def total(x: Tensor, t: Tensor, outputs: Any = outputs) -> Tensor:
            loss, lse, _, entropy, *_ = outputs(x, t)
            numbers = torch.arange(1, loss.numel() + 1, device=any_device).view(loss.shape)
            return (loss * numbers).sum() + (lse.sin() + 2 * entropy).sum()

        assert_is_the_loop(lambda x, t, f=outputs: f(x, t)[0], x, target)
        assert_is_the_loop(outputs, x, target)
        assert_is_the_loop(grad(total), x, target)


@each("ignore_index", [2**32, 2**31, 2])
def test_int32_classes_that_are_no_larger_than_ignore_index(ignore_index: int, any_device: torch.device) -> None:
    x, head, target, _ = problem((4, 6, 8), 5, torch.float32, any_device)
    target = target.clamp(min=0).to(torch.int32)

    def function(x: Tensor, t: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x, head, t, ignore_index=ignore_index)

    assert_is_the_loop(function, x, target)
    assert_is_the_loop(grad(function), x, target)


def test_each_tensor_may_have_a_batch_or_none(any_device: torch.device) -> None:
    dtype = torch.float32
    x, head, target, bias = problem((4, 3, 8), 5, dtype, any_device)
    heads = torch.stack([head * factor for factor in (1.0, -0.5, 2.0, 0.0)])
    biases, weights = torch.stack([bias] * 4) * heads[:, 0, :1], torch.rand(4, 5, device=any_device, dtype=dtype)
    normalizers = torch.tensor([1.0, 2.0, 5.0, 7.0], device=any_device, dtype=dtype)

    def function(x: Tensor, w: Tensor, t: Tensor, b: Tensor, c: Tensor, n: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x, w, t, linear_bias=b, weight=c, normalizer=n, label_smoothing=0.1)

    batches = (x, heads, target, biases, weights, normalizers)
    for dims in ((0, 0, 0, 0, 0, 0), (0, None, 0, None, None, None), (None, 0, None, None, None, None),
                 (0, None, None, 0, None, 0), (None, None, 0, None, 0, None), (0, None, 0, None, None, 0)):  # fmt: skip
        given = [t if d == 0 else t[0] for t, d in zip(batches, dims, strict=True)]
        each_sample = [[t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)] for i in range(4)]
        for f in (function, grad(function, (0, 1, 3)), grad(function), grad(function, 1)):
            expected = [f(*sample) for sample in each_sample]
            actual = torch.vmap(f, in_dims=dims)(*given)
            if isinstance(actual, Tensor):
                assert_agree(actual, torch.stack(expected))
            else:
                for index, found in enumerate(actual):
                    assert_agree(found, torch.stack([e[index] for e in expected]))
