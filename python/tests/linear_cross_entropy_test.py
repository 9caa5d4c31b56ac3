"""eaves.linear_cross_entropy: the arguments and results of a call of the core, with every option, dtype and layout; and
its signature beside torch.nn.functional.linear_cross_entropy.

The core's own tests check its accuracy. Other files check autograd (linear_cross_entropy_gradient_test.py), refused
arguments (linear_cross_entropy_refusals_test.py), errors beside torch's (linear_cross_entropy_parity_test.py), and the
rules for every operator (library_test.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy as torch_cross_entropy

import eaves
from comparison import FLOATING_POINT, assert_within
from cross_entropy_cases import random_targets
from cross_entropy_test import OPTIONS, REDUCTIONS, each, every_output, upstream
from eaves._torch.head import _is_matrix, check_grad_weight_out
from eaves._torch.linear_cross_entropy_rules import Backward, Forward
from eaves._torch.outputs import MEAN, SUM
from layouts import LAYOUTS, contiguous, expanded_along_the_first_axis, random_tensor
from linear_cross_entropy_cases import LinearOracle, assert_gradients, bytes_of_half
from pairwise import pairwise
from watch import watched


def problem(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """input, linear_weight, target, linear_bias; logits have a deviation of about 2."""
    features = shape[-1]
    x = random_tensor(shape, dtype, device)
    head = random_tensor((classes, features), dtype, device, 2.0 / features**0.5).flip(0)
    return x, head, random_targets(shape[:-1], classes, device), random_tensor((classes,), dtype, device)


def soft_targets(shape: tuple[int, ...], classes: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    dtype = dtype if dtype == torch.float64 else torch.float32
    return random_tensor((*shape[:-1], classes), torch.float64, device, 2.0).softmax(-1).to(dtype)


# ------------------------------------------------------------------------------------------------------- the whole call


# shape of the input, classes. With one class the gradient of the bias is one sum over rows, which must not nearly
# cancel: with two rows it does, and one rounding of a row exceeds the share.
SHAPES = [((7,), 5), ((1, 1), 1), ((4, 8), 1), ((0, 8), 5), ((13, 17), 19), ((2, 3, 4, 24), 33), ((64, 100), 131)]
TARGETS = (torch.int64, torch.int32, None, torch.float32)  # two of classes, two of probabilities; None: as the input
BESIDE = (None, "of the input's dtype", torch.float32)
LIMITS = (None, 1, 100_000)
CALLS = pairwise(FLOATING_POINT, SHAPES, TARGETS, REDUCTIONS, [{}, *OPTIONS], BESIDE, BESIDE, (False, True),
                 (None, 7.0), (-100, 3), LIMITS, (False, True), LAYOUTS)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_arrives_whatever_its_dtype_and_layout(call: tuple[Any, ...], device: torch.device) -> None:
    dtype, (shape, classes), kind, reduction, options, of_bias, of_weight, has_row_weight, *rest = call
    normalizer, ignored, limit, skip_ignored, layout = rest
    x, head, target, bias = problem(shape, classes, dtype, device)
    named: dict[str, Any] = {"reduction": reduction, **options}
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if not is_narrow:  # each chunk rounds its part of a head's gradient in 16 bits
        named["workspace_bytes"] = limit
    if kind in (torch.int64, torch.int32):
        target = target.to(kind)
        if ignored < classes:
            named["ignore_index"] = ignored
            target = target.masked_fill(target == -100, ignored)
    else:
        target = soft_targets(shape, classes, device, dtype).to(kind or dtype)
    if has_row_weight:
        rows = x.select(-1, 0)
        named["row_weight"] = layout(torch.linspace(0.5, 3, rows.numel(), device=device).view(rows.shape))
    if normalizer is not None and reduction == "mean":
        named["normalizer"] = normalizer
    weight = None
    if of_weight is not None:
        weight = torch.linspace(0.25, 2, classes, device=device).to(dtype if type(of_weight) is str else of_weight)
    if of_bias is torch.float32 and is_narrow:
        bias = bias.float() * 1.001
    # If there is only one class, the gradient of the input is 0, and no share of it is allowed.
    check(
        layout(x), head if layout is expanded_along_the_first_axis else layout(head), layout(target),
        None if of_bias is None else layout(bias), None if weight is None else layout(weight), layout, skip_ignored,
        **named,
    )  # fmt: skip


def check(
    x: Tensor,
    head: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    layout: Callable[[Tensor], Tensor] = contiguous,
    skip_ignored: bool = False,
    **options: Any,
) -> None:
    """Checks a call without a gradient, and a call with each algorithm: the gradients of the loss alone, and of loss,
    lse and entropy together."""
    oracle = LinearOracle(x, head, target, bias, weight, **options)
    result_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    bounds = oracle.bounds(result_dtype)
    kept = [("keep", keep_bytes) for keep_bytes in (0, bytes_of_half(x, head), None)]
    for algorithm, keep_bytes in [(None, None), ("speed", None), ("memory", None), ("recompute", None), *kept]:
        given = [each.detach().requires_grad_(algorithm is not None) for each in (x, head, bias) if each is not None]
        what = f"{algorithm} {x.dtype} {target.dtype} strides={x.stride()} {options}"
        named = {"weight": weight, "algorithm": algorithm or "auto", "skip_ignored": skip_ignored, **options}
        named |= {} if keep_bytes is None else {"keep_bytes": keep_bytes}
        if bias is not None:
            named["linear_bias"] = given[2]
        loss = eaves.linear_cross_entropy(given[0], given[1], target, **named)
        asked = every_output(target, **named)
        out = eaves.linear_cross_entropy(given[0], given[1], target, **named, **asked)
        assert out._fields == ("loss", *asked["outputs"])
        assert loss.dtype == result_dtype and loss.is_contiguous(), what
        assert loss.requires_grad == (algorithm is not None)
        for name in set(bounds) & set(out._fields):
            result, bound = getattr(out, name), bounds[name]
            assert result.dtype == result_dtype and result.is_contiguous(), what
            assert_within(result, bound, f"{name} {what}")
        assert_within(loss, bounds["loss"], what)
        is_first = out.argmax.cpu() == torch.where(oracle.rows.counts, oracle.rows.argmax, 0)
        largest = oracle.rows.logits.gather(-1, out.argmax.cpu().unsqueeze(-1)).squeeze(-1)
        is_near = (oracle.rows.largest - largest).abs() <= 2 * oracle.row_error  # two logits that round to one number
        assert (is_first | is_near).all(), what
        if algorithm is None:
            continue
        upstreams = [upstream(each, layout) for each in (loss, out.lse, out.entropy)]
        upstreams[2] = upstreams[2].flip(0) if upstreams[2].dim() else -upstreams[2]  # not the upstream gradient of lse
        grads = torch.autograd.grad(loss, given, upstreams[0])
        assert [g.dtype for g in grads] == [t.dtype for t in given], what
        assert_gradients([*grads, None][:3], oracle.gradients(upstreams[0]), x.dtype, what)
        grads = torch.autograd.grad((out.loss, out.lse, out.entropy), given, upstreams)
        assert_gradients([*grads, None][:3], oracle.gradients(*upstreams), x.dtype, f"of all outputs {what}")


@each("skip_ignored", (False, True))
def test_the_operator_is_told_whether_to_leave_out_ignored_rows(skip_ignored: bool) -> None:
    with watched() as calls:
        eaves.linear_cross_entropy(*problem((9, 24), 33, torch.float32, "cpu")[:3], skip_ignored=skip_ignored)
    assert calls[0][1][-3] is skip_ignored  # skip_ignored comes before the limit and the outputs


@pytest.mark.parametrize("algorithm", ["speed", "recompute"])
def test_each_replay_of_a_cuda_graph_reads_which_rows_are_ignored_then(algorithm: str, cuda: torch.device) -> None:
    rows, limit = 1500, 36 << 20  # several chunks, of several sizes
    x, head, target, bias = problem((rows, 24), 517, torch.float32, cuda)
    wanted = [tensor.requires_grad_() for tensor in (x, head, bias)]
    random = target.clone()

    def run(skip: bool) -> tuple[Tensor, ...]:
        loss = eaves.linear_cross_entropy(
            x, head, target, linear_bias=bias, algorithm=algorithm, skip_ignored=skip, workspace_bytes=limit
        )
        return loss.detach(), *torch.autograd.grad(loss, wanted)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch needs a call outside of the graph first
        run(skip=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(skip=True)
    for counted in (rows, 0, 1, 128, 129, 700, 1000, rows - 1):
        target.copy_(torch.where(torch.arange(rows, device=cuda) * 37 % rows < counted, random, -100))
        graph.replay()
        for replayed, expected in zip(results, run(skip=False), strict=True):
            torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------- the surface of a call


def torch_function() -> Any:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("this PyTorch has no linear_cross_entropy")
    return function


def test_it_takes_the_calls_of_torch() -> None:
    ours, torchs = (inspect.signature(f).parameters for f in (eaves.linear_cross_entropy, torch_function()))
    for name, parameter in torchs.items():
        assert ours[name].kind == parameter.kind, name
        if name != "ignore_index":  # torch's None means -100
            assert ours[name].default == parameter.default, name
    x, head, target, bias = problem((9, 24), 33, torch.float32, "cpu")
    weight = torch.rand(33)
    options = torch.nn.LinearCrossEntropyOptions()
    for named in (
        {},
        {"linear_bias": bias},
        {"linear_bias": bias, "weight": weight, "reduction": "none", "ignore_index": 3, "label_smoothing": 0.1},
        {"ignore_index": None, "options": None},
        {"options": options, "reduction": "sum"},
    ):
        target[target == -100] = 3
        expected = torch_function()(x, head, target, **named)
        torch.testing.assert_close(eaves.linear_cross_entropy(x, head, target, **named), expected)
    torch.testing.assert_close(
        eaves.linear_cross_entropy(x[0], head, target[0]), torch_function()(x[0], head, target[0])
    )
    soft = soft_targets(x.shape, 33, "cpu", x.dtype)
    torch.testing.assert_close(eaves.linear_cross_entropy(x, head, soft), torch_function()(x, head, soft))


def test_the_module_is_the_function(device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    options = {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}
    weight = torch.rand(33, device=device)
    target[target == -100] = 3
    module = eaves.LinearCrossEntropyLoss(weight, algorithm="recompute", **options)
    expected = eaves.linear_cross_entropy(x, head, target, linear_bias=bias, weight=weight, **options)
    assert torch.equal(module(x, head, target, bias), expected)
    weights = torch.linspace(0.5, 3, 9, device=device)
    expected = eaves.linear_cross_entropy(x, head, target, weight=weight, row_weight=weights, **options)
    assert torch.equal(module(x, head, target, row_weight=weights), expected)
    assert torch.equal(module.state_dict()["weight"], weight)
    text = "reduction='sum', ignore_index=3, label_smoothing=0.1, softcap=5.0, z_loss=0.1, algorithm='recompute'"
    assert module.extra_repr() == text
    arguments = set(inspect.signature(eaves.linear_cross_entropy).parameters)
    passed = set(inspect.signature(eaves.LinearCrossEntropyLoss).parameters) | set(
        inspect.signature(eaves.LinearCrossEntropyLoss.forward).parameters
    )
    assert arguments - passed == {"options"}


@each("outputs", ["lse", ["argmax"], ("z_loss", "lse"), ("mean_logit", "entropy", "sum_sq")])
def test_outputs_come_as_a_named_tuple(outputs: Any, device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    out: Any = eaves.linear_cross_entropy(x, head, target, outputs=outputs)
    assert isinstance(out, tuple) and type(out).__name__ == "CrossEntropyOutput"
    assert out._fields == ("loss", *([outputs] if isinstance(outputs, str) else outputs))


def test_the_head_may_be_a_torch_linear(device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    linear = torch.nn.Linear(24, 33, device=device)
    torch.nn.utils.vector_to_parameters(torch.cat((head.flatten(), bias)), linear.parameters())
    expected = eaves.linear_cross_entropy(x, linear.weight, target, linear_bias=linear.bias)
    found = eaves.linear_cross_entropy(x, linear, target)
    assert torch.equal(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(e, [*linear.parameters()]) for e in (found, expected)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"linear_weight is a torch\.nn\.Linear with a bias; leave linear_bias out"):
        eaves.linear_cross_entropy(x, linear, target, linear_bias=bias)
    linear.bias = None
    assert torch.equal(eaves.linear_cross_entropy(x, linear, target, linear_bias=bias), expected)

    class Scaled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(TypeError, match=r"linear_weight is a Scaled with hooks or a forward of its own"):
        eaves.linear_cross_entropy(x, Scaled(24, 33, device=device), target)
    hooked, watched, replaced = (torch.nn.Linear(24, 33, device=device) for _ in range(3))
    hooked.register_forward_pre_hook(lambda module, inputs: None)
    watched.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    for changed in (hooked, watched, replaced):
        with pytest.raises(TypeError, match=r"linear_weight is a Linear with hooks or a forward of its own"):
            eaves.linear_cross_entropy(x, changed, target)


# ------------------------------------------------------------------------------------------------------------- autocast


@each("algorithm", ["speed", "recompute", "keep"])
def test_autocast_casts_the_factors_of_the_product(algorithm: str, device: torch.device) -> None:
    x, head, target, bias = problem((9, 24), 33, torch.float32, device)
    for dtypes in ((torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32), (torch.bfloat16,) * 3):
        given = [t.to(d).requires_grad_() for t, d in zip((x, head, bias), dtypes, strict=True)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = eaves.linear_cross_entropy(given[0], given[1], target, linear_bias=given[2], algorithm=algorithm)
        cast = [t.detach().bfloat16().requires_grad_() for t in given[:2]] + [given[2].detach().requires_grad_()]
        sums = torch.zeros(head.shape, dtype=torch.float32, device=device)
        expected = eaves.linear_cross_entropy(
            cast[0], cast[1], target, linear_bias=cast[2], algorithm=algorithm, grad_weight_out=sums
        )
        assert loss.dtype == torch.float32 and torch.equal(loss, expected)
        grads = torch.autograd.grad(loss, given, retain_graph=True)
        wanted = torch.autograd.grad(expected, [cast[0], cast[2]])
        for again, first in zip(torch.autograd.grad(loss, given), grads, strict=True):
            assert torch.equal(again, first)
        assert [g.dtype for g in grads] == list(dtypes)
        assert torch.equal(grads[0], wanted[0].to(dtypes[0])) and torch.equal(grads[2], wanted[1])
        # The sums are in float32, and the gradient of a float32 head is never rounded to 16 bits.
        if dtypes[1] == torch.float32:
            assert torch.equal(grads[1], sums) and not torch.equal(grads[1], sums.bfloat16().float())
        exact = LinearOracle(*(t.detach() for t in cast[:2]), target, cast[2].detach())
        assert_within(loss, exact.bounds(torch.float32)["loss"])
    with torch.autocast(device.type, torch.bfloat16):
        double = eaves.linear_cross_entropy(x.double(), head.double(), target)
    assert double.dtype == torch.float64


@each("algorithm", ["speed", "recompute"])
def test_under_autocast_the_gradient_of_a_float32_head_is_as_exact_as_that_of_torch(
    algorithm: str, device: torch.device
) -> None:
    # There are 16 chunks of rows or more, and each would round its part of the gradient.
    x, head, target, _ = problem((2048, 64), 1000, torch.float32, device)
    options = {"algorithm": algorithm, "workspace_bytes": 512 << 10}

    def error_of(loss_of: Callable[[Tensor, Tensor], Tensor]) -> float:
        leaf = head.detach().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(x, leaf)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.dtype == torch.float32
        return float((grad.double() - exact).norm() / exact.norm())

    cast = [tensor.bfloat16().double() for tensor in (x, head)]
    leaf = cast[1].requires_grad_()
    (exact,) = torch.autograd.grad(torch_cross_entropy(cast[0] @ leaf.T, target), leaf)
    of_torch = error_of(lambda x, head: torch_cross_entropy(torch.nn.functional.linear(x, head), target))
    default = error_of(lambda x, head: eaves.linear_cross_entropy(x, head, target, **options))
    assert default <= of_torch
    # A caller can still ask for sums in 16 bits.
    narrow = error_of(
        lambda x, head: eaves.linear_cross_entropy(x, head, target, grad_weight_dtype=torch.bfloat16, **options)
    )
    assert narrow > default


def test_under_autocast_a_second_derivative_of_the_head_is_refused_and_not_lost(device: torch.device) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, device)
    leaf = head.requires_grad_()
    for algorithm in ("speed", "recompute"):
        with torch.autocast(device.type, torch.bfloat16):
            loss = eaves.linear_cross_entropy(x, leaf, target, algorithm=algorithm)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="there is no second derivative"):
            torch.autograd.grad(grad.sum(), leaf)


# ----------------------------------------------------------------------------------------------- argument checks


def test_arguments_are_those_of_the_extension() -> None:
    for name, expected in (
        ("forward_backward", (*Forward._fields, "gradients")),
        ("backward_accumulate", ("grad_head", *Backward._fields, "kept")),
        ("backward_kept", ("kept", *Backward._fields)),
        ("forward_keep", (*Forward._fields, "most_bytes")),
    ):
        schema = getattr(torch.ops.eaves, f"linear_cross_entropy_{name}").default._schema
        assert [argument.name for argument in schema.arguments] == list(expected), name


def strides_of(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Strides of lines that touch, that have gaps, that overlap, and that are one line."""
    rows, columns = shape
    some = {0, 1, 2, rows - 1, rows, rows + 1, columns - 1, columns, columns + 1}
    return [(a, b) for a in sorted(some) for b in sorted(some)]


def is_taken(function: Callable[..., object], *arguments: object) -> bool:
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        assert "strides" in str(error) or "share memory" in str(error), error
        return False
    return True


@each("shape", [(5, 3), (3, 5), (4, 4), (1, 4), (4, 1), (1, 1)])
def test_a_matrix_is_one_to_the_core_too(shape: tuple[int, int]) -> None:
    features = shape[1]
    x, target, one = torch.zeros(2, features), torch.zeros(2, dtype=torch.int64), torch.ones(())
    options = (-100, MEAN, (), False, 0)
    saved = (None, target, None, None, torch.zeros(2), None, None, one, *options, 0)
    memory, head = torch.zeros(64), torch.zeros(shape)
    for strides in strides_of(shape):
        tensor = memory.as_strided(shape, strides)
        forward = torch.ops.eaves.linear_cross_entropy_forward
        is_matrix = is_taken(forward, x, tensor, None, target, None, None, None, *options, 0)
        assert _is_matrix(tensor) == is_matrix, strides
        accumulate = torch.ops.eaves.linear_cross_entropy_backward_accumulate
        is_place = is_taken(accumulate, tensor, one, None, None, x, head, *saved)
        check = check_grad_weight_out
        assert (
            is_taken(check, "linear_cross_entropy", tensor, head.dtype, head, None, torch.float32, False) == is_place
        ), strides


@each("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_tensors_without_data_are_those_of_the_core(dtype: torch.dtype) -> None:
    x, head, target, _ = problem((4, 8), 5, dtype, "cpu")
    options = (-100, SUM, (), False, 0)
    for bias_dtype in {dtype, torch.float32}:
        bias = torch.zeros(5, dtype=bias_dtype)
        for gradients in range(16):
            given = (x, head, bias, target, None, None, None, *options, 0, gradients)
            real = torch.ops.eaves.linear_cross_entropy_forward_backward(*given)
            with FakeTensorMode(allow_non_fake_inputs=True):
                fake = torch.ops.eaves.linear_cross_entropy_forward_backward(*given)
            described = [[(t.dtype, t.shape, t.stride()) for t in tensors] for tensors in (fake, real)]
            assert described[0] == described[1], (bias_dtype, gradients)
