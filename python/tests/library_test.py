"""The duties of every operator of the library, independent of its function: torch's contracts (fake tensors,
torch.compile, autograd), determinism, threads, and no side effects. The extension and torch.export are in
library_extension_test.py, torch.func and torch.vmap in transforms_test.py, GPU matters in cuda_test.py.
"""

import copy
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import eaves
from comparison import assert_agree
from layouts import LAYOUTS
from operators import (
    OPERATORS,
    Caller,
    Operator,
    Stop,
    assert_same,
    differentiable,
    each_operator,
    gradient,
    gradients_of,
    leaves,
    lying,
    of_differentiable,
)
from watch import watched

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
    # The function passes them to the record of the call by position.
    function = getattr(eaves, name)
    calls: list[Any] = []
    monkeypatch.setattr(sys.modules[function.__module__], run, calls.append)
    parameters = inspect.signature(function).parameters.values()
    given = {each.name: object() for each in parameters if each.kind is not each.VAR_KEYWORD}
    function(**given)
    found = calls[0]._asdict()
    of_core = {
        "input": "hidden" if "hidden" in found else "logits", "linear_weight": "head", "linear_bias": "bias",
        "target": "targets", "weight": "class_weight",
    }  # fmt: skip
    assert {name: found[name if name in found else of_core[name]] for name in given} == given


def scaled(op: Operator, factor: float, inputs: Sequence[Tensor]) -> list[Tensor]:
    return lying(op, lambda tensor: factor * tensor, inputs)


# ------------------------------------------------------------------------------------------------ torch's own contracts


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
    # A backward that writes over the forward's tensors must not scale them twice.
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, op.inputs(3, device, dtype))
        out = op.function(*tensors)
        first = torch.autograd.grad(out.sum(), differentiable(op, tensors), retain_graph=True)
        second = torch.autograd.grad(out.sum(), differentiable(op, tensors))
        assert_same(first, second)


@each_operator()
def test_a_tensor_that_was_changed_before_the_backward_is_noticed(op: Operator, device: torch.device) -> None:
    tensors = leaves(op, op.inputs(3, device, torch.float16))  # the only dtype in which linear_cross_entropy keeps it
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


@each_operator()
def test_a_backward_is_one_operator_that_no_tensor_is_filled_for(op: Operator, any_device: torch.device) -> None:
    # By default autograd gives a Function zeros for each unused result.
    for dtype in (torch.float32, torch.bfloat16):
        tensors = leaves(op, op.inputs(3, any_device, dtype))
        out = op.function(*tensors)
        upstream = torch.ones_like(out)
        with watched("") as calls:
            torch.autograd.grad(out, differentiable(op, tensors), upstream)
        called = [name for name, *_ in calls if name != "aten.detach.default"]  # a new view, of no bytes
        assert len(called) == 1 and called[0].startswith(f"eaves.{op.name}"), called


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


# -------------------------------------------------------------------------------------------------- the rest of PyTorch


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
    module, inputs = Caller(op.function), op.inputs(2, any_device, torch.float32)
    assert_same([copy.deepcopy(module)(*inputs)], [module(*inputs)])


@each_operator()
def test_a_distributed_tensor_is_refused_with_what_to_do(op: Operator, process_group: None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    for wants_grad in (False, True):
        tensors = [distribute_tensor(t, mesh, [Shard(0)]) for t in op.inputs(2, "cpu", torch.float32)]
        tensors = leaves(op, tensors) if wants_grad else tensors
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: .* is a DTensor.*to_local\(\)"):
            op.function(*tensors)


# -------------------------------------------------------------------------------- determinism, threads, other libraries


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
    # In a process of its own, in which nothing has run in parallel before.
    command = [sys.executable, "-c", COUNT_THREADS, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [f"{threads} {op.name} {threads}" for threads in (1, 3) for op in OPERATORS for _ in range(2)]
    assert result.stdout.splitlines() == lines


def mapping_flags(address: int) -> list[str]:
    """The flags of the mapping that contains an address (VmFlags in proc_pid_smaps(5)); empty if the file has none."""
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
    # The test checks the request, because the system grants it only if its memory is not too fragmented.
    tensors = leaves(op, op.inputs(2**17, "cpu", torch.bfloat16))
    if not Path("/proc/self/smaps").exists() or not mapping_flags(tensors[0].data_ptr()):
        pytest.skip("this system does not report advice about memory")
    out = op.function(*tensors)
    grads = torch.autograd.grad(out, differentiable(op, tensors), torch.ones_like(out))
    large = [grad for grad in grads if grad.numel() * grad.element_size() >= 2**22]
    assert large
    for grad in large:
        # The address in the middle, because the ends have no whole page.
        assert "hg" in mapping_flags(grad.data_ptr() + grad.numel() * grad.element_size() // 2)
