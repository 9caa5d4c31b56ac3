"""eaves.linear_kl_div against the formula in float64, and its gradients against autograd of that formula. The tests
shared by heads in chunks of rows are in chunked_heads_test.py."""

import math
from typing import Any

import torch
from torch import Tensor

import eaves
from chunked_cases import (
    DIVERGENCES,
    IGNORED,
    DivergenceOracle,
    Watching,
    assert_gradients,
    differentiated,
    heads,
    uneven,
)
from comparison import FLOATING_POINT, assert_agree, assert_within
from cross_entropy_test import REDUCTIONS, each
from layouts import LAYOUTS, random_tensor
from pairwise import pairwise

# ---------------------------------------------------------------------------------------------------------- the formula


@each("divergence", DIVERGENCES)
def test_divergences_and_gradients_match_the_oracle(divergence: str, device: torch.device) -> None:
    for dtype, reduction, temperature, kind_of_bias, has_target, workspace_bytes in pairwise(
        FLOATING_POINT, REDUCTIONS, (None, 0.5, 10.0), ("none", "float32", "as the head"), (False, True),
        (None, 1, 1500),  # one chunk, of single rows, of a few
    ):  # fmt: skip
        tensors = heads(dtype, device)
        options: dict[str, Any] = {
            "divergence": divergence, "beta": 0.3, "temperature": temperature, "reduction": reduction,
            "workspace_bytes": workspace_bytes,
        }  # fmt: skip
        bias = None
        if kind_of_bias != "none":
            of_bias = torch.float32 if kind_of_bias == "float32" else dtype
            bias = random_tensor((33,), of_bias, device)
            options["teacher_bias"] = random_tensor((33,), of_bias, device).flip(0)
        if has_target:
            target = torch.arange(15, device=device, dtype=torch.int32).view(3, 5)
            options |= {"targets": target, "ignore_index": 7}
        what = f"{dtype} {options} bias {kind_of_bias}"
        oracle = DivergenceOracle(*tensors, bias=bias, **options)
        found, upstream, gradients = differentiated(tensors, bias, uneven, **options)
        assert found.dtype == oracle.dtype and found.is_contiguous(), what
        assert_within(found, oracle.bound, what)
        assert_gradients(gradients, oracle.gradients(upstream), what)
        alone = eaves.linear_kl_div(*tensors, bias=bias, **options)
        assert torch.equal(alone, found), what


@each("divergence", DIVERGENCES)
def test_gradients_are_those_of_finite_differences(divergence: str, device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float64, device, (3,), 5, 4, 2)
    bias = random_tensor((5,), torch.float64, device)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return eaves.linear_kl_div(
            x, weight, y, teacher, bias=bias, divergence=divergence, beta=0.2, temperature=1.5, reduction="none"
        )

    assert torch.autograd.gradcheck(function, [each.requires_grad_() for each in (x, weight, bias)])


@each("temperature", (0.1, 10.0, None))
@each("divergence", DIVERGENCES)
def test_sharp_and_flat_distributions(divergence: str, temperature: float | None, device: torch.device) -> None:
    tensors = heads(torch.float32, device, (40,), 100, deviation=0.5 * (temperature or 0.1) ** 0.5)
    of_rows = torch.logspace(-1, 1, 40, device=device) if temperature is None else temperature
    options: dict[str, Any] = {"divergence": divergence, "temperature": of_rows, "reduction": "none"}
    oracle = DivergenceOracle(*tensors, **options)
    found, upstream, gradients = differentiated(tensors, None, uneven, **options)
    assert_within(found, oracle.bound)
    assert_gradients(gradients, oracle.gradients(upstream))


def at_level(level: float, spread: float, device: torch.device) -> list[Tensor]:
    """Heads with exact logits, multiples of 1/64 around `level`."""
    classes = 500
    weight = (spread * torch.linspace(-1, 1, classes) * 64).round() / 64
    student = torch.stack([weight, torch.full((classes,), level)], 1)
    teacher = torch.stack([weight.flip(0), torch.full((classes,), level)], 1)
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [0.5, 1.0]])
    return [each.to(device) for each in (x, student, x.flip(0), teacher)]


@each("level_and_spread", ((-1e4, 4), (1e4, 4), (0.0, 1e4)))
@each("divergence", DIVERGENCES)
def test_logits_that_are_all_large_or_far_apart(
    divergence: str, level_and_spread: tuple[float, float], device: torch.device
) -> None:
    tensors = at_level(*level_and_spread, device)
    options: dict[str, Any] = {"divergence": divergence, "reduction": "none"}
    oracle = DivergenceOracle(*tensors, **options)
    found, upstream, gradients = differentiated(tensors, None, uneven, **options)
    # m is 0 if both are, and then the formula has no logarithm. The divergence of disjoint distributions is ln 2.
    is_ln2 = oracle.bound.exact.isnan() if divergence == "jsd" else torch.zeros(3, dtype=torch.bool)
    assert_within(found, oracle.bound._replace(exact=oracle.bound.exact.masked_fill(is_ln2, math.log(2))))
    assert all(each is None or each.isfinite().all() for each in gradients)
    if level_and_spread[0]:
        assert_agree(found, eaves.linear_kl_div(*at_level(0.0, 4, device), **options))
    elif divergence == "forward":
        assert_gradients(gradients, oracle.gradients(upstream))


@each("divergence", DIVERGENCES)
@each("dtype", (torch.bfloat16, torch.float32))
def test_of_one_head_twice_nothing_is_left(dtype: torch.dtype, divergence: str, device: torch.device) -> None:
    x, weight = heads(dtype, device, (64,), 1000)[:2]
    found, _, gradients = differentiated([x, weight, x, weight], None, torch.ones_like, divergence=divergence)
    rounded = 0 if divergence != "jsd" else 1e-6
    assert 0 <= found <= rounded
    assert all(each is None or each.abs().max() <= rounded for each in gradients)


@each("divergence", DIVERGENCES)
def test_no_divergence_is_below_0(divergence: str, device: torch.device) -> None:
    x, weight = heads(torch.float32, device, (256,), 300)[:2]
    near = weight * (1 + 1e-6 * torch.randn_like(weight))
    found = eaves.linear_kl_div(x, near, x, weight, divergence=divergence, reduction="none")
    assert (found >= 0).all() and found.max() < 1e-6


def test_beta_belongs_to_the_teacher(device: torch.device) -> None:
    tensors = heads(torch.float64, device)
    kls = {name: eaves.linear_kl_div(*tensors, divergence=name) for name in ("forward", "reverse")}
    # For a small weight the divergence is the weight times the KL divergence of that side.
    near_0 = eaves.linear_kl_div(*tensors, divergence="jsd", beta=1e-7)
    near_1 = eaves.linear_kl_div(*tensors, divergence="jsd", beta=1 - 1e-7)
    torch.testing.assert_close(near_0 / 1e-7, kls["forward"], rtol=1e-5, atol=0)
    torch.testing.assert_close(near_1 / 1e-7, kls["reverse"], rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------------------------------- ignored rows


@each("divergence", DIVERGENCES)
@each("reduction", REDUCTIONS)
def test_ignored_rows_count_for_nothing_whatever_they_hold(
    reduction: str, divergence: str, device: torch.device
) -> None:
    tensors = heads(torch.float32, device, (6,))
    target = torch.tensor([1, IGNORED, 2, 3, IGNORED, 0], device=device)
    counts = target != IGNORED
    expected = differentiated(
        [tensors[0][counts], tensors[1], tensors[2][counts], tensors[3]], None, torch.ones_like,
        divergence=divergence, reduction=reduction,
    )  # fmt: skip
    tensors[0][1], tensors[2][4] = math.nan, math.inf
    found = differentiated(tensors, None, torch.ones_like, targets=target, divergence=divergence, reduction=reduction)
    of_rows = found[0][counts] if reduction == "none" else found[0]
    assert_agree(of_rows, expected[0])
    assert reduction != "none" or (found[0][~counts] == 0).all()
    grad_input, grad_weight, _ = found[2]
    assert grad_input is not None and grad_weight is not None
    assert (grad_input[~counts] == 0).all()
    assert_agree(grad_input[counts], expected[2][0])
    assert_agree(grad_weight, expected[2][1])


@each("divergence", DIVERGENCES)
@each("reduction", REDUCTIONS)
@each("rows", (0, 4))
def test_nothing_that_counts_is_0_with_gradient_0(
    rows: int, reduction: str, divergence: str, device: torch.device
) -> None:
    tensors = heads(torch.float32, device, (rows,))
    bias = random_tensor((33,), torch.float32, device)
    target = torch.full((rows,), 5, device=device)
    found, _, gradients = differentiated(
        tensors, bias, torch.ones_like, targets=target, ignore_index=5, divergence=divergence, reduction=reduction
    )
    assert found.shape == ((rows,) if reduction == "none" else ()) and (found == 0).all()
    for gradient, of in zip(gradients, (*tensors[:2], bias), strict=True):
        assert gradient is not None and gradient.shape == of.shape and (gradient == 0).all()


@each("normalizer", (7, 2.5, torch.tensor([2.5]), 0.0))
def test_a_normalizer_divides_instead_of_the_rows(normalizer: Any, device: torch.device) -> None:
    tensors = heads(torch.float32, device)
    given = normalizer.to(device) if isinstance(normalizer, Tensor) else normalizer
    found, _, gradients = differentiated(tensors, None, torch.ones_like, normalizer=given)
    if normalizer == 0:
        assert found == math.inf and all(each is None or (each == 0).all() for each in gradients)
        none = torch.full((4,), -100, device=device)
        assert eaves.linear_kl_div(*heads(torch.float32, device, (4,)), targets=none, normalizer=given) == 0
        return
    oracle = DivergenceOracle(*tensors, normalizer=float(normalizer))
    assert_within(found, oracle.bound)
    assert_gradients(gradients, oracle.gradients())


def test_ignored_rows_whose_divergence_is_infinite_have_gradient_0(device: torch.device) -> None:
    x, head, y, teacher, *_ = heads(torch.float32, device, (4,))
    given = [x.requires_grad_(), head.requires_grad_()]
    teacher_bias = torch.zeros(len(teacher), device=device)
    teacher_bias[1] = -math.inf
    target = torch.tensor([-100, -100, -100, -100], device=device)
    loss = eaves.linear_kl_div(*given, y, teacher, teacher_bias=teacher_bias, targets=target, divergence="reverse")
    assert loss == 0 and all(not grad.any() for grad in torch.autograd.grad(loss, given))


# ------------------------------------------------------------------------------------------------------- masked classes


def masking(classes: int, masked: list[int], device: torch.device) -> Tensor:
    bias = torch.zeros(classes, device=device)
    bias[masked] = -math.inf
    return bias


@each("divergence", DIVERGENCES)
def test_classes_that_both_mask_are_as_if_they_were_not_there(divergence: str, device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float32, device)
    bias = masking(33, [0, 7, 32], device)
    kept = bias == 0
    found, upstream, gradients = differentiated(
        [x, weight, y, teacher], bias, uneven, teacher_bias=bias, divergence=divergence, reduction="none"
    )
    oracle = DivergenceOracle(x, weight[kept], y, teacher[kept], divergence=divergence, reduction="none")
    assert_within(found, oracle.bound)
    grad_input, grad_weight, grad_bias = gradients
    assert grad_weight is not None and grad_bias is not None
    assert (grad_weight[~kept] == 0).all() and (grad_bias[~kept] == 0).all()
    assert_gradients((grad_input, grad_weight[kept], None), oracle.gradients(upstream))


def test_classes_that_the_teacher_masks_add_nothing_to_forward(device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float64, device)
    bias = masking(33, [4, 11], device)
    kept = bias == 0
    log_s, log_t = torch.log_softmax(x @ weight.T, -1), torch.log_softmax((y @ teacher.T)[..., kept], -1)
    t = torch.zeros_like(log_s)
    t[..., kept] = log_t.exp()
    found, _, (_, _, grad_bias) = differentiated(
        [x, weight, y, teacher], torch.zeros_like(weight[:, 0]), torch.ones_like, teacher_bias=bias, reduction="sum"
    )
    torch.testing.assert_close(found, (log_t.exp() * (log_t - log_s[..., kept])).sum())
    torch.testing.assert_close(grad_bias, (log_s.exp() - t).flatten(0, 1).sum(0))


def test_classes_that_one_masks_in_jsd(device: torch.device) -> None:
    # Each has all mass on one class, a different one: the supports do not meet, and m is half of each.
    x = torch.ones(1, 1, dtype=torch.float64, device=device)
    weight = torch.zeros(2, 1, dtype=torch.float64, device=device)
    found, _, gradients = differentiated(
        [x, weight, x, weight], masking(2, [0], device), torch.ones_like,
        teacher_bias=masking(2, [1], device), divergence="jsd",
    )  # fmt: skip
    torch.testing.assert_close(found.item(), math.log(2))
    assert all(each is not None and (each == 0).all() for each in gradients)  # a masked class cannot come back


@each("case", [("reverse", "teacher_bias"), ("forward", "bias")])
def test_a_class_that_one_alone_masks_makes_infinity(case: tuple[str, str], device: torch.device) -> None:
    divergence, bias = case
    named: dict[str, Any] = {"divergence": divergence, bias: masking(33, [4], device)}
    assert (eaves.linear_kl_div(*heads(torch.float32, device), **named, reduction="none") == math.inf).all()


@each("divergence", DIVERGENCES)
@each("place", range(4))
def test_a_nan_stays_one(place: int, divergence: str, device: torch.device) -> None:
    for teacher_bias in (None, masking(33, [1], device)):
        tensors = heads(torch.float32, device, (3,))
        tensors[place][0, 0] = math.nan
        found = eaves.linear_kl_div(
            *tensors, divergence=divergence, reduction="none", bias=teacher_bias, teacher_bias=teacher_bias
        )
        assert found[0].isnan()


# --------------------------------------------------------------------------------------------------- layouts of tensors


def test_any_layout_gives_the_same(device: torch.device) -> None:
    for layout in LAYOUTS:
        tensors = [layout(each) for each in heads(torch.float32, device)]
        expected = differentiated([each.contiguous() for each in tensors], None, uneven, reduction="none")
        found = differentiated(tensors, None, uneven, reduction="none")
        for actual, wanted in zip((found[0], *found[2][:2]), (expected[0], *expected[2][:2]), strict=True):
            assert_agree(actual, wanted)


@each("rows", ((), (1,), (2, 3, 4)))
def test_any_number_of_axes(rows: tuple[int, ...], device: torch.device) -> None:
    tensors = heads(torch.float32, device, rows)
    found, upstream, gradients = differentiated(tensors, None, uneven, reduction="none")
    assert found.shape == rows
    assert_gradients(gradients, DivergenceOracle(*tensors, reduction="none").gradients(upstream))


@each("teacher_dtype", FLOATING_POINT)
@each("dtype", FLOATING_POINT)
def test_the_teacher_has_a_dtype_of_its_own(
    dtype: torch.dtype, teacher_dtype: torch.dtype, device: torch.device
) -> None:
    tensors = [*heads(dtype, device)[:2], *heads(teacher_dtype, device)[2:]]
    oracle = DivergenceOracle(*tensors)
    found, upstream, gradients = differentiated(tensors, None, uneven)
    assert found.dtype == oracle.dtype
    if dtype == torch.float64 and teacher_dtype != torch.float64:
        return  # the dtype of the teacher's logits limits their accuracy
    assert_within(found, oracle.bound)
    assert_gradients(gradients, oracle.gradients(upstream))


def test_the_teacher_gets_no_gradient_and_may_be_the_student(device: torch.device) -> None:
    x, weight, y, _ = heads(torch.float32, device, student=24, teacher=24)
    head = torch.nn.Parameter(weight)
    bias = torch.nn.Parameter(random_tensor((33,), torch.float32, device))
    eaves.linear_kl_div(x, head, y, head, bias=bias, teacher_bias=bias).backward()
    exact = DivergenceOracle(x, weight, y, weight, bias=bias, teacher_bias=bias).gradients()
    assert_gradients((None, head.grad, bias.grad), exact)


def test_gradients_of_float16_do_not_underflow(device: torch.device) -> None:
    tensors = heads(torch.float16, device, (4096,))
    scale = 2.0**14
    exact = DivergenceOracle(*tensors).gradients(scale)
    _, _, gradients = differentiated(tensors, None, lambda found: torch.full_like(found, scale))
    assert exact.input is not None
    assert (exact.input / scale).abs().median() < torch.finfo(torch.float16).tiny  # without the loss scale
    assert_gradients(gradients, exact)


def test_the_gradient_of_the_head_is_rounded_once_over_all_chunks(device: torch.device) -> None:
    tensors = heads(torch.bfloat16, device, (512,))
    exact = DivergenceOracle(*tensors).gradients()
    for workspace_bytes in (None, 1):  # one chunk, 512 of them
        _, _, gradients = differentiated(tensors, None, torch.ones_like, workspace_bytes=workspace_bytes)
        assert_gradients(gradients, exact)


def test_by_default_a_cpu_takes_32_mib() -> None:
    tensors = heads(torch.float32, "cpu", (300,), 50257, 4, 4)
    with torch.no_grad(), Watching() as watching:
        eaves.linear_kl_div(*tensors)
    assert 16 << 20 < watching.peak < 33 << 20


def test_heads_may_be_modules(device: torch.device) -> None:
    student, teacher = torch.nn.Linear(6, 9, device=device), torch.nn.Linear(4, 9, device=device)
    x, y = torch.randn(5, 6, device=device), torch.randn(5, 4, device=device)
    actual = eaves.linear_kl_div(x, student, y, teacher)
    bias = {"bias": student.bias, "teacher_bias": teacher.bias}
    expected = eaves.linear_kl_div(x, student.weight, y, teacher.weight, **bias)
    assert torch.equal(actual, expected)
    actual.backward()
    grads = torch.autograd.grad(expected, (student.weight, student.bias))
    assert torch.equal(student.weight.grad, grads[0]) and torch.equal(student.bias.grad, grads[1])
    assert teacher.weight.grad is None and teacher.bias.grad is None
