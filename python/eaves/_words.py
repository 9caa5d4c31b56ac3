"""Sentences about an argument, in the names of the function that the user called. Without PyTorch and without JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "soft targets" and "targets are soft" are no names.
_WORD = re.compile(r"(?<!soft )\b\w+\b(?! are (?:soft|distributions))")


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """Every word of the sentence that is a name of `names`, replaced by what the caller calls it."""
    return _WORD.sub(lambda found: names.get(found[0], found[0]), sentence)
