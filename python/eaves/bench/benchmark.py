"""What an operator declares so that the harness can measure it: tables, rows, inputs, bytes, and who implements it; and
the two kinds of error, a wrong argument, which ends the program, and what somebody's code raised, which fills a cell.

No timing code is here or in any operator, and no operator is named in the harness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Mode = Literal["fwd", "bwd", "fwd+bwd"]

Forward = Callable[..., Tensor]
"""Called with `Inputs.arguments`; autograd gives the backward."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
"""By the names that titles, options and result files use."""


@dataclass(frozen=True)
class Inputs:
    """One set of what a call works on; every provider gets the same tensors."""

    arguments: tuple[Tensor, ...]
    """Of the forward, in order: integers too, targets for one. Those that require a gradient are what the backward
    differentiates."""

    grad_out: Tensor
    """dL/d(out)."""

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return tuple(argument for argument in self.arguments if argument.requires_grad)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.arguments, self.grad_out))

    def remade(self) -> Inputs:
        """The same values, those that require a gradient in tensors of their own, which a call may overwrite. They are
        no leaves, as the logits of a model are none: autograd lets nobody write to a leaf. A gradient in .grad still
        ends in the original."""
        copied = tuple(each.clone() if each.requires_grad else each for each in self.arguments)
        return replace(self, arguments=copied)

    def clear_gradients(self) -> None:
        for argument in self.differentiable:
            argument.grad = None


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    axis_value: int
    """What stands in the table's first column: n, v."""

    shape: Mapping[str, int]
    """The keys of "shape" in the result file, in order: batch, dim, n."""

    options: Mapping[str, Any]
    """The arguments that differ from the table's usual ones, as values of JSON: {"axes": [0]}."""

    read_bytes: int
    write_bytes: int
    """What any implementation has to read and write in this mode: what the column `limit` streams."""

    gradient_bytes: int
    """All gradients that a backward returns; 0 in a forward. What the protocol `seed` accumulates."""

    make_inputs: Callable[[torch.device, int], Inputs]
    """The inputs on a device; the number seeds them."""

    flops: int = 0
    """Of the products of an operator that the time of memory is no limit of; else 0."""

    make_limit: Callable[[Inputs], Callable[[], object]] | None = None
    """What the column `limit` measures of such an operator, instead of streaming bytes."""

    tolerance: float | None = None
    """How far a peer may be off from eaves, of the largest value, where its own rounding makes that more than usual."""

    is_backward_alone: bool = False
    """The forward is not in the time, so that who computes gradients there has nothing to be measured."""

    in_place: bool = False
    """With fwd+bwd: who can do so may write the gradients over the arguments. Every call, of everybody, gets arguments
    that were made anew for it (`Inputs.remade`) before its time begins."""


@dataclass(frozen=True)
class Table:
    """Rows of one mode along one axis: a table for each of speed, memory and host."""

    op: str
    mode: Mode
    title_suffix: str
    """What follows "<op>-speed-<mode>-" in the title: "batch4-dim1024-bf16"."""

    axis_name: str
    dtype: str
    rows: Sequence[Row]

    axis_words: str = ""
    """What the axis is, for a plot: "length of a row"."""

    shape_words: str = ""
    """What a plot says behind the shape: "reduced over n"."""

    title_op: str = ""
    """What stands for the operator in the title, where the published tables have another name than `op`
    (`published.py`)."""

    @property
    def is_curve(self) -> bool:
        """The rows differ along the axis alone, and not in another length or in an option."""

        def beside_the_axis(row: Row) -> tuple[dict[str, int], dict[str, Any]]:
            return {key: size for key, size in row.shape.items() if key != self.axis_name}, dict(row.options)

        return all(beside_the_axis(row) == beside_the_axis(self.rows[0]) for row in self.rows)


@dataclass(frozen=True)
class Request:
    """What the command line asks an operator for."""

    sweep: Literal["quick", "seed"]
    device: torch.device
    dtype: str
    has_dtype: bool
    """The user named the dtype: tables of other dtypes are left out."""


class Provider(ABC):
    """One implementation of an operator. Its name is the head of its columns."""

    name: ClassVar[str]

    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions the result file shall name."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Where it runs. Elsewhere the provider is missing."""

    def load(self) -> None:
        """Imports what the provider needs. What this raises says why the provider is missing."""

    def lacks(self, row: Row) -> str:
        """What the row asks for that the provider does not have, in a few words; nothing where it has all. A provider
        that lacks something in every row of a table has no column there."""
        return ""

    @abstractmethod
    def forward(self, row: Row) -> Forward:
        """The operator with the row's options. Asked for once for each row and mode."""


@dataclass(frozen=True)
class Operator:
    """What an operator's file defines."""

    name: str

    providers: Sequence[Provider]
    """In the order of the columns; the first is eaves, with whose results all others are compared."""

    tables: Callable[[Request], list[Table]]


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


def reason(error: Exception) -> str:
    """Why there is no number, in one line."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "does not fit in memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "DefaultCPUAllocator" in text:  # which raises a plain RuntimeError
        return "does not fit in memory"
    if isinstance(error, NotImplementedError):
        text = f"not supported: {text}"
    longest = 200
    return text if len(text) <= longest else text[: longest - 3] + "..."
