"""`python -m eaves bench`: times an operator beside PyTorch's formula and its torch.compile, on the user's own shape.

The table has a training step's forward and backward, each timed until its end, and the step's peak of memory. The
implementations take turns. The benchmark of the project's pages, with other libraries, cold caches and the limit of the
device, is in the repository under benchmarks/.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

import eaves
from eaves import _command_line, _info

T = TypeVar("T")
Function = Callable[..., Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_WARM_UP_CALLS = 2
_NO_ROOM = "does not fit in memory"
_BUSY = 2.0
"""A median above so many times the fastest repetition is that of a machine that is busy with something else."""


class Operator(NamedTuple):
    example: str
    """A value of --shape, with the sizes in the order of `make_inputs`: "rows=2048,dim=768,v=50257"."""

    make_inputs: Callable[..., tuple[Tensor, ...]]
    """The arguments on the default device, from a dtype and the sizes; a step computes the gradients they require."""

    ours: Function
    formula: Function

    @property
    def sizes(self) -> list[str]:
        """The keys of --shape."""
        return [part.partition("=")[0] for part in self.example.split(",")]


# ------------------------------------------------------------------------------------------------------------ operators


def _logits(dtype: torch.dtype, rows: int, classes: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, classes, dtype=dtype, requires_grad=True), torch.randint(classes, (rows,))


def _head(dtype: torch.dtype, rows: int, dim: int, classes: int) -> tuple[Tensor, ...]:
    """Hidden states, head, classes. The logits have a standard deviation of 1.3, as in a model in training."""
    hidden = (torch.randn(rows, dim) * (1.3 / dim**0.5)).to(dtype).requires_grad_()
    return hidden, torch.randn(classes, dim, dtype=dtype, requires_grad=True), torch.randint(classes, (rows,))


def _positions(dtype: torch.dtype, batch: int, length: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    theta = (10000.0 ** (-torch.arange(dim) / dim)).to(dtype)
    return torch.randn(batch, length, heads, dim, dtype=dtype, requires_grad=True), theta.expand(heads, dim)


def _log_prob(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    logits = functional.linear(hidden, head)
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return log_p.gather(-1, tokens[:, None])[:, 0]


def _lrpe_cosine(x: Tensor, theta: Tensor) -> Tensor:
    """The formula for x, [batch, length, heads, dim], with angles in float32, as models have them."""
    phi = theta.float() * torch.arange(x.shape[1], device=x.device)[:, None, None]
    return torch.cat([x * phi.cos(), x * phi.sin()], -1).to(x.dtype)


OPERATORS = {
    "logsumexp": Operator(
        "rows=4096,n=131072",
        lambda dtype, rows, n: (torch.randn(rows, n, dtype=dtype, requires_grad=True),),
        lambda x: eaves.logsumexp(x, -1),
        lambda x: torch.logsumexp(x, -1),
    ),
    "cross_entropy": Operator("rows=4096,v=131072", _logits, eaves.cross_entropy, functional.cross_entropy),
    "linear_cross_entropy": Operator(
        "rows=2048,dim=768,v=50257",
        _head,
        eaves.linear_cross_entropy,
        lambda hidden, head, target: functional.cross_entropy(functional.linear(hidden, head), target),
    ),
    "linear_log_prob": Operator("rows=2048,dim=768,v=50257", _head, eaves.linear_log_prob, _log_prob),
    "lrpe_cosine": Operator("batch=12,length=8192,heads=12,dim=128", _positions, eaves.lrpe_cosine, _lrpe_cosine),
}

EPILOG = "\n".join(
    [
        "operators, and sizes of --shape:",
        *(f"  {name:<22}{operator.example}" for name, operator in OPERATORS.items()),
        "",
        "columns of the table:",
        "  forward, backward  median time in milliseconds, until the results exist",
        "  step               both",
        "  MiB                peak memory of a step, with inputs and results",
        "  / eaves            time of a step / time of eaves' step: 2 is twice as long",
    ]
)

# ------------------------------------------------------------------------------------------------------------ measuring


class Step:
    """A training step of one implementation: forward, then backward."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._function, self._inputs = function, inputs
        self._leaves = [each for each in inputs if each.requires_grad]

    def forward(self) -> Tensor:
        return self._function(*self._inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self._leaves, torch.ones_like(out))

    def run(self) -> None:
        self.backward(self.forward())


def time_in_turns(
    steps: dict[str, Step], repetitions: int, wait: Callable[[], None]
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of forward and backward in each repetition; `wait` returns when the device is done."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            wait()
            begin = time.perf_counter()
            out = step.forward()
            wait()
            middle = time.perf_counter()
            gradients = step.backward(out)
            wait()
            end = time.perf_counter()
            del out, gradients  # not sooner, because giving memory back to the system takes time
            times[name].append(((middle - begin) * 1e3, (end - middle) * 1e3))
    return times


def allocations(function: Callable[[], T]) -> tuple[T, list[int]]:
    """The function's result, and the bytes that it allocates (positive) and frees (negative) on the CPU, in order.
    torch's profiler sees only the memory of torch's allocator."""
    from torch.profiler import ProfilerActivity, profile  # imported here, because `info` does not need it

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
    """Silences stderr in the block, because some versions of the profiler write a line to it at start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_of_call(run: Callable[[], object], device: torch.device) -> int:
    """The peak of memory during a call, without the memory that was allocated before it."""
    if device.type != "cuda":
        return max(accumulate(allocations(run)[1]), default=0)
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def reason(error: BaseException) -> str:
    """The reason for a missing number, in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    # The CPU's allocator raises a plain RuntimeError.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in text:
        return _NO_ROOM
    if isinstance(error, NotImplementedError):
        text = f"not supported: {text}"
    return text if len(text) <= 200 else text[:197] + "..."


def _prepared(operator: Operator, inputs: Sequence[Tensor], device: torch.device) -> Iterator[tuple[str, Step, float]]:
    """Name, step and MiB of each implementation that runs here. Prints a line for an implementation that does not."""
    compiled = torch.compile(operator.formula, fullgraph=True, dynamic=False)
    inputs_bytes = sum(each.nbytes for each in inputs)
    for name, function in (("eaves", operator.ours), ("torch", operator.formula), ("torch.compile", compiled)):
        try:
            step = Step(function, inputs)
            for _ in range(_WARM_UP_CALLS):
                step.run()
            yield name, step, (inputs_bytes + peak_of_call(step.run, device)) / 2**20
        except Exception as error:  # a missing compiler, too little memory
            if name == "eaves" and reason(error) != _NO_ROOM:
                raise
            _command_line.say(f"{name} is skipped: {reason(error)}")


# -------------------------------------------------------------------------------------------------------------- program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the command to the parser of `python -m eaves`."""
    add = parser.add_argument
    add("operator", choices=OPERATORS, metavar="OPERATOR", help="operator to measure, see the list below")
    add("--shape", default="", metavar="KEY=N,..", help="sizes of its inputs, see the list below (required)")
    add("--dtype", choices=DTYPES, default="bf16", help="type of the inputs (bf16)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if PyTorch finds a GPU, else cpu")
    add("--repetitions", type=int, default=10, metavar="N", help="number of repetitions of each implementation (10)")
    add("--threads", type=int, metavar="N", help="number of CPU threads; default: PyTorch's number")


def run(arguments: argparse.Namespace) -> str:
    """Prints the table. Returns the error in the arguments, or nothing. MemoryError: the shape does not fit."""
    operator, has_gpu = OPERATORS[arguments.operator], torch.cuda.is_available()
    keys, parts = operator.sizes, [part.partition("=") for part in arguments.shape.split(",")]
    sizes = {key: int(size) for key, _, size in parts if size.isdecimal()}
    numbers = [sizes.get(key, 0) for key in keys]
    if sorted(key for key, *_ in parts) != sorted(keys) or min(numbers) < 1 or math.prod(numbers) >= 2**50:
        found = f'is "{arguments.shape}"' if arguments.shape else "is missing"
        return f"--shape: {found}, expected {'=..,'.join(keys)}=.. with positive numbers, such as {operator.example}"
    if arguments.device == "cuda" and not has_gpu:
        return "--device: is cuda, but PyTorch finds no GPU; expected cpu"
    for name, value in (("repetitions", arguments.repetitions), ("threads", arguments.threads)):
        if value is not None and value < 1:
            return f"--{name}: is {value}, expected 1 or more"
    device = torch.device(arguments.device or ("cuda" if has_gpu else "cpu"))
    if device.type == "cuda" and not (info := _info.extension())["gpus"]:
        return f"--device: is cuda, but eaves cannot use the GPU; expected cpu: {' '.join(info['missing'])}"
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)

    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    _command_line.say(f"# {on}, eaves {eaves.__version__}, torch {torch.__version__}")
    _command_line.say(f"{arguments.operator}, {arguments.shape}, {arguments.dtype}; milliseconds")
    torch.manual_seed(0)
    try:
        with device:
            inputs = operator.make_inputs(DTYPES[arguments.dtype], *numbers)
        _print_table(operator, inputs, device, arguments.repetitions)
    except (RuntimeError, MemoryError) as error:
        if reason(error) != _NO_ROOM:
            raise
        raise MemoryError(f"{arguments.operator}, {arguments.shape}: {_NO_ROOM}") from error
    return ""


def _print_table(operator: Operator, inputs: Sequence[Tensor], device: torch.device, repetitions: int) -> None:
    steps, peaks = {}, {}
    for name, step, mib in _prepared(operator, inputs, device):
        steps[name], peaks[name] = step, mib
    if not steps:
        raise MemoryError
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = time_in_turns(steps, repetitions, wait)
    whole = {name: [forward + backward for forward, backward in pairs] for name, pairs in times.items()}
    medians = {name: statistics.median(each) for name, each in whole.items()}
    _command_line.say(f"{'':<15}{'forward':>11}{'backward':>11}{'step':>11}{'MiB':>11}{'/ eaves':>9}")
    for name, pairs in times.items():
        forward, backward = map(statistics.median, zip(*pairs))
        ratio = f"{medians[name] / medians['eaves']:9.2f}" if "eaves" in medians else ""
        _command_line.say(f"{name:<15}{forward:11.3f}{backward:11.3f}{medians[name]:11.3f}{peaks[name]:11.1f}{ratio}")
    if busy := [name for name, each in whole.items() if medians[name] > _BUSY * min(each)]:
        _command_line.say(f"Other programs slowed down {', '.join(busy)}. Measure again on a quiet machine.")
