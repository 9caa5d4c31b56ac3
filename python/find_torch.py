"""Prints "<version>;<folder>" of the PyTorch that this Python finds, without importing it. Fails without one."""

import importlib.util
import re
import sys
from pathlib import Path

spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch")
folder = Path(spec.submodule_search_locations[0])
version = re.search(r"^__version__ = '(\d+\.\d+\.\d+)", (folder / "version.py").read_text(), re.MULTILINE)
if version is None:
    sys.exit(f"{folder} names no version")
print(f"{version[1]};{folder}")
