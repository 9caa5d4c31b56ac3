"""Helpers for the libraries that can train with eaves: the recipes of docs/trainers.md, other versions than the
installed ones, stand-ins of modules, and modules of libraries that cannot be imported as a whole."""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
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


@contextlib.contextmanager
def installed(version: str | None) -> Iterator[None]:
    """In the block eaves finds every library in this version, or none."""
    found = mock.Mock(return_value=version, side_effect=PackageNotFoundError if version is None else None)
    with mock.patch("eaves._replacement.version", found):
        yield


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "get_current_target":  # Triton's, of the GPU, and there is none
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls if cls is Anything else super().__call__(*arguments, **keywords)


class Anything(metaclass=_Anything):
    """Gives itself where it is called, decorates, or is asked for an attribute. Objects of a class with this base have
    every attribute."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(Anything, name)


class StandIns:
    """Modules of these names, and all below them, that have every name, also where the library is installed. From
    `start` on, or in a block, they are what an import finds, unless the module was imported before."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def start(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                del sys.modules[name]

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_one = any(f"{name}.".startswith(f"{each}.") for each in self._names)
        return ModuleSpec(name, self, is_package=True) if is_one else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(__version__="3.9.0", __getattr__=lambda name: getattr(Anything, name))
        return module

    def exec_module(self, _: ModuleType) -> None: ...


class Foreign(NamedTuple):
    """Modules of a library that are imported without their packages, which ask for GPUs, or for much else. `modules`
    has sources that replace the modules if the library is not installed. `unused` names modules that they
    import and do not need."""

    version: str
    modules: dict[str, str]
    unused: tuple[str, ...]

    @contextlib.contextmanager
    def imported(self) -> Iterator[bool]:
        """Makes the modules importable in the block. True if they are the library's own."""
        before = set(sys.modules)
        library = next(iter(self.modules)).split(".")[0]
        spec = importlib.util.find_spec(library)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        try:
            for name in (*self.unused, *self.modules):
                for package in _packages(name):
                    is_own = package.split(".")[0] == library
                    sys.modules.setdefault(package, _package(package, folders if is_own else []))
            for name, source in ({} if folders else self.modules).items():
                sys.modules[name] = ModuleType(name)
                exec(compile(source, name, "exec"), vars(sys.modules[name]))
            with installed(self.version), StandIns(*self.unused):
                yield bool(folders)
        finally:
            for name in set(sys.modules) - before:
                if name.split(".")[0] in {each.split(".")[0] for each in (*self.unused, *self.modules)}:
                    del sys.modules[name]


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _package(name: str, folders: list[str]) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
    return module
