"""The peak of memory over one call in MiB, with inputs and outputs counted, as in the published tables.

On a GPU torch's allocator records the peak. On a CPU it does not, so the call runs once under torch's profiler, which
records every allocation of torch's CPU allocator; the peak is the maximum of their running sum. Neither counts memory
that an implementation takes from elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch

from eaves._bench import allocations

from .benchmark import Inputs, Row
from .calls import Call


def peak_bytes(row: Row, make: Callable[[], Call], inputs: Inputs) -> int:
    """The peak during the second of two calls, with the call's inputs and the tensors that its graph keeps.

    The second call counts, because in the protocol `accumulate` the first has no gradient to add to. An in-place call
    has as its inputs the copies that its `prepare` makes. These are part of the growth; the originals are no memory of
    the call.
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
        gc.collect()  # memory that is freed during the calls would be missing from the growth
        before = torch.cuda.memory_allocated(device)
        call = warm_up()
        torch.cuda.reset_peak_memory_stats(device)
        call.run()
        grown = torch.cuda.max_memory_allocated(device)
        del call
        gradients = sum(each.grad.nbytes for each in inputs.differentiable if each.grad is not None)
        # Memory of earlier calls that was freed during these calls is no part of the growth. The gradients stay, and
        # would hide it.
        grown -= min(before, torch.cuda.memory_allocated(device) - gradients)
    else:
        call, kept = allocations(warm_up)
        grown = sum(kept) + max(accumulate(allocations(call.run)[1]), default=0)
    return sum(tensor.nbytes for tensor in tensors) + grown
