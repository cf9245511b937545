"""Ctrl-C where it is no plain exception. While libraries are imported some swallow that, and the command would go on as if nothing had been
pressed; while a model answers in a conversation, it ends the answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130  # the exit code, as shells have it for a process that Ctrl-C ended


@contextmanager
def ending_at_once(tidy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-C inside ends the process there and then, after `tidy()`. Ranks that it has started end with it: they watch their parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        tidy()
        print("colrow: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def said_by_a_file(file: Path) -> Iterator[None]:
    """Ctrl-C inside makes the file, by which other processes hear of it; a second one, before that came to an end, is what it always is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def make(number: int, frame: object) -> None:
        if file.exists():
            raise KeyboardInterrupt
        file.touch()

    before = signal.signal(signal.SIGINT, make)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
