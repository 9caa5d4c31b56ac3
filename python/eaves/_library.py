"""Loads the compiled extension: after this import torch.ops.eaves has its operators."""

from pathlib import Path

import torch

EXTENSION = Path(__file__).with_name("eaves_torch.so")

TORCH_TARGET = (2, 10)  # the oldest PyTorch whose stable interface the extension uses


def _load() -> str:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < TORCH_TARGET:
        target = ".".join(map(str, TORCH_TARGET))
        raise ImportError(f"eaves needs PyTorch {target} or newer, and this is {torch.__version__}")
    try:
        torch.ops.load_library(str(EXTENSION))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"eaves: the compiled extension does not load: {error}") from error
    return str(torch.ops.eaves.version())


__version__ = _load()
