"""Which providers there are and which of them are installed; and torch.compile of any of them.

What a provider is stands in `benchmark.py`; each operator's own are in the operator's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata

import torch
import torch._functorch.config

from eaves.bench.benchmark import Forward, Operator, Provider, Row, reason


class TorchCompile(Provider):
    """torch.compile of what another provider calls, compiled anew for each row."""

    name = "torch.compile"

    def __init__(self, eager: Provider) -> None:
        self._eager = eager

    def forward(self, row: Row) -> Forward:
        # What earlier rows compiled would count towards dynamo's limit of recompilations, past which it silently runs
        # the eager code, and every call would compare its arguments with all of it.
        torch.compiler.reset()
        # A backward that owns its buffers refuses retain_graph=True, which both protocols need.
        torch._functorch.config.donated_buffer = False
        return torch.compile(self._eager.forward(row), fullgraph=True, dynamic=False)


def known_names(operators: Sequence[Operator]) -> list[str]:
    """Of the providers of all of them, each once."""
    return list(dict.fromkeys(provider.name for operator in operators for provider in operator.providers))


class Availability:
    """Loads the providers for a device, and remembers who is missing, so that each is named once whatever the number of
    operators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.missing: dict[str, str] = {}
        """Why each missing provider is missing."""

    def installed(self, providers: Iterable[Provider]) -> list[Provider]:
        """Those that load, in their order."""
        found = []
        for provider in providers:
            if self._device.type not in provider.device_types:
                self.missing.setdefault(provider.name, "needs a GPU" if self._device.type == "cpu" else "needs a CPU")
                continue
            try:
                provider.load()
                found.append(provider)
            except Exception as error:  # whatever an import of somebody else's package may raise
                self.missing.setdefault(provider.name, reason(error))
        return found


def versions(providers: Iterable[Provider]) -> dict[str, str]:
    """The versions of the providers' packages that are installed, and of what they stand on."""
    packages = ["torch", "triton"] + [package for provider in providers for package in provider.packages]
    found = {}
    for package in dict.fromkeys(packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
