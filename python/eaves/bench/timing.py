"""Times calls that take turns. It knows neither rows nor operators: only calls, one for each of several sets of
buffers.

One repetition calls each contestant once: read a buffer larger than the last cache, call, read it again, call the next.
So all see the same cold cache and the same clocks, alternating. On a GPU all repetitions are enqueued before any is
waited for, with a pair of events around each call, and reading the buffer lasts longer than the host needs for a call:
the events see the device's work, not Python. What Python costs is measured by itself, `host_ms`: calls enqueued back to
back. What a call has to have prepared (a copy of inputs that it overwrites) is made before the buffer is read, so that
neither its time nor its lines in the cache are the call's.

On a CPU a call is timed by the clock, Python and all. The flushed cache is cold for the interpreter too, which costs a
call 0.1 to 0.2 ms (AMD EPYC) where it would cost 0.02 ms warm: short rows show that before they show the operator. An
output is fresh memory, whose pages the system first has to hand over; the limit writes to memory that is there. A
virtual machine may give large free pages back to its host within two seconds, and the next call waits for them. So each
call that is timed follows one that is not, as in a loop that trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eaves.bench.benchmark import normal, reason
from eaves.bench.calls import Call
from eaves.bench.device import Stopwatch, free_memory_bytes, last_cache_bytes, now_ms, stream_bytes, synchronize

# There are fewer repetitions, but not below five, where all would take longer than this for each contestant.
_SLOW_CONTESTANT_MS = 1000.0
_MINIMUM_REPETITIONS = 5
_WARM_UP_CALLS = 3

# Back to back, in rounds that are waited for: a GPU takes about a thousand launches before the host has to wait, and an
# operator's eager backward is about ten. Where calls keep the GPU busy for long a round has fewer, but not below three:
# as many as have room in _HOST_MS; and there are no more rounds than have room in that time for each contestant.
_HOST_ROUNDS = 5
_MOST_HOST_CALLS = 20
_MINIMUM_HOST_CALLS = 3
_HOST_MS = 100.0

Cell = dict[str, Any]
"""What was measured of a provider in a row, by the keys of the result file; or `skipped`, why there is nothing."""


class _Contestant:
    def __init__(self, calls: Sequence[Call]) -> None:
        self.skipped = ""
        self.host_ms: list[float] = []
        self._calls = calls

    def prepare(self, index: int) -> None:
        """What the call on the set whose turn it is needs done before."""
        self._try(index, "prepare")

    def run(self, index: int) -> object:
        """That call. What either of the two raises is kept, and is the end of this contestant."""
        return self._try(index, "run")

    def _try(self, index: int, what: str) -> object:
        try:
            return getattr(self._calls[index % len(self._calls)], what)()
        except Exception as error:  # a provider's code: whatever it raises, the others go on
            self.skipped = self.skipped or reason(error)
            return None


def flush_bytes(is_gpu: bool, cache_bytes: int, free_bytes: int) -> int:
    """How much is read so that nothing of use is left in the last cache."""
    wanted = max(4 * cache_bytes, 256 * 2**20) if is_gpu else 2 * cache_bytes
    return min(wanted, free_bytes // 4) // 256 * 256


class Timer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush_bytes = flush_bytes(device.type == "cuda", last_cache_bytes(device), free_memory_bytes(device))
        self._flush_source = normal([self._flush_bytes // 2], torch.bfloat16, device, seed=1)
        self._no_destination = torch.empty(0, dtype=torch.uint8, device=device)

    def warm_up(self, warm_up_ms: float) -> None:
        """Runs the device until its clocks have settled."""
        end = now_ms() + warm_up_ms
        while now_ms() < end:
            self._flush_caches(10)
            synchronize(self._device)

    def time(self, calls: Mapping[str, Sequence[Call]], repetitions: int) -> dict[str, Cell]:
        """By the contestants' names; each has a call for each set."""
        contestants = [_Contestant(each) for each in calls.values()]
        # At least once on every set: a first call may fault pages in, or load a kernel.
        for index in range(max(_WARM_UP_CALLS, *(len(each) for each in calls.values()))):
            self._repeat(contestants, index)
        synchronize(self._device)
        flushes = 1
        if self._device.type == "cuda":
            flushes = self._flushes_that_cover(self._measure_host(contestants))
        begin = now_ms()
        self._repeat(contestants, 0, flushes)
        synchronize(self._device)
        repetition_ms = max(1e-3, now_ms() - begin)
        affordable = max(_MINIMUM_REPETITIONS, int(_SLOW_CONTESTANT_MS * len(contestants) / repetition_ms))

        stopwatches = [[Stopwatch(self._device) for _ in contestants] for _ in range(min(repetitions, affordable))]
        for index, row in enumerate(stopwatches):
            self._repeat(contestants, index, flushes, row)
        synchronize(self._device)
        columns = zip(calls, contestants, zip(*stopwatches))
        return {name: _cell(contestant, column) for name, contestant, column in columns}

    def _repeat(
        self,
        contestants: Sequence[_Contestant],
        index: int,
        flushes: int = 1,
        stopwatches: Sequence[Stopwatch] | None = None,
    ) -> None:
        """One repetition, enqueued."""
        for place, contestant in enumerate(contestants):
            if contestant.skipped:
                continue
            if stopwatches is not None and self._device.type == "cpu":
                contestant.prepare(index - 1)  # of the set that is the last to come again
                contestant.run(index - 1)
            contestant.prepare(index)
            self._flush_caches(flushes)
            if stopwatches is None:
                contestant.run(index)
                continue
            stopwatches[place].start()
            output = contestant.run(index)
            stopwatches[place].stop()
            del output  # not sooner: giving gigabytes back to the system takes milliseconds, and is no part of the call

    def _measure_host(self, contestants: Sequence[_Contestant]) -> float:
        """What a call costs the host, for each contestant; returns the most."""
        counts = [0 if each.skipped else self._affordable_host_calls(each) for each in contestants]
        begin = now_ms()
        for _ in range(_HOST_ROUNDS):
            for contestant, count in zip(contestants, counts):
                for index in range(0 if contestant.skipped else count):
                    contestant.prepare(index)
                    call_begin = now_ms()
                    contestant.run(index)
                    contestant.host_ms.append(now_ms() - call_begin)
                synchronize(self._device)
            if now_ms() - begin > _HOST_MS * len(contestants):
                break
        return max(statistics.median(each.host_ms or [0.0]) for each in contestants)

    def _affordable_host_calls(self, contestant: _Contestant) -> int:
        """In a round, by the time of one call to its end."""
        contestant.prepare(0)
        synchronize(self._device)
        begin = now_ms()
        contestant.run(0)
        synchronize(self._device)
        affordable = int(_HOST_MS / max(1e-3, now_ms() - begin))
        return min(_MOST_HOST_CALLS, max(_MINIMUM_HOST_CALLS, affordable))

    def _flushes_that_cover(self, host_ms: float) -> int:
        """How often the buffer has to be read so that the device is busy for half as long again as the host."""
        stopwatch, count = Stopwatch(self._device), 10
        stopwatch.start()
        self._flush_caches(count)
        stopwatch.stop()
        synchronize(self._device)
        return max(1, math.ceil(1.5 * host_ms * count / stopwatch.elapsed_ms()))

    def _flush_caches(self, count: int = 1) -> None:
        # Reading, not writing: dirty lines would be written back during the measurement that follows.
        for _ in range(count):
            stream_bytes(self._flush_source, self._no_destination, self._flush_bytes, 0)


def _cell(contestant: _Contestant, stopwatches: Sequence[Stopwatch]) -> Cell:
    if contestant.skipped:
        return {"skipped": contestant.skipped}
    times = [stopwatch.elapsed_ms() for stopwatch in stopwatches]
    host = {"host_ms": statistics.median(contestant.host_ms)} if contestant.host_ms else {}
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), **host} | {
        "repetitions": len(times)
    }
