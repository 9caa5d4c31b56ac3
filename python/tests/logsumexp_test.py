"""eaves.logsumexp forward: values against the float64 oracle, everything else against torch.logsumexp.

Gradients are in logsumexp_gradient_test.py, arguments that are refused in logsumexp_refusals_test.py, and what every
operator has to do in library_test.py.
"""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, PROMOTED, Bound, LogsumexpOracle, allowed_error, assert_within
from layouts import LAYOUTS, random_tensor

INFINITY = math.inf
NAN = math.nan

# shape, dims, the reason
SAMPLES = [
    ((), 0, "no axes: x is its own logsumexp"),
    ((), -1, "no axes, counted from the end"),
    ((), (), "no axes, all of them"),
    ((1,), 0, "one element"),
    ((7,), -1, "one short of a vector of 16-bit elements"),
    ((0,), 0, "an empty row: -inf"),
    ((3, 0), 1, "three empty rows"),
    ((3, 0), -2, "no rows"),
    ((0, 3), 0, "three empty columns"),
    ((0, 3), 1, "no rows of three"),
    ((3, 0), (0, 1), "everything, and there is nothing"),
    ((2, 0, 3), (0, 2), "an empty axis stays"),
    ((1, 1, 1), 1, "size 1 everywhere"),
    ((5, 1, 3), 1, "summing over an axis of size 1"),
    ((1, 13), 0, "one row summed down its columns"),
    ((13, 17), 0, "primes, down the columns"),
    ((13, 17), 1, "primes, along the rows"),
    ((13, 17), (0, 1), "all axes by name"),
    ((13, 17), (), "all axes, without naming any"),
    ((13, 17), [1], "a list"),
    ((13, 17), [-1, 0], "a list in another order, mixed signs"),
    ((5, 11, 257), 1, "the middle axis; one more than 512 bytes of 16-bit elements"),
    ((5, 11, 257), (0, 2), "the axes around one that stays"),
    ((5, 11, 257), (-3, -2), "the first axes"),
    ((3, 50257), -1, "the vocabulary of GPT-2: rows that start anywhere between 16-byte boundaries"),
    ((2049, 3), 0, "long columns next to each other"),
    ((2, 3, 4, 5, 6), (1, 3), "five axes, every second one"),
    ((2, 3, 4, 5, 6), -4, "five axes, one near the front"),
    ((2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1), (0, 5, -2), "sixteen axes, the most there may be"),
]


def samples() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "dims"), [pytest.param(*s[:2], id=s[2]) for s in SAMPLES])


def each(name: str, values: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, values, ids=lambda value: getattr(value, "__name__", str(value)))


def check(x: Tensor, dims: object, keepdim: bool = False, dtype: torch.dtype | None = None) -> None:
    """One call, without and with a gradient asked for: they are two operators beneath. Shape and strides as torch has
    them."""
    oracle = LogsumexpOracle(x, dims, keepdim)
    expected_dtype = dtype or (x.dtype if x.is_floating_point() else torch.float32)
    # torch takes an empty tuple for all axes in some versions only.
    of_torch = torch.logsumexp(x, tuple(range(x.dim())) if dims == () else dims, keepdim)
    for wants_grad in [False, True] if x.is_floating_point() else [False]:
        out = eaves.logsumexp(x.detach().requires_grad_(wants_grad), dims, keepdim, dtype=dtype)
        what = f"{x.dtype} keepdim={keepdim} dtype={dtype} strides={x.stride()} wants_grad={wants_grad}"
        assert out.dtype == expected_dtype, what
        assert out.device.type == x.device.type, what
        assert out.is_contiguous() and (out.shape, out.stride()) == (of_torch.shape, of_torch.stride()), what
        assert out.requires_grad == wants_grad, what
        assert_within(out, oracle.forward(out.dtype), what)


# --------------------------------------------------------------------------------------------------------------- values


@samples()
def test_every_dtype_matches_the_oracle(shape: tuple[int, ...], dims: object, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        for keepdim in (False, True):
            check(random_tensor(shape, dtype, device), dims, keepdim)


def test_integers_and_float32_results_match_the_oracle(device: torch.device) -> None:
    for dtype in FLOATING_POINT + PROMOTED:
        for shape, dims in (((), 0), ((3, 0), 1), ((5, 11, 257), (0, 2))):
            x = random_tensor(shape, dtype, device)
            check(x, dims, dtype=torch.float32)
            check(x, dims, keepdim=True)


@each("dtype", FLOATING_POINT)
def test_the_dtype_of_x_can_be_asked_for(dtype: torch.dtype, device: torch.device) -> None:
    check(random_tensor((3, 5), dtype, device), 1, dtype=dtype)


def test_float32_out_of_16_bits_is_not_rounded_to_16_bits(device: torch.device) -> None:
    x = random_tensor((64, 100), torch.bfloat16, device)
    out = eaves.logsumexp(x, 1, dtype=torch.float32)
    assert (out != out.to(torch.bfloat16)).any()
    assert_within(out, LogsumexpOracle(x, 1).forward(torch.float32))


def test_integers_give_float32_whatever_the_default_dtype_is(device: torch.device) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert eaves.logsumexp(torch.arange(4, device=device), 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_integers_are_not_wrapped(device: torch.device) -> None:
    # 2^40 and -2^40 are exact in float32; a cast to 32 bits would make 0 of both.
    x = torch.tensor([[2**40, 0], [-(2**40), 5]], device=device)
    assert eaves.logsumexp(x, 1).tolist() == [2.0**40, 5.0]


@each("deviation", [1.0, 64.0])  # 64: a few elements carry the sum, most vanish
def test_rows_of_every_spread_match_the_oracle(deviation: float, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        check(random_tensor((7, 3001), dtype, device, deviation), 1)


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


# -------------------------------------------------------------------------------------------------------------- layouts


@each("layout", LAYOUTS)
def test_every_layout_matches_the_oracle(layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    # 257 columns: one more than a whole number of vectors, so that every row has a tail.
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int8):
        for dims in (0, 1, -1, (0, 2), (1, 2), ()):
            check(layout(random_tensor((3, 5, 257), dtype, device)), dims)


def test_channels_last_matches_the_oracle_and_gives_a_contiguous_result(device: torch.device) -> None:
    x = random_tensor((2, 3, 5, 7), torch.float32, device).to(memory_format=torch.channels_last)
    for dims in (0, 1, 2, 3, (2, 3), (0, 2, 3), ()):
        check(x, dims)
        check(x, dims, keepdim=True)


def test_a_permutation_of_five_axes_matches_the_oracle(device: torch.device) -> None:
    x = random_tensor((2, 3, 4, 5, 6), torch.float32, device).permute(3, 0, 4, 2, 1)
    for dims in (0, 2, 4, (0, 3), (1, 2, 4), ()):
        check(x, dims)


def test_rows_that_overlap_in_memory_match_the_oracle(device: torch.device) -> None:
    # Windows of 5 elements that start at every element.
    x = random_tensor((100,), torch.float32, device).unfold(0, 5, 1)
    for dims in (0, 1, (0, 1)):
        check(x, dims)


def test_a_view_whose_negation_is_pending_is_negated(device: torch.device) -> None:
    # The imaginary part of a conjugate is a view whose sign torch has put off.
    x = torch.complex(random_tensor((3, 5), torch.float32), random_tensor((3, 5), torch.float32, "cpu", 2.0))
    negated = x.to(device).conj().imag
    assert negated.is_neg()
    check(negated, 1)


# ---------------------------------------------------------------------------------------------------------------- edges


EDGES = [
    ([-INFINITY, -INFINITY, -INFINITY], -INFINITY, "all -inf"),
    ([-INFINITY, 2.0, -INFINITY], 2.0, "a single finite element"),
    ([INFINITY, 1.0, -INFINITY], INFINITY, "a +inf"),
    ([INFINITY, INFINITY, 0.0], INFINITY, "two +inf"),
    ([NAN, 1.0, 2.0], NAN, "a NaN"),
    ([NAN, INFINITY, -INFINITY], NAN, "a NaN beats infinities"),
    ([NAN, -INFINITY, -INFINITY], NAN, "a NaN among -inf"),
]


@pytest.mark.parametrize(("row", "expected"), [pytest.param(*e[:2], id=e[2]) for e in EDGES])
def test_edges(row: list[float], expected: float, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x = torch.tensor(row, dtype=torch.float64).to(dtype).to(device)
        # Alone, along a row, and down a column beside others.
        table = torch.stack([x, torch.zeros_like(x)])
        actual = [eaves.logsumexp(x, 0), eaves.logsumexp(table, 1)[0], eaves.logsumexp(table.t().contiguous(), 0)[0]]
        for value in actual:
            assert value.item() == expected or (math.isnan(expected) and value.isnan()), actual


@each("position", [0, 1500, 3000])  # at the start of a long row, in its middle, as its last element
def test_one_nan_or_infinity_anywhere_in_a_long_row_decides(position: int, device: torch.device) -> None:
    for special in (NAN, INFINITY):
        x = random_tensor((2, 3001), torch.float32, device)
        x[1, position] = special
        out = eaves.logsumexp(x, 1)
        assert out[0].isfinite()
        assert out[1].item() == special or (math.isnan(special) and out[1].isnan())


def test_a_long_row_that_starts_with_minus_infinity_keeps_its_tail(device: torch.device) -> None:
    x = torch.full((3, 5000), -INFINITY, device=device)
    x[:, 4990:] = 1.0
    check(x, 1)


@each("dtype", FLOATING_POINT)
def test_large_elements_do_not_overflow(dtype: torch.dtype, device: torch.device) -> None:
    for size in (1e4, -1e4, torch.finfo(dtype).max, torch.finfo(dtype).min):
        x = torch.full((2, 3), size, dtype=dtype, device=device)
        x[1, 1:] = 0.0
        out = eaves.logsumexp(x, 1)
        # The oracle by hand, in closed form: three equal elements, and one beside two zeros.
        element = x[0, 0].item()
        exact = torch.tensor([element + math.log(3), math.log(2) if size < 0 else element], dtype=torch.float64)
        assert_within(out, Bound(exact, allowed_error(dtype, exact, x[0, 0].abs().cpu().double())))


# -------------------------------------------------------------------------------------------- what must not happen to x


def test_no_grad_and_inference_mode_give_results_without_a_graph(device: torch.device) -> None:
    x = random_tensor((3, 5), torch.float32, device).requires_grad_()
    expected = eaves.logsumexp(x, 1).detach()
    with torch.no_grad():
        out = eaves.logsumexp(x, 1)
        assert not out.requires_grad and torch.equal(out, expected)
    with torch.inference_mode():
        out = eaves.logsumexp(x, 1)
        assert not out.requires_grad and out.is_inference() and torch.equal(out, expected)


def test_an_inference_tensor_is_a_legal_input(device: torch.device) -> None:
    with torch.inference_mode():
        x = random_tensor((3, 5), torch.float32, device) * 1.0
    assert_within(eaves.logsumexp(x, 1), LogsumexpOracle(x.clone(), 1).forward(torch.float32))


def test_a_parameter_is_a_tensor_and_the_result_is_a_plain_one(device: torch.device) -> None:
    parameter = torch.nn.Parameter(random_tensor((3, 5), torch.float32, device))
    out = eaves.logsumexp(parameter, 1)
    assert type(out) is Tensor
    assert_within(out, LogsumexpOracle(parameter, 1).forward(torch.float32))


def test_the_result_shares_no_memory_with_x(device: torch.device) -> None:
    # Summing one element, a kernel might be tempted to hand x back.
    for shape in ((), (1,), (4, 1)):
        x = random_tensor(shape, torch.float32, device)
        out = eaves.logsumexp(x, -1)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert_within(out, LogsumexpOracle(x, -1).forward(torch.float32))
