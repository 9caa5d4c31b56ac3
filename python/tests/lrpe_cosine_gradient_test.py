"""The gradients of eaves.lrpe_cosine: correct, only of the tensors that want one, and the tensors kept for them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import assert_agree
from layouts import random_tensor
from lrpe_cosine_cases import ACTIVATIONS, angles
from lrpe_cosine_test import each_activation, same
from watch import watched


def gradients(x: Tensor, theta: Tensor, grad_out: Tensor, **options: Any) -> tuple[Tensor, ...]:
    x, theta = x.detach().requires_grad_(), theta.detach().requires_grad_()
    return torch.autograd.grad(eaves.lrpe_cosine(x, theta, **options), (x, theta), grad_out)


POSITIONS: list[dict[str, Any]] = [
    {},
    {"extra_tokens": 1, "grid": (2, 2)},
    {"offset": torch.tensor([3, -2])},
    {"positions": torch.tensor([[4, 1, 0, 2, 9], [3, 3, 3, 3, 3]])},
    {"cu_seqlens": torch.tensor([0, 2, 5])},
]


# Every activation, and every kind of positions.
@pytest.mark.parametrize(
    ("options", "activation", "dim"),
    [
        (POSITIONS[0], "none", None), (POSITIONS[1], "none", None), (POSITIONS[1], "relu", None),
        (POSITIONS[2], "sigmoid", None), (POSITIONS[3], "silu", None), (POSITIONS[4], "softmax", -1),
        (POSITIONS[2], "softmax", -2), (POSITIONS[1], "softmax", -2),
    ],
)  # fmt: skip
def test_derivatives_of_first_and_second_order_agree_with_finite_differences(
    options: dict[str, Any], activation: str, dim: int | None, device: torch.device
) -> None:
    call = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    # One layout each: angles for half of the features, as in grids, or one head for all.
    is_turned = [each is options for each in POSITIONS].index(True) % 2 == 0
    layout, shape = ("bhnd", (1, 3)) if is_turned else ("bnhd", (2, 2))
    x = random_tensor((2, 2, 5, 3) if is_turned else (2, 5, 2, 3), torch.float64, device).requires_grad_()
    theta = angles(*shape, torch.float64, device)

    def function(x: Tensor, theta: Tensor) -> Tensor:
        return eaves.lrpe_cosine(x, theta, activation=activation, activation_dim=dim, layout=layout, **call)

    tracked = theta.clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, tracked))
    assert torch.autograd.gradgradcheck(function, (x, tracked))
    assert torch.autograd.gradcheck(function, (x.detach(), tracked))
    if activation == "none":  # linear in x: the second derivative is the operator itself
        assert torch.autograd.gradcheck(function, (x, theta))
        assert torch.autograd.gradgradcheck(function, (x, theta))


def test_the_gradient_of_a_turned_tensor_lies_as_the_tensor_does(device: torch.device) -> None:
    # The layout of x.view(B, N, H, D).transpose(1, 2). In another one the projection behind it would copy its gradient.
    theta = angles(3, 7, device=device)
    for activation, dim in ACTIVATIONS:
        for layout in ("bnhd", "bhnd"):
            size = (2, 3, 9, 7) if layout == "bnhd" else (2, 9, 3, 7)
            x = random_tensor(size, torch.float32, device).transpose(1, 2).requires_grad_()
            call = {"activation": activation, "activation_dim": dim, "layout": layout}
            out = eaves.lrpe_cosine(x, theta, **call)
            assert out.is_contiguous()
            (grad_x,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert grad_x.stride() == x.stride()
            same(grad_x, gradients(x.contiguous(), theta, torch.ones_like(out), **call)[0])


@each_activation
def test_only_the_gradients_that_are_asked_for_are_computed(
    activation: str, dim: int | None, device: torch.device
) -> None:
    x, theta = random_tensor((2, 9, 3, 7), torch.float32, device), angles(3, 7, device=device)
    both = gradients(x, theta, torch.ones(2, 9, 3, 14, device=device), activation=activation, activation_dim=dim)
    for of_x, of_theta in ((True, False), (False, True), (True, True)):
        inputs = x.detach().requires_grad_(of_x), theta.detach().requires_grad_(of_theta)
        out = eaves.lrpe_cosine(*inputs, activation=activation, activation_dim=dim)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        with watched() as calls:
            grads = torch.autograd.grad(out, wanted, torch.ones_like(out))
        assert [[result.numel() > 0 for result in results] for _, _, results in calls] == [[of_x, of_theta]]
        for actual, expected in zip(grads, [g for g, t in zip(both, inputs) if t.requires_grad], strict=True):
            same(actual, expected)


@each_activation
def test_what_is_kept_for_the_backward(activation: str, dim: int | None, device: torch.device) -> None:
    x, theta = random_tensor((2, 9, 3, 7), torch.float32, device), angles(3, 7, device=device)

    def kept(of_x: bool, of_theta: bool, **options: Any) -> list[tuple[int, ...]]:
        saved: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
            eaves.lrpe_cosine(
                x.detach().requires_grad_(of_x), theta.detach().requires_grad_(of_theta),
                activation=activation, activation_dim=dim, **options,
            )  # fmt: skip
        return sorted(saved)

    of_x = [] if activation == "none" else [(2, 9, 3, 7)]
    lse = [(2, 3, 2, 7)] if dim == -2 else []
    assert kept(True, False) == sorted([(3, 7), *of_x, *lse])
    assert kept(True, False, offset=torch.tensor([1, 2], device=device)) == sorted([(2,), (3, 7), *of_x, *lse])
    assert kept(True, True) == kept(False, True) == sorted([(3, 7), (2, 9, 3, 7), *lse])
    assert kept(False, False) == []
    with torch.no_grad():
        assert kept(True, True) == []


def test_a_change_of_x_before_the_backward_is_noticed_where_it_matters(device: torch.device) -> None:
    for activation, dim in ACTIVATIONS:
        x = random_tensor((2, 9, 3, 7), torch.float32, device).requires_grad_()
        moved = x * 1
        out = eaves.lrpe_cosine(moved, angles(3, 7, device=device), activation=activation, activation_dim=dim)
        moved.add_(1)
        if activation == "none":
            out.sum().backward()  # x is not kept
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_gradients_of_higher_order(device: torch.device) -> None:
    # The second derivatives are torch's own operators, so any order works.
    x = random_tensor((1, 3, 1, 2), torch.float64, device).requires_grad_()
    theta = angles(1, 2, torch.float64, device).requires_grad_()

    def third(function: Any) -> tuple[Tensor, ...]:
        out = function(x, theta)
        first = torch.autograd.grad(out.square().sum(), (x, theta), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, theta), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in second), (x, theta))

    def plain(x: Tensor, theta: Tensor) -> Tensor:
        a = torch.nn.functional.silu(x)
        phi = torch.arange(3, device=device).view(3, 1, 1) * theta
        return torch.cat([a * phi.cos(), a * phi.sin()], -1)

    actual = third(lambda x, theta: eaves.lrpe_cosine(x, theta, activation="silu"))
    for a, e in zip(actual, third(plain), strict=True):
        assert_agree(a, e)
