"""Loads the compiled extension: after this import torch.ops.eaves has its operators."""

from pathlib import Path

import torch

EXTENSION = Path(__file__).with_name("eaves_torch.so")

TORCH_TARGET = "2.10"  # the oldest PyTorch whose stable interface the extension uses; cmake/torch.cmake reads it here


def _load() -> str:
    if _numbers(torch.__version__) < _numbers(TORCH_TARGET):
        raise ImportError(f"eaves needs PyTorch {TORCH_TARGET} or newer, and this is {torch.__version__}")
    try:
        torch.ops.load_library(str(EXTENSION))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"eaves: the compiled extension does not load: {error}") from error
    return str(torch.ops.eaves.version())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


__version__ = _load()
