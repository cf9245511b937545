"""What the ranks do for `run` and `chat`. Generators; rank 0's items reach the parent (show.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..engine.account import Stages
from ..engine.engine import Engine
from ..engine.generate import Memory
from ..engine.prompts import Message
from .job import Account, Opening, Stage, Traced, Wish
from .opening import account_of, open_engine


def run(group: Group, opening: Opening, prompt: str, wish: Wish) -> Iterator[Stage | str | Traced | Account]:
    """Stages of the start, then pieces of text, then the trace if one is wanted, then the account."""
    stages = Stages(seconds={"start": time.time() - opening.started})
    engine = yield from open_engine(group, opening, stages, "run", translators=True)
    yield Stage("prompt")
    group.counters.events = [] if opening.trace else None
    for chunk in engine.stream([prompt], wish.sampling, wish.max_new_tokens, wish.stop, raw=wish.raw):
        yield chunk.texts[0]
    if opening.trace:
        mine, group.counters.events = tuple(group.counters.events or ()), None
        yield Traced(tuple(gather_objects(mine, group, "run.trace")))
    yield account_of(engine, opening, wish.sampling, stages)


@dataclass
class _Conversation:
    """What a rank keeps between the turns of a chat, which reach it as separate jobs."""

    engine: Engine
    memory: Memory = field(default_factory=Memory)


_open: list[_Conversation] = []  # of this process: one job opens it, later ones continue it


def open_chat(group: Group, opening: Opening) -> Iterator[Stage]:
    """Stages of the start; afterwards `turn` can be called."""
    _open[:] = [_Conversation((yield from open_engine(group, opening, Stages(), "chat")))]


def turn(group: Group, messages: Sequence[Message], wish: Wish) -> Iterator[str]:
    """The answer to the conversation, piece by piece. What was computed for earlier turns is kept where the tokens are the same."""
    (kept,) = _open
    for chunk in kept.engine.stream([messages], wish.sampling, wish.max_new_tokens, wish.stop, memory=kept.memory):
        yield chunk.texts[0]
