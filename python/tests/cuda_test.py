"""The duties of every operator of the library on a GPU: torch's stream and allocator, no waiting, CUDA graphs, and
several GPUs in one process.
"""

import pytest
import torch
from torch import Tensor

from conftest import require_gpus
from operators import Operator, assert_same, differentiable, each_operator, gradient, leaves

# About a quarter of a second on a GPU of 1 to 2 GHz: far longer than a launch, and than a call takes on the host.
LONG_CYCLES = 400_000_000


@each_operator()
@pytest.mark.parametrize("large", [False, True])  # large: a second kernel and a workspace
def test_work_is_queued_on_the_current_stream(op: Operator, large: bool, cuda: torch.device) -> None:
    sources = op.large_inputs(cuda) if large else op.inputs(8, cuda, torch.float32)
    expected = gradient(op, sources)
    inputs = [torch.zeros_like(source) for source in sources]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradient(op, inputs)  # the allocator has blocks for this stream now
        # A reader that does not wait for this stream sees the zeros.
        torch.cuda._sleep(LONG_CYCLES)
        for tensor, source in zip(inputs, sources, strict=True):
            tensor.copy_(source)
        actual = gradient(op, inputs)
        assert not stream.query(), "the stream ran dry before the call returned, so this test showed nothing"
    stream.synchronize()
    assert_same(actual, expected)


@each_operator()
def test_a_backward_called_on_another_stream_runs_behind_its_forward(op: Operator, cuda: torch.device) -> None:
    sources = op.inputs(8, cuda, torch.float32)
    out, *expected = gradient(op, sources)
    upstream = torch.ones_like(out)
    tensors = leaves(op, sources)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        out = op.function(*tensors)
    # Autograd runs a backward on its forward's stream, and makes the caller's stream wait for it. The tensors that the
    # forward keeps are not computed yet.
    assert_same(torch.autograd.grad(out, differentiable(op, tensors), upstream), expected)


@each_operator()
@pytest.mark.parametrize("large", [False, True])
def test_nothing_waits_for_the_device(op: Operator, large: bool, cuda: torch.device) -> None:
    inputs = op.large_inputs(cuda) if large else op.inputs(8, cuda, torch.float32)
    upstream = torch.ones_like(gradient(op, inputs)[0])  # also loads the kernels, and fills the allocator's cache
    gradient(op, inputs, upstream)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradient(op, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done.record()
    assert not done.query(), "the host came back after the device was done"
    torch.cuda.synchronize()


def capture(
    op: Operator, inputs: list[Tensor], upstream: Tensor
) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]:
    """A graph of forward and backward that reads `inputs`, the result and the gradients that it writes."""
    wanted = [tensor.requires_grad_() for tensor in differentiable(op, inputs)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch asks for a call outside of the graph first
        torch.autograd.grad(op.function(*inputs), wanted, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.function(*inputs)
        grads = torch.autograd.grad(out, wanted, upstream)
    return graph, out.detach(), grads


@each_operator()
@pytest.mark.parametrize("large", [False, True])
def test_a_graph_replays_forward_and_backward_on_new_data(op: Operator, large: bool, cuda: torch.device) -> None:
    sources = op.large_inputs(cuda) if large else op.inputs(8, cuda, torch.bfloat16)
    inputs = [torch.zeros_like(source) for source in sources]
    upstream = torch.ones_like(op.function(*sources))
    graph, out, grads = capture(op, inputs, upstream)
    for factor in (1, 2):
        data = [factor * s if index in op.differentiable else s for index, s in enumerate(sources)]
        with torch.no_grad():
            for tensor, values in zip(inputs, data, strict=True):
                tensor.copy_(values)
        graph.replay()
        assert_same([out, *grads], gradient(op, data, upstream))


@each_operator()
def test_memory_comes_from_torch_and_goes_back(op: Operator, cuda: torch.device) -> None:
    inputs = op.large_inputs(cuda)
    op.function(*inputs)
    torch.cuda.synchronize()
    held_before = torch.cuda.memory_allocated()
    blocks_before = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = op.function(*inputs)
    # The result, and the workspace if the operator has one.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - blocks_before >= 1 + op.has_workspace
    assert torch.cuda.memory_allocated() - held_before < out.numel() * out.element_size() + 512
    del out
    assert torch.cuda.memory_allocated() == held_before

    # The device does not have less memory either, unless another process took some meanwhile.
    def taken() -> int:
        torch.cuda.synchronize()
        free_before, _ = torch.cuda.mem_get_info()
        op.function(*inputs)
        torch.cuda.synchronize()
        return free_before - torch.cuda.mem_get_info()[0]

    assert 0 in (taken() for _ in range(100))


@each_operator()
def test_a_call_on_another_gpu_leaves_the_current_one_current(op: Operator) -> None:
    require_gpus(2)
    sources = op.inputs(8, "cuda:0", torch.float32)
    expected = gradient(op, sources)
    inputs = [source.to("cuda:1") for source in sources]
    assert torch.cuda.current_device() == 0
    actual = gradient(op, inputs)
    assert torch.cuda.current_device() == 0
    assert all(tensor.device == torch.device("cuda:1") for tensor in actual)
    assert_same([tensor.to("cuda:0") for tensor in actual], expected)


@each_operator()
def test_each_gpu_has_its_own_current_stream(op: Operator) -> None:
    require_gpus(2)
    sources = op.inputs(8, "cuda:1", torch.float32)
    expected = gradient(op, sources)
    inputs = [torch.zeros_like(source) for source in sources]
    torch.cuda.synchronize("cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        for tensor, source in zip(inputs, sources, strict=True):
            tensor.copy_(source)
        with torch.cuda.device(0):  # the current stream of cuda:1 is still the one above
            actual = gradient(op, inputs)
    stream.synchronize()
    assert_same(actual, expected)
