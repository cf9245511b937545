"""`run`, `chat` and `train` as the user sees them: starts the ranks, shows what comes from them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..comm import launch
from ..comm.child import bring
from ..comm.ranks import Ranks
from ..errors import UserError
from .interrupt import ending_at_once, said_by_a_file, sigterm_is_said
from .job import Account, OnRanks, Opening, Stage, Traced, Training, Wish
from .options import check_room, check_training_files
from .screen import Screen, account_lines, note, say, write

IMPORTS = ("colrow.cli.run", "colrow.proof.gate")  # before the first job: with all that opening a model imports late

Stream = Callable[..., Iterator[Any]]
"""stream(fn, *args): what `fn(group, *args)` yields on rank 0."""


def run(ranks: int, backend: str, opening: Opening, prompt: str, wish: Wish, trace: Path | None = None) -> None:
    account: Account | None = None
    traced: Traced | None = None
    with Screen() as screen, _ranks(ranks, backend, screen) as stream:
        for item in stream(OnRanks("run"), opening, prompt, wish):
            if isinstance(item, Stage):
                screen.show(item.name, item.done, item.total)
            elif isinstance(item, str):
                screen.clear()
                say(item, end="")
            elif isinstance(item, Traced):
                traced = item
            else:
                account = item
                say()
    for line in account_lines(account) if account is not None else ():
        note(line)
    if trace is not None and traced is not None:
        _write_trace(trace, traced)
        for line in trace_lines(traced):
            note(line)


def trace_lines(traced: Traced) -> list[str]:
    """The prompt and the median token, predicted beside measured, with the token's parts where both have them."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    took = {(s.inside, s.name): s.seconds for s in traced.steps}
    for s in traced.predicted:
        if (seconds := took.get((s.inside, s.name))) is not None:
            step = (s.inside or s.name).partition(" ")[0]
            found.setdefault((step, s.name if s.inside else ""), []).append((s.seconds, seconds))
    middle = {key: tuple(f"{1e3 * median(side):.2f}" for side in zip(*pairs, strict=True)) for key, pairs in found.items()}
    texts = {step: f"{step}: {' / '.join(pair)}" for (step, part), pair in middle.items() if not part}
    for step in texts:
        parts = [f"{part} {' / '.join(pair)}" for (of, part), pair in middle.items() if of == step and part]
        texts[step] += f" ({', '.join(parts)})" if parts else ""
    return ["predicted / measured, ms (medians)", *(f"  {text}" for text in texts.values())] if texts else []


def _write_trace(file: Path, traced: Traced) -> None:
    from ..report.timeline import timeline

    write(file, timeline(traced.ranks, traced.steps, traced.predicted), "--trace trace.json")


def chat(ranks: int, backend: str, opening: Opening, system: str, wish: Wish) -> None:
    if launch.under_torchrun():
        raise UserError("a conversation needs a terminal, which torchrun does not give to its ranks", works="colrow chat MODEL --tp N")
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    with Screen() as screen, _ranks(ranks, backend, screen) as stream:
        for stage in stream(OnRanks("open_chat"), opening):
            screen.show(stage.name, stage.done, stage.total)
        screen.clear()
        note("Ctrl-C ends an answer, an empty line or Ctrl-D the conversation.")
        with tempfile.TemporaryDirectory(prefix="colrow-chat-") as folder, sigterm_is_said(lambda: shutil.rmtree(folder)):
            while text := _ask():
                messages.append({"role": "user", "content": text})
                answer, enough = "", Path(folder) / str(len(messages))
                with said_by_a_file(enough):
                    for piece in stream(OnRanks("turn"), messages, wish, enough):
                        answer += piece
                        say(piece, end="")
                say()
                messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    """What the user types; "" at the end. The prompt goes to standard error, so that standard output has the answers alone. Bytes that are
    no UTF-8 become replacement characters: they are not worth the conversation."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input().encode(errors="surrogateescape").decode(errors="replace").strip()
    except EOFError:
        return ""


def train(ranks: int, backend: str, opening: Opening, asked: Training, trace: Path | None = None) -> None:
    data, evaluation = check_training_files(asked.data, asked.evaluation, asked.out, opening.files)
    asked = replace(asked, data=data, evaluation=evaluation, out=asked.out.resolve(), png=asked.png and asked.png.resolve())
    with Screen() as screen, _ranks(ranks, backend, screen, f"{__package__}.train") as stream:
        from . import train as command

        traced = command.show(stream, screen, opening, asked)
    if trace is not None and traced is not None:
        _write_trace(trace, traced)


@contextmanager
def _ranks(size: int, backend: str, screen: Screen, *more: str) -> Iterator[Stream]:
    """Ranks for one or several jobs: processes that are started now, those of torchrun, or for one rank this process. `more`: modules that
    the jobs need beside IMPORTS."""
    with ExitStack() as stack:
        stack.enter_context(sigterm_is_said(screen.clear))
        if size == 1 or launch.under_torchrun():
            with ending_at_once(screen.clear):
                bring((f"{__package__}.run",))
            yield lambda fn, *args: launch.stream(fn, size, args, backend)
            return
        check_room(size)
        screen.show("start")
        with ending_at_once(screen.clear):
            ranks = stack.enter_context(Ranks(size, backend, (*IMPORTS, *more)))
        yield lambda fn, *args: ranks.stream(fn, args)
