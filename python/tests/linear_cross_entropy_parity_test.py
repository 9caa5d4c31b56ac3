"""Combinations of options beside PyTorch: the error of eaves against float64 is no larger than PyTorch's own.

Both get the same tensors, already rounded to their dtype. PyTorch's side is the code that a user writes without eaves:
F.cross_entropy of F.linear, and, if PyTorch has it, F.linear_cross_entropy, whole and in chunks.

In float32 both are a few roundings away from the exact result, and either may be closer.
"""

from collections.abc import Callable
from functools import partial
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

# Tolerances of a loss and of a gradient in float32: in the last places luck decides which of two sums is closer.
LUCK = {torch.float32: 2e-6, torch.bfloat16: 0.0, torch.float16: 0.0}


def peers(options: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """PyTorch's functions of x, head, target and bias."""
    found = {"linear and cross_entropy": lambda x, head, target, bias, **named: functional.cross_entropy(
        functional.linear(x, head, bias), target, **named)}  # fmt: skip
    for name, of_torch in (("linear_cross_entropy", None), ("in chunks", "LinearCrossEntropyOptions")):
        if hasattr(functional, "linear_cross_entropy") and (of_torch is None or "label_smoothing" not in options):
            named = {"options": of_torch and getattr(torch.nn, of_torch)()}
            found[name] = partial(whole_loss, functional.linear_cross_entropy, **named)
    return found


def whole_loss(function: Any, x: Tensor, head: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return function(x, head, target, linear_bias=bias, **options)


def errors_of(function: Callable[..., Tensor], tensors: list[Tensor], oracle: LinearOracle, **options: Any) -> Any:
    """The errors of the loss and the three gradients, each relative to the norm of the exact result."""
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
        ours = errors_of(
            partial(whole_loss, eaves.linear_cross_entropy, algorithm=algorithm), tensors, oracle, **options
        )
        for name, peer in peers(options).items():
            theirs = errors_of(peer, tensors, oracle, **options)
            for what, our, their in zip(("loss", "grad_x", "grad_weight", "grad_bias"), ours, theirs, strict=True):
                # The gradient of the logits is rounded once, and the result once, each by at most half a unit. (On a
                # CPU the chunks of torch multiply in float32, and round once.)
                rounded_twice = 0.0 if what == "loss" else 0.5 * allowed_share(dtype)
                assert our <= max(1.15 * their, LUCK[dtype], rounded_twice), f"{what}: {our}, {name} {their}"
            assert ours[0] <= 2e-6
