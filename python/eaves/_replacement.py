"""One table of the libraries that can train with eaves, and the replacement of their functions by eaves' own."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MethodType, ModuleType
from typing import Any, ClassVar


class Integration:
    """A library that can train with eaves. `library` is the name of eaves' module for it; a Replacement changes the
    modules of the Python package of this name too. `package` is pip's name of the library. eaves knows the release
    series `known`, "1.16" for instance; another series may pass and expect other arguments."""

    def __init__(self, library: str, known: tuple[str, ...], *, package: str | None = None) -> None:
        self.library, self.known, self.package = library, known, package or library

    def version(self) -> str | None:
        """The version of the installed library; None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def series(self) -> str | None:
        """The known release series of the installed version; None if the version is in none of them."""
        return self.series_of(self.version())

    def series_of(self, version: str | None) -> str | None:
        return next((series for series in self.known if f"{version}.".startswith(f"{series}.")), None)

    def is_known(self) -> bool:
        return self.series() is not None

    @property
    def turned_on(self) -> str:
        """The words behind "active" that say when a process calls eaves."""
        return f"after eaves.{self.library}.install()"

    def is_active(self) -> bool:
        """Whether this process calls eaves."""
        raise NotImplementedError

    def check_version(self) -> None:
        """Raises ImportError if the library is not installed, RuntimeError if its version is unknown."""
        found, expected = self.version(), " or ".join(f"{series}.x" for series in self.known)
        if found is None:
            raise ImportError(f"eaves.{self.library} needs {self.package} {expected}, which is not installed")
        if not self.is_known():
            raise RuntimeError(
                f"eaves.{self.library}: {self.package} has version {found}, expected {expected}; nothing was replaced"
            )


class Module(Integration):
    """A library that calls eaves' module for it without a replacement. The module says whether it is active."""

    def __init__(self, library: str, known: tuple[str, ...], turned_on: str, *, package: str | None = None) -> None:
        super().__init__(library, known, package=package)
        self._turned_on = turned_on
        self.objects: weakref.WeakSet[Any] = weakref.WeakSet()  # eaves' objects that the library has made and calls

    def has_objects(self) -> bool:
        """Whether one of `objects` is alive, for the module's is_active()."""
        return bool(self.objects)

    @property
    def turned_on(self) -> str:
        return self._turned_on

    def is_active(self) -> bool:
        module = sys.modules.get(f"eaves.{self.library}")
        return module is not None and bool(module.is_active())


class Counted:
    """The base of a class of eaves whose objects a library makes and calls. It counts them in `__new__`, because copies
    and pickles call no `__init__`."""

    _counted_by: ClassVar[Module]

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        cls._counted_by.objects.add(made)
        return made


Places = tuple[tuple[str, str], ...]  # (module, name)


class Replacement(Integration):
    """Functions of a library that eaves replaces. For each function, `functions` has its places (module, name): first
    the place of its definition, then the places that call it. A name may lie in a class, "Trainer.compute_loss". If
    release series have different functions, `known` is a dict: the functions of each series."""

    def __init__(
        self,
        library: str,
        known: tuple[str, ...] | dict[str, tuple[Places, ...]],
        *functions: Places,
        package: str | None = None,
    ) -> None:
        super().__init__(library, tuple(known), package=package)
        self._functions_of = known if isinstance(known, dict) else dict.fromkeys(known, functions)
        self._functions: tuple[Places, ...] = ()
        self._theirs: tuple[Any, ...] = ()
        self._installed: list[Installed] = []  # the last is in place
        self._lock = threading.RLock()

    def is_active(self) -> bool:
        """False too if somebody else has replaced the function since."""
        with self._lock:
            return bool(self._installed) and self._is_everywhere(self._installed[-1].ours)

    def install(self, make: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Installed:
        """Replaces the functions everywhere in the library that imported theirs, or ours with other options. `make`
        gets their functions and returns ours."""
        self.check_version()
        with self._lock:
            self._functions = self._functions_of[self.series() or ""]
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
                    f"eaves.{self.library}: other code has already replaced "
                    + " or ".join(f"{module}.{name}" for places in self._functions for module, name in places)
                    + "; nothing was replaced"
                )
            installed = Installed(self, ours)
            self._installed.append(installed)
            return installed

    def uninstall(self, which: Installed | None = None) -> None:
        """Gives the library its own functions back, or undoes the one install `which`. Without an install nothing
        happens."""
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
        pairs = [(before, after) for before, after in zip(old, new) if before is not after]
        pairs += [
            (before.apply, after.apply)
            for before, after in pairs
            if hasattr(before, "apply") and hasattr(after, "apply")
        ]
        changes = {_identity(before): after for before, after in pairs}
        owners = [
            module
            for name, module in list(sys.modules.items())
            if self._is_changed(name) and isinstance(module, ModuleType)
        ]
        owners += [_owner(*place) for places in self._functions for place in places if "." in place[1]]
        for owner in filter(None, owners):  # None: a class that was not imported
            for name, value in list(vars(owner).items()):
                if _identity(value) in changes:
                    setattr(owner, name, changes[_identity(value)])

    def _is_changed(self, module: str) -> bool:
        return f"{module}.".startswith(f"{self.library}.")


class ReplacementEverywhere(Replacement):
    """Changes modules of every library that have imported one of the functions, or bound the `apply` of one."""

    def _is_changed(self, module: str) -> bool:
        return True


class ReplacementOfLiger(ReplacementEverywhere):
    """Liger also chooses a kernel for the loss of logits by name, and only "nvidia-triton" calls a function here."""

    def is_active(self) -> bool:
        """False too if set_impl or the environment chooses another kernel."""
        return super().is_active() and self.other_kernel() is None

    @staticmethod
    def other_kernel() -> str | None:
        """The name of another kernel that Liger chooses, or None. Liger's own resolve_impl would import every kernel,
        and log those that it cannot import."""
        backends: Any = sys.modules.get("liger_kernel.backends")  # from 0.8.3 on
        if backends is None:
            return None
        names = [f"LIGER_KERNEL_{each}" for each in ("IMPL_CROSS_ENTROPY", "BACKEND_CROSS_ENTROPY", "IMPL", "BACKEND")]
        chosen = next(filter(None, map(os.environ.get, names)), backends.get_impl())
        return None if chosen in ("nvidia-triton", "triton") else chosen


def _identity(value: Any) -> object:
    """The identity of a value. A bound method has the identity of its parts, because each access makes another
    object."""
    return (id(value.__self__), id(value.__func__)) if type(value) is MethodType else id(value)


def _owner(module: str, name: str) -> Any:
    """The module, or the class in it, that has the attribute `name`."""
    classes = name.split(".")[:-1]
    return functools.reduce(lambda owner, each: getattr(owner, each, None), classes, sys.modules.get(module))


def _found(module: str, name: str) -> Any:
    return getattr(_owner(module, name), name.split(".")[-1], None)


def called_like(theirs: Callable[..., Any], ours: Callable[[dict[str, Any]], Any], *first: None) -> Callable[..., Any]:
    """A function with the signature of `theirs`, without its arguments `first`: a Function's ctx. `ours` gets the
    arguments by their names in `theirs`, because versions of a library differ in the order."""
    signature = inspect.signature(theirs)

    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*first, *arguments, **keywords)
        bound.apply_defaults()
        return ours(dict(bound.arguments))

    return call


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


_TRL_LOG_PROBS: Places = (("trl.trainer.utils", "_ChunkedLogProbFunction"),)
_TRL_SFT: Places = (("trl.trainer.sft_trainer", "_chunked_cross_entropy_loss"),)
_TRL_DISTILLATION: Places = (("trl.trainer.distillation_trainer", "_chunked_divergence_loss"),)
_TRL_GKD: Places = (("trl.experimental.gkd.gkd_trainer", "GKDTrainer.compute_loss"),)
_TRL = {
    "1.9": (_TRL_LOG_PROBS, _TRL_SFT, _TRL_GKD),
    **dict.fromkeys(("1.10", "1.11", "1.12", "1.13", "1.14"), (_TRL_LOG_PROBS, _TRL_SFT, _TRL_DISTILLATION, _TRL_GKD)),
    **dict.fromkeys(
        ("1.15", "1.16"),
        ((("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"), *_TRL_LOG_PROBS), _TRL_DISTILLATION, _TRL_GKD),
    ),
}

# Each library once, in alphabetical order, with its known versions and the places of its functions. eaves' own
# functions are in the module of the library's name. `python -m eaves info` prints the table.
INTEGRATIONS: dict[str, Integration] = {
    each.library: each
    for each in (
        Module(
            "automodel",
            ("0.7",),
            "if the configuration names eaves.automodel.LinearCrossEntropy",
            package="nemo-automodel",
        ),
        Module("axolotl", ("0.19", "0.20", "0.21"), "if the configuration names eaves.axolotl.EavesPlugin"),
        Module("fla", ("0.6",), "after import eaves.fla", package="fla-core"),
        Replacement(
            "hf",
            ("4.57", "5"),
            (("transformers.trainer", "Trainer.__init__"),),
            (("transformers.trainer", "Trainer.prediction_step"),),
            package="transformers",
        ),
        ReplacementOfLiger(
            "liger",
            ("0.6.5", "0.7", "0.8"),
            *(
                ((f"liger_kernel.ops.{file}", name), ("liger_kernel.transformers.functional", name))
                for file, name in (
                    ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
                    ("cross_entropy", "LigerCrossEntropyFunction"),
                    ("fused_linear_jsd", "LigerFusedLinearJSDFunction"),
                )
            ),
            (("liger_kernel.chunked_loss.jsd_loss", "LigerFusedLinearJSDFunction"),),
            (("liger_kernel.ops", "LigerFusedLinearScaledCrossEntropyFunction"),),  # from 0.8.2 on
            package="liger-kernel",
        ),
        Module("lm_eval", ("0.4.13",), "if the model is an eaves.lm_eval.HFLM", package="lm-eval"),
        Replacement(
            "megatron",
            ("0.18", "0.19"),
            (("megatron.core.models.gpt.gpt_model", "GPTModel.forward"),),
            package="megatron-core",
        ),
        Replacement(
            "nemo_rl",
            ("0.6", "0.7"),
            (("nemo_rl.distributed.model_utils", "ChunkedDistributedHiddenStatesToLogprobs"),),
            package="nemo-rl",
        ),
        Replacement(
            "prime_rl",
            ("0.7", "0.8"),
            (("prime_rl.trainer.models.layers.lm_head", "_SequenceChunkedLogProbEntropyFn"),),
            (("prime_rl.trainer.models.layers.lm_head_gemma", "_GemmaChunkedLogProbEntropyFn"),),
            package="prime-rl",
        ),
        Module(
            "sentence_transformers",
            ("6.0", "6.1", "6.2"),
            "if the loss is an eaves.sentence_transformers.MultipleNegativesRankingLoss",
            package="sentence-transformers",
        ),
        Replacement(
            "skyrl",
            ("0.3", "0.4"),
            (("skyrl.backends.skyrl_train.distributed.megatron.model_utils", "_fused_lm_head_logprob_apply"),),
        ),
        Replacement("torch", ("2.13", "2.14", "2.15"), (("torch.nn.functional", "linear_cross_entropy"),)),
        Module("torchtitan", ("0.3",), "if the configuration names eaves.torchtitan.fused_loss"),
        Replacement("trl", _TRL),
        Replacement("verl", ("0.9",), (("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),)),
    )
}


def replacement_of(library: str) -> Replacement:
    integration = INTEGRATIONS[library]
    assert isinstance(integration, Replacement)
    return integration


def module_of(library: str) -> Module:
    """The library's integration. Raises an error if the installed version is not known."""
    integration = INTEGRATIONS[library]
    assert isinstance(integration, Module)
    integration.check_version()
    return integration
