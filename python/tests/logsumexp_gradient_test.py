"""eaves.logsumexp and autograd: kept tensors, layouts of gradients, finite differences, second derivatives."""

import math

import pytest
import torch
from torch import Tensor

import eaves
from comparison import (
    FLOATING_POINT,
    PROMOTED,
    Bound,
    LogsumexpOracle,
    allowed_error,
    assert_rounded,
    assert_within,
    differences,
)
from layouts import padded_rows, random_tensor
from logsumexp_test import each

INFINITY = math.inf


def test_a_dense_x_gets_a_gradient_that_lies_as_it_does(device: torch.device) -> None:
    # Otherwise autograd copies the gradient before it becomes x.grad.
    for x in (
        random_tensor((4, 6), torch.float32, device),
        random_tensor((4, 6), torch.float32, device).t(),
        random_tensor((2, 3, 4, 5), torch.float32, device).to(memory_format=torch.channels_last),
    ):
        x = x.detach().requires_grad_()
        (grad_x,) = torch.autograd.grad(eaves.logsumexp(x, 1).sum(), x)
        assert grad_x.stride() == x.stride()


def test_an_x_with_shared_or_unused_elements_gets_a_contiguous_gradient(device: torch.device) -> None:
    base = random_tensor((4, 6), torch.float32, device)
    for x in (base[:1].expand(4, 6), padded_rows(base), base.view(-1).unfold(0, 5, 1)):
        x = x.detach().requires_grad_()
        (grad_x,) = torch.autograd.grad(eaves.logsumexp(x, 1).sum(), x)
        assert grad_x.is_contiguous()
        assert_within(grad_x, LogsumexpOracle(x, 1).backward(torch.ones(x.shape[0]), torch.float32))


@pytest.mark.parametrize(("dims", "keepdim"), [(0, False), (-1, True), ((0, 2), False), ((), True), ([2, 1], True)])
def test_finite_differences_agree(dims: object, keepdim: bool, device: torch.device) -> None:
    # Small, because each element costs two calls. Batched too: torch.vmap over the backward.
    x = random_tensor((3, 2, 4), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: eaves.logsumexp(t, dims, keepdim), x, check_batched_grad=True)


@pytest.mark.parametrize(("dims", "keepdim"), [(0, True), (-1, False), ((0, 2), True), ((), False)])
def test_finite_differences_of_the_gradient_agree(dims: object, keepdim: bool, device: torch.device) -> None:
    x = random_tensor((3, 2, 2), torch.float64, device).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: eaves.logsumexp(t, dims, keepdim), x)


def test_second_derivatives_have_the_dtype_of_x(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = random_tensor((3, 5), dtype, device).requires_grad_()
        (grad_x,) = torch.autograd.grad(eaves.logsumexp(x, 1, dtype=torch.float32).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad_x * grad_x.detach()).sum(), x)
        # The function is sum(p * q) with q = p held fixed, its derivative p * (q - sum p * q).
        p = x.detach().double().softmax(1)
        assert second.dtype == dtype
        # q, p, their product and the result are rounded.
        assert_rounded(second, p * (p - (p * p).sum(1, keepdim=True)), roundings=4)


@each("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_second_derivatives_are_not_rounded_to_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    # 64 equal elements make p = 1/64 and v * p exact; only their sum needs more bits than the dtype has. bfloat16 keeps
    # 8 bits: 257 / 64 would be 4, and its difference to 4 would be 0. float16 keeps 11.
    large = 256 if dtype == torch.bfloat16 else 2048
    x = torch.zeros(2, 64, dtype=dtype, device=device, requires_grad=True)
    out = eaves.logsumexp(x, 1)
    grad_out = torch.tensor([1.0, -2.0], dtype=dtype, device=device, requires_grad=True)
    (grad_x,) = torch.autograd.grad(out, x, grad_out, create_graph=True)
    v = torch.zeros(2, 64, dtype=dtype, device=device)
    v[:, 0], v[:, 1], v[:, 2] = large, 1.0, large / 64
    of_x, of_grad_out = torch.autograd.grad(grad_x, (x, grad_out), v)
    # The function is sum(grad_out * v * p): its derivatives are grad_out * p * (v - sum(v * p)) and sum(v * p).
    total = v.double().sum(1, keepdim=True) / 64
    exact = grad_out.detach().double()[:, None] / 64 * (v.double() - total)
    for actual, expected in ((of_x, exact.cpu()), (of_grad_out, total[:, 0].cpu())):
        assert actual.dtype == dtype
        assert_within(actual, Bound(expected, allowed_error(dtype, expected, expected.abs())))
    rounded = total.to(dtype).double()
    through_16_bits = (grad_out.detach().double()[:, None] / 64 * (v.double() - rounded)).to(dtype)
    bound = Bound(exact.cpu(), allowed_error(dtype, exact.cpu(), exact.abs().cpu()))
    assert differences(through_16_bits, bound), "this test could not tell the two apart"


def test_a_row_of_minus_infinity_has_second_derivative_zero(device: torch.device) -> None:
    x = torch.full((2, 3), -INFINITY, device=device, requires_grad=True)
    (grad_x,) = torch.autograd.grad(eaves.logsumexp(x, 1).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad_x.sum(), x)
    assert not second.any()


# --------------------------------------------------------------------------------------------------- autograd's corners


def test_gradients_are_asked_for_as_torch_does(device: torch.device) -> None:
    x = random_tensor((3, 5), torch.float32, device)
    leaf = x.clone().requires_grad_()
    for value in (x, leaf, leaf * 2, leaf.detach(), (leaf * 2).detach()):
        assert eaves.logsumexp(value, 1).requires_grad == torch.logsumexp(value, 1).requires_grad
    with torch.no_grad():
        assert not eaves.logsumexp(leaf, 1).requires_grad
    with torch.no_grad(), torch.enable_grad():
        assert eaves.logsumexp(leaf, 1).requires_grad


def test_integers_have_no_gradient(device: torch.device) -> None:
    for dtype in PROMOTED:
        out = eaves.logsumexp(random_tensor((3, 5), dtype, device), 1)
        assert not out.requires_grad and out.grad_fn is None


def test_only_x_and_two_numbers_a_row_are_kept_for_the_backward(device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x = random_tensor((64, 1000), dtype, device).requires_grad_()
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            eaves.logsumexp(x, 1).sum().backward()
        assert [t.data_ptr() == x.data_ptr() for t in kept].count(True) == 1, "x itself, not a copy"
        besides = [t for t in kept if t.data_ptr() != x.data_ptr()]
        assert sum(t.untyped_storage().nbytes() for t in besides) == 64 * 2 * (8 if dtype == torch.float64 else 4)
