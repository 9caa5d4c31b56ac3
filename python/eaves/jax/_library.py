"""Loads the library of XLA handlers, and asks it the questions that come up while JAX traces."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import ctypes
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxlib.version import __version__ as jaxlib_version

from eaves._algorithm import suits_speed_of

LIBRARY = Path(__file__).parents[1] / "eaves_jax.so"
# The names of the custom calls in XLA's programs: one for functions of rows, one for functions with matrix products.
TARGETS = ROWS_TARGET, PRODUCTS_TARGET = "eaves", "eaves_products"

JAX_TARGET = "0.10.2"  # the oldest jaxlib that the library is built with and runs under


class Workspace(NamedTuple):
    """The bytes of scratch memory that a call needs, and of a buffer that has room to align them."""

    needed: int
    buffer: int


def _load() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(
            f"eaves.jax: {LIBRARY} is missing, because the package was built without jaxlib; install jaxlib "
            f"{JAX_TARGET} or newer and build the package again (pip install .)"
        )
    if _numbers(jaxlib_version) < _numbers(JAX_TARGET):
        raise ImportError(f"eaves.jax needs jaxlib {JAX_TARGET} or newer, but {jaxlib_version} is installed")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"eaves.jax: {LIBRARY} cannot be loaded: {error}; install the package again") from error
    library.eaves_jax_table.restype = library.eaves_jax_system.restype = ctypes.c_char_p
    library.eaves_jax_workspace_bytes.restype = library.eaves_jax_self_test.restype = ctypes.c_char_p
    number = ctypes.POINTER(ctypes.c_int64)
    library.eaves_jax_self_test.argtypes = [number]
    library.eaves_jax_workspace_bytes.argtypes = [ctypes.c_char_p, number, number]
    on_gpu = {ROWS_TARGET: library.eaves_jax_cuda, PRODUCTS_TARGET: library.eaves_jax_cuda_products}
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library.eaves_jax_cpu), platform="cpu")
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(on_gpu[target]), platform="CUDA")
    return library


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_library = _load()
suits_speed = suits_speed_of(_library)

TABLE: dict[str, Any] = json.loads(_library.eaves_jax_table())
"""The version, and the table of the losses' options."""


def system() -> dict[str, Any]:
    """The facts about the library on this machine that `eaves info --json` prints."""
    found: dict[str, Any] = json.loads(_library.eaves_jax_system())
    return found


def self_test() -> tuple[str, int]:
    """The lines of `eaves info --self-test`, and how many of its cases differ."""
    differing = ctypes.c_int64()
    lines: bytes = _library.eaves_jax_self_test(ctypes.byref(differing))
    return lines.decode(), differing.value


@functools.lru_cache(maxsize=4096)
def workspace(question: str) -> Workspace:
    """The scratch memory of a call. For a call that the core refuses, raises its error, ValueError or
    NotImplementedError."""
    needed, buffer = ctypes.c_int64(), ctypes.c_int64()
    error = _library.eaves_jax_workspace_bytes(question.encode(), ctypes.byref(needed), ctypes.byref(buffer))
    if error is None:
        return Workspace(needed.value, buffer.value)
    kind, _, sentence = error.decode().partition(":")
    raise {"InvalidArgument": ValueError, "Unsupported": NotImplementedError}.get(kind, RuntimeError)(sentence)
