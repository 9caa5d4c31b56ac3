"""add_product of the extension: adds a product to a third matrix. Heads in chunks of rows use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eaves._torch.chunked_rules import add_product

each = pytest.mark.parametrize
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def factors(dtype: torch.dtype, device: torch.device, rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(depth)
    return torch.randn(rows, depth).to(device, dtype), torch.randn(depth, columns).to(device, dtype)


def bound(a: Tensor, b: Tensor) -> Tensor:
    """The bound of sums in float32, for terms as if they did not cancel."""
    return 1e-6 * (1 + a.double().abs() @ b.double().abs())


@each("dtype", DTYPES, ids=str)
def test_a_product_is_added_in_the_dtype_of_sums(dtype: torch.dtype, device: torch.device) -> None:
    # Sizes that are no whole vectors, a transposed factor, one with gaps between columns, and a sum with gaps between
    # rows.
    a, b = factors(dtype, device, 37, 131, 29)
    given = torch.randn(37, 40, device=device, dtype=torch.promote_types(dtype, torch.float32))
    for left in (a, a.t().contiguous().t(), torch.cat([a, a], 1)[:, :131]):
        for right in (b, b.t().contiguous().t()):
            wide = given.clone()
            add_product(wide[:, :29], left, right)
            off = (wide[:, :29].double() - given[:, :29].double() - a.double() @ b.double()).abs()
            assert (off <= bound(a, b)).all()
            assert torch.equal(wide[:, 29:], given[:, 29:])


@each("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_sum_may_have_the_dtype_of_the_factors(dtype: torch.dtype, device: torch.device) -> None:
    a, b = factors(dtype, device, 16, 64, 24)
    given = torch.randn(16, 24, device=device).to(dtype)
    sums = given.clone()
    add_product(sums, a, b)
    exact = given.double() + a.double() @ b.double()
    # Rounded once; on a GPU the product is also rounded before the addition.
    eps = torch.finfo(dtype).eps
    assert ((sums.double() - exact).abs() <= eps * (exact.abs() + (exact - given.double()).abs())).all()


def test_a_sum_of_nothing_stays(device: torch.device) -> None:
    a, b = factors(torch.bfloat16, device, 3, 0, 5)
    sums = torch.ones(3, 5, device=device)
    add_product(sums, a, b)
    assert torch.equal(sums, torch.ones(3, 5, device=device))
    add_product(sums[:0], a[:0], b)


@each("call", [
    ((3, 4), (3, 5), (6, 4), torch.float32, r"b` has shape \[6, 4\], expected \[5, 4\]"),
    ((3, 4), (2, 5), (5, 4), torch.float32, r"a` has shape \[2, 5\], expected \[3, 5\]"),
    ((3, 4), (3, 5), (5, 4), torch.float64, "sum` has dtype float64, expected"),
])  # fmt: skip
def test_refusals(call: tuple[tuple[int, int], tuple[int, int], tuple[int, int], torch.dtype, str]) -> None:
    sums, a, b, dtype, message = call
    with pytest.raises(RuntimeError, match=message):
        add_product(torch.zeros(sums, dtype=dtype), torch.zeros(a), torch.zeros(b))
    with pytest.raises(RuntimeError, match="has strides"):
        add_product(torch.zeros(3, 4), torch.zeros(3, 10)[:, ::2], torch.zeros(5, 4))
