"""Combinations of options beside PyTorch: the error of eaves against float64 is no larger than PyTorch's own.

Both get the same tensors, already rounded to their dtype. PyTorch's side is what a user writes without eaves:
F.cross_entropy of F.linear, and where it is there F.linear_cross_entropy, whole and in chunks.

In float32 both are a few roundings away from what is exact, and either may be ahead.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import eaves
from cross_entropy_test import REDUCTIONS, each
from layouts import random_tensor
from linear_cross_entropy_cases import LinearOracle, allowed_share
from pairwise import pairwise

ROWS, FEATURES, CLASSES = 96, 72, 1003

# Of a loss and of a gradient, in float32: the last places, where which of two sums is closer is luck.
LUCK = {torch.float32: 2e-6, torch.bfloat16: 0.0, torch.float16: 0.0}


def plain(x: Tensor, head: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(x, head, bias), target, **options)


def with_torchs_function(options_of_torch: Any) -> Callable[..., Tensor]:
    def function(x: Tensor, head: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Tensor:
        return functional.linear_cross_entropy(x, head, target, linear_bias=bias, options=options_of_torch, **options)

    return function


def peers(options: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {"linear and cross_entropy": plain}
    if hasattr(functional, "linear_cross_entropy"):
        found["linear_cross_entropy"] = with_torchs_function(None)
        if "label_smoothing" not in options:
            found["in chunks"] = with_torchs_function(torch.nn.LinearCrossEntropyOptions())
    return found


def with_eaves(algorithm: str) -> Callable[..., Tensor]:
    def function(x: Tensor, head: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Tensor:
        return eaves.linear_cross_entropy(x, head, target, linear_bias=bias, algorithm=algorithm, **options)

    return function


def errors_of(function: Callable[..., Tensor], tensors: list[Tensor], oracle: LinearOracle, **options: Any) -> Any:
    """Of the loss and the three gradients, relative to the norm of what is exact."""
    x, head, target, bias = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (x, head, bias)]
    loss = function(leaves[0], leaves[1], target, leaves[2], **options)
    grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    found, exact = (loss.detach(), *grads), (oracle.rows.loss.exact, *oracle.gradients())
    return [float((a.cpu().double() - e).norm() / e.norm()) for a, e in zip(found, exact, strict=True)]


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("deviation", "reduction", "is_weighted", "smoothing"),
    pairwise((1.3, 4.0), REDUCTIONS, (False, True), (0.0, 0.1)),
)
def test_the_error_is_no_larger_than_that_of_torch(
    dtype: torch.dtype, deviation: float, reduction: str, is_weighted: bool, smoothing: float, device: torch.device
) -> None:
    x = random_tensor((ROWS, FEATURES), dtype, device)
    head = random_tensor((CLASSES, FEATURES), dtype, device, deviation / FEATURES**0.5)
    target = torch.arange(ROWS, device=device) * 11 % CLASSES
    target[::5] = -100
    bias = random_tensor((CLASSES,), dtype, device, 0.3)
    options: dict[str, Any] = {"reduction": reduction} | ({"label_smoothing": smoothing} if smoothing else {})
    if is_weighted:
        options["weight"] = torch.linspace(0.25, 1.25, CLASSES, device=device).to(dtype)
    named = {key: value for key, value in options.items() if key != "weight"}
    oracle = LinearOracle(x, head, target, bias, options.get("weight"), **named)
    tensors = [x, head, target, bias]
    for algorithm in ("speed", "recompute"):
        ours = errors_of(with_eaves(algorithm), tensors, oracle, **options)
        for name, peer in peers(options).items():
            theirs = errors_of(peer, tensors, oracle, **options)
            for what, our, their in zip(("loss", "grad_x", "grad_weight", "grad_bias"), ours, theirs, strict=True):
                # The gradient of the logits is rounded once and the result once, by half a unit each at worst. (On a
                # CPU the chunks of torch multiply in float32, and round once.)
                rounded_twice = 0.0 if what == "loss" else 0.5 * allowed_share(dtype)
                assert our <= max(1.15 * their, LUCK[dtype], rounded_twice), f"{what}: {our}, {name} {their}"
            assert ours[0] <= 2e-6
