"""Loads the compiled extension: after this import torch.ops.eaves has its operators."""

from __future__ import annotations

from pathlib import Path

import torch

EXTENSION = Path(__file__).parents[1] / "eaves_torch.so"

TORCH_TARGET = "2.10"  # the oldest PyTorch whose stable interface the extension uses; cmake/torch.cmake reads it here


def _load() -> str:
    if _numbers(torch.__version__) < _numbers(TORCH_TARGET):
        raise ImportError(f"eaves needs PyTorch {TORCH_TARGET} or newer, but {torch.__version__} is installed")
    if not EXTENSION.exists():
        raise ImportError(
            f"eaves: {EXTENSION} is missing, because Python imports the sources of eaves and not an "
            "installation; run Python from another folder, or install the package (pip install .)"
        )
    try:
        torch.ops.load_library(str(EXTENSION))  # type: ignore[no-untyped-call]
    except OSError as error:
        reason = error.__cause__ or error.__context__ or error  # torch's own sentence names only the file
        raise ImportError(f"eaves: {EXTENSION} cannot be loaded: {reason}; install the package again") from error
    return str(torch.ops.eaves.version())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


__version__ = _load()
