"""A function of another library and eaves' own in its place, as long as that is wanted: what eaves.trl and eaves.verl
share."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any


class Replacement:
    """Of a function of `library`. `places` are (module, name): where it is defined, and where it is called. The library
    is known in the release series `known`, "1.16" for instance: what another one passes and expects may differ."""

    def __init__(self, library: str, known: tuple[str, ...], *places: tuple[str, str]) -> None:
        self.library, self._known, self._places = library, known, places
        self._theirs: Any = None
        self._installed: list[Installed] = []  # the last is in place
        self._lock = threading.RLock()

    def version(self) -> str | None:
        """Of the installed library; None where there is none."""
        try:
            return version(self.library)
        except PackageNotFoundError:
            return None

    def is_known(self) -> bool:
        found = self.version()
        return found is not None and any(f"{found}.".startswith(f"{series}.") for series in self._known)

    def is_active(self) -> bool:
        """Whether this process calls eaves: not, where somebody else has replaced the function since."""
        with self._lock:
            return bool(self._installed) and self._is_everywhere(self._installed[-1].ours)

    def install(self, ours: Any) -> Installed:
        """Everywhere in the library that theirs, or ours with other options, was imported to."""
        found, expected = self.version(), " or ".join(f"{series}.x" for series in self._known)
        if found is None:
            raise ImportError(f"eaves.{self.library} needs {self.library} {expected}, which is not installed")
        if not self.is_known():
            raise RuntimeError(
                f"eaves.{self.library}: this is {self.library} {found}, expected {expected}: nothing is replaced"
            )
        with self._lock:
            for module, _ in self._places:
                import_module(module)
            if not self._installed:
                module, name = self._places[0]
                self._theirs = getattr(sys.modules[module], name)
            before = self._in_place()
            self._exchange(before, ours)
            if not self._is_everywhere(ours):
                self._exchange(ours, before)
                raise RuntimeError(
                    f"eaves.{self.library}: somebody else has replaced "
                    + " or ".join(f"{module}.{name}" for module, name in self._places)
                    + ": nothing is replaced"
                )
            installed = Installed(self, ours)
            self._installed.append(installed)
            return installed

    def uninstall(self, which: Installed | None = None) -> None:
        """Gives the library its own function back, or undoes one install; without an install nothing happens."""
        with self._lock:
            before = self._in_place()
            self._installed = [each for each in self._installed if which is not None and each is not which]
            self._exchange(before, self._in_place())

    def has(self, installed: Installed) -> bool:
        return installed in self._installed

    def _in_place(self) -> Any:
        return self._installed[-1].ours if self._installed else self._theirs

    def _is_everywhere(self, ours: Any) -> bool:
        return all(getattr(sys.modules.get(module), name, None) is ours for module, name in self._places)

    def _exchange(self, old: Any, new: Any) -> None:
        if old is new:
            return
        for module_name, module in list(sys.modules.items()):
            if f"{module_name}.".startswith(f"{self.library}.") and isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)


class Installed:
    """What install() returns. As a context manager it makes the end of the block undo this install."""

    def __init__(self, replacement: Replacement, ours: Any) -> None:
        self._replacement, self.ours = replacement, ours

    def __enter__(self) -> Installed:
        if not self._replacement.has(self):
            raise RuntimeError(f"eaves.{self._replacement.library}: this install was undone; call install() again")
        return self

    def __exit__(self, *_: object) -> None:
        self._replacement.uninstall(self)
