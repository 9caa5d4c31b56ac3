"""The batching rules of eaves.cross_entropy: every option under torch.vmap, with and without a gradient, is the loop.

The duties of any operator under torch.vmap and torch.func are in transforms_test.py.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

import eaves
from comparison import assert_agree
from cross_entropy_test import REDUCTIONS, each, every_output, probabilities_of, targets_of
from layouts import random_tensor
from pairwise import pairwise

# shape of the batch, class_dim of a sample, the reason
CASES = [
    ((4, 5), -1, "a row a sample"),
    ((4, 3, 5), -1, "rows a sample"),
    ((4, 5, 3), 0, "the classes in front of the rows"),
    ((4, 2, 5, 3), 1, "torch's layout"),
    ((4, 0, 5), -1, "samples without rows"),
]


def cases() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "class_dim"), [pytest.param(*c[:2], id=c[2]) for c in CASES])


def assert_is_the_loop(function: Callable[..., Any], *tensors: Tensor) -> None:
    """Asserts that the batch equals the loop. `function` of a sample returns a tensor or several."""
    expected = [function(*sample) for sample in zip(*tensors, strict=True)]
    actual = torch.vmap(function)(*tensors)
    if isinstance(actual, Tensor):
        expected, actual = [[e] for e in expected], [actual]
    for index, each_actual in enumerate(actual):
        wanted = torch.stack([e[index] for e in expected])
        assert each_actual.dtype == wanted.dtype
        assert_agree(each_actual, wanted)


def test_weights_of_rows_under_vmap_are_those_of_the_loop(any_device: torch.device) -> None:
    # Weights that all samples share, of both signs, and NaN beside an ignored row.
    logits = random_tensor((3, 4, 33), torch.float32, any_device)
    for targets in (targets_of, probabilities_of):
        target = targets(logits)
        for row_weight in (torch.tensor([1e8, 1.0, -1e8, 2.0]), torch.tensor([math.nan, 1.0, 2.0, 3.0])):
            row_weight = row_weight.to(any_device)
            if targets is targets_of:
                target[:, 0] = -100
            elif row_weight.isnan().any():
                continue

            def function(x: Tensor, t: Tensor, row_weight: Tensor = row_weight) -> Tensor:
                return eaves.cross_entropy(x, t, row_weight=row_weight)

            # The gradient of probabilities cancels: the rest is as exact as for a row of weight 1.
            scale = row_weight.nan_to_num(1.0).abs()[:, None]

            def gradient(x: Tensor, t: Tensor, function: Any = function, scale: Tensor = scale) -> Tensor:
                result: Tensor = grad(function)(x, t) / scale
                return result

            assert_is_the_loop(function, logits, target)
            assert_is_the_loop(gradient, logits, target)


ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "scale": 1.5}


@cases()
def test_every_option_under_vmap_is_the_loop(shape: tuple[int, ...], class_dim: int, any_device: torch.device) -> None:
    axis = class_dim if class_dim < 0 else class_dim + 1
    for dtype, reduction, targets, is_weighted, has_row_weight, options in pairwise(
        (torch.float32, torch.bfloat16), REDUCTIONS, (targets_of, probabilities_of), (False, True), (False, True),
        ({}, ALL_OPTIONS),
    ):  # fmt: skip
        logits = random_tensor(shape, dtype, any_device)
        target = targets(logits, axis)
        if logits.numel() and targets is targets_of:
            target[1] = -100  # a sample whose rows are all ignored
        weight = torch.linspace(0.1, 2, logits.shape[axis], device=any_device).to(dtype) if is_weighted else None
        named: dict[str, Any] = {"class_dim": class_dim, "reduction": reduction, **options}

        def function(x: Tensor, t: Tensor, w: Tensor | None = weight, named: Any = named) -> Tensor:
            return eaves.cross_entropy(x, t, w, **named)

        def outputs(
            x: Tensor, t: Tensor, w: Tensor | None = weight, named: Any = named, has_row_weight: bool = has_row_weight
        ) -> tuple[Tensor, ...]:
            row_weight = x.detach().select(named["class_dim"], 0).abs() if has_row_weight else None
            return eaves.cross_entropy(x, t, w, row_weight=row_weight, **named, **every_output(t, w, **named))

        def weighted(x: Tensor, t: Tensor, outputs: Any = outputs) -> Tensor:
            loss, lse, _, entropy, *_ = outputs(x, t)
            numbers = torch.arange(1, loss.numel() + 1, device=any_device).view(loss.shape)
            return (loss * numbers).sum() + (lse.sin() + 2 * entropy).sum()

        assert_is_the_loop(function, logits, target)
        assert_is_the_loop(outputs, logits, target)
        assert_is_the_loop(grad(weighted), logits, target)
        of_batch = grad(lambda x, t=target, f=weighted: torch.vmap(f)(x, t).sum())(logits)
        wanted = [grad(weighted)(x, t) for x, t in zip(logits, target, strict=True)]
        assert_agree(of_batch, torch.stack(wanted))


def test_each_tensor_may_have_no_batch_or_one_on_any_axis(any_device: torch.device) -> None:
    logits, target = (
        random_tensor((6, 5, 4), torch.float32, any_device),
        targets_of(torch.empty(6, 4, 5), -1).to(any_device),
    )
    assert_is_the_loop(
        lambda x, t: eaves.cross_entropy(x, t), logits.permute(2, 0, 1).contiguous(), target.t().contiguous()
    )
    for function in (eaves.cross_entropy, grad(eaves.cross_entropy)):
        expected = torch.stack([function(logits[:, :, i], target[:, i]) for i in range(4)])
        assert_agree(torch.vmap(function, in_dims=(2, 1))(logits, target), expected)
        expected = torch.stack([function(logits[:, :, 0], target[:, i]) for i in range(4)])
        assert_agree(torch.vmap(function, in_dims=(None, 1))(logits[:, :, 0], target), expected)
        expected = torch.stack([function(logits[:, :, i], target[:, 0]) for i in range(4)])
        assert_agree(torch.vmap(function, in_dims=(2, None))(logits, target[:, 0]), expected)


@each("ignore_index", [2**32, -(2**32), 2**31, 2**62, 2, -1])
def test_classes_that_are_no_larger_than_ignore_index(ignore_index: int, any_device: torch.device) -> None:
    # int32 classes next to an ignore_index that has its last 32 bits in common with class 0.
    logits = random_tensor((4, 6, 5), torch.float32, any_device)
    weight = torch.linspace(0.5, 2, 5, device=any_device)
    for w, dtype in ((None, torch.int64), (weight, torch.int32)):
        target = torch.zeros(4, 6, dtype=dtype, device=any_device)
        target[:, 1:] = torch.arange(5, device=any_device)

        def function(x: Tensor, t: Tensor, w: Tensor | None = w) -> Tensor:
            return eaves.cross_entropy(x, t, w, ignore_index=ignore_index)

        assert_is_the_loop(function, logits, target)
        assert_is_the_loop(grad(function), logits, target)


def test_weights_and_normalizers_may_have_a_batch(any_device: torch.device) -> None:
    logits = random_tensor((4, 6, 5), torch.float32, any_device)
    target = targets_of(logits)
    weights, normalizers = torch.rand(4, 5, device=any_device), torch.tensor([1.0, 2.0, 5.0, 7.0], device=any_device)

    def with_weight(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return eaves.cross_entropy(x, t, w, label_smoothing=0.1)

    def with_normalizer(x: Tensor, t: Tensor, n: Tensor) -> Tensor:
        return eaves.cross_entropy(x, t, normalizer=n)

    for function, third in ((with_weight, weights), (with_normalizer, normalizers)):
        assert_is_the_loop(function, logits, target, third)
        assert_is_the_loop(grad(function), logits, target, third)
        for dims in ((None, None, 0), (None, 0, 0), (0, None, None)):
            given = [tensor if d == 0 else tensor[0] for tensor, d in zip((logits, target, third), dims, strict=True)]
            samples = [[t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)] for i in range(4)]
            for f in (function, grad(function)):
                expected = torch.stack([f(*sample) for sample in samples])
                assert_agree(torch.vmap(f, in_dims=dims)(*given), expected)
