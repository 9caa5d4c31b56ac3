"""eaves.logsumexp: the path of a call and its backward to the core, beside torch.logsumexp.

The tests of the core check its accuracy. Derivatives are in logsumexp_gradient_test.py, refused arguments are in
logsumexp_refusals_test.py, and the duties of every operator are in library_test.py.
"""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, PROMOTED, LogsumexpOracle, assert_within
from layouts import LAYOUTS, contiguous, random_tensor
from pairwise import pairwise


def upstream(out: Tensor) -> Tensor:
    """An upstream gradient of both signs, for a result of this shape and dtype."""
    numbers = torch.linspace(-1.5, 2.0, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
    return numbers.view(out.shape).to(out.dtype).to(out.device)


def each(name: str, values: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, values, ids=lambda value: getattr(value, "__name__", str(value)))


# shape, dims
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), 0), ((), ()), ((3, 0), 1), ((0, 3), 1), ((2, 0, 3), (0, 2)), ((13, 17), ()), ((13, 17), [-1, 0]),
    ((13, 17), 0), ((5, 11, 257), (0, 2)), ((5, 11, 257), -2), ((2, 3, 4, 5, 6), (1, 3)),
]  # fmt: skip
DTYPES = (None, "that of x", torch.float32)
CALLS = pairwise((*FLOATING_POINT, *PROMOTED), SHAPES, (False, True), DTYPES, LAYOUTS, LAYOUTS)


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_arrives_whatever_its_dtype_and_layout(call: tuple[Any, ...], device: torch.device) -> None:
    dtype, (shape, dims), keepdim, asked, layout, of_upstream = call
    if asked == "that of x":
        asked = dtype if dtype.is_floating_point else None
    check(layout(random_tensor(shape, dtype, device)), dims, keepdim, asked, of_upstream)


def test_views_of_torch_are_read_as_they_lie(device: torch.device) -> None:
    x = random_tensor((2, 3, 4, 5, 6), torch.float32, device)
    images = random_tensor((2, 3, 5, 7), torch.float32, device).to(memory_format=torch.channels_last)
    imaginary = torch.complex(x, 2 * x).conj().imag
    assert imaginary.is_neg(), "a view whose sign torch has put off"
    sixteen = random_tensor((2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1), torch.float32, device)
    for view in (x.permute(3, 0, 4, 2, 1), images, x.view(-1).unfold(0, 5, 1)[:, None, :, None], imaginary, sixteen):
        for dims in (0, 1, 2, 3, (0, 3), (0, 2, 3), ()):
            check(view, dims)


def check(
    x: Tensor,
    dims: Any,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    of_upstream: Callable[[Tensor], Tensor] = contiguous,
) -> None:
    """One call without and one with a gradient, which use two operators. Compares shape and strides with torch's, and
    the gradient."""
    oracle = LogsumexpOracle(x, dims, keepdim)
    expected_dtype = dtype or (x.dtype if x.is_floating_point() else torch.float32)
    # Only some versions of torch take an empty tuple for all axes.
    of_torch = torch.logsumexp(x, tuple(range(x.dim())) if dims == () else dims, keepdim)
    what = f"{x.dtype} keepdim={keepdim} dtype={dtype} strides={x.stride()}"
    for wants_grad in [False, True] if x.is_floating_point() else [False]:
        leaf = x.detach().requires_grad_(wants_grad)
        out = eaves.logsumexp(leaf, dims, keepdim, dtype=dtype)
        assert out.dtype == expected_dtype and out.device.type == x.device.type, what
        assert out.is_contiguous() and (out.shape, out.stride()) == (of_torch.shape, of_torch.stride()), what
        assert out.requires_grad == wants_grad, what
        assert_within(out, oracle.forward(out.dtype), f"{what} wants_grad={wants_grad}")
    if x.is_floating_point():
        grad_out = of_upstream(upstream(out))
        (grad_x,) = torch.autograd.grad(out, leaf, grad_out)
        assert grad_x.dtype == x.dtype and grad_x.device == x.device, what
        assert_within(grad_x, oracle.backward(grad_out, x.dtype), f"gradient {what} upstream {grad_out.stride()}")


def test_integers_give_float32_whatever_the_default_dtype_is(device: torch.device) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert eaves.logsumexp(torch.arange(4, device=device), 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_integers_are_not_wrapped(device: torch.device) -> None:
    # 2^40 and -2^40 are exact in float32; a cast to 32 bits would make both 0.
    x = torch.tensor([[2**40, 0], [-(2**40), 5]], device=device)
    assert eaves.logsumexp(x, 1).tolist() == [2.0**40, 5.0]


def test_keyword_and_positional_arguments_mean_the_same(device: torch.device) -> None:
    x = random_tensor((3, 5), torch.float32, device)
    expected = eaves.logsumexp(x, 1, True)
    assert torch.equal(eaves.logsumexp(x, dim=1, keepdim=True), expected)
    assert torch.equal(eaves.logsumexp(x, [1], keepdim=True), expected)
    assert torch.equal(eaves.logsumexp(x=x, dim=(-1,), keepdim=True, dtype=None), expected)
    assert torch.equal(eaves.logsumexp(x, torch.Size([1]), True), expected)


def test_an_integer_of_numpy_names_an_axis(device: torch.device) -> None:
    # As in torch; sizes and positions often come from numpy.
    x = random_tensor((3, 5), torch.float32, device)
    assert torch.equal(eaves.logsumexp(x, numpy.int64(1)), eaves.logsumexp(x, 1))
    assert torch.equal(eaves.logsumexp(x, (numpy.int64(0), -1)), eaves.logsumexp(x, (0, 1)))


def test_parameters_inference_tensors_and_modes_without_a_graph(device: torch.device) -> None:
    parameter = torch.nn.Parameter(random_tensor((3, 5), torch.float32, device))
    expected = eaves.logsumexp(parameter.detach(), 1)
    out = eaves.logsumexp(parameter, 1)
    assert type(out) is Tensor and torch.equal(out, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = eaves.logsumexp(parameter, 1)
            assert not out.requires_grad and torch.equal(out, expected)
            made = parameter * 1.0
        assert torch.equal(eaves.logsumexp(made, 1), expected)


def test_the_result_shares_no_memory_with_x(device: torch.device) -> None:
    # A sum of one element must not return x itself.
    for shape in ((), (1,), (4, 1)):
        x = random_tensor(shape, torch.float32, device)
        out = eaves.logsumexp(x, -1)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert torch.equal(out, x if shape == () else x[..., 0])
