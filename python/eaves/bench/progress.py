"""A progress bar on a terminal, where tqdm is installed; nothing where stderr is a file or a pipe."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Progress:
    def __init__(self, rows: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                tqdm = importlib.import_module("tqdm").tqdm
            except ImportError:
                return
            self._bar = tqdm(total=rows, unit="row", file=sys.stderr, leave=False, dynamic_ncols=True)

    def show(self, text: str) -> None:
        """What is measured now."""
        if self._bar is not None:
            self._bar.set_description(text)

    def advance(self, rows: int = 1) -> None:
        """So many rows are done."""
        if self._bar is not None:
            self._bar.update(rows)

    def hide(self) -> None:
        """Before anything is printed; the next show() brings the bar back."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
