"""torch.func, torch.vmap and forward mode around every operator: in any nesting the result equals the loop's, or the
call is refused. A derivative is never lost silently: each test that asks for one compares it.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp

from comparison import assert_agree
from operators import (
    Operator,
    assert_same,
    differentiable,
    each_operator,
    gradient,
    gradients_of,
    leaves,
    loop,
    of_differentiable,
)
from watch import watched

DTYPES = (torch.float32, torch.bfloat16)


def assert_all_agree(actual: object, expected: object) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_agree(a, e)


def pairs_of(op: Operator, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Two batches that differ, with an axis in front."""
    return [torch.stack([tensor, tensor.flip(0)]) for tensor in op.inputs(4, device, dtype)]


def nested_loop(op: Operator, *inputs: Tensor) -> Tensor:
    return torch.stack([loop(op, *sample) for sample in zip(*inputs, strict=True)])


# ----------------------------------------------------------------------------------------------------------- torch.vmap


@each_operator()
def test_vmap_is_the_loop(op: Operator, any_device: torch.device) -> None:
    inputs = op.inputs(4, any_device, torch.float32)
    expected = loop(op, *inputs)
    assert_agree(torch.vmap(op.function)(*inputs), expected)
    # The batch as the last axis, in memory and for vmap.
    moved = [tensor.movedim(0, -1) for tensor in inputs]
    assert_agree(torch.vmap(op.function, in_dims=-1)(*moved), expected)
    assert_agree(torch.vmap(op.function, out_dims=-1)(*inputs).movedim(-1, 0), expected)
    assert_agree(torch.vmap(op.function, chunk_size=3)(*inputs), expected)


@each_operator()
def test_vmap_in_vmap_is_the_loop_in_the_loop(op: Operator, any_device: torch.device) -> None:
    inputs = pairs_of(op, any_device, torch.float32)
    assert_agree(torch.vmap(torch.vmap(op.function))(*inputs), nested_loop(op, *inputs))


def calls_of(function: Callable[[], object]) -> int:
    with watched() as calls:
        function()
    return len(calls)


@each_operator()
def test_one_call_serves_the_whole_batch(op: Operator, any_device: torch.device) -> None:
    def total(*sample: Tensor) -> Tensor:
        return op.function(*sample).sum()

    for dtype in DTYPES:
        inputs = op.inputs(4, any_device, dtype)
        sample = [tensor[0] for tensor in inputs]
        forward = calls_of(lambda sample=sample: op.function(*sample))
        assert forward > 0
        assert calls_of(lambda inputs=inputs: torch.vmap(op.function)(*inputs)) == forward
        pairs = pairs_of(op, any_device, dtype)
        assert calls_of(lambda pairs=pairs: torch.vmap(torch.vmap(op.function))(*pairs)) == forward
        both = calls_of(lambda sample=sample: grad(total, op.differentiable)(*sample))
        assert both > forward
        assert calls_of(lambda inputs=inputs: torch.vmap(grad(total, op.differentiable))(*inputs)) == both


# ------------------------------------------------------------------------------------- derivatives through and in vmap


@each_operator()
def test_gradients_of_samples_are_the_gradients_of_the_loop(op: Operator, any_device: torch.device) -> None:
    for dtype in (*DTYPES, torch.float64):
        inputs = op.inputs(4, any_device, dtype)
        of_samples = torch.vmap(grad(lambda *sample: op.function(*sample).sin().sum(), op.differentiable))
        _, *expected = gradients_of(op, lambda *tensors: loop(op, *tensors).sin().sum(), inputs)
        assert_all_agree(of_samples(*inputs), expected)


@each_operator()
def test_gradients_of_a_batch_are_the_gradients_of_the_loop(op: Operator, any_device: torch.device) -> None:
    # The transform is outside of vmap, so the tensors do not show that they need a gradient.
    for dtype in DTYPES:
        inputs = op.inputs(4, any_device, dtype)
        _, *expected = gradients_of(op, lambda *tensors: loop(op, *tensors).sin().sum(), inputs)
        for function in (op.function, torch.vmap(op.function), torch.vmap(op.function, in_dims=0, chunk_size=3)):
            of_batch = grad(lambda *tensors, f=function: f(*tensors).sin().sum(), op.differentiable)
            if function is not op.function:
                assert_all_agree(of_batch(*inputs), expected)
            # A term with a gradient of its own: without the operator's gradient the sum would be wrong, but no error.
            with_term = grad(
                lambda *tensors, f=function: (f(*tensors).sin() + totals(op, tensors)).sum(), op.differentiable
            )
            out = function(*inputs)
            assert_all_agree(with_term(*inputs), [each + out.numel() for each in of_batch(*inputs)])


def totals(op: Operator, tensors: tuple[Tensor, ...]) -> Tensor:
    """A number whose derivative with respect to every element is 1."""
    return sum(tensor.sum() for tensor in differentiable(op, tensors))


@each_operator()
def test_vjp_and_jacobians_of_a_batch_are_those_of_the_loop(op: Operator, any_device: torch.device) -> None:
    for dtype in DTYPES:
        inputs = op.inputs(2, any_device, dtype)
        batch = of_differentiable(op, torch.vmap(op.function), inputs)
        out, backward = vjp(batch, *differentiable(op, inputs))
        upstream = torch.linspace(-1.5, 2, out.numel(), device=any_device).view(out.shape).to(dtype)
        expected_out, *expected = gradients_of(op, lambda *tensors: loop(op, *tensors), inputs, upstream)
        assert_agree(out, expected_out)
        assert_all_agree(backward(upstream), expected)
        assert_all_agree(
            jacrev(torch.vmap(op.function), op.differentiable)(*inputs),
            jacrev(lambda *tensors: loop(op, *tensors), op.differentiable)(*inputs),
        )


@each_operator()
def test_a_backward_goes_through_vmap(op: Operator, any_device: torch.device) -> None:
    for dtype in DTYPES:
        inputs = op.inputs(4, any_device, dtype)
        expected = gradients_of(op, lambda *tensors: loop(op, *tensors), inputs)
        assert_all_agree(gradients_of(op, torch.vmap(op.function), inputs), expected)

        def with_term(*tensors: Tensor) -> Tensor:
            return torch.vmap(op.function)(*tensors) + totals(op, tensors)

        out, *grads = expected
        assert_all_agree(gradients_of(op, with_term, inputs)[1:], [each + out.numel() for each in grads])


@each_operator()
def test_a_backward_goes_through_vmap_in_vmap(op: Operator, any_device: torch.device) -> None:
    for dtype in DTYPES:
        inputs = pairs_of(op, any_device, dtype)
        nested = torch.vmap(torch.vmap(op.function))
        expected = gradients_of(op, lambda *tensors: nested_loop(op, *tensors), inputs)
        assert_all_agree(gradients_of(op, nested, inputs), expected)
        of_batch = grad(lambda *tensors, f=nested: f(*tensors).sum(), op.differentiable)
        assert_all_agree(of_batch(*inputs), expected[1:])
        # One transform between the two.
        inner = grad(lambda *tensors: torch.vmap(op.function)(*tensors).sum(), op.differentiable)
        assert_all_agree(torch.vmap(inner)(*inputs), expected[1:])


@each_operator()
def test_a_tensor_from_outside_of_a_transform_gets_its_gradient(op: Operator, any_device: torch.device) -> None:
    factors = torch.tensor([1.0, -2.0, 0.5], device=any_device)
    for dtype in DTYPES:
        inputs = op.inputs(2, any_device, dtype)
        out, *expected = gradient(op, inputs)
        tensors = leaves(op, inputs)

        def weighted(factor: Tensor, tensors: tuple[Tensor, ...] = tensors) -> Tensor:
            return op.function(*tensors).float().sum() * factor

        total = torch.vmap(weighted)(factors).sum()
        actual = torch.autograd.grad(total, differentiable(op, tensors))
        assert_all_agree(actual, [each * factors.sum().to(dtype) for each in expected])

        def of_scaled(factor: Tensor, tensors: tuple[Tensor, ...] = tensors) -> Tensor:
            return op.function(*[t * factor if i in op.differentiable else t for i, t in enumerate(tensors)])

        # The product of the factor and a sample.
        total = torch.vmap(of_scaled)(torch.ones_like(factors, dtype=dtype)).sum()
        actual = torch.autograd.grad(total, differentiable(op, tensors))
        assert_all_agree(actual, [3 * each for each in expected])
        # Under grad of another tensor, the outer transform still sees the operator.
        _, backward = vjp(weighted, factors[0])
        assert_agree(backward(torch.ones_like(factors[0]))[0], out.float().sum())


@each_operator()
def test_jacobians_are_rows_of_gradients(op: Operator, any_device: torch.device) -> None:
    inputs = op.inputs(2, any_device, torch.float64)
    tensors = leaves(op, inputs)
    out = op.function(*tensors)
    basis = torch.eye(out.numel(), dtype=out.dtype, device=any_device).view(-1, *out.shape)
    jacobians = jacrev(op.function, op.differentiable)(*inputs)
    for x, jacobian in zip(differentiable(op, tensors), jacobians, strict=True):
        rows = torch.stack([torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in basis])
        expected = rows.view(*out.shape, *x.shape)
        assert_agree(jacobian, expected)
        # The same through autograd: the upstream gradient is batched, the tensors are not.
        (batched,) = torch.autograd.grad(out, x, basis, is_grads_batched=True, retain_graph=True)
        assert_agree(batched.view_as(expected), expected)


# --------------------------------------------------------------------------------------------------------- forward mode


@each_operator()
def test_forward_mode_is_refused_and_not_ignored(op: Operator, any_device: torch.device) -> None:
    inputs = op.inputs(2, any_device, torch.float32)
    for index in op.differentiable:

        def function(x: Tensor, index: int = index, of: Callable[..., Tensor] = op.function) -> Tensor:
            return of(*inputs[:index], x, *inputs[index + 1 :])

        def of_batch(x: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            return function(x, of=torch.vmap(op.function))

        x = inputs[index]
        with pytest.raises(NotImplementedError, match=rf"{op.name}.*forward"):
            jvp(function, (x,), (torch.ones_like(x),))
        # Here torch's own batching rule may fail first, with its own message.
        with pytest.raises((NotImplementedError, AssertionError, ValueError)) as caught:
            jvp(of_batch, (x,), (torch.ones_like(x),))
        assert caught.type is not ValueError or "treespec" in str(caught.value)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=rf"{op.name}.*forward"):
                function(dual)


# ------------------------------------------------------------------------------------------- transforms and compilation


@each_operator()
def test_a_compiled_transform_is_right_or_refused_and_gives_no_zeros(
    op: Operator, any_device: torch.device, fresh_compiler: None
) -> None:
    wanted = op.differentiable

    def total(*tensors: Tensor) -> Tensor:
        return op.function(*tensors).sum()

    def of_batch(*tensors: Tensor) -> object:
        return grad(lambda *t: torch.vmap(op.function)(*t).sum(), wanted)(*tensors)

    def forward_mode(*tensors: Tensor) -> object:
        values = differentiable(op, tensors)
        return jvp(of_differentiable(op, op.function, tensors), values, tuple(map(torch.ones_like, values)))

    inputs = op.inputs(2, any_device, torch.float32)
    of_call, of_samples = grad(total, wanted), torch.vmap(grad(total, wanted))
    functions = (lambda *t: of_call(*t), lambda *t: of_samples(*t), of_batch, forward_mode)
    for function in functions:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        try:
            actual = compiled(*inputs)
        except Exception as error:  # eaves' sentence, or PyTorch 2.15's with a batch around it
            assert re.search("derivative is lost|does not have vmap support|Observed exception", str(error))
        else:  # PyTorch 2.15 follows torch.func.grad
            assert function is functions[0]
            for a, e in zip(actual, function(*inputs), strict=True):
                assert_agree(a, e)
    # Without a transform around the batch, the lost derivative is autograd's.
    batch = torch.compile(lambda *t: torch.vmap(op.function)(*t), fullgraph=True, backend="aot_eager")
    assert_same([batch(*inputs)], [torch.vmap(op.function)(*inputs)])
    try:
        actual = gradients_of(op, batch, inputs)
    except Exception as error:
        assert op.name == "logsumexp" and "derivative is lost" in str(error)
    else:
        assert_all_agree(actual, gradients_of(op, torch.vmap(op.function), inputs))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@each_operator()
def test_what_is_inside_of_a_transform_can_be_compiled(
    op: Operator, any_device: torch.device, fresh_compiler: None
) -> None:
    # The way out that the refusal names. It excludes fullgraph=True, which torch refuses inside of torch.func.grad.
    compiled = torch.compile(op.function, backend="aot_eager")
    inputs = op.inputs(4, any_device, torch.float32)
    _, *expected = gradients_of(op, lambda *tensors: loop(op, *tensors), inputs)
    of_samples = torch.vmap(grad(lambda *sample: compiled(*sample).sum(), op.differentiable))
    assert_all_agree(of_samples(*inputs), expected)
    of_batch = grad(lambda *tensors: torch.vmap(compiled)(*tensors).sum(), op.differentiable)
    assert_all_agree(of_batch(*inputs), expected)
