"""How a call is made, the same for every provider: forward and backward under one of two protocols.

`autograd`: a backward is torch.autograd.grad(out, inputs, grad_out, retain_graph=True).
`seed`: it is out.backward(grad_out, retain_graph=True), and nobody ever clears .grad. From the second call on, so in
all that are timed, a call also adds its gradient to the one that is there, which reads two gradients and writes one
more. The limit streams these bytes too, in the same kernel. That is what the published tables measured, so only these
numbers may be put beside them. A small gradient is still in the cache when it is added: there a call may beat the
limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eaves.bench.benchmark import Forward, Inputs, Mode, Row

Call = Callable[[], object]
"""One call as it is timed; what it returns is its output."""


class Bytes(NamedTuple):
    read: int
    write: int

    @property
    def total(self) -> int:
        return self.read + self.write


@dataclass(frozen=True)
class Protocol:
    name: Literal["autograd", "seed"]

    def make_call(self, mode: Mode, forward: Forward, inputs: Inputs) -> Call:
        """The call of that mode on these inputs. The forward that a backward needs runs here, once."""
        if mode == "fwd":
            return lambda: forward(*inputs.arguments)
        if mode == "bwd":
            out = forward(*inputs.arguments)
            # A peer may round its out where eaves does not; autograd would convert grad_out to that type in every call.
            grad_out = inputs.grad_out.to(out.dtype)
            return lambda: self._backward(out, inputs, grad_out)
        return lambda: self._backward(forward(*inputs.arguments), inputs, inputs.grad_out)

    def moved(self, row: Row) -> Bytes:
        """What any implementation has to move in a call: the row's bytes and, here, those of the accumulation."""
        accumulated = row.gradient_bytes if self.name == "seed" else 0
        return Bytes(row.read_bytes + 2 * accumulated, row.write_bytes + accumulated)

    def least_peak_bytes(self, row: Row) -> int:
        """Inputs and outputs of a call and, where gradients accumulate, the gradient that is already there."""
        return row.read_bytes + row.write_bytes + (row.gradient_bytes if self.name == "seed" else 0)

    def _backward(self, out: Tensor, inputs: Inputs, grad_out: Tensor) -> tuple[Tensor, ...]:
        if self.name == "autograd":
            return torch.autograd.grad(out, inputs.differentiable, grad_out, retain_graph=True)
        torch.autograd.backward(out, grad_out, retain_graph=True)  # what out.backward() calls
        return ()
