"""Rows that are ignored or have weight 0. For any input and any upstream gradient they have gradient 0 and affect no
other row, through every loss. linear_cross_entropy computes as if they did not exist."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import REDUCTIONS, each
from linear_cross_entropy_test import problem, soft_targets

ALGORITHMS = ("speed", "memory", "recompute", "keep")
OUTPUTS = ("lse", "argmax", "entropy", "sum_sq")


@each("reduction", REDUCTIONS)
@each("algorithm", ALGORITHMS)
@each("is_soft", (False, True))
@each("is_mask", (False, True))
def test_linear_rows_of_weight_zero_are_as_if_they_were_not_there(
    is_mask: bool, is_soft: bool, algorithm: str, reduction: str, device: torch.device
) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    target = soft_targets(x.shape, 33, device, x.dtype) if is_soft else target
    row_weight = torch.tensor([1.0, 0, 2, -0.0, 1, 1, 0, 3, 1], device=device)
    row_weight = row_weight != 0 if is_mask else row_weight
    kept = row_weight != 0
    x[~kept] = torch.tensor([[math.nan], [math.inf], [-math.inf]], device=device)

    def call(x: Tensor, target: Tensor, row_weight: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        leaves = [each.clone().requires_grad_() for each in (x, head, bias)]
        out = eaves.linear_cross_entropy(
            *leaves[:2], target, linear_bias=leaves[2], row_weight=row_weight, reduction=reduction, skip_ignored=True,
            algorithm=algorithm, outputs=OUTPUTS,
        )  # fmt: skip
        return out, torch.autograd.grad(out.loss.sum(), leaves)

    out, (grad_x, *grads) = call(x, target, row_weight)
    expected, (grad_of_kept, *grads_of_kept) = call(x[kept], target[kept], row_weight[kept])
    assert torch.count_nonzero(grad_x[~kept]) == 0
    torch.testing.assert_close([grad_x[kept], *grads], [grad_of_kept, *grads_of_kept])
    for name in OUTPUTS:
        found = getattr(out, name)
        assert torch.count_nonzero(found[~kept]) == 0
        torch.testing.assert_close(found[kept], getattr(expected, name))
    torch.testing.assert_close(out.loss[kept] if reduction == "none" else out.loss, expected.loss)


@each("is_soft", (False, True))
def test_linear_rows_of_weight_zero_have_outputs_of_0_where_they_are_computed(
    is_soft: bool, device: torch.device
) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    target = soft_targets(x.shape, 33, device, x.dtype) if is_soft else target
    kept = torch.arange(9, device=device) % 3 != 1
    x.requires_grad_()
    out = eaves.linear_cross_entropy(x, head, target, row_weight=kept, outputs=OUTPUTS)
    assert all(torch.count_nonzero(getattr(out, name)[~kept]) == 0 for name in OUTPUTS)
    (out.loss + out.lse.sum() + out.entropy.sum()).backward()
    assert x.grad[~kept].count_nonzero() == 0 and x.grad[kept].all(1).any()


# ------------------------------------------------------------------------------------------- upstream gradients --

# The second and the fifth of six rows do not count.
UNCOUNTED = [1, 4]
TARGET = [1, -100, 2, 3, 0, 5]
WEIGHT = [1.0, 1, 2, 1, 0, 1]


def _logits(device: torch.device) -> Tensor:
    torch.manual_seed(1)
    logits = torch.randn(6, 8, device=device)
    logits[UNCOUNTED] = math.nan
    return logits


def _cross_entropy(**options: Any) -> Callable[[torch.device, str], tuple[Tensor, Tensor]]:
    def call(device: torch.device, reduction: str) -> tuple[Tensor, Tensor]:
        x = _logits(device).requires_grad_()
        target, row_weight = torch.tensor(TARGET, device=device), torch.tensor(WEIGHT, device=device)
        dtype = options.get("dtype", torch.float32)
        named = {name: value for name, value in options.items() if name != "dtype"}
        z = x.to(dtype) * 1
        if named.get("class_dim") == 1:
            z = z.view(2, 3, 8).mT
            target, row_weight = target.view(2, 3), row_weight.view(2, 3)
        return eaves.cross_entropy(z, target, row_weight=row_weight, reduction=reduction, **named), x

    return call


def _linear(**options: Any) -> Callable[[torch.device, str], tuple[Tensor, Tensor]]:
    def call(device: torch.device, reduction: str) -> tuple[Tensor, Tensor]:
        x, head, _, _ = problem((6, 24), 8, options.get("dtype", torch.float32), device)
        named = {name: value for name, value in options.items() if name != "dtype"}
        x.requires_grad_()
        target, row_weight = torch.tensor(TARGET, device=device), torch.tensor(WEIGHT, device=device)
        return eaves.linear_cross_entropy(x, head, target, row_weight=row_weight, reduction=reduction, **named), x

    return call


def _log_prob(**options: Any) -> Callable[[torch.device, str], tuple[Tensor, Tensor]]:
    def call(device: torch.device, reduction: str) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([1, -100, 2, 3, -100, 5], device=device).unsqueeze(1).expand(6, 2)
        temperature = torch.full((6,), 0.5, device=device)
        if options.get("is_linear"):
            x, head, _, _ = problem((6, 24), 8, torch.float32, device)
            x[UNCOUNTED] = math.nan
            x.requires_grad_()
            found = eaves.linear_log_prob(x, head, tokens, temperature=temperature)
        else:
            x = _logits(device).requires_grad_()
            found = eaves.log_prob(x * 1, tokens, temperature=temperature, **options)
        return found if reduction == "none" else found.sum() / (6 if reduction == "mean" else 1), x

    return call


def _divergence(**options: Any) -> Callable[[torch.device, str], tuple[Tensor, Tensor]]:
    def call(device: torch.device, reduction: str) -> tuple[Tensor, Tensor]:
        x, head, _, _ = problem((6, 24), 8, torch.float32, device)
        teacher_x, teacher, _, _ = problem((6, 16), 8, torch.float32, device)
        x[UNCOUNTED], teacher_x[UNCOUNTED] = math.nan, math.inf
        x.requires_grad_()
        target = torch.tensor([1, -100, 2, 3, -100, 5], device=device)
        found = eaves.linear_kl_div(x, head, teacher_x, teacher, targets=target, reduction=reduction, **options)
        return found, x

    return call


CALLS = {
    "cross_entropy": _cross_entropy(),
    "softcap": _cross_entropy(softcap=3.0),
    "smoothing": _cross_entropy(label_smoothing=0.1, z_loss=0.1),
    "class_dim": _cross_entropy(class_dim=1),
    "in place": _cross_entropy(inplace_backward=True),
    "in place in float16": _cross_entropy(inplace_backward=True, dtype=torch.float16),
    "speed": _linear(algorithm="speed"),
    "memory": _linear(algorithm="memory"),
    "recompute": _linear(algorithm="recompute"),
    "keep": _linear(algorithm="keep"),
    "float16": _linear(dtype=torch.float16),
    "log_prob": _log_prob(),
    "log_prob with a softcap": _log_prob(softcap=3.0),
    "log_prob in place": _log_prob(inplace_backward=True, softcap=3.0),
    "linear_log_prob": _log_prob(is_linear=True),
    "forward": _divergence(),
    "reverse": _divergence(divergence="reverse"),
    "jsd": _divergence(divergence="jsd"),
}


@each("reduction", REDUCTIONS)
@each("up", (1.0, math.inf, math.nan))
@pytest.mark.parametrize("name", CALLS)
def test_an_upstream_gradient_that_is_not_finite_does_not_reach_them(
    name: str, up: float, reduction: str, device: torch.device
) -> None:
    found, x = CALLS[name](device, reduction)
    found.backward(torch.full_like(found, up))
    counted = [row for row in range(6) if row not in UNCOUNTED]
    assert x.grad is not None and torch.count_nonzero(x.grad[UNCOUNTED]) == 0
    is_finite = x.grad[counted].isfinite()
    assert is_finite.all() if up == 1 else not is_finite.any()


@each("reduction", REDUCTIONS)
@each("up", (math.inf, math.nan))
def test_nor_where_the_call_is_compiled(up: float, reduction: str, device: torch.device) -> None:
    target, row_weight = torch.tensor(TARGET, device=device), torch.tensor(WEIGHT, device=device)
    x, head, _, _ = problem((6, 24), 8, torch.float32, device)

    @torch.compile(backend="aot_eager")
    def function(x: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x, head, target, row_weight=row_weight, reduction=reduction)

    x.requires_grad_()
    found = function(x)
    found.backward(torch.full_like(found, up))
    assert x.grad is not None and torch.count_nonzero(x.grad[UNCOUNTED]) == 0
    assert not x.grad[[0, 2, 3, 5]].isfinite().any()


@each("algorithm", ALGORITHMS)
def test_without_rows_that_count_no_gradient_is_nan(algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    leaves = [each.requires_grad_() for each in (x, head, bias)]
    loss = eaves.linear_cross_entropy(
        x, head, target, linear_bias=bias, row_weight=torch.zeros(9, device=device), algorithm=algorithm
    )
    assert loss == 0
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, math.inf))
    assert all(torch.count_nonzero(grad) == 0 for grad in grads)


def test_a_divergence_divided_by_0_has_gradient_0_whatever_comes(device: torch.device) -> None:
    x, head, _, _ = problem((6, 24), 8, torch.float32, device)
    x.requires_grad_()
    loss = eaves.linear_kl_div(x, head, torch.randn(6, 24, device=device), head, normalizer=0.0)
    loss.backward(torch.full_like(loss, math.inf))
    assert torch.count_nonzero(x.grad) == 0


# ------------------------------------------------------------------------------------------- the mean's divisor ---


@each("samples", (None, 2))
def test_an_infinite_class_weight_makes_a_mean_and_its_gradient_nan(samples: int | None, device: torch.device) -> None:
    weight = torch.ones(8, device=device)
    weight[2] = math.inf
    target, of_rows = torch.tensor([1, -100, 2, 3], device=device), torch.tensor([1.0, 1, 0, 1], device=device)
    for row_weight, is_finite in ((torch.ones_like(of_rows), False), (of_rows, True)):
        logits = torch.randn(*(() if samples is None else (samples,)), 4, 8, device=device, requires_grad=True)

        def mean(logits: Tensor, row_weight: Tensor = row_weight) -> Tensor:
            return eaves.cross_entropy(logits, target, weight, row_weight=row_weight)

        loss = mean(logits) if samples is None else torch.vmap(mean)(logits)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert loss.isnan().all() != is_finite and grad[..., [0, 3], :].isnan().all() != is_finite
        assert torch.count_nonzero(grad[..., 1, :]) == 0


@pytest.mark.parametrize("normalizer", [-1, -0.5, torch.tensor(-1.0), torch.tensor([-2])], ids=str)
def test_a_negative_normalizer_is_refused(normalizer: Any) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, torch.device("cpu"))
    calls = {
        "cross_entropy": lambda: eaves.cross_entropy(x @ head.t(), target, normalizer=normalizer),
        "linear_cross_entropy": lambda: eaves.linear_cross_entropy(x, head, target, normalizer=normalizer),
        "linear_kl_div": lambda: eaves.linear_kl_div(x, head, x, head, normalizer=normalizer),
    }
    for name, call in calls.items():
        sentence = rf"^{name}: normalizer is -.*, expected a number (from 0|that is not negative)"
        with pytest.raises(ValueError, match=sentence):
            call()
    assert eaves.cross_entropy(x @ head.t(), target, normalizer=0.0) == math.inf


def test_a_negative_normalizer_of_a_compiled_call_is_refused_when_it_runs() -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, torch.device("cpu"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(normalizer: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x, head, target, normalizer=normalizer)

    assert function(torch.tensor(2.0)).isfinite()
    with pytest.raises(RuntimeError, match="`normalizer` is -2, expected a number that is not negative"):
        function(torch.tensor(-2.0))


@each("is_linear", (False, True))
def test_a_target_of_a_row_of_weight_zero_is_a_class_all_the_same(is_linear: bool) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, torch.device("cpu"))
    target[3], row_weight = 33, torch.arange(9) != 3
    with pytest.raises(ValueError, match=r"target\[3\] is 33, expected 0 to 32, or ignore_index -100"):
        if is_linear:
            eaves.linear_cross_entropy(x, head, target, row_weight=row_weight)
        else:
            eaves.cross_entropy(x @ head.t(), target, row_weight=row_weight)


@each("inplace_backward", (False, True))
def test_an_upstream_gradient_of_0_does_not_hide_a_target_that_is_no_class(
    inplace_backward: bool, cuda: torch.device
) -> None:
    logits = torch.randn(3, 40, device=cuda, requires_grad=True)
    target, row_weight = torch.tensor([1, 40, 40], device=cuda), torch.tensor([1.0, 1.0, 0.0], device=cuda)
    loss = eaves.cross_entropy(
        logits * 1, target, row_weight=row_weight, reduction="none", inplace_backward=inplace_backward
    )
    (grad,) = torch.autograd.grad(loss, logits, torch.zeros(3, device=cuda))
    assert grad[1].isnan().all()
    assert torch.count_nonzero(grad[::2]) == 0
