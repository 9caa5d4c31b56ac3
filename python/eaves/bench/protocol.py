"""How a call is made, the same for every provider: forward and backward under one of two protocols.

`autograd`: a backward is torch.autograd.grad(out, inputs, grad_out, retain_graph=True).
`seed`: it is out.backward(grad_out, retain_graph=True), and nobody ever clears .grad. From the second call on, so in
all that are timed, a call also adds its gradient to the one that is there, which reads two gradients and writes one
more. The limit streams these bytes too, in the same kernel. That is what the published tables (`published.py`)
measured, so only these numbers may be put beside them. A small gradient is still in the cache when it is added: there a
call may beat the limit.

A call that may overwrite its inputs works on copies of them, made by its `prepare` outside of what is timed. It is made
once and not again on the same graph, so there nothing is retained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eaves.bench.benchmark import Forward, Inputs, Mode, Row


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Call:
    """One call as it is timed."""

    run: Callable[[], object]
    """What is timed. What it returns is its output."""

    prepare: Callable[[], None] = field(default=_nothing)
    """To be called before every run, and not timed."""


class Bytes(NamedTuple):
    read: int
    write: int

    @property
    def total(self) -> int:
        return self.read + self.write


@dataclass(frozen=True)
class Protocol:
    name: Literal["autograd", "seed"]

    def make_call(self, mode: Mode, forward: Forward, inputs: Inputs, in_place: bool = False) -> Call:
        """The call of that mode on these inputs. The forward that a backward needs runs here, once."""
        if in_place:
            return self._call_in_place(mode, forward, inputs)
        if mode == "fwd":
            return Call(lambda: forward(*inputs.arguments))
        if mode == "bwd":
            out = forward(*inputs.arguments)
            # A peer may round its out where eaves does not; autograd would convert grad_out to that type in every call.
            grad_out = inputs.grad_out.to(out.dtype)
            return Call(lambda: self._backward(out, inputs, grad_out))
        return Call(lambda: self._backward(forward(*inputs.arguments), inputs, inputs.grad_out))

    def moved(self, row: Row) -> Bytes:
        """What any implementation has to move in a call: the row's bytes and, here, those of the accumulation."""
        accumulated = row.gradient_bytes if self.name == "seed" else 0
        return Bytes(row.read_bytes + 2 * accumulated, row.write_bytes + accumulated)

    def least_peak_bytes(self, row: Row) -> int:
        """Inputs and outputs of a call and, where gradients accumulate, the gradient that is already there. In place,
        the gradient needs no memory of its own."""
        accumulated = row.gradient_bytes if self.name == "seed" else 0
        overwritten = row.gradient_bytes if row.in_place else 0
        return row.read_bytes + row.write_bytes + accumulated - overwritten

    def _call_in_place(self, mode: Mode, forward: Forward, inputs: Inputs) -> Call:
        if mode != "fwd+bwd":
            raise ValueError(f"in place: the mode is {mode}, expected fwd+bwd")
        prepared: list[Inputs] = []
        grad_outs: dict[torch.dtype, Tensor] = {}  # as above: converted in the first call and in no other

        def prepare() -> None:
            prepared.clear()  # so that what was not used is gone before its successor is made
            prepared.append(inputs.remade())

        def run() -> object:
            own = prepared.pop()
            out = forward(*own.arguments)
            if out.dtype not in grad_outs:
                grad_outs[out.dtype] = inputs.grad_out.to(out.dtype)
            # The copies are returned, so that giving back their memory is not timed either.
            return own, self._backward(out, own, grad_outs[out.dtype], retain_graph=False)

        return Call(run, prepare)

    def _backward(self, out: Tensor, inputs: Inputs, grad_out: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        if self.name == "autograd":
            return torch.autograd.grad(out, inputs.differentiable, grad_out, retain_graph=retain_graph)
        torch.autograd.backward(out, grad_out, retain_graph=retain_graph)  # what out.backward() calls
        return ()
