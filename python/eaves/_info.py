"""What `python -m eaves info` says: the versions that meet in this process, what the extension can do here, and what
does not fit together."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import json

import torch

from eaves import _library


def collect() -> dict[str, Any]:
    """The report of `python -m eaves info --json`.

    Keys: python (version), package (version, target: the oldest PyTorch it runs under), torch (version, cuda, threads,
    gpus), extension (what `eaves info --json` says of the same library: version, commit, compiler, backends, cpu, cuda,
    gpus, missing), matches (bool), problems (sentences; empty where matches is true).
    """
    extension = json.loads(torch.ops.eaves.system_info())
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "package": {"version": _package_version(), "target": ".".join(map(str, _library.TORCH_TARGET))},
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "extension": extension,
    }
    report["problems"] = _problems(report)
    report["matches"] = not report["problems"]
    return report


def _package_version() -> str | None:
    try:
        return version("eaves")
    except PackageNotFoundError:  # on PYTHONPATH, not installed
        return None


def _problems(report: dict[str, Any]) -> list[str]:
    """What does not fit together, and the way out, one sentence each."""
    problems = []
    package, extension, of_torch = report["package"]["version"], report["extension"], report["torch"]
    if package is not None and package != extension["version"]:
        problems.append(
            f"The package is version {package}, its extension {extension['version']}: install the wheel again "
            "(pip install --force-reinstall)."
        )
    if of_torch["gpus"] and not extension["backends"].count("cuda"):
        problems.append(
            "PyTorch has CUDA and a GPU, but the extension was built without CUDA: install a CUDA toolkit "
            "and build the wheel again."
        )
    if of_torch["gpus"] and extension["backends"].count("cuda") and not extension["gpus"]:
        problems.append(f"PyTorch sees a GPU that eaves cannot use: {' '.join(extension['missing'])}")
    return problems


def text(report: dict[str, Any]) -> str:
    """The report as lines to read."""
    extension, of_torch = report["extension"], report["torch"]
    cuda = extension["cuda"]
    lines = [
        ("eaves", f"{extension['version']} (commit {extension['commit']}, {extension['compiler']})"),
        ("backends", ", ".join(extension["backends"])),
        ("torch", f"{of_torch['version']}, CUDA {of_torch['cuda'] or 'none'} (eaves needs {report['package']['target']})"),
        ("python", report["python"]),
        ("CPU", f"{extension['cpu']['name']}, vectors {extension['cpu']['level']}, torch uses {of_torch['threads']}"),
    ]
    if cuda:
        lines.append(("CUDA", f"{cuda['version']} for {cuda['architectures']}, driver {cuda['driver'] or 'none'}"))
    for gpu in extension["gpus"]:
        lines.append((f"GPU {gpu['index']}", f"{gpu['name']}, compute capability {gpu['compute_capability']}"))
    for title, sentences in (("missing", extension["missing"]), ("problems", report["problems"])):
        for number, sentence in enumerate(sentences or ["none" if title == "problems" else "nothing"]):
            lines.append((title if number == 0 else "", sentence))
    return "\n".join(f"{name:<9} {value}" for name, value in lines)
