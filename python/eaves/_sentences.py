"""Sentences of the core, in the names of the function that the user called. Without PyTorch and without JAX."""

from __future__ import annotations

from collections.abc import Mapping


def in_names(sentence: str, names: Mapping[str, str]) -> str:
    """A sentence in which names of arguments stand in backticks (include/eaves/error.h), with those of `names` for the
    core's, and without backticks."""
    words = enumerate(sentence.split("`"))
    return "".join([names.get(word, word) if place % 2 else word for place, word in words])
