"""The terms in which an operator declares its measurements: rows, inputs, bytes, and implementations. There are two
kinds of error: a wrong argument ends the program, an error of a provider's code fills a cell.

Neither this file nor any operator has timing code, and the harness names no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import torch
import torch._functorch.config
from torch import Tensor

from eaves._bench import DTYPES as DTYPES
from eaves._bench import reason as reason

Mode = Literal["fwd", "bwd", "fwd+bwd"]

Forward = Callable[..., Tensor]
"""Called with `Inputs.arguments`; autograd gives the backward."""

PROGRAM = "python benchmarks"

_IN_GRAPH = "in_graph"


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call; every provider gets the same ones."""

    arguments: tuple[Tensor, ...]
    """The forward's, in order. The backward differentiates those that require a gradient."""

    grad_out: Tensor
    """dL/d(out)."""

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return tuple(argument for argument in self.arguments if argument.requires_grad)

    def remade(self) -> Inputs:
        """The same values, with copies of the tensors that require a gradient. A call may overwrite the copies. Like
        the logits of a model they are no leaves, because autograd lets no call write to a leaf. A gradient in .grad
        still ends in the original."""
        copied = tuple(each.clone() if each.requires_grad else each for each in self.arguments)
        return replace(self, arguments=copied)


@dataclass(frozen=True)
class Row:
    """One case that is measured."""

    op: str
    mode: Mode
    dtype: str

    shape: Mapping[str, int]
    """As in the result file; the axis of a table is `v` or `n`."""

    read_bytes: int
    write_bytes: int
    """The bytes that any implementation has to read and write in this mode: the column `limit` streams them."""

    gradient_bytes: int
    """All gradients that a backward returns; 0 in a forward. The protocol `accumulate` adds them up."""

    make_inputs: Callable[[torch.device, int], Inputs]
    """The inputs on a device; the number seeds them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that differ from the operator's usual ones, as values of JSON: {"axes": [0]}."""

    flops: int = 0
    """The operations of an operator that is limited by its products; else 0."""

    make_limit: Callable[[Inputs], Callable[[], object]] | None = None
    """The products that the column `limit` measures for such an operator, instead of streaming bytes."""

    tolerance: float | None = None
    """How far a peer may be off from eaves, of the largest value, where its own rounding makes that more than usual."""

    @property
    def in_place(self) -> bool:
        """True if a call with fwd+bwd may write the gradients over the arguments. Every call, of every provider, then
        gets new arguments (`Inputs.remade`) before its time begins."""
        return bool(self.options.get("in_place"))

    @property
    def in_graph(self) -> bool:
        """True if the call is captured in a CUDA graph, whose replay is timed."""
        return bool(self.options.get(_IN_GRAPH))

    def captured(self) -> Row:
        """The same row in a CUDA graph."""
        return replace(self, options={**self.options, _IN_GRAPH: True})

    def eager(self) -> Row:
        """The same row without a CUDA graph. An operator declares no other row, and sees no other."""
        return replace(self, options={key: value for key, value in self.options.items() if key != _IN_GRAPH})

    @property
    def case(self) -> dict[str, Any]:
        """The first keys of the row in the result file."""
        head = {"op": self.op, "mode": self.mode, "dtype": self.dtype}
        return head | {"shape": dict(self.shape), "options": dict(self.options)}


@dataclass(frozen=True)
class Request:
    """The rows that the command line asks an operator for."""

    sweep: Literal["quick", "published"]
    device_type: str
    dtype: str
    has_dtype: bool
    """The user named the dtype: rows of other dtypes are left out."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an operator."""

    name: str

    source: str
    """The module, or "module:name". An error of its import says why the provider is missing."""

    make: Callable[[Any, Row], Forward]
    """The operator with the row's options, from the thing that `source` names. Called once for each row."""

    packages: tuple[str, ...] = ()
    """Distributions whose versions the result file shall name."""

    needs_gpu: bool = False

    lacks: Callable[[Row], str] = lambda row: ""
    """The option of the row that the provider does not have, in a few words; nothing if it has all. A provider that
    lacks something in every row of a table has no column there."""

    note: str = ""
    """A sentence for the page, below the operator's first table."""

    def load(self) -> Any:
        module, _, name = self.source.partition(":")
        return getattr(import_module(module), name) if name else import_module(module)

    def forward(self, row: Row) -> Forward:
        return self.make(self.load(), row.eager())


def peer(name: str, source: str, make: Any, packages: str, lacks: Callable[[Row], str], note: str = "") -> Provider:
    """Another library's implementation, on a GPU. `packages` are names separated by spaces."""
    return Provider(name, source, make, tuple(packages.split()), needs_gpu=True, lacks=lacks, note=note)


def compiled(eager: Provider, name: str = "torch.compile", **options: Any) -> Provider:
    """torch.compile of another provider's function, compiled anew for each row."""

    def make(function: Any, row: Row) -> Forward:
        # Without a reset earlier rows count towards dynamo's limit of recompilations, past which it silently runs the
        # eager code. Every call would also compare its arguments with all of them.
        torch.compiler.reset()
        return torch.compile(eager.make(function, row), fullgraph=True, dynamic=False, **options)

    return replace(eager, name=name, make=make)


@dataclass(frozen=True)
class Operator:
    """The definition in an operator's file."""

    name: str

    providers: Sequence[Provider]
    """In the order of the columns; the first is eaves, with whose results all others are compared."""

    rows: Callable[[Request], list[Row]]

    shapes: Sequence[str]
    """The keys that --shape may have: "rows,dim,v"."""

    row_of_shape: Callable[[Mapping[str, Any], str], Row]
    """Forward and backward together of such a shape, in a dtype."""


def normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Normal random numbers (mean 0, deviation 1), never zeros; `seed` fixes them."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), dtype=dtype, device=device, generator=generator)


class InvalidArgument(ValueError):
    """An option of the command line is wrong; the message is one sentence that names it."""


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a name that is not known; `what` begins the sentence."""
    known = list(known)
    for name in names:
        if name not in known:
            raise InvalidArgument(f'{what} "{name}", expected one of: {", ".join(known)}')
