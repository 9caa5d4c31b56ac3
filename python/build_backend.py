"""The build of the package: scikit-build-core, which asks for oneDNN and, where there is none, for PyTorch as well.

pip builds in an environment of its own. The extension needs no more of PyTorch than its headers, so the one that is
installed already serves; only without one is PyTorch, which takes gigabytes, named as a requirement of the build.
oneDNN's package is there for Linux with glibc on x86-64; elsewhere the wheel has none.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

from scikit_build_core.build import *  # noqa: F403  # everything that a build backend has
from scikit_build_core.build import get_requires_for_build_wheel as _requirements

# Those that the project is developed with.
_SETUP = (Path(__file__).parents[1] / "tools" / "setup").read_text()
_TORCH = re.findall(r"torch==[\d.]+", _SETUP)[0]
_ONEDNN = re.findall(r"onednn-cpu-gomp==[\d.]+", _SETUP)[0]


def get_requires_for_build_wheel(config_settings: dict[str, list[str] | str] | None = None) -> list[str]:
    """What the build needs beyond pyproject.toml's list."""
    # -I: as the Python outside of pip's environment sees its packages.
    find = subprocess.run([sys.executable, "-I", str(Path(__file__).with_name("find_torch.py"))], capture_output=True)
    has_onednn = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
    return _requirements(config_settings) + [_TORCH] * (find.returncode != 0) + [_ONEDNN] * has_onednn


get_requires_for_build_editable = get_requires_for_build_wheel
