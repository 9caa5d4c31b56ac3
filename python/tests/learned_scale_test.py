"""eaves.linear_cross_entropy with a tensor as scale: loss and gradients against the formula in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT
from cross_entropy_test import REDUCTIONS, each, upstream
from linear_cross_entropy_cases import allowed_share
from linear_cross_entropy_test import problem
from pairwise import pairwise

ROWS, CLASSES, FEATURES = 24, 131, 32


def by_the_formula(
    given: list[Tensor], target: Tensor, reduction: str, softcap: float | None, z_loss: float, smoothing: float
) -> Tensor:
    x, head, scale, *bias = given
    z = x @ head.T
    z = scale * (z + bias[0] if bias else z)
    z = z if softcap is None else softcap * (z / softcap).tanh()
    rows = torch.nn.functional.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    rows = rows + z_loss * z.logsumexp(-1).square() * (target != -100)
    if reduction == "none":
        return rows
    return rows.sum() / (1 if reduction == "sum" else (target != -100).sum())


@each("dtype", FLOATING_POINT)
def test_loss_and_gradients_are_those_of_the_formula(dtype: torch.dtype, device: torch.device) -> None:
    for reduction, softcap, z_loss, smoothing, has_bias, algorithm, learns_all in pairwise(
        REDUCTIONS, (None, 2.0), (0.0, 1e-2), (0.0, 0.1), (False, True), ("auto", "speed", "recompute", "keep"),
        (False, True),
    ):  # fmt: skip
        x, head, target, bias = problem((ROWS, FEATURES), CLASSES, dtype, device)
        target[::5] = -100
        scale = torch.tensor(1.7, dtype=torch.promote_types(dtype, torch.float32), device=device)
        tensors = [x, head, scale, bias][: 4 if has_bias else 3]
        given = [each.detach().requires_grad_(learns_all or each is scale) for each in tensors]
        exact = [each.detach().cpu().double().requires_grad_() for each in given]
        expected = by_the_formula(exact, target.cpu(), reduction, softcap, z_loss, smoothing)
        loss = eaves.linear_cross_entropy(
            *given[:2], target, linear_bias=given[3] if has_bias else None, reduction=reduction, softcap=softcap,
            z_loss=z_loss, label_smoothing=smoothing, scale=given[2], algorithm=algorithm,
        )  # fmt: skip
        error = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=error, atol=error)
        loss.backward(upstream(loss))
        expected.backward(upstream(expected))
        share = allowed_share(dtype)
        for found, true in zip(given, exact, strict=True):
            assert (found.grad is not None) == found.requires_grad and true.grad is not None
            if found.grad is not None:
                # The scale's gradient sums products that may cancel, and inherits the error of the gradients in them.
                size = true.grad.norm()
                if found is given[2]:
                    size = sum(((each * each.grad).norm() for each in (exact[0], *exact[3:])), size)
                assert found.grad.dtype == found.dtype and found.grad.shape == found.shape
                assert (found.grad.cpu().double() - true.grad).norm() <= share * size


@each("dtype", (torch.bfloat16, torch.float32))
def test_rows_that_do_not_count_may_hold_anything(dtype: torch.dtype, device: torch.device) -> None:
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, dtype, device)
    target[3] = -100
    gradients = []
    for value in (0.0, math.nan, math.inf):
        x[3] = value
        scale = torch.tensor([1.7], device=device, requires_grad=True)
        eaves.linear_cross_entropy(x, head, target, scale=scale).backward()
        assert scale.grad is not None and scale.grad.shape == (1,)
        gradients.append(scale.grad)
    assert gradients[0].isfinite() and gradients[0] == gradients[1] == gradients[2]


def steps(x: Tensor, head: Tensor, target: Tensor, scale: Tensor, call: Any) -> list[Tensor]:
    given = [each.detach().clone().requires_grad_() for each in (x, head, scale)]
    loss = call(*given[:2], target, scale=given[2])
    loss.backward()
    return [loss.detach(), *(each.grad for each in given if each.grad is not None)]


@each("dtype", (torch.bfloat16, torch.float32))
def test_compiled_calls_have_the_same_numbers(dtype: torch.dtype, any_device: torch.device) -> None:
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, dtype, any_device)
    scale = torch.tensor(1.7, device=any_device)
    expected = steps(x, head, target, scale, eaves.linear_cross_entropy)
    is_whole = dtype == torch.float32  # 16 bits read the value
    found = steps(
        x, head, target, scale, torch.compile(eaves.linear_cross_entropy, backend="eager", fullgraph=is_whole)
    )
    assert len(found) == len(expected) == 4
    for ours, true in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)
    if not is_whole:
        with pytest.raises(Exception, match="linear_cross_entropy: this operator runs outside of the graph"):
            torch.compile(eaves.linear_cross_entropy, backend="eager", fullgraph=True)(x, head, target, scale=scale)


@each("strict", (False, True))
def test_programs_have_a_scale_in_float32_alone(strict: bool) -> None:
    criterion = eaves.LinearCrossEntropyLoss(scale=torch.nn.Parameter(torch.tensor(1.7)))
    x, head, target, bias = problem((ROWS, FEATURES), CLASSES, torch.float32, "cpu")
    program = torch.export.export(criterion, (x, head, target, bias), strict=strict).module()
    gradients = []
    for module in (program, criterion):
        given = [each.clone().requires_grad_() for each in (x, bias)]
        module(given[0], head, target, given[1]).backward()
        gradients.append([each.grad for each in (*given, *module.parameters())])
    assert len(gradients[0]) == 3
    torch.testing.assert_close(*gradients)
    with pytest.raises(Exception, match=r"scale is a tensor, but a call .* reads its value, and torch\.export"):
        torch.export.export(criterion, (x.bfloat16(), head.bfloat16(), target), strict=strict)


def test_torch_func_follows_a_scale(any_device: torch.device) -> None:
    x, head, target, _ = problem((3, ROWS, FEATURES), CLASSES, torch.float32, any_device)
    scales = torch.tensor([0.5, 1.0, 2.0], device=any_device)

    def loss(x: Tensor, scale: Tensor, target: Tensor) -> Tensor:
        result: Tensor = eaves.linear_cross_entropy(x, head, target, scale=scale)
        return result

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, scales, target)
    for i, scale in enumerate(scales):
        _, grad_x, _, grad_scale = steps(x[i], head, target[i], scale, eaves.linear_cross_entropy)
        torch.testing.assert_close((found[0][i], found[1][i]), (grad_x, grad_scale))


def test_autocast_rounds_the_scaled_rows_once(any_device: torch.device) -> None:
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, torch.float32, any_device)
    scale = torch.tensor(1.7, device=any_device)
    with torch.autocast(any_device.type, torch.bfloat16):
        found = steps(x, head, target, scale, eaves.linear_cross_entropy)
        expected = steps(x * scale, head, target, torch.ones((), device=any_device), eaves.linear_cross_entropy)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1] * scale)
    assert all(each.dtype == torch.float32 for each in found)


def test_a_module_learns_its_scale() -> None:
    criterion = eaves.LinearCrossEntropyLoss(scale=torch.nn.Parameter(torch.tensor(1.7)))
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, torch.float32, "cpu")
    criterion(x, head, target).backward()
    assert [name for name, each in criterion.named_parameters() if each.grad is not None] == ["scale"]


def test_ranks_integers_and_a_scale_of_0_are_refused() -> None:
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="scale is a tensor, expected a number over ranks; multiply input"):
        eaves.linear_cross_entropy(x, head, target, scale=torch.ones(()), group=object())  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="linear_bias has dtype int64, expected float32"):
        eaves.linear_cross_entropy(x, head, target, linear_bias=torch.arange(CLASSES), scale=torch.ones(()))
    with pytest.raises(ValueError, match=r"scale is 0\.0, expected a positive number"):
        eaves.linear_cross_entropy(x.bfloat16(), head.bfloat16(), target, scale=torch.zeros(()))


def test_only_16_bits_wait_for_the_device(cuda: torch.device) -> None:
    x, head, target, _ = problem((ROWS, FEATURES), CLASSES, torch.float32, cuda)
    scale = torch.tensor(1.7, device=cuda, requires_grad=True)
    eaves.linear_cross_entropy(x, head, target, scale=scale).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eaves.linear_cross_entropy(x, head, target, scale=scale).backward()
        with pytest.raises(RuntimeError, match="synchroniz"):
            eaves.linear_cross_entropy(x.bfloat16(), head.bfloat16(), target, scale=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(NotImplementedError, match="a CUDA graph cannot"):
            eaves.linear_cross_entropy(x.bfloat16(), head.bfloat16(), target, scale=scale)
