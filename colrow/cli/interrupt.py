"""Signals that are no plain exception. Ctrl-C: while libraries are imported some swallow that, and the command would go on as if nothing
had been pressed; while a model answers in a conversation, it ends the answer. SIGTERM: it ends a command with one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

INTERRUPTED = 130  # the exit code, as shells have it for a process that Ctrl-C ended


def ending_at_once(tidy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """Ctrl-C inside ends the process there and then, after `tidy()`. Ranks that it has started end with it: they watch their parent."""

    def end() -> None:
        tidy()
        print("colrow: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    return _calling(end, signal.SIGINT)


def said_by_a_file(file: Path) -> AbstractContextManager[None]:
    """Ctrl-C inside makes the file, by which other processes hear of it; a second one, before that came to an end, is what it always is."""

    def make() -> None:
        if file.exists():
            raise KeyboardInterrupt
        file.touch()

    return _calling(make, signal.SIGINT)


def sigterm_is_said(tidy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """SIGTERM inside ends the process as ever, by the signal, but after `tidy()` and with one line; ranks that it has started end with it.
    Not under torchrun, which ends the ranks itself, and must not have to wait for one that is blocked outside of Python."""
    from ..comm.launch import under_torchrun  # it imports a little by itself

    def end() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        with suppress(Exception):
            tidy()
        with suppress(OSError):
            os.write(2, b"colrow: terminated\n")  # print may have been what the signal has interrupted
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    return nullcontext() if under_torchrun() else _calling(end, signal.SIGTERM)


@contextmanager
def _calling(task: Callable[[], None], number: signal.Signals) -> Iterator[None]:
    """The signal calls `task()` inside. In the main thread; others, to which Python gives no signals, go on as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: task())
    try:
        yield
    finally:
        signal.signal(number, before)
