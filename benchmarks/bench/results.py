"""Result files: the JSON of `eaves bench --json`, with every provider's lines and the versions of all packages. Also
the names of files and folders of results."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eaves import _info

from .benchmark import InvalidArgument
from .calls import PROTOCOLS
from .device import device_name
from .harness import Entry

RESULTS = Path(__file__).parents[1] / "results"


def result(
    rows: Sequence[Entry],
    device: torch.device,
    protocol: str,
    packages: Iterable[str] = (),
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of a result file, schema 1. `left_out` has the reasons of the providers that do not load."""
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
        "date": now(),
        "protocol": protocol,
        "versions": versions(["torch", "triton", *packages]),
        **({} if left_out is None else {"left_out": dict(left_out)}),
        "rows": list(rows),
    }


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of eaves, Python and the packages that are installed."""
    found = {"eaves": _info.extension()["version"], "python": platform.python_version()}
    for package in dict.fromkeys(packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def read(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The result files of these operators, by their names; the lines are under "rows"."""
    paths = [folder / name for name in file_names(names)]
    return checked({path.name: path.read_bytes() for path in paths if path.exists()}, folder)


def checked(files: Mapping[str, bytes], place: Path) -> dict[str, dict[str, Any]]:
    """The contents of result files, by their names. `place` is the folder that holds them."""
    found = {}
    for name, text in files.items():
        try:
            content = json.loads(text)
            if file_name(content["rows"][0]["op"], content["protocol"]) != name:
                raise ValueError(f"its rows are of {content['rows'][0]['op']} and the protocol {content['protocol']}")
            for row in content["rows"]:
                _check_names(row["op"], row["mode"], row["dtype"], row["provider"], *row["shape"], *row["options"])
                if row["ms"] is None:
                    _check_type(str, row["skipped"])
                else:
                    _check_type((int, float), row["ms"], row["ms_min"])
            _check_names(content["device"], content["commit"], content["date"], content["driver"] or "")
            versions, left_out = content["versions"], content.get("left_out", {})
            _check_names(versions["eaves"], versions["torch"], *versions, *versions.values(), *left_out)
            _check_type(str, *left_out.values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InvalidArgument(f'"{place / name}" is not a result file of this program: {why}') from error
        found[name] = {"cuda": None} | content
    devices = dict.fromkeys(content["device"] for content in found.values())
    if len(devices) > 1:
        raise InvalidArgument(
            f'"{place}" holds results of {" and ".join(devices)}, expected one folder for each device'
        )
    return found


def _check_type(kind: type | tuple[type, ...], *values: object) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is of another type")


def _check_names(*values: object) -> None:
    """Pages show names as they are: a name with a sign of Markdown or HTML is refused."""
    _check_type(str, *values)
    for value in values:
        if re.search(r"[<>|`\n]", str(value)):
            raise ValueError(f"{value!r} is not a name")


def file_names(operators: Iterable[str]) -> list[str]:
    """The names of the result files of these operators."""
    return [file_name(operator, protocol) for operator in operators for protocol in PROTOCOLS]


def file_name(operator: str, protocol: str, is_partial: bool = False) -> str:
    """The name of a result file in the folder of a device. An operator that is still being measured has its rows in a
    partial file, which no page shows."""
    return f"{operator}_{protocol}{'.partial' if is_partial else ''}.json"


def folder_name(device: str, is_gpu: bool) -> str:
    """The words of the device's name: nvidia-h200, amd-epyc-7b13. Leaves out words in brackets ("Intel(R)", "(2
    threads)") and words that only say that the device is a CPU ("64-Core Processor", "CPU @ 2.20GHz")."""
    name = re.sub(r"\([^()]*\)", " ", device.lower())
    if not is_gpu:
        name = re.sub(r"@.*|\bwith .*|\bw/.*|\b\w+-core\b|\bprocessor\b|\bcpu\b", " ", name)
    return "-".join(re.findall(r"[a-z0-9]+", name)) or "cpu"


def check_folder(argument: str, path: str | Path) -> Path:
    """Makes the folder. Called before minutes of measuring, so that a wrong path fails at once."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise InvalidArgument(f'{argument}: "{path}" cannot be written: {error.strerror}') from error


def check_file(argument: str, path: str) -> Path:
    """Makes the file's folder, as above."""
    if not path or path.endswith("/") or Path(path).is_dir():
        raise InvalidArgument(f'{argument}: is "{path}", expected the name of a file')
    check_folder(argument, Path(path).parent)
    return Path(path)


def text_of(content: dict[str, Any]) -> str:
    """The JSON of a file."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(path: Path, content: str | dict[str, Any]) -> None:
    """Writes text or JSON. The file exists whole or not at all: it is written beside its place and moved there."""
    text = content if isinstance(content, str) else text_of(content)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
