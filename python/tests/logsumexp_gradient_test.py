"""The gradient of eaves.logsumexp, through autograd, against the float64 oracle."""

import math
from collections.abc import Callable

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
from layouts import LAYOUTS, padded_rows, random_tensor
from logsumexp_test import each, samples

INFINITY = math.inf


def upstream(out: Tensor) -> Tensor:
    """An upstream gradient of both signs, for a result of this shape and dtype."""
    numbers = torch.linspace(-1.5, 2.0, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
    return numbers.view(out.shape).to(out.dtype).to(out.device)


def check(x: Tensor, dims: object, keepdim: bool = False, dtype: torch.dtype | None = None) -> None:
    x = x.detach().requires_grad_()
    out = eaves.logsumexp(x, dims, keepdim, dtype=dtype)
    grad_out = upstream(out)
    (grad_x,) = torch.autograd.grad(out, x, grad_out)
    what = f"{x.dtype} keepdim={keepdim} dtype={dtype} strides={x.stride()}"
    assert grad_x.dtype == x.dtype and grad_x.device == x.device, what
    assert_within(grad_x, LogsumexpOracle(x, dims, keepdim).backward(grad_out, x.dtype), what)


@samples()
def test_every_dtype_matches_the_oracle(shape: tuple[int, ...], dims: object, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        for keepdim in (False, True):
            check(random_tensor(shape, dtype, device), dims, keepdim)


@each("layout", LAYOUTS)
def test_every_layout_of_x_matches_the_oracle(layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    # 257 columns: one more than a whole number of vectors, so that every row has a tail.
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for dims in (0, 1, -1, (0, 2), (1, 2), ()):
            check(layout(random_tensor((3, 5, 257), dtype, device)), dims)


@each("layout", LAYOUTS)
def test_every_layout_of_the_upstream_gradient_matches_the_oracle(
    layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = random_tensor((6, 33, 10), dtype, device).requires_grad_()
        out = eaves.logsumexp(x, 1)
        grad_out = layout(upstream(out))
        (grad_x,) = torch.autograd.grad(out, x, grad_out)
        assert_within(grad_x, LogsumexpOracle(x, 1).backward(grad_out, dtype), f"{dtype} {grad_out.stride()}")


def test_the_gradient_of_a_sum_is_an_expanded_number(device: torch.device) -> None:
    # .sum() hands down a gradient whose strides are all 0.
    for dtype in FLOATING_POINT:
        x = random_tensor((5, 100), dtype, device).requires_grad_()
        eaves.logsumexp(x, 1).sum().backward()
        assert_within(x.grad, LogsumexpOracle(x, 1).backward(torch.ones(5), dtype))


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


def test_the_gradient_reaches_what_x_was_made_of(device: torch.device) -> None:
    # Four rows that are one: its gradient is the sum of theirs.
    row = random_tensor((1, 50), torch.float64, device).requires_grad_()
    eaves.logsumexp(row.expand(4, 50), 1).sum().backward()
    exact = LogsumexpOracle(row, 1).backward(torch.tensor([4.0]), torch.float64)
    assert_within(row.grad, exact)


def test_a_float32_upstream_gradient_of_16_bits_is_not_rounded(device: torch.device) -> None:
    # 1 + 2^-9 is 1 in bfloat16, and would move a quarter of the gradients by a unit in the last place.
    for dtype in (torch.bfloat16, torch.float16):
        x = random_tensor((20, 300), dtype, device).requires_grad_()
        out = eaves.logsumexp(x, 1, dtype=torch.float32)
        grad_out = torch.full_like(out, 1 + 2**-9 if dtype == torch.bfloat16 else 1 + 2**-12)
        (grad_x,) = torch.autograd.grad(out, x, grad_out)
        assert grad_x.dtype == dtype
        oracle = LogsumexpOracle(x, 1)
        assert_within(grad_x, oracle.backward(grad_out, dtype))
        rounded = oracle.backward(grad_out.to(dtype), dtype).exact.to(dtype)
        assert differences(rounded, oracle.backward(grad_out, dtype)), "this test could not tell the two apart"


def test_gradients_in_bfloat16_do_not_go_through_an_lse_in_bfloat16(device: torch.device) -> None:
    # 50257 elements of deviation 1: lse is about 11.3, where neighbours in bfloat16 are 1/16 apart.
    x = random_tensor((4, 50257), torch.bfloat16, device).requires_grad_()
    out = eaves.logsumexp(x, 1)
    assert (out > 11).all() and (out < 12).all()
    grad_out = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.bfloat16, device=device)
    (grad_x,) = torch.autograd.grad(out, x, grad_out)
    bound = LogsumexpOracle(x, 1).backward(grad_out, torch.bfloat16)
    assert_within(grad_x, bound)
    through_bfloat16 = grad_out[:, None] * (x.detach().float() - out.detach().float()[:, None]).exp()
    assert differences(through_bfloat16.to(torch.bfloat16), bound), "this test could not tell the two apart"


def test_float32_results_of_every_dtype_have_their_gradient(device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        check(random_tensor((3, 5, 77), dtype, device), (0, 2), dtype=torch.float32)


@pytest.mark.parametrize(("dims", "keepdim"), [(0, False), (-1, True), ((0, 2), False), ((), True), ([2, 1], True)])
def test_finite_differences_agree(dims: object, keepdim: bool, device: torch.device) -> None:
    # Small, because each element costs two calls. Batched too: torch.vmap over the backward.
    x = random_tensor((3, 2, 4), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: eaves.logsumexp(t, dims, keepdim), x, check_batched_grad=True)


def test_finite_differences_agree_for_a_transposed_x(device: torch.device) -> None:
    x = random_tensor((4, 3), torch.float64, device).t().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: eaves.logsumexp(t, 1), x)


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
    # 64 equal elements, so that p = 1/64 and v * p are exact; only what is summed needs more bits than there are.
    # bfloat16 keeps 8 bits: 257 / 64 would be 4, and its difference to 4 nothing. float16 keeps 11.
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


# ---------------------------------------------------------------------------------------------------------------- edges


@each("dtype", FLOATING_POINT)
def test_a_row_of_minus_infinity_has_gradient_zero(dtype: torch.dtype, device: torch.device) -> None:
    # torch gives NaN. The second row shows that its neighbours are not harmed.
    x = torch.tensor([[-INFINITY] * 3, [0.0, -INFINITY, 0.0]], dtype=dtype, device=device)
    for table, axis in ((x, 1), (x.t().contiguous(), 0)):
        table = table.detach().requires_grad_()
        eaves.logsumexp(table, axis).sum().backward()
        rows = table.grad if axis == 1 else table.grad.t()
        assert rows[0].tolist() == [0.0, 0.0, 0.0]
        assert_within(table.grad, LogsumexpOracle(table, axis).backward(torch.ones(2), dtype))
    assert rows[1].tolist() == [0.5, 0.0, 0.5]


def test_infinities_and_nan_have_the_gradient_that_the_formula_says(device: torch.device) -> None:
    x = torch.tensor([[INFINITY, 1.0, -INFINITY], [math.nan, 1.0, 2.0], [1.0, 1.0, -INFINITY]], device=device)
    x.requires_grad_()
    eaves.logsumexp(x, 1).sum().backward()
    assert x.grad[0, 0].isnan() and x.grad[0, 1:].tolist() == [0.0, 0.0]
    assert x.grad[1].isnan().all()
    assert x.grad[2].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("offset", [300.0, -1e4, 1e4])
def test_elements_far_from_zero_have_exact_gradients(offset: float, device: torch.device) -> None:
    x = (random_tensor((8, 500), torch.float32, device=device) + offset).requires_grad_()
    expected = torch.softmax(x.detach().double(), -1)
    (found,) = torch.autograd.grad(eaves.logsumexp(x, -1).sum(), x)
    assert ((found - expected).abs() <= 2e-6 * expected.amax(-1, keepdim=True)).all()


def test_large_elements_have_finite_gradients(device: torch.device) -> None:
    x = torch.tensor([[1e4, 1e4, 0.0], [-1e4, -1e4, -2e4], [3e38, 0.0, -3e38]], device=device, requires_grad=True)
    out = eaves.logsumexp(x, 1)
    (grad_x,) = torch.autograd.grad(out.sum(), x)
    assert_within(grad_x, LogsumexpOracle(x, 1).backward(torch.ones(3), torch.float32))
    assert grad_x[2].tolist() == [1.0, 0.0, 0.0]


def test_an_upstream_gradient_of_zero_gives_zero(device: torch.device) -> None:
    x = random_tensor((3, 100), torch.float32, device).requires_grad_()
    out = eaves.logsumexp(x, 1)
    (grad_x,) = torch.autograd.grad(out, x, torch.zeros_like(out))
    assert not grad_x.any()


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


def test_gradients_add_up_over_calls(device: torch.device) -> None:
    x = random_tensor((3, 5), torch.float64, device).requires_grad_()
    eaves.logsumexp(x, 1).sum().backward()
    once = x.grad.clone()
    eaves.logsumexp(x, 1).sum().backward()
    assert torch.equal(x.grad, 2 * once)


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


def test_an_x_that_was_changed_before_the_backward_is_noticed(device: torch.device) -> None:
    leaf = random_tensor((3, 5), torch.float32, device).requires_grad_()
    x = leaf * 1
    out = eaves.logsumexp(x, 1)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
