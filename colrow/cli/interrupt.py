"""Ctrl-C while libraries are imported: some swallow the exception, and the command would go on as if nothing had been pressed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
