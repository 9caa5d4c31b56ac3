"""Helpers for the libraries that can train with eaves: the recipes of docs/trainers.md, and modules of libraries that
cannot be imported as a whole."""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def recipe(title: str, language: str = "python") -> str:
    """The code block of this language in the section with this title."""
    block = rf"^## {re.escape(title)}\n(?:(?!^## ).)*?^```{language}\n(.*?)^```"
    found = re.findall(block, PAGE.read_text(), re.M | re.S)
    assert len(found) == 1, title
    return str(found[0])


def run_recipe(title: str, **given: Any) -> dict[str, Any]:
    """Runs that block with these names, and returns all names that it leaves."""
    names: dict[str, Any] = dict(given)
    exec(compile(recipe(title), f"{PAGE.name}: {title}", "exec"), names)
    return names


class Foreign(NamedTuple):
    """Modules of a library that are imported without their packages, which ask for GPUs, or for much else. `modules`
    has sources that replace the modules if the library is not installed. `stubs` has sources for modules that they
    import and do not need."""

    version: str
    modules: dict[str, str]
    stubs: dict[str, str]

    @contextlib.contextmanager
    def imported(self) -> Iterator[bool]:
        """Makes the modules importable in the block. True if they are the library's own."""
        before = set(sys.modules)
        library = next(iter(self.modules)).split(".")[0]
        spec = importlib.util.find_spec(library)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        try:
            for name in (*self.stubs, *self.modules):
                for package in _packages(name):
                    is_own = package.split(".")[0] == library
                    sys.modules.setdefault(package, _package(package, folders if is_own else []))
            for name, source in (self.stubs if folders else self.stubs | self.modules).items():
                sys.modules[name] = ModuleType(name)
                exec(compile(source, name, "exec"), vars(sys.modules[name]))
            with mock.patch("eaves._replacement.version", lambda _: self.version):
                yield bool(folders)
        finally:
            for name in set(sys.modules) - before:
                if name.split(".")[0] in {each.split(".")[0] for each in (*self.stubs, *self.modules)}:
                    del sys.modules[name]


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _package(name: str, folders: list[str]) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
    return module
