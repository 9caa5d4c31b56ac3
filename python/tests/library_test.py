"""What every operator of the library has to do, whatever it computes: torch's contracts (schemas, fake tensors,
torch.compile, autograd), determinism, threads, and what it must leave alone. torch.func and torch.vmap are in
transforms_test.py, GPU matters in cuda_test.py.
"""

import copy
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import eaves
from comparison import assert_agree
from layouts import LAYOUTS
from operators import (
    OPERATORS,
    Operator,
    Stop,
    assert_same,
    differentiable,
    each_operator,
    gradient,
    gradients_of,
    leaves,
    of_differentiable,
)

# opcheck scripts something inside of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def test_every_public_function_is_tested_here() -> None:
    functions = {name for name in eaves.__all__ if inspect.isfunction(getattr(eaves, name))}
    assert functions == {name for op in OPERATORS for name in (op.name, *op.parts)}


@pytest.mark.parametrize(("name", "run"), [
    ("cross_entropy", "loss_of_logits"), ("linear_cross_entropy", "loss_of_head"), ("linear_kl_div", "divergence_of"),
    ("log_prob", "log_probs_of"), ("linear_log_prob", "log_probs_of"), ("lrpe_cosine", "encoding_of"),
])  # fmt: skip
def test_every_argument_arrives_under_its_name(name: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The function puts them into the record of the call by their places.
    function = getattr(eaves, name)
    calls: list[Any] = []
    monkeypatch.setattr(sys.modules[function.__module__], run, calls.append)
    parameters = inspect.signature(function).parameters.values()
    given = {each.name: object() for each in parameters if each.kind is not each.VAR_KEYWORD}
    function(**given)
    found = calls[0]._asdict()
    # The record of log-probabilities has logits or hidden states.
    assert {name: found[name if name in found else "x"] for name in given} == given


def lying(op: Operator, layout: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in another layout, of the tensors that are differentiable."""
    return [layout(tensor) if index in op.differentiable else tensor for index, tensor in enumerate(inputs)]


def scaled(op: Operator, factor: float, inputs: Sequence[Tensor]) -> list[Tensor]:
    return lying(op, lambda tensor: factor * tensor, inputs)


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
            inputs = lying(op, layout, op.inputs(3, device, dtype))
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
def test_one_compilation_serves_every_size(op: Operator, any_device: torch.device, fresh_compiler: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 7, 12):
        inputs = op.inputs(batch, any_device, torch.float32)
        assert_same([compiled(*inputs)], [op.function(*inputs)])
    assert counter.frame_count == 1


@each_operator()
def test_forward_and_backward_compile_without_a_graph_break(
    op: Operator, device: torch.device, fresh_compiler: None
) -> None:
    def function(*tensors: Tensor) -> Tensor:
        return op.function(*tensors).sin()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 7):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = op.inputs(batch, device, dtype)
            assert_same(gradients_of(op, compiled, inputs), gradients_of(op, function, inputs))
    assert counter.frame_count == 2  # one for each dtype, none for the second size


@each_operator()
def test_the_default_backend_compiles_it_between_other_operators(
    op: Operator, device: torch.device, fresh_compiler: None
) -> None:
    def function(*tensors: Tensor) -> Tensor:
        return op.function(*scaled(op, 2, tensors)) + 1

    inputs = op.inputs(4, device, torch.float32)
    compiled = torch.compile(function, fullgraph=True)
    assert_same(gradients_of(op, compiled, inputs), gradients_of(op, function, inputs))


# ------------------------------------------------------------------------------------------------------------- autograd


@each_operator()
def test_a_second_backward_gives_the_same_gradient(op: Operator, device: torch.device) -> None:
    # Not scaled twice, as where a backward writes over what the forward kept.
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, op.inputs(3, device, dtype))
        out = op.function(*tensors)
        first = torch.autograd.grad(out.sum(), differentiable(op, tensors), retain_graph=True)
        second = torch.autograd.grad(out.sum(), differentiable(op, tensors))
        assert_same(first, second)


@each_operator()
def test_a_tensor_that_was_changed_before_the_backward_is_noticed(op: Operator, device: torch.device) -> None:
    tensors = leaves(op, op.inputs(3, device, torch.float16))  # linear_cross_entropy keeps it in this dtype alone
    moved = scaled(op, 1, tensors)
    out = op.function(*moved)
    moved[op.differentiable[0]].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_operator()
def test_second_derivatives_agree_with_finite_differences_or_are_refused(op: Operator, device: torch.device) -> None:
    tensors = leaves(op, op.tiny_inputs(device, torch.float64))
    wanted = differentiable(op, tensors)
    if op.has_second_derivative:
        assert torch.autograd.gradgradcheck(of_differentiable(op, op.function, tensors), wanted)
        return
    grads = torch.autograd.grad(op.function(*tensors).sum(), wanted, create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"^{op.name}: there is no second derivative"):
        torch.autograd.grad(sum(each.sum() for each in grads), wanted)


@each_operator()
def test_a_graph_whose_gradient_is_missing_gives_none(op: Operator, any_device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, op.inputs(3, any_device, dtype))
        wanted = differentiable(op, tensors)
        for create_graph in (False, True):
            out = Stop.apply(op.function(*tensors))
            grads = torch.autograd.grad(out.sum(), wanted, create_graph=create_graph, allow_unused=True)
            assert grads == (None,) * len(wanted)


class Log(TorchDispatchMode):
    """The names of the operators that are called in it, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, overload: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(overload.name())
        return overload(*args, **(kwargs or {}))


@each_operator()
def test_a_backward_is_one_operator_that_no_tensor_is_filled_for(op: Operator, any_device: torch.device) -> None:
    # Autograd hands zeros to a Function for each result that nobody used, unless it is told not to.
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, op.inputs(3, any_device, dtype))
        out = op.function(*tensors)
        upstream = torch.ones_like(out)
        with Log() as log:
            torch.autograd.grad(out, differentiable(op, tensors), upstream)
        called = [name for name in log.names if name != "aten::detach"]  # a new view, of no bytes
        assert len(called) == 1 and called[0].startswith(f"eaves::{op.name}"), called


@each_operator()
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_tensor_is_read_as_it_lies_and_never_copied(
    op: Operator, layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, lying(op, layout, op.inputs(3, device, dtype)))
        upstream = layout(torch.ones_like(op.function(*tensors)))
        # The profiler also sees what the extension calls of torch.
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            out = op.function(*tensors)
            torch.autograd.grad(out, differentiable(op, tensors), upstream)
        names = [event.name for event in profiler.events()]
        assert any(name.startswith(f"eaves::{op.name}") for name in names), names
        copying = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "Memcpy", "cudaMemcpy")
        assert not [name for name in names if name.startswith(copying)], names


# ------------------------------------------------------------------------------------- the operators of the extension


def wants_gradient(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with a gradient asked for of the tensors that can have one."""
    return [
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    ]


# The arguments of the forward that have a derivative, also in a direct call.
DERIVATIVES = {
    "logsumexp": {"x"},
    "cross_entropy": {"logits"},
    "linear_cross_entropy": {"hidden", "head", "bias"},
    "lrpe_cosine": {"x", "theta"},
}


def derivatives(op: Operator, overload: Any) -> set[int]:
    """The places of the differentiable arguments; an operator without a derivative has none."""
    if overload._schema.name != f"eaves::{op.name}_forward":
        return set()
    return {index for index, each in enumerate(overload._schema.arguments) if each.name in DERIVATIVES[op.name]}


@each_operator()
def test_a_direct_call_that_would_lose_a_derivative_is_refused(op: Operator, any_device: torch.device) -> None:
    for overload, arguments in op.extension_calls(any_device):
        tracked = wants_gradient(arguments)
        if derivatives(op, overload) or not any(isinstance(each, Tensor) and each.requires_grad for each in tracked):
            continue
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: .*derivative is lost.*eaves\.{op.name}$"):
            overload(*tracked)
        expected = overload(*copy.deepcopy(arguments))  # some are written over
        with torch.no_grad():
            actual = overload(*copy.deepcopy(tracked))
        assert_same(as_tuple(actual), as_tuple(expected))


@each_operator()
def test_each_tensor_whose_derivative_would_be_lost_is_enough(op: Operator, any_device: torch.device) -> None:
    for overload, arguments in {str(call[0]): call for call in op.extension_calls(any_device)}.values():
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.is_floating_point():
                tracked = list(arguments)
                tracked[index] = value.detach().requires_grad_()
                if index not in derivatives(op, overload):
                    sentence = "derivative is lost|there is no derivative with respect to"
                    with pytest.raises(NotImplementedError, match=sentence):
                        overload(*tracked)
                with torch.autograd.forward_ad.dual_level():
                    tracked[index] = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
                    with pytest.raises(NotImplementedError, match="derivative is lost"), torch.no_grad():
                        overload(*tracked)


@each_operator()
def test_a_direct_call_of_a_forward_has_its_derivatives(op: Operator, device: torch.device) -> None:
    def in_float64(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    traced = set()
    for overload, arguments in op.extension_calls(device):
        places = sorted(index for index in derivatives(op, overload) if arguments[index] is not None)
        if not places or any(arguments[index].numel() == 0 for index in places):
            continue
        given = [in_float64(value) for value in arguments]

        def function(*wanted: Tensor, call: Any = overload, places: Any = places, given: Any = given) -> Any:
            tensors = dict(zip(places, wanted, strict=True))
            results = as_tuple(call(*[tensors.get(index, value) for index, value in enumerate(given)]))
            return tuple(result for result in results if result.requires_grad)

        wanted = [given[index].detach().clone().requires_grad_() for index in places]
        assert torch.autograd.gradcheck(function, wanted, fast_mode=True)
        # In the dtypes of the call: results with a derivative equal results without.
        tracked = [value.detach().requires_grad_() if i in places else value for i, value in enumerate(arguments)]
        for actual, expected in zip(as_tuple(overload(*tracked)), as_tuple(overload(*arguments)), strict=True):
            assert_agree(actual, expected)
        torch.library.opcheck(overload, tuple(tracked), test_utils=("test_autograd_registration", "test_faketensor"))
        if overload not in traced:  # it takes a second
            traced.add(overload)
            torch.library.opcheck(overload, tuple(tracked), test_utils=("test_aot_dispatch_dynamic",))
    assert traced


def as_tuple(result: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result or ())


@each_operator()
def test_tensors_of_two_devices_are_refused_and_not_read(op: Operator, device: torch.device) -> None:
    others = [torch.device("meta")] + ([torch.device("cpu")] if device.type == "cuda" else [])
    inputs = op.inputs(3, device, torch.float32)
    for other in others:
        for index in range(len(inputs) if len(inputs) > 1 else 0):
            moved = [each.to(other) if i == index else each for i, each in enumerate(inputs)]
            for given in (moved, leaves(op, moved)):
                said = rf"^{op.name}: \w+ is on [\w:]+, expected [\w:]+ \(as \w+\)(; on meta|$)"
                with pytest.raises(ValueError, match=said):
                    op.function(*given)
    # And on the other way to the extension.
    for overload, arguments in op.extension_calls(device):
        tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        for index in tensors if len(tensors) > 1 else []:
            moved = [each.to("meta") if i == index else each for i, each in enumerate(arguments)]
            with torch.no_grad(), pytest.raises(ValueError, match=r"is on [\w:]+, expected [\w:]+"):
                overload(*moved)


# -------------------------------------------------------------------------------------------- the rest of PyTorch


@each_operator()
def test_it_can_be_exported(op: Operator, any_device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return op.function(*tensors) + 1

    inputs = op.inputs(4, any_device, torch.float32)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Module(), inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),))
    others = op.inputs(7, any_device, torch.float32)
    assert_same([exported.module()(*others)], [op.function(*others) + 1])


@each_operator()
@pytest.mark.parametrize(("strict", "wants_gradients"), [(False, True), (True, False)])
def test_an_exported_program_has_the_gradients_of_the_call(
    op: Operator, strict: bool, wants_gradients: bool, any_device: torch.device, fresh_compiler: None
) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return op.function(*tensors)

    inputs = op.inputs(4, any_device, torch.float32)
    given = leaves(op, inputs)
    exported = torch.export.export(Module(), given if wants_gradients else inputs, strict=strict)
    compiled = torch.compile(exported.module(), backend="aot_eager", fullgraph=True)
    upstream = torch.randn_like(op.function(*inputs))
    expected = gradient(op, inputs, upstream)
    for program in (exported.module(), exported.run_decompositions().module(), compiled):
        assert_same([program(*inputs)], [op.function(*inputs)])
        with torch.no_grad():
            assert_same([program(*given)], [op.function(*inputs)])
        for actual, wanted in zip(gradients_of(op, program, inputs, upstream), expected, strict=True):
            assert_agree(actual, wanted)


@each_operator()
def test_an_exported_program_has_no_other_derivatives_than_the_call(op: Operator, any_device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return op.function(*tensors)

    inputs = op.inputs(4, any_device, torch.float32)
    program = torch.export.export(Module(), inputs).module()
    given = leaves(op, inputs)
    wanted = differentiable(op, given)
    gradients = [
        torch.autograd.grad(function(*given).square().sum(), wanted, create_graph=True)
        for function in (op.function, program)
    ]
    if op.has_second_derivative:
        second = [torch.autograd.grad(sum(each.sin().sum() for each in first), wanted) for first in gradients]
        for expected, actual in zip(*second, strict=True):
            assert_agree(actual, expected)
    else:
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: there is no second derivative"):
            torch.autograd.grad(gradients[1][0].sum(), wanted)
    with pytest.raises(NotImplementedError, match=rf"^{op.name}: its derivative is lost .* around a program"):
        torch.func.grad(lambda *tensors: program(*tensors).sum(), op.differentiable)(*inputs)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(each, torch.ones_like(each)) for each in wanted]
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: its derivative is lost .* around a program"):
            of_differentiable(op, program, inputs)(*dual)


def test_a_model_trains_as_an_exported_program(any_device: torch.device) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.rand(2, 2))
            self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 11)
            self.frozen = torch.nn.Parameter(torch.randn(11, 8), requires_grad=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            encoded = eaves.lrpe_cosine(x.view(1, 6, 2, 2), self.theta, activation="softmax", activation_dim=-2)
            hidden = self.body(encoded.reshape(6, 8))
            of_head = eaves.linear_cross_entropy(
                hidden, self.head.weight, target, linear_bias=self.head.bias, algorithm="speed", outputs="entropy"
            )
            logits = self.head(hidden)
            of_logits = eaves.cross_entropy(logits, target, z_loss=0.1, outputs="lse")
            assert of_head.entropy is not None and of_logits.lse is not None
            frozen = eaves.linear_log_prob(hidden, self.frozen, target, outputs="entropy", temperature=2.0)
            assert frozen.entropy is not None
            numbers = (of_head.loss, of_head.entropy.mean(), of_logits.loss, of_logits.lse.square().mean(),
                       frozen.log_prob.sum(), frozen.entropy.mean(), eaves.logsumexp(hidden, -1).mean())  # fmt: skip
            return torch.stack(numbers).sin().sum()

    x = torch.randn(6, 4, device=any_device)
    target = torch.tensor([3, -100, 0, 10, 3, 7], device=any_device)
    model = Model().to(any_device)
    for is_decomposed in (False, True):
        exported = torch.export.export(copy.deepcopy(model), (x, target))
        program = exported.run_decompositions().module() if is_decomposed else exported.module()
        trained = []
        for each in (copy.deepcopy(model), program):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = each(x, target)
                loss.backward()
                optimizer.step()
            trained.append({"loss": loss.detach(), **{k: v.detach() for k, v in each.named_parameters()}})
        assert trained[0].keys() == trained[1].keys()
        for name, expected in trained[0].items():
            assert_agree(trained[1][name], expected)


@each_operator()
@pytest.mark.parametrize("compiles_the_forward", [False, True])
def test_compiled_autograd_gives_the_same_gradients(
    compiles_the_forward: bool, op: Operator, any_device: torch.device, fresh_compiler: None
) -> None:
    inputs = op.inputs(4, any_device, torch.float32)
    given = leaves(op, inputs)
    function = torch.compile(op.function, backend="aot_eager") if compiles_the_forward else op.function
    loss = function(*given).sum() * 2
    expected = [2 * gradient for gradient in gradient(op, inputs)[1:]]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        for _ in range(1 if compiles_the_forward else 3):  # the second gives the same, and leaves the first alone
            actual = torch.autograd.grad(loss, differentiable(op, given), retain_graph=not compiles_the_forward)
            for tensor, wanted in zip(actual, expected, strict=True):
                assert_agree(tensor, wanted)


@each_operator()
def test_autocast_leaves_the_dtype_as_it_is_or_casts_what_is_given(op: Operator, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(3, device, dtype)
        cast = lying(op, lambda tensor: tensor.to(torch.bfloat16), inputs) if op.follows_autocast else inputs
        out, *expected = gradient(op, cast)
        with torch.autocast(device.type, torch.bfloat16):
            actual = gradient(op, inputs)
        assert_same(actual, [out, *(each.to(dtype) for each in expected)])


@each_operator()
def test_a_module_that_calls_it_can_be_copied(op: Operator, any_device: torch.device) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = op.function

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.function(*tensors)

    module = Module()
    inputs = op.inputs(2, any_device, torch.float32)
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
        tensors = [distribute_tensor(t, mesh, [Shard(0)]) for t in op.inputs(2, "cpu", torch.float32)]
        tensors = leaves(op, tensors) if wants_grad else tensors
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: .* is a DTensor.*to_local\(\)"):
            op.function(*tensors)


# ----------------------------------------------------------------------------------- determinism, threads, other people


@each_operator()
def test_inputs_are_not_modified(op: Operator, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(3, device, dtype)
        before = [(tensor.clone(), tensor._version) for tensor in inputs]
        gradient(op, inputs)
        for tensor, (values, version) in zip(inputs, before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor, values)


def results_of(op: Operator, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of a call that wants no gradient, of one that does, and the gradient."""
    return [op.function(*inputs), *gradient(op, inputs)]


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
    actual: list[list[tuple[Tensor, ...]]] = [[] for _ in inputs]

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
    tensors = leaves(op, inputs)
    branches = [op.function(*tensors).sum() for _ in range(2)]
    torch.autograd.backward(branches)
    assert_same([tensor.grad for tensor in differentiable(op, tensors)], [2 * grad for grad in expected[1:]])


# Prints for each number of threads that torch is told, and each operator, how many threads of the process computed.
COUNT_THREADS = """
import os, sys, time, torch
sys.path.insert(0, sys.argv[1])
from operators import OPERATORS, gradient

def computed():
    # The clock of a thread; its number is made as pthread_getcpuclockid does.
    return {task: time.clock_gettime((~int(task) << 3) | 6) for task in os.listdir("/proc/self/task")}

torch.set_num_threads(1)
inputs = {op: op.large_inputs("cpu") for op in OPERATORS}
for op in OPERATORS:
    gradient(op, inputs[op])  # autograd starts a thread for each device at its first backward
for threads in (1, 3):
    torch.set_num_threads(threads)  # the pool grows here, not in the call
    for op in OPERATORS:
        for direction in (lambda: op.function(*inputs[op]), lambda: gradient(op, inputs[op])):
            time.sleep(0.3)  # threads that have just started, or wait for more work, come to rest
            before = computed()
            direction()
            after = computed()
            print(threads, op.name, sum(after[task] - before.get(task, 0) > 50e-6 for task in after))
"""


def test_the_cpu_computes_on_as_many_threads_as_torch_is_told() -> None:
    # In a process of its own, in which nothing ran in parallel before.
    command = [sys.executable, "-c", COUNT_THREADS, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [f"{threads} {op.name} {threads}" for threads in (1, 3) for op in OPERATORS for _ in range(2)]
    assert result.stdout.splitlines() == lines


def mapping_flags(address: int) -> list[str]:
    """The flags of the mapping in which an address lies (VmFlags in proc_pid_smaps(5)); empty where none are said."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and inside:
            return rest
        if "-" in first:
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
    return []


@each_operator()
def test_a_large_result_on_the_cpu_asks_for_huge_pages(op: Operator) -> None:
    # Whether the system then gives them depends on how its memory is cut up, so it is the request that is looked at.
    tensors = leaves(op, op.inputs(2**17, "cpu", torch.bfloat16))
    if not Path("/proc/self/smaps").exists() or not mapping_flags(tensors[0].data_ptr()):
        pytest.skip("the system does not say what is asked of its memory")
    out = op.function(*tensors)
    grads = torch.autograd.grad(out, differentiable(op, tensors), torch.ones_like(out))
    large = [grad for grad in grads if grad.numel() * grad.element_size() >= 2**22]
    assert large
    for grad in large:
        # In the middle: the ends have no whole page.
        assert "hg" in mapping_flags(grad.data_ptr() + grad.numel() * grad.element_size() // 2)
