"""The one loop that times calls, for PyTorch, JAX and ranks. It knows neither rows nor operators.

Calls take turns: one repetition calls each contestant once, so all see the same clocks. `Timer` is that loop. The
preparation of a call (a copy of inputs that it overwrites, a barrier of all ranks) comes before its time begins.

`ColdTimer` is the loop for PyTorch's devices, with cold caches (docs/performance.md). On a GPU all repetitions are
enqueued before any is waited for. Reading the buffer lasts longer than the host needs for a call, so the events around
a call measure the device's work, not Python. `host_ms` is Python's time, for calls enqueued back to back.

On a CPU the clock times a call including Python: the cold interpreter costs a call 0.1 to 0.2 ms (AMD EPYC), a warm one
0.02 ms. Outputs are fresh memory. A virtual machine may give large free pages back to its host within two seconds, and
the next call waits for them. So an untimed call precedes each timed call, as in a training loop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .benchmark import normal, reason
from .calls import Call, nothing
from .device import Stopwatch, free_memory_bytes, last_cache_bytes, now_ms, stream_bytes, synchronize

# If all repetitions would take longer than this for each contestant, there are fewer, but at least five.
_SLOW_CONTESTANT_MS = 1000.0
_MINIMUM_REPETITIONS = 5
_WARM_UP_CALLS = 3

# Calls are enqueued back to back, in rounds that are waited for: a GPU takes about a thousand launches before the host
# has to wait, and an operator's eager backward is about ten. If calls keep the GPU busy for long, a round has as many
# as fit in _HOST_MS, at least three. There are at most as many rounds as fit in that time for each contestant.
_HOST_ROUNDS = 5
_MOST_HOST_CALLS = 20
_MINIMUM_HOST_CALLS = 3
_HOST_MS = 100.0

Cell = dict[str, Any]
"""The numbers of a provider in a row, by the keys of the result file; or `skipped`, why it has none."""


class Contestant:
    """The calls of one implementation, one for each set of buffers, and their times."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.skipped = ""
        self.times_ms: list[float] = []
        self.host_ms: list[float] = []
        self._calls = calls

    def prepare(self, index: int) -> None:
        """Runs the preparation of the call on the set whose turn it is."""
        self._try(index, "prepare")

    def run(self, index: int) -> object:
        """Runs that call. An error of either is kept, and ends this contestant."""
        return self._try(index, "run")

    def cell(self) -> Cell:
        if self.skipped:
            return {"skipped": self.skipped}
        host = {"host_ms": statistics.median(self.host_ms)} if self.host_ms else {}
        times = self.times_ms
        spread = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
        return spread | host | {"repetitions": len(times)}

    def _try(self, index: int, what: str) -> object:
        if self.skipped:
            return None
        try:
            return getattr(self._calls[index % len(self._calls)], what)()
        except Exception as error:  # a provider may raise anything; the others go on
            self.skipped = reason(error)
            return None


class Timer:
    """The loop. `wait` returns when the device has finished its enqueued work. With `runs_twice` an untimed call of the
    same contestant precedes each timed call."""

    def __init__(self, device: torch.device, wait: Callable[[], None] = nothing, runs_twice: bool = False) -> None:
        self._device, self._wait, self._runs_twice = device, wait, runs_twice

    def time(self, calls: Mapping[str, Sequence[Call]], repetitions: int) -> dict[str, Contestant]:
        """The timed contestants by their names. `calls` has for each name a call for each set."""
        contestants = {name: Contestant(each) for name, each in calls.items()}
        # At least once on every set: a first call may fault pages in, or load a kernel.
        for index in range(max(_WARM_UP_CALLS, *map(len, calls.values()))):
            self._repeat(contestants, index)
        self._wait()
        repetitions = self._affordable(contestants, repetitions)
        columns = {name: [Stopwatch(self._device) for _ in range(repetitions)] for name in contestants}
        for index in range(repetitions):
            self._repeat(contestants, index, {name: column[index] for name, column in columns.items()})
        self._wait()
        for name, contestant in contestants.items():
            if not contestant.skipped:
                contestant.times_ms = [stopwatch.elapsed_ms() for stopwatch in columns[name]]
        return contestants

    def _repeat(
        self, contestants: Mapping[str, Contestant], index: int, stopwatches: Mapping[str, Stopwatch] | None = None
    ) -> None:
        """Enqueues one repetition."""
        for name, contestant in contestants.items():
            if contestant.skipped:
                continue
            if stopwatches is not None and self._runs_twice:
                contestant.prepare(index - 1)  # on the set that comes again last
                contestant.run(index - 1)
            contestant.prepare(index)
            self._flush_caches()
            if stopwatches is None:
                contestant.run(index)
                continue
            stopwatches[name].start()
            output = contestant.run(index)
            stopwatches[name].stop()
            del output  # not sooner: releasing gigabytes takes milliseconds that are no part of the call

    def _affordable(self, contestants: Mapping[str, Contestant], repetitions: int) -> int:
        """The number of repetitions. Ranks have to agree on it, so the loop by itself changes nothing."""
        return repetitions

    def _flush_caches(self) -> None:
        pass


def flush_bytes(is_gpu: bool, cache_bytes: int, free_bytes: int) -> int:
    """The bytes to read so that nothing useful is left in the last cache."""
    wanted = max(4 * cache_bytes, 256 * 2**20) if is_gpu else 2 * cache_bytes
    return min(wanted, free_bytes // 4) // 256 * 256


class ColdTimer(Timer):
    """The loop with cold caches, and with fewer repetitions of slow calls."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        super().__init__(device, lambda: synchronize(device), runs_twice=not is_gpu)
        self._flush_bytes = flush_bytes(is_gpu, last_cache_bytes(device), free_memory_bytes(device))
        self._flush_source = normal([self._flush_bytes // 2], torch.bfloat16, device, seed=1)
        self._no_destination = torch.empty(0, dtype=torch.uint8, device=device)
        self._flushes = 1

    def warm_up(self, warm_up_ms: float) -> None:
        """Runs the device until its clocks have settled."""
        self._flushes, end = 10, now_ms() + warm_up_ms
        while now_ms() < end:
            self._flush_caches()
            self._wait()

    def time(self, calls: Mapping[str, Sequence[Call]], repetitions: int) -> dict[str, Contestant]:
        self._flushes = 1
        return super().time(calls, repetitions)

    def _affordable(self, contestants: Mapping[str, Contestant], repetitions: int) -> int:
        if self._device.type == "cuda":
            self._flushes = self._flushes_that_cover(self._measure_host(list(contestants.values())))
        begin = now_ms()
        self._repeat(contestants, 0)
        self._wait()
        repetition_ms = max(1e-3, now_ms() - begin)
        return min(repetitions, max(_MINIMUM_REPETITIONS, int(_SLOW_CONTESTANT_MS * len(contestants) / repetition_ms)))

    def _measure_host(self, contestants: Sequence[Contestant]) -> float:
        """The host's time of a call, for each contestant; returns the most."""
        counts = [0 if each.skipped else self._affordable_host_calls(each) for each in contestants]
        begin = now_ms()
        for _ in range(_HOST_ROUNDS):
            for contestant, count in zip(contestants, counts):
                for index in range(0 if contestant.skipped else count):
                    contestant.prepare(index)
                    call_begin = now_ms()
                    contestant.run(index)
                    contestant.host_ms.append(now_ms() - call_begin)
                self._wait()
            if now_ms() - begin > _HOST_MS * len(contestants):
                break
        return max(statistics.median(each.host_ms or [0.0]) for each in contestants)

    def _affordable_host_calls(self, contestant: Contestant) -> int:
        """The number of calls in a round, from the time of one call to its end."""
        contestant.prepare(0)
        self._wait()
        begin = now_ms()
        contestant.run(0)
        self._wait()
        affordable = int(_HOST_MS / max(1e-3, now_ms() - begin))
        return min(_MOST_HOST_CALLS, max(_MINIMUM_HOST_CALLS, affordable))

    def _flushes_that_cover(self, host_ms: float) -> int:
        """The number of reads of the buffer that keep the device busy for one and a half times the host's time."""
        stopwatch, self._flushes = Stopwatch(self._device), 10
        stopwatch.start()
        self._flush_caches()
        stopwatch.stop()
        self._wait()
        return max(1, math.ceil(1.5 * host_ms * self._flushes / stopwatch.elapsed_ms()))

    def _flush_caches(self) -> None:
        # Reading, not writing, because dirty lines would be written back during the next measurement.
        for _ in range(self._flushes):
            stream_bytes(self._flush_source, self._no_destination, self._flush_bytes, 0)
