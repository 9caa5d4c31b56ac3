"""The result file: what `eaves bench --json` writes, with every provider's rows and the versions of all packages; and
how files and folders of results are named."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import torch

from eaves import _info
from eaves.bench.benchmark import InvalidArgument, Row, Table
from eaves.bench.device import device_name
from eaves.bench.protocol import Protocol
from eaves.bench.report import MIB, MeasuredTable
from eaves.bench.timing import Column


def result(
    tables: Sequence[MeasuredTable],
    device: torch.device,
    protocol: Protocol,
    versions: Mapping[str, str],
    is_stopped: bool = False,
) -> dict[str, Any]:
    """Schema 1. That of a stopped run, which lacks rows, says so."""
    info = _info.extension()
    is_gpu = device.type == "cuda"
    head: dict[str, Any] = {
        "schema": 1,
        "device": device_name(device),
        "cuda": torch.version.cuda if is_gpu else None,
        "driver": info["cuda"]["driver"] if is_gpu else None,
    }
    if not is_gpu:
        head |= {"cpu_level": info["cpu"]["level"], "threads": torch.get_num_threads()}
    return head | {
        "commit": info["commit"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "protocol": protocol.name,
        **({"stopped": True} if is_stopped else {}),
        "versions": {"eaves": info["version"], "python": platform.python_version(), **versions},
        "rows": [
            _row(measured.table, row, name, column, protocol)
            for measured in tables
            for row, measurement in zip(measured.table.rows, measured.measurements)
            for name, column in measurement.columns.items()
        ],
    }


def to_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


def _row(table: Table, row: Row, provider: str, column: Column, protocol: Protocol) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "op": table.op,
        "mode": table.mode,
        "dtype": table.dtype,
        "shape": dict(row.shape),
        "options": dict(row.options),
        "provider": provider,
    }
    timing = column.timing
    if timing is None:
        return entry | {"ms": None, "skipped": column.skipped}
    entry |= {"ms": timing.median_ms, "ms_min": timing.min_ms, "ms_max": timing.max_ms}
    if column.host_ms is not None:
        entry["host_ms"] = column.host_ms
    if column.peak_bytes is not None:
        entry["peak_mib"] = column.peak_bytes / MIB
    if row.flops:
        entry["tflops"] = row.flops / (timing.median_ms * 1e9)
    else:
        entry["gbps"] = protocol.moved(row).total / (timing.median_ms * 1e6)
    entry["repetitions"] = timing.repetitions
    return entry


def file_name(operator: str, protocol: Protocol, is_stopped: bool = False) -> str:
    """Of a result file in the folder of a device. That of a stopped run, which lacks rows, has a name of its own."""
    return f"{operator}_{protocol.name}{'.stopped' if is_stopped else ''}.json"


def folder_name(device: str, is_gpu: bool) -> str:
    """nvidia-h200, amd-epyc-7b13: the words of its name. What is in brackets is none of them: "Intel(R)",
    "(2 threads)"; and of a CPU nothing that says no more than that it is one: "64-Core Processor", "CPU @ 2.20GHz"."""
    name = re.sub(r"\([^()]*\)", " ", device.lower())
    if not is_gpu:
        name = re.sub(r"@.*|\bwith .*|\bw/.*|\b\w+-core\b|\bprocessor\b|\bcpu\b", " ", name)
    return "-".join(re.findall(r"[a-z0-9]+", name)) or "cpu"


def without_threads(device: str) -> str:
    """AMD EPYC, of AMD EPYC (2 threads)."""
    return re.sub(r" \(\d+ threads?\)$", "", device)


def make_folder(argument: str, path: str) -> None:
    """Before minutes of measuring, so that a wrong path is known at once."""
    if not path:
        raise InvalidArgument(f"{argument}: is empty, expected the name of a folder")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f'{argument}: "{path}" cannot be made: {error.strerror}') from error


class AtomicFile:
    """A file that is there whole or not at all: written beside its place, then moved there. Used in a `with`, at whose
    end nothing is left beside it."""

    _temporaries: ClassVar[set[str]] = set()
    """Those that are there now."""

    def __init__(self, argument: str, path: str) -> None:
        """Opened before minutes of measuring, so that a wrong path is known at once."""
        self.path = Path(path)
        if not path:
            raise InvalidArgument(f"{argument}: is empty, expected the name of a file")
        if path.endswith("/") or self.path.is_dir():
            raise InvalidArgument(f'{argument}: "{path}" is a folder, expected the name of a file')
        try:
            handle, self._temporary = tempfile.mkstemp(".tmp", f".{self.path.name}.", self.path.parent)
            self._temporaries.add(self._temporary)
            self._file = os.fdopen(handle, "w")
        except OSError as error:
            raise InvalidArgument(f'{argument}: "{path}" cannot be written: {error.strerror}') from error

    def commit(self, text: str) -> None:
        with self._file as file:
            file.write(text)
        os.chmod(self._temporary, 0o666 & ~_umask())
        os.replace(self._temporary, self.path)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        Path(self._temporary).unlink(missing_ok=True)
        self._temporaries.discard(self._temporary)

    @classmethod
    def discard_all(cls) -> None:
        """For a program that ends at once."""
        for path in list(cls._temporaries):
            Path(path).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
