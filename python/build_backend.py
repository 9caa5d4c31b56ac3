"""The build of the package: scikit-build-core, which asks for oneDNN and, where there is none, for PyTorch as well.

pip builds in an environment of its own. The extension needs no more of PyTorch than its headers, so the one that is
installed already serves; only without one is PyTorch, which takes gigabytes, named as a requirement of the build.
oneDNN's package is there for Linux with glibc on x86-64; elsewhere the wheel has none.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

if sys.platform != "linux":
    way_out = "install it in a Linux container, or on Windows in WSL 2"
    sys.exit(f"eaves needs Linux, but this system is {sys.platform}: {way_out}")

from scikit_build_core.build import *  # noqa: F403  # everything that a build backend has
from scikit_build_core.build import get_requires_for_build_wheel as _requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # scikit-build-core brings it

# The versions that the project is developed with.
_GROUPS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["dependency-groups"]


def get_requires_for_build_wheel(config_settings: dict[str, list[str] | str] | None = None) -> list[str]:
    """What the build needs beyond pyproject.toml's list."""
    # -I: as the Python outside of pip's environment sees its packages.
    find = subprocess.run([sys.executable, "-I", str(Path(__file__).with_name("find_torch.py"))], capture_output=True)
    torch = _GROUPS["torch"] if find.returncode else []
    onednn = _GROUPS["onednn"] if platform.libc_ver()[0] == "glibc" else []
    return [*_requirements(config_settings), *torch, *onednn]


get_requires_for_build_editable = get_requires_for_build_wheel
