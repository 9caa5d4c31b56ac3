"""eaves.lrpe_cosine in programs: torch.compile with offsets that change, torch.func, a model that learns its angles."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, vjp

import eaves
from comparison import assert_agree
from layouts import random_tensor
from lrpe_cosine_cases import ACTIVATIONS, angles
from lrpe_cosine_test import same


def inputs(device: torch.device, batch: int = 2) -> tuple[Tensor, Tensor]:
    return random_tensor((batch, 9, 3, 8), torch.float32, device), angles(3, 8, device=device)


# -------------------------------------------------------------------------------------------------------- torch.compile


def test_another_offset_is_no_other_compilation(any_device: torch.device, fresh_compiler: None) -> None:
    x, theta = inputs(any_device)
    counter = CompileCounterWithBackend("inductor")

    def function(x: Tensor, offset: int) -> Tensor:
        return eaves.lrpe_cosine(x, theta, offset=offset, activation="silu") + 1

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for offset in (0, 7, 8, 1000, -5):
        same(compiled(x, offset), function(x, offset))
    assert counter.frame_count <= 2


def test_an_offset_on_the_device_is_one_compilation(any_device: torch.device, fresh_compiler: None) -> None:
    x, theta = inputs(any_device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, offset: eaves.lrpe_cosine(x, theta, offset=offset), fullgraph=True, backend=counter
    )
    for offset in (0, 7, 1000):
        same(compiled(x, torch.tensor([offset], device=any_device)), eaves.lrpe_cosine(x, theta, offset=offset))
    assert counter.frame_count == 1


# The tensors kept for the backward differ: none, x, or x and an lse.
@pytest.mark.parametrize(
    ("activation", "dim", "layout"), [("none", None, "bnhd"), ("silu", None, "bhnd"), ("softmax", -2, "bhnd")]
)
@pytest.mark.parametrize("learnable", [False, True])
def test_forward_and_backward_compile_whole(
    learnable: bool, activation: str, dim: int | None, layout: str, any_device: torch.device, fresh_compiler: None
) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, theta: Tensor) -> Tensor:
        return eaves.lrpe_cosine(
            x.sin(), theta, grid=(2, 4), extra_tokens=1, activation=activation, activation_dim=dim, layout=layout
        ).cos()

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    x, theta = inputs(any_device)
    tokens = (x if layout == "bnhd" else x.transpose(1, 2)).detach().requires_grad_()
    of = theta.detach().requires_grad_(learnable)
    wanted = (tokens, of) if learnable else (tokens,)
    results = [
        (out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out)))
        for out in (compiled(tokens, of), function(tokens, of))
    ]
    for a, e in zip(*results, strict=True):
        same(a, e)
    assert counter.frame_count == 1


def test_the_module_compiles_for_any_length(any_device: torch.device, fresh_compiler: None) -> None:
    module = eaves.LRPECosine(3, 8, learnable=True, activation="softmax", activation_dim=-2, device=any_device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 12, 31):
        x = random_tensor((2, length, 3, 8), torch.float32, any_device).requires_grad_()
        results = []
        for call in (compiled, module):
            out = call(x)
            results.append((out.detach(), *torch.autograd.grad(out, (x, module.theta), torch.ones_like(out))))
        for a, e in zip(*results, strict=True):
            same(a, e)
    assert counter.frame_count == 1


def test_positions_and_packed_sequences_compile(any_device: torch.device, fresh_compiler: None) -> None:
    x, theta = inputs(any_device)
    for name, tensor in (("positions", torch.arange(9)), ("cu_seqlens", torch.tensor([0, 4, 9]))):
        call = {name: tensor.to(any_device)}
        compiled = torch.compile(
            lambda x, c=call: eaves.lrpe_cosine(x, theta, **c), fullgraph=True, backend="aot_eager"
        )
        same(compiled(x), eaves.lrpe_cosine(x, theta, **call))


# ----------------------------------------------------------------------------------------------------------- torch.func


def loop(function: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Tensor:
    (count,) = {t.shape[dim] for t, dim in zip(tensors, in_dims) if dim is not None}
    return torch.stack(
        [function(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims))) for i in range(count)]
    )


# The axis of the samples in x, theta and the third tensor, if there is one; None: all samples share the tensor.
IN_DIMS = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (3, 1, -1), (1, None, -1), (0, 1, None)]


# The third tensor of one sample.
THIRDS = {
    "none": torch.zeros(1, dtype=torch.int64),
    "offset": torch.tensor([5]),
    "offsets": torch.tensor([5, 9]),
    "positions": torch.tensor([4, 1, 0, 2, 9]),
    "positions of each": torch.tensor([[4, 1, 0, 2, 9], [3, 3, 3, 1, 0]]),
    "cu_seqlens": torch.tensor([0, 2, 5]),
}


def vmapped(third: str, device: torch.device) -> Iterator[tuple[Any, tuple[int | None, ...], list[Tensor]]]:
    """A function of one sample, in_dims, and x, theta and the third tensor of a sample. The activation changes with
    in_dims and with the third tensor, so that every two of the three meet."""
    name = {"offsets": "offset", "positions of each": "positions"}.get(third, third)
    one = [random_tensor((2, 5, 3, 4), torch.float32, device), angles(3, 4, device=device), THIRDS[third].to(device)]
    for index, in_dims in enumerate(IN_DIMS):
        activation, dim = ACTIVATIONS[(index + list(THIRDS).index(third)) % len(ACTIVATIONS)]
        is_batched = third != "none" or in_dims != (None, None, 0)
        if not is_batched or (third == "cu_seqlens" and dim == -2):
            continue

        def function(x: Tensor, theta: Tensor, t: Tensor, a: str = activation, d: int | None = dim) -> Tensor:
            call = {} if third == "none" else {name: t}
            return eaves.lrpe_cosine(x, theta, activation=a, activation_dim=d, **call)

        yield function, in_dims, one


@pytest.mark.parametrize("third", THIRDS)
def test_vmap_is_the_loop(third: str, any_device: torch.device) -> None:
    def batched(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor
        if tensor.is_floating_point():
            return torch.stack([tensor, tensor.flip(0), 2 * tensor], dim)
        if third == "cu_seqlens":
            return torch.stack([tensor, tensor.clamp(max=1).where(tensor < 5, tensor), tensor], dim)
        return torch.stack([tensor, tensor + 3, tensor * 2], dim)

    for function, in_dims, one in vmapped(third, any_device):
        tensors = list(map(batched, one, in_dims))
        assert_agree(torch.vmap(function, in_dims=in_dims)(*tensors), loop(function, in_dims, *tensors))

        def total(x: Tensor, theta: Tensor, t: Tensor, f: Any = function) -> Tensor:
            return f(x, theta, t).sin().sum()

        for argnum in (0, 1):
            of_samples = grad(total, argnum)
            assert_agree(torch.vmap(of_samples, in_dims=in_dims)(*tensors), loop(of_samples, in_dims, *tensors))


@pytest.mark.parametrize("third", THIRDS)
def test_vmap_over_no_samples_is_empty(third: str, any_device: torch.device) -> None:
    def none_of(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else torch.stack([tensor], dim).narrow(dim, 0, 0)

    for function, in_dims, one in vmapped(third, any_device):
        tensors = list(map(none_of, one, in_dims))

        def total(x: Tensor, theta: Tensor, t: Tensor, f: Any = function) -> Tensor:
            return f(x, theta, t).sin().sum()

        for of_sample in (function, grad(total, 0), grad(total, 1), grad(total, (0, 1))):
            results, of_one = torch.vmap(of_sample, in_dims=in_dims)(*tensors), of_sample(*one)
            pairs = [(results, of_one)] if isinstance(results, Tensor) else zip(results, of_one, strict=True)
            for result, like in pairs:
                assert result.shape == (0, *like.shape)
                assert (result.dtype, result.device) == (like.dtype, like.device)


def test_a_theta_from_outside_of_a_transform_gets_its_gradient(any_device: torch.device) -> None:
    x, theta = inputs(any_device)
    theta.requires_grad_()
    out = torch.vmap(lambda sample: eaves.lrpe_cosine(sample.unsqueeze(0), theta, activation="silu"))(x)
    (actual,) = torch.autograd.grad(out.sin().sum(), theta)
    (expected,) = torch.autograd.grad(eaves.lrpe_cosine(x, theta, activation="silu").sin().sum(), theta)
    assert_agree(actual, expected)
    # Only an outer transform tracks theta; an inner one is of x.
    detached = theta.detach()

    def inner(theta: Tensor) -> Tensor:
        return grad(lambda x: eaves.lrpe_cosine(x, theta).sin().sum())(x).sum()

    def plain(theta: Tensor) -> Tensor:
        phi = torch.arange(9, device=any_device).view(9, 1, 1) * theta
        return grad(lambda x: torch.cat([x * phi.cos(), x * phi.sin()], -1).sin().sum())(x).sum()

    torch.testing.assert_close(grad(inner)(detached), grad(plain)(detached), rtol=1e-4, atol=1e-4)


def test_jacobians_of_both_and_hessians(any_device: torch.device) -> None:
    x = random_tensor((1, 3, 1, 2), torch.float64, any_device)
    theta = angles(1, 2, torch.float64, any_device)

    def function(x: Tensor, theta: Tensor) -> Tensor:
        return eaves.lrpe_cosine(x, theta, activation="softmax", activation_dim=-2)

    tracked = x.detach().requires_grad_(), theta.detach().requires_grad_()
    out = function(*tracked)
    for jacobian, t in zip(jacrev(function, (0, 1))(x, theta), tracked, strict=True):
        rows = [
            torch.autograd.grad(out, t, row.view_as(out), retain_graph=True)[0]
            for row in torch.eye(out.numel(), dtype=out.dtype, device=any_device)
        ]
        assert_agree(jacobian, torch.stack(rows).view(*out.shape, *t.shape))
    _, backward = vjp(function, x, theta)
    for a, e in zip(backward(torch.ones_like(out)), torch.autograd.grad(out.sum(), tracked), strict=True):
        assert_agree(a, e)

    def loss(theta: Tensor) -> Tensor:
        return function(x, theta).square().mul(torch.arange(4, device=any_device)).sum()

    hessian = jacrev(jacrev(loss))(theta)
    expected = torch.autograd.functional.hessian(loss, theta)
    assert_agree(hessian, expected)


# ------------------------------------------------------------------------------------------------------------- programs


def test_angles_are_learned(any_device: torch.device) -> None:
    # Learns the turn of a key that is one position behind, from inner products.
    target = torch.tensor([[0.3]], device=any_device)
    x = torch.ones(1, 8, 1, 1, device=any_device)
    module = eaves.LRPECosine(1, 1, learnable=True, device=any_device)
    with torch.no_grad():
        module.theta.fill_(0.25)
    optimizer = torch.optim.SGD(module.parameters(), lr=2e-3)
    for _ in range(200):
        loss = (module(x) - eaves.lrpe_cosine(x, target)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(module.theta.detach(), target, rtol=0, atol=1e-3)
