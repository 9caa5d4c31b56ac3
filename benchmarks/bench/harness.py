"""The measurement of a row: compares the providers' results, measures their memory one by one, times them in turns.

It knows no operator and prints nothing. If a provider fails anywhere, its cell gets the reason, and the others go on.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import memory, verify
from .benchmark import Forward, Inputs, Provider, Row, normal, reason
from .calls import Bytes, Call, captured, least_peak_bytes, make_call, moved, retains_graph
from .device import free_memory_bytes, last_cache_bytes, stream_bytes, synchronize
from .timing import Cell, ColdTimer

LIMIT = "limit"
"""The contestant that streams the bytes of the row and computes nothing, or makes its products and nothing else."""

Entry = dict[str, Any]
"""A line of the result file: one row, one provider."""

CASE = ("op", "mode", "dtype", "shape", "options")
"""The keys that say which row."""


class Harness:
    """Times `repetitions` of each row, fewer of slow rows."""

    def __init__(self, device: torch.device, protocol: str, repetitions: int = 30) -> None:
        self.device, self.protocol, self.repetitions = device, protocol, repetitions
        self.timer = ColdTimer(device)

    def measure(self, row: Row, providers: Sequence[Provider], reference: Provider) -> list[Entry]:
        """The entries of one row. Every provider's results are first compared with the reference's."""
        gc.collect()  # gives back memory that earlier rows left in cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        cells: dict[str, Cell] = {name: {} for name in [*(provider.name for provider in providers), LIMIT]}
        skipped = self._why_left_out(row)
        if not skipped:
            try:
                self._measure(row, providers, reference, cells)
            except (RuntimeError, MemoryError) as error:  # most likely, the benchmark's own buffers did not fit
                skipped = reason(error)
        if skipped:
            cells = {name: {"skipped": skipped} for name in cells}
        return [row.case | {"provider": name} | self._entry(row, cell) for name, cell in cells.items()]

    def _entry(self, row: Row, cell: Cell) -> Entry:
        if "ms" not in cell:
            return {"ms": None, "skipped": cell["skipped"]}
        done = row.flops or sum(moved(self.protocol, row))
        rate = {"tflops": done / (cell["ms"] * 1e9)} if row.flops else {"gbps": done / (cell["ms"] * 1e6)}
        keys = ("ms", "ms_min", "ms_max", "host_ms", "peak_mib", "gbps", "tflops", "repetitions")
        return {key: (cell | rate)[key] for key in keys if key in cell | rate}

    def _why_left_out(self, row: Row) -> str:
        # Inputs, outputs, as much again for intermediate results, and the limit's buffers. A provider that needs more
        # fails by itself on a GPU; on a CPU the system would kill the program.
        needed = 2 * (row.read_bytes + row.write_bytes) + sum(moved(self.protocol, row))
        free = free_memory_bytes(self.device)
        if needed > free:
            return f"does not fit in memory: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        return ""

    def _measure(self, row: Row, providers: Sequence[Provider], reference: Provider, cells: dict[str, Cell]) -> None:
        # A compiled backward may overwrite the tensors that the forward saved, unless the graph is retained. It is
        # compiled in the very first call, which compares the results. Inductor's cache tells the two backwards apart by
        # the tag alone: without it a step would get the code of an earlier backward of the same shape.
        torch._functorch.config.donated_buffer = not retains_graph(self.protocol, row)
        torch.compiler.config.cache_key_tag = f"donated {torch._functorch.config.donated_buffer}"
        inputs = row.make_inputs(self.device, 2)
        forwards = self._verified(row, providers, reference, inputs, cells)
        # The graph of a call holds its memory, so a replay allocates nothing: the row without a graph has the peak.
        for name, forward in [] if row.in_graph else list(forwards.items()):
            try:
                call = partial(make_call, self.protocol, row, forward, inputs)
                cells[name]["peak_mib"] = memory.peak_bytes(row, call, inputs) / 2**20
            except Exception as error:  # a provider may raise anything; the others go on
                cells[name] = {"skipped": reason(error)}
                del forwards[name]
            for argument in inputs.differentiable:
                argument.grad = None
        if not row.in_graph:
            cells[LIMIT]["peak_mib"] = least_peak_bytes(self.protocol, row) / 2**20
        sets = self._make_sets(row, inputs)
        calls: dict[str, Sequence[Call]] = {}
        for name, forward in forwards.items():
            try:
                calls[name] = [make_call(self.protocol, row, forward, own) for own, *_ in sets]
            except Exception as error:  # as above
                cells[name] = {"skipped": reason(error)}
        calls[LIMIT] = [self._limit_call(row, *each) for each in sets]
        synchronize(self.device)
        for name, contestant in self.timer.time(calls, self.repetitions).items():
            cells[name] |= contestant.cell()

    def _verified(
        self, row: Row, providers: Sequence[Provider], reference: Provider, inputs: Inputs, cells: dict[str, Cell]
    ) -> dict[str, Forward]:
        """The forwards that work and agree with the reference; the other cells get the reason."""
        forwards, expected = {}, None
        for provider in dict.fromkeys([reference, *providers]):
            skipped = f"not supported: {lacking}" if (lacking := provider.lacks(row)) else ""
            if not skipped:
                try:
                    forward = provider.forward(row)
                    actual = verify.results(row, forward, inputs)
                    expected = expected or actual
                    skipped = verify.difference(actual, expected, row.tolerance)
                except Exception as error:  # as above
                    skipped = reason(error)
            if provider in providers:  # the reference may be no measured provider
                if skipped:
                    cells[provider.name]["skipped"] = skipped
                else:
                    forwards[provider.name] = forward
        return forwards

    def _make_sets(self, row: Row, inputs: Inputs) -> list[tuple[Inputs, Tensor, Tensor]]:
        """The buffers of one repetition: inputs, and the limit's source and destination. If one set would fit in the
        cache, there are several, used in turn, so that even lines that a flush missed are of no use."""
        own = moved(self.protocol, row) if row.make_limit is None else Bytes(0, 0)
        cache_bytes = last_cache_bytes(self.device)
        inputs_bytes = sum(tensor.nbytes for tensor in (*inputs.arguments, inputs.grad_out))
        set_bytes, count = max(1, inputs_bytes + sum(own)), 1
        if set_bytes < 2 * cache_bytes:
            affordable = free_memory_bytes(self.device) // 2 // set_bytes
            count = min(max(2, min(4, 2 * cache_bytes // set_bytes)), 1 + affordable)
        return [
            (
                inputs if index == 0 else row.make_inputs(self.device, 2 + 2 * index),
                normal([(own.read + 1) // 2], torch.bfloat16, self.device, seed=100 + index),
                torch.empty(own.write, dtype=torch.uint8, device=self.device),
            )
            for index in range(count)
        ]

    def _limit_call(self, row: Row, inputs: Inputs, source: Tensor, destination: Tensor) -> Call:
        if row.make_limit is not None:
            call = Call(row.make_limit(inputs))
        else:
            call = Call(lambda: stream_bytes(source, destination, *moved(self.protocol, row)))
        return captured(inputs, lambda: call) if row.in_graph else call
