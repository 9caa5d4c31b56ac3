"""One timed call, the same for every provider: forward and backward under one of two protocols.

`autograd`: a backward is torch.autograd.grad(out, inputs, grad_out). After a forward of its own it frees the graph, as
in a training step; if it is timed alone, it keeps the graph (retain_graph=True).
`accumulate`: a backward is out.backward(grad_out, retain_graph=True), and .grad is never cleared. Each timed call
therefore also reads two gradients and writes one, and so does the limit. The published measurements used this protocol,
so only its numbers are comparable. A small gradient is still in the cache then: a call may beat the limit.

A call that may overwrite its inputs works on copies, which its `prepare` makes before the time begins. It runs once on
each graph, so it retains no graph.

A row in a CUDA graph captures this call, of every provider, and times the replay. Compiled functions are captured like
others: their own graphs (mode "reduce-overhead") would copy the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import verify
from .benchmark import Forward, Inputs, Row

PROTOCOLS = ("autograd", "accumulate")


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Call:
    run: Callable[[], object]
    """The timed function. It returns its output."""

    prepare: Callable[[], None] = nothing
    """To be called before every run, and not timed."""


class Bytes(NamedTuple):
    read: int
    write: int


def moved(protocol: str, row: Row) -> Bytes:
    """The bytes that any implementation has to move in a call: the row's, and with `accumulate` the addition's."""
    accumulated = row.gradient_bytes if protocol == "accumulate" else 0
    return Bytes(row.read_bytes + 2 * accumulated, row.write_bytes + accumulated)


def least_peak_bytes(protocol: str, row: Row) -> int:
    """The bytes of a call's inputs and outputs, and with `accumulate` of the gradient that exists already. In place,
    the gradient needs no memory of its own."""
    accumulated = row.gradient_bytes if protocol == "accumulate" else 0
    return row.read_bytes + row.write_bytes + accumulated - (row.gradient_bytes if row.in_place else 0)


def retains_graph(protocol: str, row: Row) -> bool:
    return not row.in_place and (row.mode == "bwd" or protocol == "accumulate")


def make_call(protocol: str, row: Row, forward: Forward, inputs: Inputs) -> Call:
    """The call of the row's mode on these inputs. The forward that a backward needs runs here, once."""
    if row.in_graph:
        return captured(inputs, lambda: make_call(protocol, row.eager(), forward, inputs))
    grad_outs: dict[torch.dtype, Tensor] = {}
    retain_graph = retains_graph(protocol, row)

    def backward(out: Tensor, inputs: Inputs) -> object:
        # A peer may round its out although eaves does not. grad_out is converted once, not by autograd in every call.
        if out.dtype not in grad_outs:
            grad_outs[out.dtype] = inputs.grad_out.to(out.dtype)
        grad_out = grad_outs[out.dtype]
        if protocol == "autograd":
            return torch.autograd.grad(out, inputs.differentiable, grad_out, retain_graph=retain_graph)
        torch.autograd.backward(out, grad_out, retain_graph=retain_graph)  # the function that out.backward() calls
        return ()

    if row.in_place:
        prepared: list[Inputs] = []

        def prepare() -> None:
            prepared.clear()  # an unused copy is gone before its successor is made
            prepared.append(inputs.remade())

        def run() -> object:
            own = prepared.pop()
            # Returning the copies keeps the release of their memory out of the time.
            return own, backward(forward(*own.arguments), own)

        return Call(run, prepare)
    if row.mode == "fwd":
        return Call(lambda: forward(*inputs.arguments))
    if row.mode == "bwd":
        out = forward(*inputs.arguments)
        return Call(lambda: backward(out, inputs))
    return Call(lambda: backward(forward(*inputs.arguments), inputs))


def captured(inputs: Inputs, make: Callable[[], Call]) -> Call:
    """A call captured in a CUDA graph. Inputs that the call overwrites get their values again before each replay."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a backward runs on the stream of its forward
        call = make()
        for _ in range(3):
            call.prepare()
            call.run()
        call.prepare()
        # A call that waits for the device fails here. A failed capture would disturb the calls after it.
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = {name: each.clone() for name, each in _tensors(call.run()).items()}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        call.prepare()
    with torch.cuda.graph(graph, stream=stream):
        output: Any = call.run()
    is_in_place = isinstance(output, tuple) and any(isinstance(each, Inputs) for each in output)
    copies = output[0].arguments if is_in_place else inputs.arguments

    def prepare() -> None:
        for copy, original in zip(copies, inputs.arguments):
            if copy is not original:
                copy.detach().copy_(original.detach())

    def run() -> object:
        graph.replay()
        return call, output  # the graph uses their memory

    prepare()
    run()
    # The plain kernel of a limit returns nothing.
    if expected and verify.difference(_tensors(output), expected):
        raise RuntimeError("the replay of the CUDA graph has another result than the call")
    return Call(run, prepare)


def _tensors(output: object) -> verify.Results:
    """The tensors of a call's output, without the inputs."""
    if isinstance(output, Tensor):
        return {"": output.detach()}
    parts = output if isinstance(output, tuple | list) and not isinstance(output, Inputs) else ()
    return {f"{place}.{name}": each for place, part in enumerate(parts) for name, each in _tensors(part).items()}
