"""eaves.log_prob and eaves.linear_log_prob for several tokens in each row, and with a temperature for each row, against
the formula in float64 and autograd's gradients of it. chunked_heads_test.py has the tests that all heads in chunks of
rows share."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from chunked_cases import (
    EVERYTHING,
    IGNORED,
    TokensOracle,
    assert_gradients,
    chosen_tokens,
    temperatures,
    uneven,
)
from comparison import FLOATING_POINT, Bound, allowed_error, assert_within
from cross_entropy_test import each
from eaves._calls import log_prob as calls
from layouts import LAYOUTS
from linear_cross_entropy_cases import assert_gradients as assert_gradients_of
from log_prob_test import rows_and_head
from pairwise import pairwise
from refusals import assert_refused_by
from watch import watched

PLACES = (None, 0, 1, 3, 64)  # None: tokens of the rows' shape


def outputs_of(out: Any, oracle: TokensOracle, what: str) -> None:
    for name, bound in oracle.bounds().items():
        found = getattr(out, name)
        assert found.dtype == oracle.dtype and found.is_contiguous(), f"{name} {what}"
        assert_within(found, bound, f"{name} {what}")
    assert torch.equal(out.is_top1.cpu(), oracle.is_top1), what
    assert (out.log_prob <= 0).all() and not torch.signbit(out.log_prob[out.log_prob == 0]).any(), what


# ---------------------------------------------------------------------------------------------------------- the numbers


@each("places", PLACES)
def test_of_a_head_everything_matches_the_formula(places: int | None, device: torch.device) -> None:
    rows, classes = (3, 5), 129
    divisors = ("rows",) if places is None else (None, 0.7, "rows")  # a number and one token take other code
    for dtype, temperature, softcap, scale, bias, workspace_bytes in pairwise(
        FLOATING_POINT, divisors, (None, 4.0), (None, 1.5), ("none", "float32", "as the head"),
        (None, 1, 8000),  # one chunk, of single rows, of a few
    ):  # fmt: skip
        hidden, head, _ = rows_and_head(rows, classes, dtype, device)
        hidden, head = hidden / 3, head / 2
        tokens = chosen_tokens(rows, places, classes, device)
        options: dict[str, Any] = {"softcap": softcap, "scale": scale}
        options["temperature"] = temperatures(rows, device) if temperature == "rows" else temperature
        if bias != "none":
            of_bias = torch.float32 if bias == "float32" else dtype
            options["bias"] = torch.linspace(-1, 1, classes, device=device).to(of_bias).requires_grad_()
        what = f"{dtype} {options} {workspace_bytes}"
        oracle = TokensOracle(hidden, head, tokens, **options)
        given = [hidden.requires_grad_(), head.requires_grad_()]
        wanted = [*given, options["bias"]] if bias != "none" else given
        # "auto" takes this implementation unless a call has one token for each row and one temperature.
        out = eaves.linear_log_prob(
            *given, tokens, workspace_bytes=workspace_bytes, grad_weight_dtype=oracle.dtype, **EVERYTHING, **options
        )
        outputs_of(out, oracle, what)
        for has_entropy in (False, True):
            upstream, of_entropy = uneven(out.log_prob), uneven(out.entropy) if has_entropy else None
            found = torch.autograd.grad(
                (out.log_prob, out.entropy), wanted, (upstream, torch.zeros_like(out.entropy) if of_entropy is None
                else of_entropy), retain_graph=True,
            )  # fmt: skip
            exact = oracle.gradients(upstream, of_entropy)
            assert [(each.dtype, each.shape) for each in found] == [(each.dtype, each.shape) for each in wanted], what
            assert_gradients((*found, None)[:3], exact, f"{what} entropy {has_entropy}")
        with torch.no_grad():
            again = eaves.linear_log_prob(*given, tokens, workspace_bytes=workspace_bytes, **EVERYTHING, **options)
        assert all(map(torch.equal, out, again)), what


@each("places", PLACES)
def test_of_logits_everything_matches_the_formula(places: int | None, device: torch.device) -> None:
    rows, classes = (3, 5), 257
    for dtype, temperature, softcap, scale, is_in_place, has_entropy in pairwise(
        FLOATING_POINT, (None, 0.7, "rows"), (None, 4.0), (None, 1.5), (False, True), (False, True)
    ):
        logits = rows_and_head(rows, 1, dtype, device, classes)[0]
        tokens = chosen_tokens(rows, places, classes, device).to(torch.int32)
        options: dict[str, Any] = {"softcap": softcap, "scale": scale}
        options["temperature"] = temperatures(rows, device) if temperature == "rows" else temperature
        what = f"{dtype} {options} in place {is_in_place}"
        oracle = TokensOracle(logits, None, tokens, **options)
        leaf = logits.clone().requires_grad_()
        out = eaves.log_prob(leaf * 1, tokens, inplace_backward=is_in_place, **EVERYTHING, **options)
        outputs_of(out, oracle, what)
        assert out.entropy.requires_grad != is_in_place, what
        upstream = uneven(out.log_prob)
        if is_in_place:  # powers of two, because bfloat16 would be rounded once more
            upstream = torch.where(upstream < 0, -0.5, 2.0).to(upstream.dtype)
        of_entropy = uneven(out.entropy) if has_entropy and not is_in_place else None
        total = (out.log_prob * upstream).sum()
        if of_entropy is not None:
            total = total + (out.entropy * of_entropy).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        exact = oracle.gradients(upstream, of_entropy).input
        assert grad.dtype == dtype and grad.shape == logits.shape
        # The share of p is as exact as lse, which is kept in float32: an absolute error of lse is a relative one of p.
        # Without cancellation the terms of an element are at most the row's upstream gradients.
        size = upstream.abs() if places is None else upstream.abs().sum(-1)
        size = size.cpu().double() if of_entropy is None else (size + 8 * of_entropy.abs()).cpu().double()
        size = (size * (scale or 1.0) * 2).unsqueeze(-1).expand_as(exact)
        assert_within(grad, Bound(exact, allowed_error(dtype, exact, size) + oracle.error.unsqueeze(-1) * size), what)


@each("temperature", (None, "rows"))
def test_gradients_are_those_of_finite_differences(temperature: str | None, device: torch.device) -> None:
    hidden, head, _ = rows_and_head((4,), 6, torch.float64, device, 3)
    bias = torch.linspace(-1, 1, 6, dtype=torch.float64, device=device)
    tokens = torch.tensor([[0, 0, 3], [5, IGNORED, 5], [IGNORED] * 3, [1, 2, 3]], device=device)
    divisors = temperatures((4,), device) if temperature else None

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = eaves.linear_log_prob(
            x, weight, tokens, bias=bias, temperature=divisors, softcap=3.0, scale=1.3, outputs="entropy"
        )
        assert out.entropy is not None
        return out.log_prob, out.entropy

    assert torch.autograd.gradcheck(function, [each.requires_grad_() for each in (hidden, head, bias)])


def test_one_place_is_as_tokens_without_it(device: torch.device) -> None:
    hidden, head, tokens = rows_and_head((3, 5), 129, torch.float32, device)
    tokens[1, 2] = IGNORED
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    for options in ({}, {"temperature": 0.7, "softcap": 4.0}):
        one = eaves.linear_log_prob(hidden, head, tokens, algorithm="recompute", **EVERYTHING, **options)
        several = eaves.linear_log_prob(hidden, head, tokens.unsqueeze(-1), **EVERYTHING, **options)
        for name, expected in zip(one._fields, one, strict=True):
            found = getattr(several, name)
            found = found.squeeze(-1) if name in ("log_prob", "is_top1") else found
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        upstream = uneven(one.log_prob)
        expected = torch.autograd.grad(one.log_prob, (hidden, head), upstream)
        found = torch.autograd.grad(several.log_prob, (hidden, head), upstream.unsqueeze(-1))
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@each("places", (None, 2))
@each("shape", ((), (1,), (4,), (4, 1), (1, 3)))
def test_temperatures_may_lack_axes_of_the_rows_and_have_any_dtype(
    shape: tuple[int, ...], places: int | None, device: torch.device
) -> None:
    hidden, head, _ = rows_and_head((4, 3), 33, torch.float32, device)
    dtype = FLOATING_POINT[sum(shape) % 4]
    tokens, temperature = chosen_tokens((4, 3), places, 33, device), temperatures(shape, device, dtype)
    of_rows = temperature.float().view(*shape, *[1] * (2 - len(shape))).expand(4, 3).contiguous()
    for function, tensors in ((eaves.linear_log_prob, (hidden, head)), (eaves.log_prob, (hidden @ head.T,))):
        found, expected = (function(*tensors, tokens, temperature=each) for each in (temperature, of_rows))
        assert torch.equal(found, expected)
        for wrong in ((3,), (2, 1), (4, 3, 1)):
            sentence = rf"temperature has shape \[{wrong[0]}.*\], expected \[4, 3\] .*, or its first axes"
            given = {"tokens": tokens, "temperature": torch.ones(wrong, device=device)}
            assert_refused_by(function, function.__name__, ValueError, sentence, *tensors, **given)


# ----------------------------------------------------------------------------------------------------------- edge cases


@each("has_temperatures", (False, True))
def test_confident_rows_are_exact(has_temperatures: bool, device: torch.device) -> None:
    # The first place is the unlikely token. If the likely token's log-probability came from its loss, no digit would be
    # right. On a GPU the sum of a row, which is close to 1, is only a float32.
    least = 2**-24 if device.type == "cuda" else 1e-12
    differences = torch.tensor([5.0, 17.0, 30.0, 60.0], device=device)
    logits = torch.stack([torch.zeros(4, device=device), differences], 1).requires_grad_()
    tokens = torch.tensor([0, 1, 1], device=device).expand(4, 3)
    temperature = torch.ones(4, device=device) if has_temperatures else None
    found = eaves.log_prob(logits, tokens, temperature=temperature)
    likely = -torch.log1p((-differences.double()).exp())
    exact = torch.stack([likely - differences, likely, likely], 1)
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=least)
    # d log p_1 = (-p_0, p_0), and the token is there twice.
    (grad,) = torch.autograd.grad(found, logits, torch.tensor([0.0, 1.0, 1.0], device=device).expand(4, 3))
    p_0 = -torch.expm1(likely)
    torch.testing.assert_close(grad[:, 1].double(), 2 * p_0, rtol=1e-6, atol=2 * least)
    torch.testing.assert_close(grad[:, 0].double(), -2 * p_0, rtol=1e-6, atol=2 * least)


@each("level", (-1e4, 1e4))
@each("has_temperatures", (False, True))
def test_logits_that_are_all_large_are_as_exact_as_others(
    has_temperatures: bool, level: float, device: torch.device
) -> None:
    logits = torch.linspace(-4, 4, 1000, device=device).repeat(3, 1) + level  # the formula gets rounded logits too
    tokens = torch.tensor([[0, 999], [500, 0], [999, 999]], device=device)
    temperature = torch.ones(3, device=device) if has_temperatures else None
    found = eaves.log_prob(logits, tokens, temperature=temperature)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, tokens)
    torch.testing.assert_close(found.double(), exact, rtol=5e-7, atol=1e-9)


def test_a_masked_class_has_log_probability_minus_infinity(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf, -math.inf, 1.0]], device=device, requires_grad=True)
    tokens = torch.tensor([[0, 1], [0, 1]], device=device)
    for temperature in (None, torch.ones(2, device=device)):
        out = eaves.log_prob(logits, tokens, temperature=temperature, outputs="entropy")
        assert out.log_prob[0, 1] == -math.inf and (out.log_prob[1] == -math.inf).all()
        (grad,) = torch.autograd.grad((out.log_prob[:, :1].sum(), out.entropy.sum()), logits)
        assert grad.isfinite().all()


@each("has_temperatures", (False, True))
def test_places_that_are_ignored_count_for_nothing(has_temperatures: bool, device: torch.device) -> None:
    hidden, head, _ = rows_and_head((4,), 33, torch.float32, device)
    hidden[2] = math.nan  # a row with only ignore_index may hold anything
    head.requires_grad_()
    tokens = torch.tensor([[5, IGNORED], [IGNORED, 7], [IGNORED, IGNORED], [1, 2]], device=device)
    temperature = temperatures((4,), device) if has_temperatures else None
    if temperature is not None:
        temperature[2] = 0
    upstream = torch.full((4, 2), 2.0, device=device).masked_fill(tokens == IGNORED, math.nan)
    of_entropy = torch.ones(4, device=device)
    of_entropy[2] = math.nan
    x = hidden.clone().requires_grad_()
    of_head = eaves.linear_log_prob(x, head, tokens, temperature=temperature, **EVERYTHING)
    logits = (hidden @ head.detach().T).requires_grad_()
    of_logits = eaves.log_prob(logits, tokens, temperature=temperature, **EVERYTHING)
    for out, tensors in ((of_head, (x, head)), (of_logits, (logits,))):
        assert (out.log_prob[tokens == IGNORED] == 0).all() and not out.is_top1[tokens == IGNORED].any()
        assert out.entropy[2] == out.sum_sq[2] == out.mean_logit[2] == 0
        assert (out.entropy[[0, 1, 3]] > 0).all()
        grads = torch.autograd.grad((out.log_prob, out.entropy), tensors, (upstream, of_entropy))
        assert (grads[0][2] == 0).all() and all(grad.isfinite().all() for grad in grads)


def test_an_ignore_index_may_be_a_class(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=device)
    out = eaves.log_prob(logits, torch.tensor([[0, 1], [0, 0]], device=device), ignore_index=0, **EVERYTHING)
    assert (out.log_prob == 0).tolist() == [[True, False], [True, True]] and not out.is_top1.any()
    assert out.entropy[0] > 0 and out.entropy[1] == 0


@each("shape", ((0, 3), (4, 0), (0, 0)))
def test_without_rows_or_places(shape: tuple[int, int], device: torch.device) -> None:
    hidden, head, _ = rows_and_head((shape[0],), 33, torch.float32, device)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    logits = (hidden @ head.T).requires_grad_()
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    for out, tensors in (
        (eaves.linear_log_prob(hidden, head, tokens, **EVERYTHING), (hidden, head)),
        (eaves.log_prob(logits, tokens, **EVERYTHING), (logits,)),
    ):
        assert out.log_prob.shape == out.is_top1.shape == shape
        assert out.entropy.shape == shape[:1] and (out.entropy == 0).all()
        for grad, of in zip(torch.autograd.grad(out.log_prob.sum(), tensors), tensors, strict=True):
            assert grad.shape == of.shape and (grad == 0).all()


@each("layout", LAYOUTS)
@each("has_temperatures", (False, True))
def test_any_strides(has_temperatures: bool, layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    rows = (4, 3, 2)
    logits = layout(rows_and_head(rows, 1, torch.float32, device, 33)[0])
    tokens = layout(chosen_tokens(rows, 5, 33, device))
    temperature = layout(temperatures(rows, device)) if has_temperatures else None
    oracle = TokensOracle(logits, None, tokens, temperature=temperature)
    leaf = logits.detach().requires_grad_()
    out = eaves.log_prob(leaf, tokens, temperature=temperature, **EVERYTHING)
    outputs_of(out, oracle, "")
    (grad,) = torch.autograd.grad(out.log_prob, leaf, uneven(out.log_prob))
    torch.testing.assert_close(grad.cpu().double(), oracle.gradients(uneven(out.log_prob)).input, rtol=1e-5, atol=1e-5)
    head = rows_and_head(rows, 33, torch.float32, device)[1]
    hidden = layout(rows_and_head(rows, 33, torch.float32, device)[0])
    oracle = TokensOracle(hidden, head, tokens, temperature=temperature)
    for weight in (head, layout(head) if "expanded" not in layout.__name__ else head.T.contiguous().T):
        outputs_of(eaves.linear_log_prob(hidden, weight, tokens, temperature=temperature, **EVERYTHING), oracle, "")


@each("has_temperatures", (False, True))
def test_in_place_the_gradient_lies_where_the_logits_were(has_temperatures: bool, device: torch.device) -> None:
    leaf = torch.randn(3, 6, 33, device=device, requires_grad=True)
    logits = (leaf * 1)[:, 1:]  # no two axes can become one
    tokens = chosen_tokens((3, 5), 4, 33, device)
    temperature = temperatures((3, 5), device) if has_temperatures else None
    exact = TokensOracle(logits, None, tokens, temperature=temperature)
    found = eaves.log_prob(logits, tokens, temperature=temperature, inplace_backward=True)
    handed_out = []
    logits.register_hook(handed_out.append)
    (grad,) = torch.autograd.grad(found, leaf, uneven(found), retain_graph=True)
    assert handed_out[0].data_ptr() == logits.data_ptr()
    expected = exact.gradients(uneven(found)).input
    torch.testing.assert_close(grad[:, 1:].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"^log_prob: with inplace_backward there is one backward"):
        torch.autograd.grad(found, leaf, uneven(found))
    with pytest.raises(RuntimeError, match=r"^log_prob: logits is a leaf"):
        eaves.log_prob(leaf, chosen_tokens((3, 6), 4, 33, device), inplace_backward=True)
    found = eaves.log_prob(leaf * 1, chosen_tokens((3, 6), 4, 33, device), inplace_backward=True)
    with pytest.raises(NotImplementedError, match=r"^log_prob: with inplace_backward the gradient has no derivative"):
        torch.autograd.grad(found.sum(), leaf, create_graph=True)


# ---------------------------------------------------------------------------------------------------- options of a head


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_gradient_of_the_head_is_added_to_what_is_there(dtype: torch.dtype, device: torch.device) -> None:
    hidden, head, _ = rows_and_head((40,), 65, dtype, device)
    tokens = chosen_tokens((40,), 3, 65, device)
    exact = TokensOracle(hidden, head, tokens).gradients(torch.ones(40, 3))
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    for of_out in {dtype, torch.float32}:
        out = torch.zeros(65, 24, dtype=of_out, device=device)
        found = eaves.linear_log_prob(hidden, head, tokens, grad_weight_out=out, workspace_bytes=1 << 20)
        version = out._version
        found.sum().backward(retain_graph=True)
        assert head.grad is None and out._version > version
        assert_gradients_of((None, out, None), exact, dtype)
        found.sum().backward()
        assert_gradients_of((None, out / 2, None), exact, dtype)
        with pytest.raises(NotImplementedError, match="with grad_weight_out the gradient has no derivative"):
            found = eaves.linear_log_prob(hidden, head, tokens, grad_weight_out=out)
            torch.autograd.grad(found.sum(), hidden, create_graph=True)


def test_parts_of_the_gradient_of_the_head_are_added_up_as_documented(device: torch.device) -> None:
    hidden, head, _ = rows_and_head((512,), 65, torch.bfloat16, device)
    head.requires_grad_()
    tokens = chosen_tokens((512,), 3, 65, device)
    exact = TokensOracle(hidden, head, tokens).gradients(torch.ones(512, 3))

    def error(dtype: torch.dtype | None) -> float:
        found = eaves.linear_log_prob(hidden, head, tokens, grad_weight_dtype=dtype, workspace_bytes=1)
        (grad,) = torch.autograd.grad(found.sum(), head)
        assert grad.dtype == torch.bfloat16
        return float((grad.cpu().double() - exact.weight).norm() / exact.weight.norm())

    # 512 chunks, each rounded to 16 bits, have several times the error of one rounding.
    assert 4 * error(torch.float32) < error(None) == error(torch.bfloat16)


@each("skip_ignored", (False, True))
def test_rows_that_are_ignored_may_be_left_out(
    skip_ignored: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    losses_of = calls.losses_of
    watch = lambda settings, *rest: told.append(settings.of_head.skip_ignored) or losses_of(settings, *rest)  # noqa: E731
    monkeypatch.setattr(calls, "losses_of", watch)
    hidden, head, _ = rows_and_head((20,), 65, torch.float32, device)
    tokens = chosen_tokens((20,), 3, 65, device)
    tokens[5:17] = IGNORED
    temperature = temperatures((20,), device)
    oracle = TokensOracle(hidden, head, tokens, temperature=temperature)
    given = [hidden.requires_grad_(), head.requires_grad_()]
    with watched("aten.mm") as products:
        out = eaves.linear_log_prob(*given, tokens, temperature=temperature, skip_ignored=skip_ignored, **EVERYTHING)
    assert told == [skip_ignored]
    counted = (tokens != IGNORED).any(1).sum() if skip_ignored or device.type == "cpu" else 20
    assert sum(results[0].shape[0] for _, _, results in products) == counted
    outputs_of(out, oracle, "")
    both = (uneven(out.log_prob), uneven(out.entropy))
    grads = torch.autograd.grad((out.log_prob, out.entropy), given, both)
    assert_gradients((*grads, None), oracle.gradients(*both))
