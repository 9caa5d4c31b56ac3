"""Ctrl-C and its like: SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP.

The first is a KeyboardInterrupt in what is measured or drawn again, and nowhere else: what writes the results of a run
is not interrupted. The second ends the program at once, even while Python waits for a call into a library.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
"""128 + SIGINT, as a shell says it; the same for all of them."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ONE_SIGNAL_SECONDS = 0.3
"""timeout(1) sends its signal to the process and to the process's group: two of them so close together are one."""

_is_wanted = False
_is_interruptible = False


class Stopped(Exception):
    """The run was stopped. The message is one sentence, which says where what was measured lies."""


def is_wanted() -> bool:
    """Whether there was a signal."""
    return _is_wanted


@contextmanager
def interruptible() -> Iterator[None]:
    """In here a signal is a KeyboardInterrupt, and so is one that came before."""
    global _is_interruptible
    _is_interruptible = True
    try:
        _raise_if_wanted()
        yield
        _raise_if_wanted()  # a provider's code may have caught the KeyboardInterrupt
    finally:
        _is_interruptible = False


def _raise_if_wanted() -> None:
    if _is_wanted:
        raise KeyboardInterrupt


@contextmanager
def signals() -> Iterator[None]:
    """Handles them in here."""
    global _is_wanted
    _is_wanted = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_end_at_the_second, args=[reader], daemon=True).start()
    # A shell without job control starts background programs with SIGINT ignored: it is handled all the same.
    handled = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    handlers = {each: signal.signal(each, _on_signal) for each in handled}
    descriptor = signal.set_wakeup_fd(writer)  # written to at once; _on_signal has to wait for the interpreter
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        os.close(writer)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _is_wanted
    is_first, _is_wanted = not _is_wanted, True
    if is_first and _is_interruptible:
        raise KeyboardInterrupt


def _end_at_the_second(reader: int) -> None:
    with os.fdopen(reader, "rb", buffering=0) as numbers:
        first: float | None = None
        while number := numbers.read(1):
            if number[0] not in _SIGNALS:
                continue
            first = first or time.monotonic()
            if time.monotonic() - first > _ONE_SIGNAL_SECONDS:
                os.write(2, b"eaves.bench: stopped at once\n")
                os._exit(EXIT_CODE)
