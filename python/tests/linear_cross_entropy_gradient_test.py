"""eaves.linear_cross_entropy and autograd: the work, the memory and the writes of each algorithm's gradients.
linear_cross_entropy_test.py checks the numbers of every option."""

from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT
from cross_entropy_test import REDUCTIONS, each, upstream
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall, loss_of_head
from linear_cross_entropy_cases import LinearOracle, allowed_share, assert_gradients
from linear_cross_entropy_test import problem, soft_targets
from pairwise import pairwise
from watch import watched

ALGORITHMS = ("speed", "recompute")


def leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]


def test_finite_differences_agree(device: torch.device) -> None:
    # The tensors are small, because each element costs two calls. A batched backward runs too (torch.vmap).
    x, head, target, bias = problem((3, 2, 4), 5, torch.float64, device)
    given = leaves(x, head, bias)
    weights = (None, torch.tensor([0.5, 1.0, 0.0, 2.0, 1.5], dtype=torch.float64, device=device))
    options = ({}, {"label_smoothing": 0.1, "softcap": 3.0, "scale": 1.5, "z_loss": 0.1})
    targets = (target, soft_targets(x.shape, 5, device, x.dtype))
    for of_loss, each_target, weight, reduction, algorithm in pairwise(
        options, targets, weights, REDUCTIONS, ALGORITHMS
    ):
        named = {"reduction": reduction, "algorithm": algorithm, "weight": weight, **of_loss}

        def function(
            x: Tensor, w: Tensor, b: Tensor, t: Tensor = each_target, named: Any = named
        ) -> tuple[Tensor, ...]:
            out = eaves.linear_cross_entropy(x, w, t, linear_bias=b, outputs=("lse", "entropy"), **named)
            loss = eaves.linear_cross_entropy(x, w, t, linear_bias=b, **named)
            return out.loss, out.lse, out.entropy, loss

        assert torch.autograd.gradcheck(function, given, check_batched_grad=True)


# --------------------------------------------------------------------------------------------------- work of a backward


def products_of(calls: list[tuple[str, tuple[Any, ...], list[Tensor]]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """For each call of the extension, the bits of the gradients that it was asked for; and the sizes of the tensors
    that it made."""
    calls = [call for call in calls if "backward" in call[0] or "forward" in call[0]]
    asked = [arguments[-1] & 7 if "backward" in name else 0 for name, arguments, _ in calls]
    return asked, [tuple(result.shape) for *_, results in calls for result in results]


SUBSETS = [("input",), ("head",), ("bias",), ("input", "bias"), ("head", "bias"), ("input", "head"), ()]


@each("wanted", SUBSETS)
@each("algorithm", ALGORITHMS)
def test_what_nobody_asks_for_is_not_computed(wanted: tuple[str, ...], algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    tensors = dict(zip(("input", "head", "bias"), leaves(x, head, bias), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    given = [tensors[name] for name in wanted]
    with watched("eaves.linear_cross_entropy") as calls:
        loss = eaves.linear_cross_entropy(
            tensors["input"], tensors["head"], target, linear_bias=tensors["bias"], algorithm=algorithm
        )
        grads = torch.autograd.grad(loss, given) if given else ()
    asked, made = products_of(calls)
    bits = sum(1 << index for index, name in enumerate(tensors) if name in wanted)
    assert asked == {"speed": [bits], "recompute": [0, bits] if given else [0]}[algorithm]
    for shape, name in (((9, 24), "input"), ((33, 24), "head"), ((33,), "bias")):
        assert made.count(shape) == (name in wanted)
    exact = LinearOracle(x, head, target, bias).gradients()
    computed = dict(zip(wanted, grads, strict=True))
    assert_gradients([computed.get(name) for name in tensors], exact, torch.float32)


def test_without_a_gradient_only_the_loss_is_computed(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    for function in (torch.no_grad, torch.inference_mode):
        with function(), watched("eaves.linear_cross_entropy") as calls:
            assert not eaves.linear_cross_entropy(x.requires_grad_(), head, target).requires_grad
        assert products_of(calls) == ([0], [()])


def test_which_way_a_call_goes(device: torch.device) -> None:
    def is_speed(dtype: torch.dtype = torch.float32, is_frozen: bool = False, **options: Any) -> bool:
        x, head, target, _ = problem((9, 24), 33, dtype, device)
        head.requires_grad_(not is_frozen)
        out: Any = loss_of_head(LinearCrossEntropyCall(x.requires_grad_(), head, target, **options))
        loss = out.loss if isinstance(out, tuple) else out
        return "Speed" in type(loss.grad_fn).__name__

    assert is_speed() and is_speed(torch.bfloat16) and is_speed(reduction="sum") and is_speed(outputs="argmax")
    assert not is_speed(torch.float16) and not is_speed(torch.float16, algorithm="speed")
    assert not is_speed(reduction="none") and not is_speed(reduction="none", algorithm="speed")
    # If input alone has a gradient, the backward can multiply its rows.
    assert is_speed(is_frozen=True) and is_speed(is_frozen=True, reduction="none")
    assert not is_speed(is_frozen=True, reduction="none", outputs="entropy")
    assert not is_speed(outputs="lse") and not is_speed(outputs="entropy")
    assert is_speed(outputs="lse", algorithm="speed") and not is_speed(algorithm="recompute")
    assert is_speed(algorithm="memory") and is_speed(is_frozen=True, reduction="none", algorithm="memory")
    assert not is_speed(outputs="lse", algorithm="memory") and not is_speed(torch.float16, algorithm="memory")
    assert not is_speed(workspace_bytes=1)
    assert is_speed(workspace_bytes=1 << 30)
    assert is_speed(outputs=("lse", "entropy"), has_constant_outputs=True)
    assert is_speed(is_frozen=True, reduction="none", outputs="entropy", has_constant_outputs=True)


@each("algorithm", ["auto", "recompute"])
def test_constant_outputs_are_those_of_a_call_without_a_gradient(algorithm: str, device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    names = ("lse", "entropy", "argmax")
    expected = eaves.linear_cross_entropy(x, head, target, outputs=names)
    given: list[Any] = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    call = LinearCrossEntropyCall(*given, target, outputs=names, algorithm=algorithm, has_constant_outputs=True)
    out: Any = loss_of_head(call)
    assert out.loss.requires_grad
    for name in names:
        assert not getattr(out, name).requires_grad
        torch.testing.assert_close(getattr(out, name), getattr(expected, name))
    actual = torch.autograd.grad(out.loss, given)
    torch.testing.assert_close(actual, torch.autograd.grad(eaves.linear_cross_entropy(*given, target), given))


# --------------------------------------------------------------------------------------- backward after backward


@each("algorithm", ALGORITHMS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_gives_the_same_and_leaves_the_first_alone(
    dtype: torch.dtype, algorithm: str, device: torch.device
) -> None:
    x, head, target, bias = problem((9, 24), 33, dtype, device)
    given = leaves(x, head, bias)
    # A call with outputs runs other kernels than the plain loss.
    loss, *_ = eaves.linear_cross_entropy(
        given[0], given[1], target, linear_bias=given[2], algorithm=algorithm, outputs=("entropy", "argmax")
    )
    factor = torch.tensor(3.0, dtype=loss.dtype, device=device)
    first = torch.autograd.grad(loss, given, factor, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, given, factor, retain_graph=True)
    other = torch.autograd.grad(loss, given, 2 * factor)
    for a, b, k, c in zip(first, second, kept, other, strict=True):
        assert torch.equal(a, b) and torch.equal(a, k) and a.data_ptr() != b.data_ptr()
        torch.testing.assert_close(c, 2 * a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, given)


@each("algorithm", ALGORITHMS)
def test_gradients_accumulate_in_leaves(algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    given = leaves(x, head, bias)
    once = leaves(x, head, bias)
    for _ in range(2):
        loss = eaves.linear_cross_entropy(given[0], given[1], target, linear_bias=given[2], algorithm=algorithm)
        loss.backward(retain_graph=True)
    loss.backward()
    eaves.linear_cross_entropy(once[0], once[1], target, linear_bias=once[2], algorithm=algorithm).backward()
    for tensor, single in zip(given, once, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * single.grad)


def test_an_upstream_gradient_of_1_costs_no_tensor_and_no_copy(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.bfloat16, device)
    given = leaves(x, head)
    loss = eaves.linear_cross_entropy(*given, target)
    computed = [grad.data_ptr() for grad in loss.grad_fn.gradients]
    loss.backward()
    assert [tensor.grad.data_ptr() for tensor in given] == computed, "what the forward computed is the .grad"
    assert loss.grad_fn.gradients is None


@each("algorithm", ALGORITHMS)
@each("reduction", REDUCTIONS)
def test_lse_and_entropy_have_a_gradient_without_the_loss(reduction: str, algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    given = leaves(x, head, bias)
    out = eaves.linear_cross_entropy(
        given[0], given[1], target, linear_bias=given[2], reduction=reduction, algorithm=algorithm,
        outputs=("lse", "entropy", "argmax", "z_loss"),
    )  # fmt: skip
    assert not out.argmax.requires_grad and not out.z_loss.requires_grad
    up = upstream(out.lse)
    oracle = LinearOracle(x, head, target, bias, reduction=reduction)
    grads = torch.autograd.grad(out.lse, given, up, retain_graph=True)
    assert_gradients(grads, oracle.gradients(0.0, up), torch.float32)
    assert_gradients(torch.autograd.grad(out.entropy, given, up), oracle.gradients(0.0, None, up), torch.float32)


def test_a_second_derivative_is_refused_on_both_ways(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    for algorithm in ALGORITHMS:
        given = leaves(x, head)
        loss = eaves.linear_cross_entropy(*given, target, algorithm=algorithm)
        grads = torch.autograd.grad(loss, given, create_graph=True)
        assert_gradients([*grads, None], LinearOracle(x, head, target).gradients(), torch.float32)
        with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy: there is no second derivative"):
            torch.autograd.grad(sum(grad.sum() for grad in grads), given)


# ---------------------------------------------------------------------------------------------- the weight's gradient


@each("algorithm", [*ALGORITHMS, "auto"])
def test_the_gradient_of_the_weight_is_added_to_the_callers_tensor(algorithm: str, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x, head, target, bias = problem((9, 24), 33, dtype, device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for out_dtype in {dtype, wide}:
            for reduction in ("mean", "none"):
                given = leaves(x, head, bias)
                out = torch.ones(33, 30, dtype=out_dtype, device=device)[:, :24]  # rows with gaps between them
                version = out._version
                loss = eaves.linear_cross_entropy(
                    given[0], given[1], target, linear_bias=given[2], reduction=reduction, algorithm=algorithm,
                    grad_weight_out=out,
                )  # fmt: skip
                assert (out == 1).all(), "it is the backward that adds"
                (2 * loss.sum()).backward(retain_graph=True)
                exact = LinearOracle(x, head, target, bias, reduction=reduction).gradients(2.0)
                assert given[1].grad is None and out._version > version
                assert_gradients([given[0].grad, None, given[2].grad], exact, dtype)
                share = 2.0 * allowed_share(out_dtype if dtype == out_dtype else dtype)
                torch.testing.assert_close(out.cpu().double() - 1, exact.weight, rtol=share, atol=share * 8)
                (2 * loss.sum()).backward()
                torch.testing.assert_close(out.cpu().double() - 1, 2 * exact.weight, rtol=share, atol=share * 16)
                assert (out._base[:, 24:] == 1).all()


def test_a_frozen_head_adds_nothing_to_the_callers_tensor(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    out = torch.zeros_like(head)
    for algorithm in ALGORITHMS:
        leaf = x.detach().requires_grad_()
        eaves.linear_cross_entropy(leaf, head, target, grad_weight_out=out, algorithm=algorithm).backward()
        assert_gradients([leaf.grad, None, None], LinearOracle(x, head, target).gradients(), torch.float32)
    with torch.no_grad():
        eaves.linear_cross_entropy(x, head, target, grad_weight_out=out)
    assert not out.any()


@each("algorithm", ALGORITHMS)
def test_a_wide_sum_of_the_weights_gradient_is_rounded_once(algorithm: str, device: torch.device) -> None:
    # The chunks are so small that a sum in 16 bits, rounded for each chunk, is off by several roundings.
    x, head, target, _ = problem((512, 24), 33, torch.bfloat16, device)
    exact = LinearOracle(x, head, target).gradients().weight
    errors = {}
    for dtype in (None, torch.float32):
        leaf = head.detach().requires_grad_()
        loss = eaves.linear_cross_entropy(
            x, leaf, target, algorithm=algorithm, grad_weight_dtype=dtype, workspace_bytes=1
        )
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.dtype == torch.bfloat16
        errors[dtype] = ((grad.cpu().double() - exact).norm() / exact.norm()).item()
    assert errors[torch.float32] < allowed_share(torch.bfloat16) / 2
    assert errors[torch.float32] <= errors[None]
    # In the caller's float32 tensor the sum is not rounded at all.
    out = torch.zeros(head.shape, device=device)
    leaf = head.detach().requires_grad_()
    eaves.linear_cross_entropy(x, leaf, target, algorithm=algorithm, grad_weight_out=out).backward()
    assert not torch.equal(out, out.bfloat16().float())


# Without a loss scale a float16 gradient itself underflows. "speed" learns of the scale only after the forward.
SCALED = [(dtype, algorithm, reduction, upstream) for dtype in (torch.bfloat16, torch.float16)
          for algorithm in ("recompute", "keep") for reduction in ("mean", "none")
          for upstream in (3700.0, 65536.0)]  # fmt: skip


@each("dtype, algorithm, reduction, upstream", [(torch.bfloat16, "speed", "mean", 1.0), *SCALED])
def test_no_divisor_has_larger_errors_than_a_power_of_two(
    dtype: torch.dtype, algorithm: str, reduction: str, upstream: float, device: torch.device
) -> None:
    # If they were divided by 877, the targets' elements of the gradient of the logits would all be off by 3.2e-3 in
    # bfloat16.
    rows, luck = 877, 1.05
    x, head, _, _ = problem((rows, 64), 500, dtype, device)
    target = torch.arange(rows, device=device) * 7919 % 500
    tensors = (x, head, torch.zeros(500, device=device))
    exact = LinearOracle(x, head, target, reduction="sum").gradients()

    def errors(reduction: str, grad_loss: float, share: float) -> list[float]:
        given = leaves(*tensors)
        loss = eaves.linear_cross_entropy(
            given[0], given[1], target, linear_bias=given[2], reduction=reduction, algorithm=algorithm,
            grad_weight_dtype=torch.float32,
        )  # fmt: skip
        found = torch.autograd.grad(loss, given, torch.full_like(loss, grad_loss))
        return [float((each.cpu().double() / share - of).norm() / of.norm()) for each, of in zip(found, exact)]

    share = upstream / rows
    scaled, best = errors(reduction, share if reduction == "none" else upstream, share), errors("sum", 1.0, 1.0)
    assert all(error <= luck * least for error, least in zip(scaled, best, strict=True)), (scaled, best)
