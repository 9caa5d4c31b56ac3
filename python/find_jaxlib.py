"""Prints "<version>;<folder>" of the jaxlib that this Python finds, without importing it. Fails without one, and where
it has no headers of XLA's foreign function interface."""

import importlib.util
import re
import sys
from pathlib import Path

spec = importlib.util.find_spec("jaxlib")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no jaxlib")
folder = Path(spec.submodule_search_locations[0])
version = re.search(r"^_?_version\w* = ['\"](\d+\.\d+\.\d+)", (folder / "version.py").read_text(), re.MULTILINE)
if version is None or not (folder / "include/xla/ffi/api/ffi.h").exists():
    sys.exit(f"{folder} names no version, or has no headers")
print(f"{version[1]};{folder}")
