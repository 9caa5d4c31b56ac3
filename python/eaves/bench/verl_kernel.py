"""verl's fused kernel, `linear_cross_entropy`, of the installed distribution and without the packages around it, whose
own imports need ray and more: empty ones stand in for those on the way, for as long as the process lives, because the
function imports its kernels when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

_FOLDER = distribution("verl").locate_file("verl")

for _name in ("verl", "verl.utils", "verl.utils.kernel"):
    if _name not in sys.modules:
        _package = ModuleType(_name)
        _package.__path__ = [str(_FOLDER.joinpath(*_name.split(".")[1:]))]
        sys.modules[_name] = _package

linear_cross_entropy: Any = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
