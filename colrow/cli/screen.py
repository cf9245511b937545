"""Screen: what the commands write. Text goes to standard output, everything else to standard error; progress only where that is a
terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .units import nbytes

if TYPE_CHECKING:
    from .job import Account

WORDS = {
    "start": "starting ranks",
    "imports": "importing torch and transformers",
    "find": "looking for the model",
    "plan": "planning",
    "gate": "proving the plan on a small copy",
    "load": "reading weights",
    "tokenizer": "reading the tokenizer",
    "prompt": "reading the prompt",
    "data": "reading the data",
}


class Screen:
    """Progress on a terminal's standard error, cleared before text appears. Silent where it is no terminal."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._progress: Any = None
        self._task: Any = None

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty()

    def show(self, name: str, done: int = 0, total: int = 0) -> None:
        if not self._stream.isatty():
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._progress.add_task("", total=None)
            self._progress.start()
        self._progress.update(self._task, description=WORDS.get(name, name), completed=done, total=total or None)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def say(text: str = "", end: str = "\n") -> None:
    """To standard output. UserError where that is a file on a disk that is full; a reader who has gone is the parser's to meet."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):
            sys.stdout.close()  # what is left in its buffer would be tried again at the end
        raise UserError("standard output cannot be written", error.strerror, "a disk with room") from error


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def account_lines(account: Account) -> Iterable[str]:
    """The account in words, for people."""
    for text in account.warnings:
        yield _line("warning", text)
    for m in account.memory:
        words = f"rank {m.rank}: {nbytes(m.resident)} resident, {nbytes(m.parameters)} of it parameters"
        yield _line("memory" if m.rank == 0 else "", words)
    yield _line("opening", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in account.stages))
    yield _line("gate", account.gate.removeprefix("gate: "))
    yield _line("decoding", account.decoding.removeprefix("decoding: "))
    words = f"{account.first_token:.1f} s after the command, {account.prefill:.2f} s of it for {account.prompt_tokens} prompt tokens"
    yield _line("first token", words)
    rate = f", {account.rate:.1f} tokens/s after the first" if account.rate is not None else ""
    yield _line("tokens", f"{account.new_tokens} new{rate}")
    t = account.traffic
    if t is not None and (t.calls or t.predicted_calls):
        verdict = "as predicted" if t.equal else f"NOT as predicted ({', '.join(t.differing[:3])})"
        counted = f"{t.calls:g} of {nbytes(t.logical_bytes)} together a token counted"
        yield _line("collectives", f"{counted}; {t.predicted_calls:g} of {nbytes(t.predicted_bytes)} predicted: {verdict}")
        if account.gathered:
            yield _line("", f"of it {account.gathered} gathers of all logits, for tokens drawn from more than the exchanged candidates")


def _line(subject: str, text: str) -> str:
    return f"{subject:12} {text}"


def write(path: Path, text: str, works: str) -> None:
    """Writes a file that the user asked for and says so. UserError, with `works` as an option that would do, where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError("the file cannot be written", f"{path}: {error.strerror}", works) from error
    note(f"written: {path}")
