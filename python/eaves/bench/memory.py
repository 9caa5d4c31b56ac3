"""The peak of memory over one call, inputs and outputs counted: what the published tables have in MiB.

On a GPU torch's allocator keeps the peak. On a CPU it does not, so the call runs once under torch's profiler, which
records every allocation of torch's CPU allocator, and the peak is that of their running sum. Memory that an
implementation takes from elsewhere is in neither.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from eaves.bench.benchmark import Inputs, Row
from eaves.bench.calls import Call

T = TypeVar("T")


def peak_bytes(row: Row, make: Callable[[], Call], inputs: Inputs) -> int:
    """The peak during the second of two calls, with the call's inputs and what its graph keeps.

    The second, because in the protocol `accumulate` it is the first that accumulates. In place the inputs of a call are
    the copies that its `prepare` makes, which are among what has grown; the originals are none of its memory.
    """
    tensors = [each for each in inputs.arguments if not (row.in_place and each.requires_grad)]
    if row.mode != "fwd":
        tensors.append(inputs.grad_out)

    def warm_up() -> Call:
        call = make()
        call.prepare()
        call.run()
        call.prepare()
        return call

    if (device := inputs.grad_out.device).type == "cuda":
        gc.collect()  # what is freed meanwhile would be missing from what has grown
        before = torch.cuda.memory_allocated(device)
        call = warm_up()
        torch.cuda.reset_peak_memory_stats(device)
        call.run()
        grown = torch.cuda.max_memory_allocated(device)
        del call
        gradients = sum(each.grad.nbytes for each in inputs.differentiable if each.grad is not None)
        # What of earlier calls was freed meanwhile is no part of what has grown. Gradients, which stay, would hide it.
        grown -= min(before, torch.cuda.memory_allocated(device) - gradients)
    else:
        call, kept = _allocations(warm_up)
        grown = sum(kept) + max(accumulate(_allocations(call.run)[1]), default=0)
    return sum(tensor.nbytes for tensor in tensors) + grown


def peak_of_call(run: Callable[[], object], device: torch.device) -> int:
    """The peak during a call, beside what was there before."""
    if device.type != "cuda":
        return max(accumulate(_allocations(run)[1]), default=0)
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _allocations(function: Callable[[], T]) -> tuple[T, list[int]]:
    """What the function returns, and the bytes that it allocated (positive) and freed (negative), in order."""
    with _silent_stderr(), tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = function()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: float(event["ts"]))
    return result, [int(event["args"]["Bytes"]) for event in events]


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Some versions of the profiler write a line to the process's stderr whenever they start and stop."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
