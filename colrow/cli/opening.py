"""Opening a model on the ranks, told stage by stage, and the account of what was done with it.

The ranks' functions are generators: what rank 0 yields goes to the parent, which alone writes to the terminal.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

from .. import api
from ..comm.group import Group
from ..engine import account, exchange
from ..engine.account import Stages
from ..engine.engine import Engine
from ..engine.settings import Sampling
from ..planning import cost
from .job import Account, Opening, Stage

T = TypeVar("T")
SECONDS = 0.1  # between two reports of one stage


def open_engine(group: Group, opening: Opening, stages: Stages, purpose: str, translators: bool = False) -> Generator[Stage, None, Engine]:
    """Yields the stages while the model is planned, proven and loaded; returns the engine."""

    def work(tell: Callable[[Stage], None]) -> Engine:
        stages.listener = lambda name: tell(Stage(name))
        return api.open_engine(
            opening.files,
            group,
            purpose,
            translators,
            plan=opening.plan,
            split=opening.split,
            dtype=opening.dtype,
            gate=opening.gate,
            stages=stages,
            progress=lambda name, done, total: tell(Stage("load", done, total)),
            adapter=opening.adapter,
            compact=opening.compact,
        )

    return (yield from told(work))


def told(work: Callable[[Callable[[Stage], None]], T]) -> Generator[Stage, None, T]:
    """Runs `work(tell)` on a thread, yields what it tells (of one stage not too often), and returns its result.

    The thread does not keep the process alive: Ctrl-C in the middle of it ends everything at once.
    """
    items: queue.SimpleQueue[Stage | None] = queue.SimpleQueue()
    outcome: Future[T] = Future()

    def target() -> None:
        try:
            outcome.set_result(work(items.put))
        except BaseException as error:  # raised again where the result is asked for
            outcome.set_exception(error)
        items.put(None)

    threading.Thread(target=target, name="opening", daemon=True).start()
    name, at = "", 0.0
    while (stage := items.get()) is not None:
        if stage.name != name or time.monotonic() - at > SECONDS:
            name, at = stage.name, time.monotonic()
            yield stage
    return outcome.result()


def account_of(engine: Engine, opening: Opening, sampling: Sampling, stages: Stages) -> Account:
    """The account of the engine's last call, which had one prompt. A collective of all ranks."""
    group, clock = engine.group, engine.clock
    steps, vocab = clock.steps - 1, engine.model.config.get_text_config().vocab_size
    element = next(engine.model.parameters()).element_size()
    of_the_model = [
        (p.op, p.name, p.calls, p.logical_bytes)
        for p in cost.predict(stages.results["plan"], 1, 1, "decode", element, whole_logits=False)
        if group.rank in p.ranks
    ]
    of_a_step = ((of_the_model, steps - clock.anew), (exchange.predicted(sampling, 1, group.size, vocab), steps))
    expected = [(op, name, times * calls, times * size) for found, times in of_a_step for op, name, calls, size in found if times > 0]
    gathers = exchange.predicted_gather(1, group.size, vocab, element)
    expected += [(op, name, clock.gathered * calls, clock.gathered * size) for op, name, calls, size in gathers if clock.gathered]
    return Account(
        memory=tuple(account.memory(engine.model, group)),
        stages=tuple(stages.seconds.items()),
        gate=str(stages.results.get("gate", "not run")),
        decoding=stages.results["decoding"],
        warnings=tuple(stages.results.get("warnings", ())),
        first_token=clock.first - opening.started,
        prefill=clock.first - clock.begun,
        prompt_tokens=clock.prompt_tokens,
        new_tokens=clock.new_tokens,
        rate=clock.decode_rate,
        gathered=clock.gathered,
        traffic=account.traffic(group, expected, steps),
    )
