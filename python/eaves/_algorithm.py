"""Questions to the core about linear_cross_entropy before a call, for PyTorch and JAX alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def suits_speed_of(library: ctypes.CDLL) -> Callable[..., bool]:
    """eaves_suits_speed of python/csrc/algorithm.cpp, as a function of positional arguments."""
    ask = library.eaves_suits_speed
    flag, size = ctypes.c_bool, ctypes.c_int64
    ask.restype = flag
    ask.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, *[flag] * 4, *[size] * 4, flag, flag]
    suits_speed: Callable[..., bool] = ask
    return suits_speed


def kept_row_bytes_of(library: ctypes.CDLL) -> Callable[..., int]:
    """eaves_kept_row_bytes of the same file, likewise."""
    ask = library.eaves_kept_row_bytes
    size = ctypes.c_int64
    ask.restype = size
    ask.argtypes = [ctypes.c_char_p, ctypes.c_int, size, size, ctypes.c_double, ctypes.c_bool]
    kept_row_bytes: Callable[..., int] = ask
    return kept_row_bytes
