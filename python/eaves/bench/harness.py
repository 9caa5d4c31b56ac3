"""The measurement of a row: compares what the providers compute, takes their memory one by one, times them in turns.

It knows no operator and prints nothing. A provider that fails, wherever, gets the reason in its column, and the others
go on.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from eaves.bench import memory, verify
from eaves.bench.benchmark import Forward, Inputs, Mode, Provider, Row, normal, reason
from eaves.bench.device import free_memory_bytes, last_cache_bytes, stream_bytes, synchronize
from eaves.bench.protocol import Bytes, Call, Protocol
from eaves.bench.timing import Column, Timer

LIMIT = "limit"
"""The contestant that streams the bytes of the row and computes nothing, or makes its products and nothing else."""


@dataclass(frozen=True)
class HarnessOptions:
    device: torch.device
    protocol: Protocol
    repetitions: int = 30
    """Of each row; slow rows get fewer."""

    warm_up_ms: float = 500.0
    """For each table: how long clocks get to settle."""

    max_bytes: int = 0
    """Rows that read and write more than this are left out; 0: none."""


@dataclass(frozen=True)
class Measurement:
    """Of one row."""

    columns: dict[str, Column]
    """By the providers' names, and `limit`."""

    skipped: str = ""
    """Why the whole row was left out."""

    limit_work: int = 0
    """What `limit` does in a call: bytes or, of products, operations."""


@dataclass(frozen=True)
class _Set:
    """What one repetition works on."""

    inputs: Inputs
    limit_source: Tensor
    limit_destination: Tensor


class Harness:
    def __init__(self, options: HarnessOptions) -> None:
        self._options = options
        self._device = options.device
        self._protocol = options.protocol
        self._timer = Timer(options.device)

    def warm_up(self) -> None:
        """Once for each table."""
        self._timer.warm_up(self._options.warm_up_ms)

    def measure(self, mode: Mode, row: Row, providers: Sequence[Provider], reference: Provider) -> Measurement:
        """One row. Every provider's results are compared with those of the reference first."""
        gc.collect()  # gives back what earlier rows left in cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        columns = {provider.name: Column() for provider in providers} | {LIMIT: Column()}
        skipped = self._why_left_out(row)
        if not skipped:
            try:
                inputs = row.make_inputs(self._device, 2)
                forwards = self._verified(mode, row, providers, reference, inputs, columns)
                self._measure_memory(mode, row, forwards, inputs, columns)
                self._measure_time(mode, row, forwards, inputs, columns)
                return Measurement(columns, limit_work=row.flops or self._protocol.moved(row).total)
            except (RuntimeError, MemoryError) as error:  # most likely, the benchmark's own buffers found no room
                skipped = reason(error)
        return Measurement({name: Column(skipped) for name in columns}, skipped)

    def _why_left_out(self, row: Row) -> str:
        moved = self._protocol.moved(row).total
        if 0 < self._options.max_bytes < moved:
            return f"left out: moves {moved} bytes, more than the {self._options.max_bytes} of --max-bytes"
        # Inputs, outputs and as much again between them, and the limit's buffers. A provider that needs more says so by
        # itself on a GPU; on a CPU the system would kill the program.
        needed = 2 * (row.read_bytes + row.write_bytes) + moved
        free = free_memory_bytes(self._device)
        if needed > free:
            return f"does not fit in memory: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        return ""

    def _verified(
        self,
        mode: Mode,
        row: Row,
        providers: Sequence[Provider],
        reference: Provider,
        inputs: Inputs,
        columns: dict[str, Column],
    ) -> dict[str, Forward]:
        """The forwards that work and agree with the reference; the columns of the others say what is wrong."""
        forwards = {}
        expected = None
        for provider in dict.fromkeys([reference, *providers]):
            column = columns.get(provider.name, Column())  # the reference may be none of those that are measured
            lacking = provider.lacks(row)
            if lacking:
                column.skipped = f"not supported: {lacking}"
                continue
            try:
                forward = provider.forward(row)
                actual = verify.results(provider.name, mode, forward, inputs, row.in_place)
                expected = expected or actual
                column.skipped = verify.difference(actual, expected, row.tolerance)
            except Exception as error:  # somebody else's code: whatever it raises, the others go on
                column.skipped = reason(error)
                continue
            if provider in providers and not column.skipped:
                forwards[provider.name] = forward
        return forwards

    def _measure_memory(
        self, mode: Mode, row: Row, forwards: dict[str, Forward], inputs: Inputs, columns: dict[str, Column]
    ) -> None:
        columns[LIMIT].peak_bytes = self._protocol.least_peak_bytes(row)
        for name, forward in list(forwards.items()):
            try:
                columns[name].peak_bytes = memory.peak_bytes(
                    mode,
                    partial(self._protocol.make_call, mode, forward, inputs, row.in_place),
                    inputs,
                    row.in_place,
                )
            except Exception as error:  # as above
                columns[name].skipped = reason(error)
                del forwards[name]
            inputs.clear_gradients()

    def _measure_time(
        self, mode: Mode, row: Row, forwards: dict[str, Forward], inputs: Inputs, columns: dict[str, Column]
    ) -> None:
        sets = self._make_sets(row, inputs)
        calls: dict[str, Sequence[Call]] = {}
        for name, forward in forwards.items():
            try:
                calls[name] = [self._protocol.make_call(mode, forward, each.inputs, row.in_place) for each in sets]
            except Exception as error:  # as above
                columns[name].skipped = reason(error)
        calls[LIMIT] = [self._limit_call(row, each) for each in sets]
        synchronize(self._device)
        for name, timed in self._timer.time(calls, self._options.repetitions).items():
            columns[name] = replace(timed, peak_bytes=columns[name].peak_bytes)

    def _make_sets(self, row: Row, inputs: Inputs) -> list[_Set]:
        """Where one set would fit in the cache there are several, taken in turn: then even a flush that missed some
        lines leaves nothing of use."""
        moved = self._protocol.moved(row) if row.make_limit is None else Bytes(0, 0)
        cache_bytes = last_cache_bytes(self._device)
        set_bytes = max(1, inputs.nbytes + moved.total)
        count = 1
        if set_bytes < 2 * cache_bytes:
            affordable = free_memory_bytes(self._device) // 2 // set_bytes
            count = min(max(2, min(4, 2 * cache_bytes // set_bytes)), 1 + affordable)
        sets = []
        for index in range(count):
            source = normal([(moved.read + 1) // 2], torch.bfloat16, self._device, seed=100 + index)
            destination = torch.empty(moved.write, dtype=torch.uint8, device=self._device)
            own_inputs = inputs if index == 0 else row.make_inputs(self._device, 2 + 2 * index)
            sets.append(_Set(own_inputs, source, destination))
        return sets

    def _limit_call(self, row: Row, each: _Set) -> Call:
        if row.make_limit is not None:
            return Call(row.make_limit(each.inputs))
        moved = self._protocol.moved(row)
        return Call(lambda: stream_bytes(each.limit_source, each.limit_destination, moved.read, moved.write))
