"""The libraries that can train with eaves, in one table; and functions of theirs that eaves takes the place of."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any


class Door:
    """A library that can train with eaves: `library` names eaves' module for it, of a Replacement also Python's, and
    `package` is pip's name. It is known in the release series `known`, "1.16" for instance: what another one passes and
    expects may differ."""

    def __init__(self, library: str, known: tuple[str, ...], *, package: str | None = None) -> None:
        self.library, self.known, self._package = library, known, package or library

    def version(self) -> str | None:
        """The version of the installed library; None if it is not installed."""
        try:
            return version(self._package)
        except PackageNotFoundError:
            return None

    def is_known(self) -> bool:
        found = self.version()
        return found is not None and any(f"{found}.".startswith(f"{series}.") for series in self.known)

    @property
    def turned_on(self) -> str:
        """When a process calls eaves, behind "active"."""
        return f"where eaves.{self.library}.install() was called"

    def is_active(self) -> bool:
        """Whether this process calls eaves."""
        raise NotImplementedError

    def check_version(self) -> None:
        """Raises ImportError if the library is not installed, RuntimeError if its version is unknown."""
        found, expected = self.version(), " or ".join(f"{series}.x" for series in self.known)
        if found is None:
            raise ImportError(f"eaves.{self.library} needs {self._package} {expected}, which is not installed")
        if not self.is_known():
            raise RuntimeError(
                f"eaves.{self.library}: this is {self._package} {found}, expected {expected}: nothing is replaced"
            )


class Module(Door):
    """A library that calls eaves' module for it, of itself. The module says whether it is active."""

    def __init__(self, library: str, known: tuple[str, ...], turned_on: str, *, package: str | None = None) -> None:
        super().__init__(library, known, package=package)
        self._turned_on = turned_on

    @property
    def turned_on(self) -> str:
        return self._turned_on

    def is_active(self) -> bool:
        module = sys.modules.get(f"eaves.{self.library}")
        return module is not None and bool(module.is_active())


class Replacement(Door):
    """Functions of a library. For each, `functions` has places (module, name): where it is defined, and where it is
    called; a name may be one in a class, "Trainer.compute_loss"."""

    def __init__(
        self, library: str, known: tuple[str, ...], *functions: tuple[tuple[str, str], ...], package: str | None = None
    ) -> None:
        super().__init__(library, known, package=package)
        self._functions = functions
        self._theirs: tuple[Any, ...] = ()
        self._installed: list[Installed] = []  # the last is in place
        self._lock = threading.RLock()

    def is_active(self) -> bool:
        """False too if somebody else has replaced the function since."""
        with self._lock:
            return bool(self._installed) and self._is_everywhere(self._installed[-1].ours)

    def install(self, make: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Installed:
        """Everywhere in the library that theirs, or ours with other options, was imported to. `make` gets theirs and
        returns ours."""
        self.check_version()
        with self._lock:
            for places in self._functions:
                for module, _ in places:
                    import_module(module)
            if not self._installed:
                self._theirs = tuple(_found(*places[0]) for places in self._functions)
            before, ours = self._in_place(), make(self._theirs)
            self._exchange(before, ours)
            if not self._is_everywhere(ours):
                self._exchange(ours, before)
                raise RuntimeError(
                    f"eaves.{self.library}: somebody else has replaced "
                    + " or ".join(f"{module}.{name}" for places in self._functions for module, name in places)
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

    def _in_place(self) -> tuple[Any, ...]:
        return self._installed[-1].ours if self._installed else self._theirs

    def _is_everywhere(self, ours: tuple[Any, ...]) -> bool:
        return all(_found(*place) is our for places, our in zip(self._functions, ours) for place in places)

    def _exchange(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
        changes = {id(before): after for before, after in zip(old, new) if before is not after}
        owners = [
            module
            for name, module in list(sys.modules.items())
            if f"{name}.".startswith(f"{self.library}.") and isinstance(module, ModuleType)
        ]
        owners += [_owner(*place) for places in self._functions for place in places if "." in place[1]]
        for owner in filter(None, owners):  # a class that was not imported is none
            for name, value in list(vars(owner).items()):
                if id(value) in changes:
                    setattr(owner, name, changes[id(value)])


def _owner(module: str, name: str) -> Any:
    """The module, or a class of it, that has the name."""
    classes = name.split(".")[:-1]
    return functools.reduce(lambda owner, each: getattr(owner, each, None), classes, sys.modules.get(module))


def _found(module: str, name: str) -> Any:
    return getattr(_owner(module, name), name.split(".")[-1], None)


class Plugin(Door):
    """A library that makes objects of eaves itself, because its configuration names `target`, a class or function."""

    def __init__(self, library: str, known: tuple[str, ...], target: str, *, package: str | None = None) -> None:
        super().__init__(library, known, package=package)
        self._target = target
        self._made: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def turned_on(self) -> str:
        return f"where the configuration names eaves.{self.library}.{self._target}"

    def made(self, thing: object) -> None:
        """Notes an object that the library calls from now on."""
        self._made.add(thing)

    def is_active(self) -> bool:
        """Whether one of them is alive."""
        return bool(self._made)


class Installed:
    """What install() returns. As a context manager it makes the end of the block undo this install."""

    def __init__(self, replacement: Replacement, ours: tuple[Any, ...]) -> None:
        self._replacement, self.ours = replacement, ours

    def __enter__(self) -> Installed:
        if not self._replacement.has(self):
            raise RuntimeError(f"eaves.{self._replacement.library}: this install was undone; call install() again")
        return self

    def __exit__(self, *_: object) -> None:
        self._replacement.uninstall(self)


# Each library once: the versions that are known, and where the functions lie. eaves' own functions are in the module of
# the library's name. `python -m eaves info` prints the table.
DOORS: dict[str, Door] = {
    door.library: door
    for door in (
        Module("axolotl", ("0.19",), "where the configuration names eaves.axolotl.EavesPlugin"),
        Module("fla", ("0.6",), "where eaves.fla was imported", package="fla-core"),
        Module("lm_eval", ("0.4.13",), "where the model is an eaves.lm_eval.HFLM"),
        Plugin("automodel", ("0.7",), "LinearCrossEntropy", package="nemo-automodel"),
        Plugin("torchtitan", ("0.3",), "fused_loss"),
        Replacement(
            "megatron",
            ("0.18", "0.19"),
            (("megatron.core.models.gpt.gpt_model", "GPTModel.forward"),),
            package="megatron-core",
        ),
        Module(
            "sentence_transformers",
            ("6.0", "6.1", "6.2"),
            "where the loss is an eaves.sentence_transformers.MultipleNegativesRankingLoss",
            package="sentence-transformers",
        ),
        Replacement("torch", ("2.13", "2.14"), (("torch.nn.functional", "linear_cross_entropy"),)),
        Replacement(
            "trl",
            ("1.16",),
            (
                ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"),
                ("trl.trainer.utils", "_ChunkedLogProbFunction"),
            ),
            (("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"),),
            (("trl.experimental.gkd.gkd_trainer", "GKDTrainer.compute_loss"),),
        ),
        Replacement("verl", ("0.9",), (("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),)),
    )
}


def replacement_of(library: str) -> Replacement:
    door = DOORS[library]
    assert isinstance(door, Replacement)
    return door


def plugin_of(library: str) -> Plugin:
    """The library's line, of a version that is known."""
    door = DOORS[library]
    assert isinstance(door, Plugin)
    door.check_version()
    return door
