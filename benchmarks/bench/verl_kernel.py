"""verl's fused kernel, `linear_cross_entropy`, from the installed distribution without the packages around it, because
their imports need ray and more. Empty packages replace them for the life of the process, because the function imports
its kernels when it is called. Importing this module does not look for verl; asking for the function does."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import distribution
from types import ModuleType
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "linear_cross_entropy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = distribution("verl").locate_file("verl")
    for package_name in ("verl", "verl.utils", "verl.utils.kernel"):
        if package_name not in sys.modules:
            package = ModuleType(package_name)
            package.__path__ = [str(folder.joinpath(*package_name.split(".")[1:]))]
            sys.modules[package_name] = package
    return import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
