"""The gradients of eaves.linear_cross_entropy, through autograd, on both ways to them: against the float64 oracle and
finite differences; and what is computed, kept and written for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import eaves
from comparison import FLOATING_POINT
from cross_entropy_gradient_test import upstream
from cross_entropy_test import OPTIONS, REDUCTIONS, each
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall, loss_of_head
from layouts import LAYOUTS, contiguous, expanded_along_the_first_axis
from linear_cross_entropy_cases import LinearOracle, allowed_share, assert_gradients
from linear_cross_entropy_test import COMBINATIONS, problem, samples, soft_targets
from pairwise import pairwise

ALGORITHMS = ("speed", "recompute")


def leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]


def check(
    x: Tensor,
    head: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    layout: Callable[[Tensor], Tensor] = contiguous,
    **options: Any,
) -> None:
    """The gradients of the loss on both ways, and those of loss, lse and entropy together."""
    oracle = LinearOracle(x, head, target, bias, weight, **options)
    for algorithm in ALGORITHMS:
        given = leaves(x, head, bias)
        what = f"{algorithm} {x.dtype} {target.dtype} strides={x.stride()} {options}"
        named = {"linear_bias": given[2] if bias is not None else None, "weight": weight, "algorithm": algorithm}
        loss = eaves.linear_cross_entropy(given[0], given[1], target, **named, **options)
        grad_loss = upstream(loss, layout)
        grads = torch.autograd.grad(loss, given, grad_loss)
        assert [g.dtype for g in grads] == [t.dtype for t in given], what
        assert_gradients([*grads, None][:3], oracle.gradients(grad_loss), x.dtype, what)
    out = eaves.linear_cross_entropy(given[0], given[1], target, **named, **options, outputs=("lse", "entropy"))
    outputs, upstreams = (out.loss, out.lse, out.entropy), (grad_loss, upstream(out.lse), upstream(out.entropy))
    grads = torch.autograd.grad(outputs, given, upstreams)
    assert_gradients([*grads, None][:3], oracle.gradients(*upstreams), x.dtype, f"of all outputs {what}")


@samples()
def test_every_dtype_matches_the_oracle(shape: tuple[int, ...], classes: int, device: torch.device) -> None:
    for dtype, reduction, is_soft in pairwise(FLOATING_POINT, REDUCTIONS, (False, True)):
        x, head, target, bias = problem(shape, classes, dtype, device)
        target = soft_targets(shape, classes, device, dtype) if is_soft else target
        check(x, head, target, bias, reduction=reduction)


@each("options", OPTIONS)
def test_every_option_matches_the_oracle(options: dict[str, Any], device: torch.device) -> None:
    for dtype, is_soft, is_weighted, reduction in COMBINATIONS:
        x, head, target, bias = problem((6, 5, 24), 129, dtype, device)
        target = soft_targets(x.shape, 129, device, dtype) if is_soft else target
        weight = torch.linspace(0, 2, 129, device=device).to(dtype) if is_weighted else None
        check(x, head, target, bias, weight, reduction=reduction, **options)


@each("layout", LAYOUTS)
def test_every_layout_matches_the_oracle(layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, head, target, bias = problem((3, 5, 24), 33, dtype, device)
        check(layout(x), head, layout(target), bias)
        if layout is not expanded_along_the_first_axis:  # where all classes are one, the gradient of input is 0
            check(x, layout(head), target, layout(bias))
        check(x, head, target, layout=layout, reduction="none")


def test_the_normalizer_divides_the_gradient(device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    check(x, head, target, bias, normalizer=7.0)


def test_weights_of_rows_multiply_the_gradient(device: torch.device) -> None:
    for dtype, reduction, is_soft, is_weighted in pairwise(FLOATING_POINT, REDUCTIONS, (False, True), (False, True)):
        x, head, target, bias = problem((9, 24), 33, dtype, device)
        target = soft_targets(x.shape, 33, device, dtype) if is_soft else target
        weight = torch.linspace(0, 2, 33, device=device).to(dtype) if is_weighted else None
        row_weight = torch.linspace(0.5, 3, 18, device=device)[::2]
        check(x, head, target, bias, weight, reduction=reduction, row_weight=row_weight)
    module = eaves.LinearCrossEntropyLoss()
    expected = eaves.linear_cross_entropy(x, head, target, linear_bias=bias, row_weight=row_weight)
    assert torch.equal(module(x, head, target, bias, row_weight=row_weight), expected)
    out = torch.zeros(1 + head.numel(), dtype=torch.float32, device=device)
    given = {"grad_weight_out": out[1:].view(head.shape), "row_weight": out[:9]}
    with pytest.raises(ValueError, match="grad_weight_out overlaps row_weight"):
        eaves.linear_cross_entropy(
            x.float(), head.float().requires_grad_(), target.float() if is_soft else target, **given
        )


def test_finite_differences_agree(device: torch.device) -> None:
    # Small, because each element costs two calls. Batched too: torch.vmap over the backward.
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


# ---------------------------------------------------------------------------------------------- what is computed for it


class Products(TorchDispatchMode):
    """The bits of the gradients that the extension was asked for, one for each call, and the sizes of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[int] = []
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, overload: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        results = overload(*args, **(kwargs or {}))
        name = overload.name()
        if name.startswith("eaves::linear_cross_entropy") and ("backward" in name or "forward" in name):
            self.gradients.append(args[-1] & 7 if "backward" in name else 0)
            self.made += [tuple(result.shape) for result in results]
        return results


SUBSETS = [("input",), ("head",), ("bias",), ("input", "bias"), ("head", "bias"), ("input", "head"), ()]


@each("wanted", SUBSETS)
@each("algorithm", ALGORITHMS)
def test_what_nobody_asks_for_is_not_computed(wanted: tuple[str, ...], algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    tensors = dict(zip(("input", "head", "bias"), leaves(x, head, bias), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    given = [tensors[name] for name in wanted]
    with Products() as products:
        loss = eaves.linear_cross_entropy(
            tensors["input"], tensors["head"], target, linear_bias=tensors["bias"], algorithm=algorithm
        )
        grads = torch.autograd.grad(loss, given) if given else ()
    bits = sum(1 << index for index, name in enumerate(tensors) if name in wanted)
    assert products.gradients == {"speed": [bits], "recompute": [0, bits] if given else [0]}[algorithm]
    for shape, name in (((9, 24), "input"), ((33, 24), "head"), ((33,), "bias")):
        assert products.made.count(shape) == (name in wanted)
    exact = LinearOracle(x, head, target, bias).gradients()
    computed = dict(zip(wanted, grads, strict=True))
    assert_gradients([computed.get(name) for name in tensors], exact, torch.float32)


def test_without_a_gradient_only_the_loss_is_computed(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    for function in (torch.no_grad, torch.inference_mode):
        with function(), Products() as products:
            assert not eaves.linear_cross_entropy(x.requires_grad_(), head, target).requires_grad
        assert products.gradients == [0] and products.made == [()]


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
    # Of input alone the rows can be multiplied in the backward.
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


@each("algorithm", ALGORITHMS)
def test_a_loss_scale_keeps_the_gradients_of_float16(algorithm: str, device: torch.device) -> None:
    # Of a mean over 1024 rows those of x are around 4e-7, of which float16 has nothing that is exact.
    x, head, target, bias = problem((1024, 24), 300, torch.float16, device)
    for scale in (1024.0, 65536.0):
        given = leaves(x, head, bias)
        loss = eaves.linear_cross_entropy(given[0], given[1], target, linear_bias=given[2], algorithm=algorithm)
        upstream = torch.full_like(loss, scale)
        grads = torch.autograd.grad(loss, given, upstream)
        exact = LinearOracle(x, head, target, bias).gradients(upstream)
        assert_gradients(grads, exact, torch.float16, f"{algorithm} loss scale {scale}")


# --------------------------------------------------------------------------------------- backward after backward


@each("algorithm", ALGORITHMS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_gives_the_same_and_leaves_the_first_alone(
    dtype: torch.dtype, algorithm: str, device: torch.device
) -> None:
    x, head, target, bias = problem((9, 24), 33, dtype, device)
    given = leaves(x, head, bias)
    # The outputs are computed by other kernels than the plain loss.
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
def test_every_kind_of_upstream_gradient(algorithm: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, head, target, bias = problem((8, 24), 33, dtype, device)
        for reduction in REDUCTIONS:
            given = leaves(x, head, bias)
            loss = eaves.linear_cross_entropy(
                given[0], given[1], target, linear_bias=given[2], reduction=reduction, algorithm=algorithm
            )
            oracle = LinearOracle(x, head, target, bias, reduction=reduction)
            (loss.sum() * 3).backward(retain_graph=True)  # an expanded number
            assert_gradients([t.grad for t in given], oracle.gradients(3.0), dtype)
            grads = torch.autograd.grad(loss.bfloat16().sum(), given)  # one that was 16 bits
            assert_gradients(grads, oracle.gradients(1.0), dtype)


@each("algorithm", ALGORITHMS)
def test_lse_and_entropy_have_a_gradient_without_the_loss(algorithm: str, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x, head, target, bias = problem((9, 24), 33, dtype, device)
        for reduction in REDUCTIONS:
            given = leaves(x, head, bias)
            out = eaves.linear_cross_entropy(
                given[0], given[1], target, linear_bias=given[2], reduction=reduction, algorithm=algorithm,
                outputs=("lse", "entropy", "argmax", "z_loss"),
            )  # fmt: skip
            assert not out.argmax.requires_grad and not out.z_loss.requires_grad
            up = upstream(out.lse)
            oracle = LinearOracle(x, head, target, bias, reduction=reduction)
            grads = torch.autograd.grad(out.lse, given, up, retain_graph=True)
            assert_gradients(grads, oracle.gradients(0.0, up), dtype)
            grads = torch.autograd.grad(out.entropy, given, up)
            assert_gradients(grads, oracle.gradients(0.0, None, up), dtype)


@each("algorithm", ["speed", "recompute"])
def test_logits_far_from_zero_keep_their_gradient(algorithm: str, device: torch.device) -> None:
    # Logits of 4096 and multiples of 1/256, exact in float32. A float32 lse is off by up to 2.4e-4 there.
    x = torch.randint(1, 3, (8, 4), device=device).float()
    head = (torch.randint(-128, 128, (500, 4), device=device) / 256).requires_grad_()
    bias = torch.full((500,), 4096.0, device=device, requires_grad=True)
    target = torch.randint(500, (8,), device=device)
    eaves.linear_cross_entropy(x, head, target, linear_bias=bias, algorithm=algorithm).backward()
    wide = bias.detach().double().requires_grad_()
    functional.cross_entropy(x.double() @ head.detach().double().t() + wide, target).backward()
    assert ((bias.grad - wide.grad).abs() <= 4e-6 * wide.grad.abs()).all()


def test_an_upstream_gradient_that_is_infinite_stays_in_the_rows_that_count_and_get_it(device: torch.device) -> None:
    x, head, _, _ = problem((5, 24), 33, torch.float32, device)
    target = torch.tensor([-100, 3, 32, 0, 7], device=device)
    for reduction, reached in (("mean", [1, 2, 3, 4]), ("none", [2])):
        given = leaves(x, head)
        loss = eaves.linear_cross_entropy(*given, target, reduction=reduction, algorithm="recompute")
        up = torch.ones_like(loss)
        up[2 if reduction == "none" else ()] = torch.inf
        grad_x, grad_head = torch.autograd.grad(loss, given, up)
        assert not grad_x[reached].isfinite().any() and not grad_head.isfinite().any()
        others = [row for row in range(5) if row not in reached]
        assert grad_x[others].isfinite().all() and (grad_x[0] == 0).all()


def test_the_gradient_in_the_middle_of_a_model_is_right(device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float64, device)
    given = leaves(x, head, bias)
    torch.manual_seed(3)
    for algorithm in ALGORITHMS:

        def function(x: Tensor, w: Tensor, b: Tensor, algorithm: str = algorithm) -> Tensor:
            # The head is the embedding's: it has a second gradient.
            hidden = torch.nn.functional.rms_norm(x.sin() + w[:9].cos(), (24,))
            return eaves.linear_cross_entropy(hidden, w, target, linear_bias=b, algorithm=algorithm).exp()

        def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            hidden = torch.nn.functional.rms_norm(x.sin() + w[:9].cos(), (24,))
            return torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, w, b), target).exp()

        for a, e in zip(
            torch.autograd.grad(function(*given), given), torch.autograd.grad(exact(*given), given), strict=True
        ):
            torch.testing.assert_close(a, e)


def test_an_input_that_was_changed_before_the_backward_is_noticed(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    leaf = x.requires_grad_()
    hidden = leaf * 1
    loss = eaves.linear_cross_entropy(hidden, head, target, algorithm="recompute")
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused_on_both_ways(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    for algorithm in ALGORITHMS:
        given = leaves(x, head)
        loss = eaves.linear_cross_entropy(*given, target, algorithm=algorithm)
        grads = torch.autograd.grad(loss, given, create_graph=True)
        assert_gradients([*grads, None], LinearOracle(x, head, target).gradients(), torch.float32)
        with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy: there is no second derivative"):
            torch.autograd.grad(sum(grad.sum() for grad in grads), given)


# -------------------------------------------------------------------------------------------- where the weight's goes


@each("algorithm", [*ALGORITHMS, "auto"])
def test_the_gradient_of_the_weight_is_added_to_the_callers_tensor(algorithm: str, device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        x, head, target, bias = problem((9, 24), 33, dtype, device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for out_dtype in {dtype, wide}:
            for reduction in ("mean", "none"):
                given = leaves(x, head, bias)
                out = torch.ones(33, 30, dtype=out_dtype, device=device)[:, :24]  # rows that do not touch
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
    # In chunks so small that a sum of 16 bits, rounded for each of them, is off by several roundings.
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
    # Into a tensor of the caller's in float32 it is not rounded at all.
    out = torch.zeros(head.shape, device=device)
    leaf = head.detach().requires_grad_()
    eaves.linear_cross_entropy(x, leaf, target, algorithm=algorithm, grad_weight_out=out).backward()
    assert not torch.equal(out, out.bfloat16().float())


def test_the_gradient_of_an_input_that_is_one_row_in_memory_is_the_sum(device: torch.device) -> None:
    row, head, _, _ = problem((1, 24), 33, torch.float64, device)
    leaf = row.detach().requires_grad_()
    target = torch.tensor([1, 2, 2, 32], device=device)
    eaves.linear_cross_entropy(expanded_along_the_first_axis(leaf.expand(4, 24)), head, target).backward()
    exact = LinearOracle(row.expand(4, 24), head, target).gradients().input.sum(0)
    torch.testing.assert_close(leaf.grad.cpu()[0], exact)


def test_random_data_of_a_model(device: torch.device) -> None:
    # So many rows and classes that there are several chunks of rows and blocks of classes.
    for dtype in (torch.float32, torch.bfloat16):
        x, head, target, _ = problem((300, 64), 2503, dtype, device)
        check(x, head, target, workspace_bytes=1_000_000)
