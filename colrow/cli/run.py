"""What the ranks do for `run` and `chat`. Generators; rank 0's items reach the parent (show.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..comm.group import Group
from ..engine.account import Stages
from ..engine.engine import Engine
from ..engine.generate import Memory
from ..engine.prompts import Message
from ..planning import timing, workload
from ..planning.links import Machine
from ..planning.plan import Plan
from .job import Account, Opening, Stage, Traced, Wish
from .opening import account_of, open_engine
from .traced import Predict, Watch


def run(group: Group, opening: Opening, prompt: str, wish: Wish) -> Iterator[Stage | str | Traced | Account]:
    """Stages of the start, then pieces of text, then the trace if one is wanted, then the account."""
    stages = Stages(seconds={"start": time.time() - opening.started})
    engine = yield from open_engine(group, opening, stages, "run", translators=True)
    yield Stage("prompt")
    watch = Watch(group, opening.trace)
    yield from watch.begin()
    at = time.perf_counter()
    for number, chunk in enumerate(engine.stream([prompt], wish.sampling, wish.max_new_tokens, wish.stop, raw=wish.raw)):
        watch.step(f"token {number}" if number else "prompt", time.perf_counter() - at)
        at = time.perf_counter()
        yield chunk.texts[0]
    yield from watch.end(stages.results["plan"], engine.model.config, _predicting(engine))
    yield account_of(engine, opening, wish.sampling, stages)


def _predicting(engine: Engine) -> Predict:
    """The prompt, then a token at a time."""
    length, element = engine.clock.prompt_tokens, next(engine.model.parameters()).element_size()

    def predict(number: int, plan: Plan, model: workload.Model, machine: Machine) -> timing.Time:
        if number == 0:
            return timing.prefill(plan, model, machine, 1, length, element)
        return timing.decode(plan, model, machine, 1, length + number, element)

    return predict


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
