"""What every operator of the library has to do, whatever it computes: torch's contracts (schemas, fake tensors,
torch.compile, torch.func), determinism, threads, and what it must leave alone. GPU matters are in cuda_test.py.
"""

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from comparison import assert_agree
from layouts import LAYOUTS
from operators import OPERATORS, Operator, assert_same, each_operator, gradient

# opcheck scripts something inside of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def test_every_public_function_is_tested_here() -> None:
    functions = {name for name in eaves.__all__ if inspect.isfunction(getattr(eaves, name))}
    assert functions == {op.name for op in OPERATORS}


# ------------------------------------------------------------------------------------------------ torch's own contracts


@each_operator()
def test_every_operator_of_the_extension_passes_opcheck(op: Operator, device: torch.device) -> None:
    # Autograd is outside of the extension: these inputs need no gradient.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for overload, arguments in op.extension_calls(device):
        torch.library.opcheck(overload, arguments, test_utils=utilities)
    # Tracing takes a second a call: once for each operator is enough to see that it can be traced.
    for overload, arguments in {str(call[0]): call for call in op.extension_calls(device)}.values():
        torch.library.opcheck(overload, arguments, test_utils=("test_aot_dispatch_dynamic",))


@each_operator()
def test_fake_tensors_have_the_metadata_of_real_ones(op: Operator, device: torch.device) -> None:
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16):
            x, *others = op.inputs(3, device, dtype)
            inputs = (layout(x), *others)
            real = gradient(op, inputs)
            with FakeTensorMode() as mode:
                fake = gradient(op, [mode.from_tensor(tensor) for tensor in inputs])
            for r, f in zip(real, fake, strict=True):
                assert (f.shape, f.stride(), f.dtype, f.device.type) == (r.shape, r.stride(), r.dtype, r.device.type)


@each_operator()
def test_meta_tensors_give_shapes_without_computing(op: Operator) -> None:
    inputs = op.inputs(3, "cpu", torch.float32)
    expected = op.function(*inputs)
    actual = op.function(*[tensor.to("meta") for tensor in inputs])
    assert actual.is_meta and (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


# -------------------------------------------------------------------------------------------------------- torch.compile


@each_operator()
def test_one_compilation_serves_every_size(op: Operator, device: torch.device, fresh_compiler: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 7, 12):
        inputs = op.inputs(batch, device, torch.float32)
        assert_same([compiled(*inputs)], [op.function(*inputs)])
    assert counter.frame_count == 1


@each_operator()
def test_forward_and_backward_compile_without_a_graph_break(
    op: Operator, device: torch.device, fresh_compiler: None
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: op.function(*t).sin(), fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 7):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = op.inputs(batch, device, dtype)
            results = []
            for function in (compiled, lambda *t: op.function(*t).sin()):
                x = inputs[0].detach().requires_grad_()
                out = function(x, *inputs[1:])
                results.append((out, *torch.autograd.grad(out.sum(), x)))
            assert_same(*results)
    assert counter.frame_count == 2  # one for each dtype, none for the second size


@each_operator()
def test_the_default_backend_compiles_it_between_other_operators(
    op: Operator, device: torch.device, fresh_compiler: None
) -> None:
    def function(*tensors: Tensor) -> Tensor:
        return op.function(tensors[0] * 2, *tensors[1:]) + 1

    inputs = op.inputs(4, device, torch.float32)
    results = []
    for f in (torch.compile(function, fullgraph=True), function):
        x = inputs[0].detach().requires_grad_()
        out = f(x, *inputs[1:])
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    assert_same(*results)


# ----------------------------------------------------------------------------------------------------------- torch.func


@each_operator()
def test_vmap_is_the_loop(op: Operator, device: torch.device) -> None:
    inputs = op.inputs(4, device, torch.float32)
    expected = torch.stack([op.function(*sample) for sample in zip(*inputs, strict=True)])
    assert_agree(torch.vmap(op.function)(*inputs), expected)
    # The batch as the last axis, in memory and for vmap.
    moved = [tensor.movedim(0, -1) for tensor in inputs]
    assert_agree(torch.vmap(op.function, in_dims=-1)(*moved), expected)
    assert_agree(torch.vmap(op.function, out_dims=-1)(*inputs).movedim(-1, 0), expected)
    assert_agree(torch.vmap(op.function, chunk_size=3)(*inputs), expected)


@each_operator()
def test_vmap_in_vmap_is_the_loop_in_the_loop(op: Operator, device: torch.device) -> None:
    first, second = op.inputs(4, device, torch.float32), op.inputs(4, device, torch.float32)
    inputs = [torch.stack([a, 2 * b]) for a, b in zip(first, second, strict=True)]
    actual = torch.vmap(torch.vmap(op.function))(*inputs)
    expected = torch.stack([op.function(*(tensor[i] for tensor in inputs)) for i in range(2)])
    assert_agree(actual, expected)


@each_operator()
def test_gradients_of_samples_are_the_gradients_of_the_loop(op: Operator, device: torch.device) -> None:
    inputs = op.inputs(4, device, torch.float64)
    actual = torch.vmap(torch.func.grad(lambda *sample: op.function(*sample).sin().sum()))(*inputs)
    x = inputs[0].detach().requires_grad_()
    total = sum(op.function(*sample).sin().sum() for sample in zip(x, *inputs[1:], strict=True))
    assert_agree(actual, torch.autograd.grad(total, x)[0])


@each_operator()
def test_jacobians_are_rows_of_gradients(op: Operator, device: torch.device) -> None:
    inputs = op.inputs(2, device, torch.float64)
    x = inputs[0].detach().requires_grad_()
    out = op.function(x, *inputs[1:])
    basis = torch.eye(out.numel(), dtype=out.dtype, device=device).view(-1, *out.shape)
    rows = torch.stack([torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in basis])
    expected = rows.view(*out.shape, *x.shape)
    assert_agree(torch.func.jacrev(op.function)(*inputs), expected)
    # The same through autograd: the upstream gradient is batched, the tensors are not.
    (batched,) = torch.autograd.grad(out, x, basis, is_grads_batched=True)
    assert_agree(batched.view_as(expected), expected)


@each_operator()
def test_forward_mode_is_refused_and_not_ignored(op: Operator, device: torch.device) -> None:
    x, *others = op.inputs(2, device, torch.float32)
    with pytest.raises(NotImplementedError, match=rf"{op.name}.*forward"):
        torch.func.jvp(lambda t: op.function(t, *others), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=rf"{op.name}.*forward"):
            op.function(dual, *others)


# ------------------------------------------------------------------------------------------------------------- autograd


@each_operator()
def test_a_second_backward_gives_the_same_gradient(op: Operator, device: torch.device) -> None:
    # Not scaled twice, as where a backward writes over what the forward kept.
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(3, device, dtype)
        x = inputs[0].detach().requires_grad_()
        out = op.function(x, *inputs[1:])
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        second = torch.autograd.grad(out.sum(), x)
        assert_same(first, second)


@each_operator()
def test_second_derivatives_agree_with_finite_differences(op: Operator, device: torch.device) -> None:
    x, *others = op.inputs(1, device, torch.float64)
    x = x[..., :3].detach().requires_grad_()
    others = [tensor[..., :3] for tensor in others]
    assert torch.autograd.gradgradcheck(lambda t: op.function(t, *others), x)


@each_operator()
def test_a_graph_whose_gradient_is_missing_gives_none(op: Operator, device: torch.device) -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, out: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx: object, grad_out: Tensor) -> None:
            return None

    for dtype in (torch.float32, torch.bfloat16):
        x, *others = op.inputs(3, device, dtype)
        x = x.detach().requires_grad_()
        for create_graph in (False, True):
            out = Stop.apply(op.function(x, *others))
            assert torch.autograd.grad(out.sum(), x, create_graph=create_graph, allow_unused=True) == (None,)


@each_operator()
def test_it_can_be_exported(op: Operator, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return op.function(*tensors) + 1

    inputs = op.inputs(4, device, torch.float32)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Module(), inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),))
    others = op.inputs(7, device, torch.float32)
    assert_same([exported.module()(*others)], [op.function(*others) + 1])


@each_operator()
def test_autocast_leaves_the_dtype_as_it_is(op: Operator, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(3, device, dtype)
        expected = gradient(op, inputs)
        with torch.autocast(device.type, torch.bfloat16):
            actual = gradient(op, inputs)
        assert_same(actual, expected)


@each_operator()
def test_a_module_that_calls_it_can_be_copied(op: Operator, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = op.function

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.function(*tensors)

    module = Module()
    inputs = op.inputs(2, device, torch.float32)
    assert_same([copy.deepcopy(module)(*inputs)], [module(*inputs)])


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@each_operator()
def test_a_distributed_tensor_is_refused_with_what_to_do(op: Operator, process_group: None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    for wants_grad in (False, True):
        x, *others = [distribute_tensor(t, mesh, [Shard(0)]) for t in op.inputs(2, "cpu", torch.float32)]
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: .* is a DTensor.*to_local\(\)"):
            op.function(x.requires_grad_(wants_grad), *others)


# ----------------------------------------------------------------------------------- determinism, threads, other people


@each_operator()
def test_inputs_are_not_modified(op: Operator, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(3, device, dtype)
        before = [(tensor.clone(), tensor._version) for tensor in inputs]
        x = inputs[0].requires_grad_()
        op.function(*inputs).sum().backward()
        for tensor, (values, version) in zip(inputs, before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor.detach(), values)
        assert x.grad is not None


def results_of(op: Operator, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of a call that wants no gradient, of one that does, and the gradient."""
    return [op.function(*inputs), *gradient(op, inputs)]


@each_operator()
def test_two_runs_are_bitwise_equal(op: Operator, device: torch.device) -> None:
    inputs = op.large_inputs(device)
    assert_same(results_of(op, inputs), results_of(op, inputs))


@each_operator()
def test_the_number_of_threads_changes_no_bit(op: Operator, cpu_threads: None) -> None:
    inputs = op.large_inputs("cpu")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(results_of(op, inputs))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@each_operator()
def test_calls_from_several_threads_do_not_disturb_each_other(op: Operator, device: torch.device) -> None:
    inputs = [op.inputs(batch, device, torch.float32) for batch in (3, 5, 8, 13)]
    expected = [gradient(op, tensors) for tensors in inputs]
    actual: list[list[tuple[Tensor, Tensor]]] = [[] for _ in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            actual[index].append(gradient(op, inputs[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, result in zip(actual, expected, strict=True):
        assert len(results) == 20
        for each in results:
            assert_same(each, result)


@each_operator()
def test_a_call_inside_a_parallel_loop_of_torch_is_right(op: Operator, cpu_threads: None) -> None:
    # torch's backward of several branches calls from threads of its own.
    torch.set_num_threads(2)
    inputs = op.large_inputs("cpu")
    expected = gradient(op, inputs)
    x = inputs[0].detach().requires_grad_()
    branches = [op.function(x, *inputs[1:]).sum() for _ in range(2)]
    torch.autograd.backward(branches)
    assert_same([x.grad], [2 * expected[1]])
