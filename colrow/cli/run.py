"""What the ranks do for `run` and `chat`. Generators; rank 0's items reach the parent (show.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..engine import pieces
from ..engine.account import Stages
from ..engine.engine import Engine
from ..engine.generate import Memory
from ..engine.program import Program
from ..engine.prompts import Message
from ..planning import timing, workload
from ..planning.links import Machine
from ..planning.plan import Plan
from ..planning.program import time as time_of_program
from .job import Account, Opening, Stage, Traced, Wish
from .opening import account_of, open_engine
from .traced import Predict, Watch


def run(group: Group, opening: Opening, prompt: str, wish: Wish) -> Iterator[Stage | str | Traced | Account]:
    """Stages of the start, then pieces of text, then the trace if one is wanted, then the account."""
    stages = Stages(seconds={"start": time.time() - opening.started})
    engine = yield from open_engine(group, opening, stages, "run", translators=True)
    yield Stage("prompt")
    watch, program = Watch(group, opening.trace), engine.decoder.program
    yield from watch.begin(program)
    with pieces.timed(program) if watch.wanted and program is not None else nullcontext() as spent:
        at = time.perf_counter()
        for number, chunk in enumerate(engine.stream([prompt], wish.sampling, wish.max_new_tokens, wish.stop, raw=wish.raw)):
            took = time.perf_counter() - at
            watch.step(f"token {number}" if number else "prompt", took, pieces.whole(spent(), took) if spent and number else None)
            at = time.perf_counter()
            yield chunk.texts[0]
    predict = _predicting(engine, program) if watch.wanted else None
    yield from watch.end(stages.results["plan"], engine.model.config, predict)
    yield account_of(engine, opening, wish.sampling, stages)


def _predicting(engine: Engine, program: Program | None) -> Predict:
    """The prompt, then a token at a time. A collective of all ranks: a token takes as long as the slowest rank's program."""
    length, element, ranks = engine.clock.prompt_tokens, next(engine.model.parameters()).element_size(), engine.group.size
    works = [pieces.work(program, length + number) for number in range(engine.clock.steps)] if program is not None else []
    every = gather_objects(works, engine.group, "trace.program")

    def predict(number: int, plan: Plan, model: workload.Model, machine: Machine) -> Mapping[Any, float]:
        if number == 0:
            return timing.prefill(plan, model, machine, 1, length, element).parts
        if program is None or machine.program is None:
            return timing.decode(plan, model, machine, 1, length + number, element).parts
        return pieces.predicted(time_of_program([own[number] for own in every], pieces.sums(program, ranks), machine.program))

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


def turn(group: Group, messages: Sequence[Message], wish: Wish, enough: Path) -> Iterator[str]:
    """The answer to the conversation, piece by piece, until a file `enough` is there. What was computed for earlier turns is kept where the
    tokens are the same."""
    (kept,) = _open
    settings = (wish.sampling, wish.max_new_tokens, wish.stop)
    for chunk in kept.engine.stream([messages], *settings, memory=kept.memory, until=enough.exists):
        yield chunk.texts[0]
