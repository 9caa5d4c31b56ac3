"""eaves.linear_kl_div against the formula in float64, its gradients against autograd of that formula, and what it may
cost: products and memory."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eaves
from comparison import FLOATING_POINT, Bound, allowed_error, assert_agree, assert_within
from cross_entropy_test import REDUCTIONS, each
from layouts import LAYOUTS, random_tensor
from linear_cross_entropy_cases import Gradients
from linear_cross_entropy_cases import assert_gradients as assert_gradients_of
from pairwise import pairwise
from refusals import Call, assert_each_refused

IGNORED = -100
DIVERGENCES = ("forward", "reverse", "jsd")


def by_the_formula(log_s: Tensor, log_t: Tensor, divergence: str, beta: float) -> Tensor:
    """Of rows of log-probabilities, all finite."""

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if divergence == "forward":
        return kl(log_t, log_s)
    if divergence == "reverse":
        return kl(log_s, log_t)
    log_m = (beta * log_t.exp() + (1 - beta) * log_s.exp()).log()
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


class Oracle:
    """eaves.linear_kl_div in float64, from the tensors as they were rounded; gradients by autograd."""

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        *,
        targets: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        divergence: str = "forward",
        beta: float = 0.5,
        temperature: float | None = None,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
        normalizer: float | None = None,
        workspace_bytes: int | None = None,  # changes nothing
    ) -> None:
        def exact(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().cpu().double()

        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.leaves = [None if each is None else exact(each).requires_grad_() for each in
                       (hidden, head, bias)]  # fmt: skip
        teacher = [exact(each) for each in (teacher_hidden, teacher_head, teacher_bias)]
        divisor = 1.0 if temperature is None else temperature
        logits = [F.linear(*each) / divisor for each in (self.leaves, teacher)]
        log_s, log_t = (torch.log_softmax(z, -1) for z in logits)
        rows = by_the_formula(log_s, log_t, divergence, beta)
        counts = torch.ones_like(rows) if targets is None else (targets.cpu().long() != ignore_index).double()
        divided = (counts.sum().item() or 1.0) if normalizer is None else float(normalizer)

        def reduced(numbers: Tensor) -> Tensor:
            numbers = torch.where(counts == 0, 0.0, numbers)
            return numbers if reduction == "none" else numbers.sum() / (divided if reduction == "mean" else 1)

        self.divergence = reduced(rows)
        with torch.no_grad():
            # The scale is that of a row's terms as if no two logarithms cancelled, and no logit and its lse. Beside it,
            # a product of float32 is off by a share of its size, and an error of a logit is one of each logarithm.
            p = log_s.exp() + log_t.exp()
            largest = torch.maximum(*(z.abs().amax(-1) for z in logits))
            scale = (p * (log_s.abs() + log_t.abs())).sum(-1) + 2 * largest + 1
            product = torch.zeros_like(scale)
            for x, weight, bias in ([each.detach() if each is not None else None for each in self.leaves], teacher):
                size = F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs()).amax(-1)
                product += torch.finfo(self.dtype).eps * (1 + x.shape[-1] ** 0.5) * size / divisor
            through = 2 * product * (1 + (p * (log_s - log_t).abs()).sum(-1))
            error = reduced(allowed_error(self.dtype, rows, scale) + through)
        self.bound = Bound(self.divergence.detach(), error)

    def gradients(self, upstream: Tensor | float = 1.0) -> Gradients:
        given = torch.as_tensor(upstream).detach().cpu().double().expand(self.divergence.shape)
        wanted = [leaf for leaf in self.leaves if leaf is not None]
        found = list(torch.autograd.grad(self.divergence, wanted, given, retain_graph=True))
        return Gradients(*[None if leaf is None else found.pop(0) for leaf in self.leaves])


def heads(
    dtype: torch.dtype,
    device: torch.device | str,
    rows: tuple[int, ...] = (3, 5),
    classes: int = 33,
    student: int = 24,
    teacher: int = 31,
    deviation: float = 0.5,
) -> list[Tensor]:
    """hidden, head, teacher_hidden, teacher_head."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((*rows, student), (classes, student), (*rows, teacher), (classes, teacher))
    return [(deviation * torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes]


def differentiated(
    tensors: list[Tensor], bias: Tensor | None, upstream_of: Callable[[Tensor], Tensor], **options: Any
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The divergence, its upstream gradient, and the gradients of hidden, head and bias."""
    student = [each.detach().requires_grad_() for each in tensors[:2]]
    bias = None if bias is None else bias.detach().requires_grad_()
    found = eaves.linear_kl_div(*student, *tensors[2:], bias=bias, **options)
    upstream = upstream_of(found)
    wanted = [each for each in (*student, bias) if each is not None]
    gradients: list[Tensor | None] = list(torch.autograd.grad(found, wanted, upstream))
    assert [each.dtype for each in wanted] == [each.dtype for each in gradients if each is not None]
    return found.detach(), upstream, gradients if bias is not None else [*gradients, None]


def assert_gradients(found: Any, exact: Gradients, what: str = "") -> None:
    """Each by the dtype that it has: a bias may be wider or narrower than its head."""
    for index, gradient in enumerate(found):
        alone = [gradient if other == index else None for other in range(3)]
        if gradient is not None:
            assert_gradients_of(alone, exact, gradient.dtype, what)


def uneven(found: Tensor) -> Tensor:
    """An upstream gradient of both signs."""
    numbers = torch.linspace(-1, 2, found.numel(), dtype=found.dtype, device=found.device)
    return numbers.view(found.shape) if found.dim() else torch.full_like(found, -1.5)


# ---------------------------------------------------------------------------------------------------------- the formula


@each("divergence", DIVERGENCES)
def test_divergences_and_gradients_match_the_oracle(divergence: str, device: torch.device) -> None:
    for dtype, reduction, temperature, bias, has_target, workspace_bytes in pairwise(
        FLOATING_POINT, REDUCTIONS, (None, 0.5, 10.0), ("none", "float32", "as the head"), (False, True),
        (None, 1, 1500),  # one chunk, of single rows, of a few
    ):  # fmt: skip
        tensors = heads(dtype, device)
        options: dict[str, Any] = {
            "divergence": divergence, "beta": 0.3, "temperature": temperature, "reduction": reduction,
            "workspace_bytes": workspace_bytes,
        }  # fmt: skip
        bias = None
        if bias != "none":
            of_bias = torch.float32 if bias == "float32" else dtype
            bias = random_tensor((33,), of_bias, device)
            options["teacher_bias"] = random_tensor((33,), of_bias, device).flip(0)
        if has_target:
            target = torch.arange(15, device=device, dtype=torch.int32).view(3, 5)
            options |= {"targets": target, "ignore_index": 7}
        what = f"{dtype} {options} bias {bias}"
        oracle = Oracle(*tensors, bias=bias, **options)
        found, upstream, gradients = differentiated(tensors, bias, uneven, **options)
        assert found.dtype == oracle.dtype and found.is_contiguous(), what
        assert_within(found, oracle.bound, what)
        assert_gradients(gradients, oracle.gradients(upstream), what)
        assert torch.equal(eaves.linear_kl_div(*tensors, bias=bias, **options), found), what


@each("divergence", DIVERGENCES)
def test_gradients_are_those_of_finite_differences(divergence: str, device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float64, device, (3,), 5, 4, 2)
    bias = random_tensor((5,), torch.float64, device)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return eaves.linear_kl_div(
            x, weight, y, teacher, bias=bias, divergence=divergence, beta=0.2, temperature=1.5, reduction="none"
        )

    assert torch.autograd.gradcheck(function, [each.requires_grad_() for each in (x, weight, bias)])


@each("temperature", (0.1, 10.0))
@each("divergence", DIVERGENCES)
def test_sharp_and_flat_distributions(divergence: str, temperature: float, device: torch.device) -> None:
    tensors = heads(torch.float32, device, (40,), 100, deviation=0.5 * temperature**0.5)
    options = {"divergence": divergence, "temperature": temperature, "reduction": "none"}
    oracle = Oracle(*tensors, **options)
    found, upstream, gradients = differentiated(tensors, None, uneven, **options)
    assert_within(found, oracle.bound)
    assert_gradients(gradients, oracle.gradients(upstream))


def at_level(level: float, spread: float, device: torch.device) -> list[Tensor]:
    """Heads whose logits are exact: multiples of 1/64 around `level`."""
    classes = 500
    weight = (spread * torch.linspace(-1, 1, classes) * 64).round() / 64
    student = torch.stack([weight, torch.full((classes,), level)], 1)
    teacher = torch.stack([weight.flip(0), torch.full((classes,), level)], 1)
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [0.5, 1.0]])
    return [each.to(device) for each in (x, student, x.flip(0), teacher)]


@each("level", (-1e4, 1e4))
@each("divergence", DIVERGENCES)
def test_logits_that_are_all_large(divergence: str, level: float, device: torch.device) -> None:
    tensors = at_level(level, 4, device)
    oracle = Oracle(*tensors, divergence=divergence, reduction="none")
    found = eaves.linear_kl_div(*tensors, divergence=divergence, reduction="none")
    assert_within(found, oracle.bound)
    assert_agree(found, eaves.linear_kl_div(*at_level(0.0, 4, device), divergence=divergence, reduction="none"))


@each("divergence", DIVERGENCES)
def test_logits_far_apart(divergence: str, device: torch.device) -> None:
    tensors = at_level(0.0, 1e4, device)
    oracle = Oracle(*tensors, divergence=divergence, reduction="none")
    found, upstream, gradients = differentiated(tensors, None, uneven, divergence=divergence, reduction="none")
    # m is 0 where both are, whose logarithm the formula has not, and the divergence of what does not meet is ln 2.
    exact = oracle.bound if divergence != "jsd" else oracle.bound._replace(
        exact=torch.where(oracle.bound.exact.isnan(), math.log(2), oracle.bound.exact))  # fmt: skip
    assert_within(found, exact)
    assert all(each is None or each.isfinite().all() for each in gradients)
    if divergence == "forward":
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
    # For small weights the divergence is the weight times the KL of that side.
    near_0 = eaves.linear_kl_div(*tensors, divergence="jsd", beta=1e-7)
    near_1 = eaves.linear_kl_div(*tensors, divergence="jsd", beta=1 - 1e-7)
    torch.testing.assert_close(near_0 / 1e-7, kls["forward"], rtol=1e-5, atol=0)
    torch.testing.assert_close(near_1 / 1e-7, kls["reverse"], rtol=1e-5, atol=0)


# ----------------------------------------------------------------------------------------------- rows that do not count


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


def test_int32_targets_are_compared_with_all_of_ignore_index(device: torch.device) -> None:
    tensors = heads(torch.float32, device, (4,))
    target = torch.zeros(4, dtype=torch.int32, device=device)
    all_count = eaves.linear_kl_div(*tensors, targets=target, ignore_index=1 << 32)
    assert torch.equal(all_count, eaves.linear_kl_div(*tensors)) and all_count > 0


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
    oracle = Oracle(*tensors, normalizer=float(normalizer))
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
    oracle = Oracle(x, weight[kept], y, teacher[kept], divergence=divergence, reduction="none")
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
    # Both of one class, each another: nothing meets, and m is half of each.
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


# ------------------------------------------------------------------------------------------------ tensors, as they come


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
    assert_gradients(gradients, Oracle(*tensors, reduction="none").gradients(upstream))


@each("teacher_dtype", FLOATING_POINT)
@each("dtype", FLOATING_POINT)
def test_the_teacher_has_a_dtype_of_its_own(
    dtype: torch.dtype, teacher_dtype: torch.dtype, device: torch.device
) -> None:
    tensors = [*heads(dtype, device)[:2], *heads(teacher_dtype, device)[2:]]
    oracle = Oracle(*tensors)
    found, upstream, gradients = differentiated(tensors, None, uneven)
    assert found.dtype == oracle.dtype
    if dtype == torch.float64 and teacher_dtype != torch.float64:
        return  # the teacher's logits are as exact as its dtype has them
    assert_within(found, oracle.bound)
    assert_gradients(gradients, oracle.gradients(upstream))


def test_the_teacher_gets_no_gradient_and_may_be_the_student(device: torch.device) -> None:
    x, weight, y, _ = heads(torch.float32, device, student=24, teacher=24)
    head = torch.nn.Parameter(weight)
    bias = torch.nn.Parameter(random_tensor((33,), torch.float32, device))
    eaves.linear_kl_div(x, head, y, head, bias=bias, teacher_bias=bias).backward()
    exact = Oracle(x, weight, y, weight, bias=bias, teacher_bias=bias).gradients()
    assert_gradients((None, head.grad, bias.grad), exact)


@each("reduction", REDUCTIONS)
@each("wanted", ((True, False, False), (False, True, False), (False, False, True), (True, False, True)))
def test_only_gradients_that_are_wanted_are_there(
    wanted: tuple[bool, ...], reduction: str, device: torch.device
) -> None:
    x, weight, y, teacher = heads(torch.bfloat16, device)
    bias = random_tensor((33,), torch.float32, device)
    student = [each.requires_grad_(wants) for each, wants in zip((x, weight, bias), wanted, strict=True)]
    eaves.linear_kl_div(x, weight, y, teacher, bias=bias, reduction=reduction).sum().backward()
    assert [each.grad is not None for each in student] == list(wanted)
    exact = Oracle(x, weight, y, teacher, bias=bias, reduction=reduction).gradients()
    # That of the bias is the sum of the logits', before these are rounded.
    assert_gradients([each.grad for each in student], exact)


# ------------------------------------------------------------------------------------------------------------ gradients


@each("reduction", REDUCTIONS)
@each("dtype", (torch.float32, torch.bfloat16))
def test_a_second_backward_gives_the_same(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    x, weight, y, teacher = heads(dtype, device)
    target = torch.tensor([[1, IGNORED, 2, 3, 4]], device=device).expand(3, 5)
    given = [each.requires_grad_() for each in (x, weight)]
    found = eaves.linear_kl_div(x, weight, y, teacher, targets=target, reduction=reduction)
    first = torch.autograd.grad(found, given, uneven(found), retain_graph=True)
    copies = [each.clone() for each in first]
    second = torch.autograd.grad(found, given, uneven(found))
    assert all(map(torch.equal, copies, second)) and all(map(torch.equal, copies, first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(found, given, uneven(found))


def test_gradients_of_float16_do_not_underflow(device: torch.device) -> None:
    tensors = heads(torch.float16, device, (4096,))
    scale = 2.0**14
    exact = Oracle(*tensors).gradients(scale)
    _, _, gradients = differentiated(tensors, None, lambda found: torch.full_like(found, scale))
    assert exact.input is not None
    assert (exact.input / scale).abs().median() < torch.finfo(torch.float16).tiny  # without the loss scale
    assert_gradients(gradients, exact)


def test_the_gradient_of_the_head_is_rounded_once_over_all_chunks(device: torch.device) -> None:
    tensors = heads(torch.bfloat16, device, (512,))
    exact = Oracle(*tensors).gradients()
    for workspace_bytes in (None, 1):  # one chunk, 512 of them
        _, _, gradients = differentiated(tensors, None, torch.ones_like, workspace_bytes=workspace_bytes)
        assert_gradients(gradients, exact)


def test_derivatives_of_second_order_are_refused(any_device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float32, any_device)
    x.requires_grad_()
    for reduction in REDUCTIONS:
        found = eaves.linear_kl_div(x, weight, y, teacher, reduction=reduction).sum()
        (grad,) = torch.autograd.grad(found, x, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"^linear_kl_div: there is no second derivative"):
            torch.autograd.grad(grad.sum(), x)


def test_forward_mode_transforms_and_export_are_refused(any_device: torch.device) -> None:
    x, *others = heads(torch.float32, any_device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=r"^linear_kl_div: there is no forward-mode derivative"):
            eaves.linear_kl_div(dual, *others)
    for transformed in (
        lambda: torch.func.grad(eaves.linear_kl_div)(x, *others),
        lambda: torch.vmap(lambda x, y: eaves.linear_kl_div(x, others[0], y, others[2]))(x, others[1]),
    ):
        with pytest.raises(NotImplementedError, match=r"^linear_kl_div: it does not work inside of"):
            transformed()

    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return eaves.linear_kl_div(*tensors)

    with pytest.raises(Exception, match=r"linear_kl_div: it does not work inside of torch\.export"):
        torch.export.export(Model(), (x, *others), strict=False)


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_leaves_it_as_it_is(any_device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float32, any_device)
    target = torch.tensor([[1, IGNORED, 2, 3, 4]], device=any_device).expand(3, 5)

    def loss(x: Tensor, weight: Tensor, temperature: float) -> Tensor:
        return 2 * eaves.linear_kl_div(2 * x, weight, y, teacher, targets=target, temperature=temperature)

    given = [each.requires_grad_() for each in (x, weight)]
    compiled = torch.compile(loss, backend="aot_eager")
    for temperature in (0.5, 2.0):
        expected = torch.autograd.grad(loss(x, weight, temperature), given)
        assert_agree(compiled(x, weight, temperature), loss(x, weight, temperature))
        for actual, wanted in zip(torch.autograd.grad(compiled(x, weight, temperature), given), expected, strict=True):
            assert_agree(actual, wanted)
        with torch.no_grad():
            assert_agree(compiled(x, weight, temperature), loss(x, weight, temperature))


@each("reduction", REDUCTIONS)
def test_under_autocast_heads_are_cast_and_a_float32_gradient_is_not_rounded(
    reduction: str, device: torch.device
) -> None:
    tensors = heads(torch.float32, device)
    bias = random_tensor((33,), torch.float32, device)
    rounded = [each.bfloat16() for each in tensors]
    oracle = Oracle(*rounded, bias=bias, reduction=reduction)
    with torch.autocast(device.type, torch.bfloat16):
        found, upstream, gradients = differentiated(tensors, bias, uneven, reduction=reduction)
    assert found.dtype == torch.float32
    assert_within(found, oracle.bound)
    assert_gradients_of(gradients, oracle.gradients(upstream), torch.bfloat16)
    grad_weight = gradients[1]
    assert grad_weight is not None and not torch.equal(grad_weight, grad_weight.bfloat16().float())


@each("reduction", REDUCTIONS)
def test_a_backward_under_autocast_computes_in_the_dtype_of_the_call(reduction: str, device: torch.device) -> None:
    x, weight, y, teacher = heads(torch.float32, device)
    given = [each.requires_grad_() for each in (x, weight)]
    found = eaves.linear_kl_div(x, weight, y, teacher, reduction=reduction)
    exact = Oracle(x, weight, y, teacher, reduction=reduction).gradients(uneven(found))
    with torch.autocast(device.type, torch.bfloat16):
        assert_gradients((*torch.autograd.grad(found, given, uneven(found)), None), exact)


# ------------------------------------------------------------------------------------------------------------ the costs


class Watching(TorchDispatchMode):
    """Counts products, and the bytes that live at once in tensors made by the calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.peak, self.largest = 0, 0, 0
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                self.made.append(weakref.ref(result))
                self.largest = max(self.largest, result.numel())
        alive = [each for reference in self.made if (each := reference()) is not None]
        self.made = [weakref.ref(each) for each in alive]
        bytes_of = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
        self.peak = max(self.peak, sum(bytes_of.values()))
        return out


@each("case", [
    ("mean", (True, True), 4), ("sum", (True, False), 3), ("mean", (False, True), 3), ("mean", (False, False), 2),
    ("none", (True, True), 6), ("none", (True, False), 5), ("none", (False, False), 2),
])  # fmt: skip
def test_products_are_as_few_as_documented(case: tuple[str, tuple[bool, bool], int], device: torch.device) -> None:
    reduction, wanted, products = case
    tensors = heads(torch.float32, device)
    for each_tensor, wants in zip(tensors, wanted, strict=False):
        each_tensor.requires_grad_(wants)
    with Watching() as watching:
        found = eaves.linear_kl_div(*tensors, reduction=reduction)
        if any(wanted):
            found.sum().backward()
    assert watching.products == products


@each("divergence", DIVERGENCES)
@each("dtype", (torch.float32, torch.bfloat16))
def test_no_more_memory_is_taken_than_was_asked_for(dtype: torch.dtype, divergence: str, device: torch.device) -> None:
    rows, classes = 1000, 2003
    tensors = heads(dtype, device, (rows,), classes, 16, 24)
    for each_tensor in tensors[:2]:
        each_tensor.requires_grad_()
    limit = 1 << 20
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    bias = masking(classes, [3], device)
    of_gradients = 2 * 4 * (rows * 16 + classes * 16)  # in float32, and as they are handed out
    of_rows = 200 * rows + 3 * 4 * classes  # numbers of the rows, and of the biases
    for reduction in ("mean", "none"):
        with Watching() as watching:
            found = eaves.linear_kl_div(
                *tensors, targets=target, teacher_bias=bias, bias=bias, divergence=divergence,
                reduction=reduction, workspace_bytes=limit,
            )  # fmt: skip
            found.sum().backward()
        assert limit / 2 < watching.peak < limit + of_gradients + of_rows
        assert watching.largest <= limit / 12, "a tensor of more than a chunk"
        assert watching.largest < rows * classes / 10


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


# ------------------------------------------------------------------------------------------------------------- refusals

X, HEAD, Y, TEACHER = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, 2), torch.zeros(5, 2)


@each("call", [
    ({"hidden": None}, TypeError, r"hidden is a NoneType, expected a torch\.Tensor"),
    ({"hidden": torch.tensor(0.0)}, ValueError, "hidden has no axes, expected at least one, of the features"),
    ({"head": torch.nn.Linear(3, 5), "bias": torch.zeros(5)}, ValueError,
        "head is a torch.nn.Linear with a bias; leave bias out"),
    ({"teacher_head": torch.nn.Linear(2, 5), "teacher_bias": torch.zeros(5)}, ValueError,
        "teacher_head is a torch.nn.Linear with a bias; leave teacher_bias out"),
    ({"hidden": X.long()}, ValueError, "hidden has dtype int64, expected a floating-point type"),
    ({"head": HEAD[:, :2]}, ValueError, r"head has shape \[5, 2\], expected \[classes, 3\]"),
    ({"head": HEAD[:0]}, ValueError, r"head has shape \[0, 3\], expected at least one class"),
    ({"head": HEAD.bfloat16()}, ValueError, "head has dtype bfloat16, expected that of hidden, fl"),
    ({"teacher_head": TEACHER.half()}, ValueError, "teacher_head has dtype float16, expected that of teacher_hidd"),
    ({"teacher_hidden": Y[:3]}, ValueError, r"teacher_hidden has shape \[3, 2\], expected \[4, 2\] \(rows as hid"),
    ({"teacher_head": torch.zeros(7, 2)}, ValueError, r"teacher_head has shape \[7, 2\], expected \[5, 2\] \(cla"),
    ({"teacher_head": TEACHER.to_sparse()}, NotImplementedError, "teacher_head is torch.sparse_coo on"),
    ({"teacher_head": TEACHER.to("meta")}, ValueError, "teacher_head is on meta, expected (cpu|cuda)"),
    ({"teacher_hidden": Y.clone().requires_grad_()}, NotImplementedError, "no derivative with respect to teacher_hidd"),
    ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \[4\], expected \[5\] \(one per class of he"),
    ({"teacher_bias": torch.zeros(5).half()}, ValueError, "teacher_bias has dtype float16, expected float32"),
    ({"targets": torch.zeros(4)}, ValueError, "targets has dtype float32, expected int64 or int32"),
    ({"targets": torch.zeros(3).long()}, ValueError, r"targets has shape \[3\], expected \[4\] \(one per row of hid"),
    ({"divergence": "kl"}, ValueError, "divergence is 'kl', expected \"forward\", \"reverse\" or \"jsd\""),
    ({"divergence": 1}, TypeError, "divergence is 1, expected"),
    ({"divergence": "jsd", "beta": 0}, ValueError, 'beta is 0.*, expected a number between 0 and 1.*"forward" for 0'),
    ({"divergence": "jsd", "beta": 1.0}, ValueError, r"beta is 1\.0, expected a number between 0 and 1"),
    ({"beta": -1}, ValueError, "beta is -1, expected a number between 0 and 1"),
    ({"beta": "0.5"}, TypeError, "beta is '0.5', expected a number between 0 and 1"),
    ({"temperature": 0}, ValueError, "temperature is 0, expected a positive number"),
    ({"temperature": torch.ones(1)}, TypeError, "temperature is .*, expected a positive number"),
    ({"ignore_index": 0.5, "targets": torch.zeros(4).long()}, TypeError, r"ignore_index is 0\.5, expected an int"),
    ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean', expected"),
    ({"reduction": "sum", "normalizer": 2.0}, ValueError, "normalizer is given, but only the mean divides"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes is 0, expected a positive number of bytes"),
    ({"workspace_bytes": 1.5}, TypeError, r"workspace_bytes is 1\.5, expected an int"),
    ({"softcap": 30.0}, TypeError, "got an unexpected keyword argument 'softcap'"),
    ({"linear_bias": HEAD[:, 0]}, TypeError, "got an unexpected keyword argument 'linear_bias'; pass bias"),
])  # fmt: skip
def test_refusals(call: Call, any_device: torch.device) -> None:
    right = {"hidden": X, "head": HEAD, "teacher_hidden": Y, "teacher_head": TEACHER}
    assert_each_refused(eaves.linear_kl_div, "linear_kl_div", right, call, any_device)


def test_tensors_of_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^linear_kl_div: teacher_head is on cpu, expected cuda"):
        eaves.linear_kl_div(X.to(cuda), HEAD.to(cuda), Y.to(cuda), TEACHER)
