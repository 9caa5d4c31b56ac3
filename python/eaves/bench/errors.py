"""Two kinds of error: a wrong argument, which ends the program, and what somebody's code raised, which fills a cell."""

from __future__ import annotations

import torch


class InvalidArgument(ValueError):
    """An option of the command line is wrong; the message is one sentence that names it."""


def reason(error: Exception) -> str:
    """Why there is no number, in one line."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "does not fit in memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "DefaultCPUAllocator" in text:  # which raises a plain RuntimeError
        return "does not fit in memory"
    if isinstance(error, NotImplementedError):
        text = f"not supported: {text}"
    longest = 200
    return text if len(text) <= longest else text[: longest - 3] + "..."
