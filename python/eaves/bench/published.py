"""What is meant by the published tables and by the names that come from them, said here for pages, printed tables and
--help.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from eaves.bench.benchmark import Table

NAMES = {"lce": "linear_cross_entropy", "md_lrpe_cosine": "lrpe_cosine over a grid of one to three axes"}
"""Every `Table.title_op`, and what it is."""


def names_of(tables: Iterable[Table]) -> list[str]:
    """Those in the titles that are not the operator's own."""
    return list(dict.fromkeys(table.title_op for table in tables if table.title_op))


def explained(names: Iterable[str] = NAMES, indent: str = "") -> list[str]:
    """A paragraph, line by line."""
    meant = ", ".join(f"{name} is {NAMES[name]}" for name in names)
    text = (
        "The published tables are measurements of other implementations, from which eaves set out. Theirs are the rows "
        "of --sweep seed, the backward of protocol seed, the inputs of data seed (normal numbers) and the titles"
    ) + (f", in which {meant}." if meant else ".")
    return textwrap.wrap(text, 119, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
