"""The report of `python -m eaves info`: the versions in this process, the abilities of the extension on this machine,
mismatches between them, and the extension's self-test."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    import torch

    from eaves._replacement import INTEGRATIONS
    from eaves._torch import library as _library
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment] # eaves.jax alone


def extension() -> dict[str, Any]:
    """The extension's report of `eaves info --json`. Without PyTorch, the report of eaves.jax's library.

    Keys: version, commit, compiler, backends, cpu, cuda, gpus, missing.
    """
    if torch is None:
        try:
            from eaves.jax._library import system
        except ModuleNotFoundError as error:
            raise ImportError("PyTorch and JAX are not installed: pip install torch, or jax for eaves.jax") from error
        return system()
    report: dict[str, Any] = json.loads(torch.ops.eaves.system_info())
    return report


def self_test() -> tuple[str, int]:
    """The lines of `eaves info --self-test`, and how many of its cases differ."""
    if torch is None:
        from eaves.jax._library import self_test as of_jax

        return of_jax()
    lines, differing = torch.ops.eaves.self_test()
    return lines, differing


def collect() -> dict[str, Any]:
    """The report of `python -m eaves info --json`.

    Keys: python (version), package (version, target: the oldest PyTorch it runs under), torch (version, cuda, threads,
    gpus), jax (version of the installed one or null, library: is eaves.jax's library here), trainers (for each library
    that can train with eaves: version or null, is_known to eaves, is_active in this process), extension (see
    extension()), matches (bool), problems (sentences; empty if matches is true). Without PyTorch, target and torch are
    null and trainers is empty.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "package": {"version": _version_of("eaves"), "target": None},
        "torch": None,
        "jax": {"version": _version_of("jax"), "library": Path(__file__).with_name("eaves_jax.so").exists()},
        "trainers": {},
        "extension": extension(),
    }
    if torch is not None:
        report["package"]["target"] = _library.TORCH_TARGET
        report["torch"] = {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        }
        report["trainers"] = {
            each.library: {"version": each.version(), "is_known": each.is_known(), "is_active": each.is_active()}
            for each in INTEGRATIONS.values()
        }
    report["problems"] = _problems(report)
    report["matches"] = not report["problems"]
    return report


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # eaves may be on PYTHONPATH without being installed
        return None


def _problems(report: dict[str, Any]) -> list[str]:
    """The mismatches, each with its way out in one sentence."""
    problems = []
    package, of_torch, ours = report["package"]["version"], report["torch"], report["extension"]
    if package is not None and package != ours["version"]:
        problems.append(
            f"The package is version {package}, its extension {ours['version']}: install the wheel again "
            "(pip install --force-reinstall)."
        )
    if of_torch is None:
        return problems
    if of_torch["gpus"] and "cuda" not in ours["backends"]:
        problems.append(
            "PyTorch has CUDA and a GPU, but the extension was built without CUDA: install a CUDA toolkit and build "
            "the wheel again, without CUDA=OFF."
        )
    if of_torch["gpus"] and "cuda" in ours["backends"] and not ours["gpus"]:
        problems.append(f"PyTorch sees a GPU that eaves cannot use: {' '.join(ours['missing'])}")
    return problems


def _torch(report: dict[str, Any]) -> str:
    found = report["torch"]
    if found is None:
        return "not installed, so only eaves.jax works"
    return f"{found['version']}, CUDA {found['cuda'] or 'none'}, eaves needs {report['package']['target']} or newer"


def _jax(found: dict[str, Any]) -> str:
    if not found["library"]:
        return "this wheel was built without jaxlib, so it has no eaves.jax; install jaxlib and build the wheel again"
    return f"{found['version']}, eaves.jax is built" if found["version"] else "not installed; eaves.jax is built"


def _trainer(name: str, trainer: dict[str, Any]) -> str:
    if trainer["version"] is None:
        return "not installed"
    if not trainer["is_known"]:
        return f"{trainer['version']}, which eaves.{name} does not support"
    return f"{trainer['version']}, active {'in this process' if trainer['is_active'] else INTEGRATIONS[name].turned_on}"


def text(report: dict[str, Any]) -> str:
    """The report as readable lines."""
    ours, of_torch = report["extension"], report["torch"]
    cuda = ours["cuda"]
    threads = f", torch uses {of_torch['threads']} threads" if of_torch else ""
    level = ours["cpu"]["level"]
    vectors = f"AVX-512 ({level})" if level.startswith("AVX3") else level  # AVX3 is Highway's name
    lines = [
        ("eaves", f"{ours['version']} (commit {ours['commit']}, {ours['compiler']})"),
        ("backends", ", ".join(ours["backends"])),
        ("torch", _torch(report)),
        ("jax", _jax(report["jax"])),
        ("python", report["python"]),
        ("CPU", f"{ours['cpu']['name']}, vectors {vectors}{threads}"),
        ("matmul", f"on the CPU: {ours['cpu']['matrix_products']}"),
    ]
    for name, trainer in report["trainers"].items():
        lines.append((name, _trainer(name, trainer)))
    if cuda:
        lines.append(("CUDA", f"{cuda['version']} for {cuda['architectures']}, driver {cuda['driver'] or 'none'}"))
    for gpu in ours["gpus"]:
        lines.append((f"GPU {gpu['index']}", f"{gpu['name']}, compute capability {gpu['compute_capability']}"))
    for title, sentences in (("missing", ours["missing"]), ("problems", report["problems"])):
        for number, sentence in enumerate(sentences or ["none" if title == "problems" else "nothing"]):
            lines.append((title if number == 0 else "", sentence))
    return "\n".join(f"{name:<9} {value}" for name, value in lines)
