"""Which algorithm linear_cross_entropy takes: the core's answer, for PyTorch and JAX alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def suits_speed_of(library: ctypes.CDLL) -> Callable[..., bool]:
    """eaves_suits_speed of python/csrc/algorithm.cpp, whose arguments it takes by their places."""
    ask = library.eaves_suits_speed
    flag, size = ctypes.c_bool, ctypes.c_int64
    ask.restype = flag
    ask.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, *[flag] * 4, *[size] * 4, flag, flag]
    suits_speed: Callable[..., bool] = ask
    return suits_speed
