"""The device that is measured: its name, caches and memory, the plain kernel that streams bytes, and a stopwatch."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaves import _info

from .benchmark import InvalidArgument

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def find_device(name: str | None) -> torch.device:
    """The named device; without a name the GPU, or the CPU if PyTorch sees no GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise InvalidArgument("--device: is cuda, but PyTorch finds no GPU; expected cpu")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    if not (info := _info.extension())["gpus"]:
        raise InvalidArgument(
            f"--device: is cuda, but eaves cannot use the GPU; expected cpu: {' '.join(info['missing'])}"
        )
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """The name of a device: NVIDIA H200; AMD EPYC (2 threads)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    threads = torch.get_num_threads()
    return f"{model[1] if model else 'CPU'} ({threads} thread{'s' if threads > 1 else ''})"


def last_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    caches = {}
    for folder in _CACHES.glob("index*"):
        level, size = _read(folder / "level").strip(), _read(folder / "size").strip()
        if level.isdigit() and size.endswith("K"):
            caches[int(level)] = int(size[:-1]) * 1024
    # A guess on the large side: a benchmark's "too cold" is right, "too warm" is wrong.
    return caches[max(caches)] if caches else 32 * 2**20


def free_memory_bytes(device: torch.device) -> int:
    """The memory that the next tensors may take."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    free = int(available[1]) * 1024 if available else 2**62
    # A container may be killed for memory long before the machine has run out.
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(free, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else free


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stream_bytes(source: Tensor, destination: Tensor, read_bytes: int, write_bytes: int) -> None:
    """Enqueues a plain kernel of eaves that reads and writes these numbers of bytes."""
    torch.ops.eaves.stream_bytes.default(source, destination, read_bytes, write_bytes)


def now_ms() -> float:
    return time.perf_counter() * 1e3


class Stopwatch:
    """The time between two points of the device's work: a pair of events on a GPU, the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        make_event: Any = torch.cuda.Event  # which torch does not annotate
        self._events = [make_event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._record(0)

    def stop(self) -> None:
        self._record(1)

    def elapsed_ms(self) -> float:
        """The elapsed time, once the device has finished."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1]))
        return self._times[1] - self._times[0]

    def _record(self, point: int) -> None:
        if self._events:
            self._events[point].record()
        else:
            self._times[point] = now_ms()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
