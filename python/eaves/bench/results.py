"""Result files: what `eaves bench --json` writes, with every provider's lines and the versions of all packages; and how
files and folders of results are named."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eaves import _info
from eaves.bench.benchmark import InvalidArgument
from eaves.bench.calls import PROTOCOLS
from eaves.bench.device import device_name
from eaves.bench.harness import CASE, Entry


def result(
    rows: Sequence[Entry],
    device: torch.device,
    protocol: str,
    packages: Iterable[str] = (),
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
        "protocol": protocol,
        **({"stopped": True} if is_stopped else {}),
        "versions": {"eaves": info["version"], "python": platform.python_version(), **versions(packages)},
        "rows": list(rows),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed, and of what all stand on."""
    found = {}
    for package in dict.fromkeys(["torch", "triton", *packages]):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def read(folder: Path, names: Iterable[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The result files of these operators, by their names, the lines under "rows"; and the names of those that are left
    out, because their run was stopped."""
    found, left_out = {}, []
    for name in (file_name(operator, protocol) for operator in names for protocol in PROTOCOLS):
        path = folder / name
        if path.with_suffix(".stopped.json").exists():
            left_out.append(f"{path.stem}.stopped.json")
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_bytes())
            if file_name(content["rows"][0]["op"], content["protocol"]) != name:
                raise ValueError(f"it holds {content['rows'][0]['op']} by the protocol {content['protocol']}")
            for row in content["rows"]:
                _ = row["mode"], row["dtype"], row["shape"], row["options"], row["provider"]
                _ = row["ms"] + row["ms_min"] if row["ms"] is not None else row["skipped"]
            if content.get("stopped"):
                left_out.append(name)
            else:
                found[name] = {"cuda": None} | content
            _ = [content[key] for key in ("device", "commit", "date")], content["versions"]["torch"]
        except (ValueError, LookupError, TypeError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else error
            raise InvalidArgument(f'"{path}" is no result file of this program: {why}') from error
    devices = dict.fromkeys(content["device"] for content in found.values())
    if len(devices) > 1:
        raise InvalidArgument(f'"{folder}" holds results of {" and ".join(devices)}, expected a folder for each')
    return found, left_out


def rows_before(paths: Iterable[Path], device: torch.device, protocol: str, packages: Iterable[str]) -> list[Entry]:
    """The lines that the same programs have written to these files on the same device, of each row those of the newest
    file; none of a build with changes that are not committed, whose commit says too little."""
    own = result([], device, protocol, packages)
    differing = {"date", "stopped", "rows"}
    contents: list[tuple[str, dict[str, list[Entry]]]] = []
    for path in paths:
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_bytes())
            rows: dict[str, list[Entry]] = {}
            for row in content["rows"]:
                rows.setdefault(json.dumps([row[key] for key in CASE]), []).append(row)
            is_own = all(content.get(key) == own[key] for key in own.keys() - differing)
            contents.append((content["date"], rows if is_own else {}))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidArgument(f'"{path}" is no result file of this program: {error}') from error
    if own["commit"].endswith("-dirty") or own["commit"] == "unknown":
        return []
    merged: dict[str, list[Entry]] = {}
    for _, rows in sorted(contents, key=lambda content: content[0]):
        merged |= rows
    return [row for lines in merged.values() for row in lines]


def file_name(operator: str, protocol: str, is_stopped: bool = False) -> str:
    """Of a result file in the folder of a device. That of a stopped run, which lacks rows, has a name of its own."""
    return f"{operator}_{protocol}{'.stopped' if is_stopped else ''}.json"


def folder_name(device: str, is_gpu: bool) -> str:
    """nvidia-h200, amd-epyc-7b13: the words of its name. What is in brackets is none of them: "Intel(R)",
    "(2 threads)"; and of a CPU nothing that says no more than that it is one: "64-Core Processor", "CPU @ 2.20GHz"."""
    name = re.sub(r"\([^()]*\)", " ", device.lower())
    if not is_gpu:
        name = re.sub(r"@.*|\bwith .*|\bw/.*|\b\w+-core\b|\bprocessor\b|\bcpu\b", " ", name)
    return "-".join(re.findall(r"[a-z0-9]+", name)) or "cpu"


def check_folder(argument: str, path: str) -> Path:
    """Makes it. Before minutes of measuring, so that a wrong path is known at once."""
    if not path:
        raise InvalidArgument(f"{argument}: is empty, expected the name of a folder")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise InvalidArgument(f'{argument}: "{path}" cannot be written: {error.strerror}') from error


def check_file(argument: str, path: str) -> Path:
    """As above, of a file that is not written yet."""
    if not path:
        raise InvalidArgument(f"{argument}: is empty, expected the name of a file")
    if path.endswith("/") or Path(path).is_dir():
        raise InvalidArgument(f'{argument}: "{path}" is a folder, expected the name of a file')
    try:
        with suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                raise InvalidArgument(f'{argument}: "{path}" exists and is not a regular file')
            if not (os.access(path, os.W_OK) and mode & 0o222):  # root may write protected files
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            return Path(path)
    except OSError as error:
        raise InvalidArgument(f'{argument}: "{path}" cannot be written: {error.strerror}') from error


def write(path: Path, content: str | dict[str, Any]) -> None:
    """Text or JSON. The file is there whole or not at all: written beside its place, then moved there. A symbolic link
    stays, and its target is written."""
    path = Path(os.path.realpath(path))
    text = content if isinstance(content, str) else json.dumps(content, indent=1, allow_nan=False) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
