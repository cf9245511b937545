"""Account: what a run cost. Memory of each rank, times, tokens per second, collectives counted beside those predicted.

Counted numbers come from comm's counters, predicted ones from planning/cost.py and, for the exchange of candidates, from exchange.py: two
sources that know nothing of each other. Not here: printing (the command line does, from these records, without importing torch).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from ..comm.group import Group

Listener = Callable[[str], None]


@dataclass
class Clock:
    """Times of one generation, on this rank: seconds since the epoch."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    gathered: int = 0  # steps after the first that needed the full logits
    anew: int = 0  # steps after the first that computed all tokens again; the model's collectives of these count as a prompt's
    begun: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def begin(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.begun = prompt_tokens, time.time()

    def step(self, tokens: int, gathered: bool = False, anew: bool = False) -> None:
        self.last = time.time()
        self.gathered += gathered and self.steps > 0
        self.anew += anew
        self.first = self.first or self.last
        self.steps, self.new_tokens = self.steps + 1, self.new_tokens + tokens

    @property
    def decode_rate(self) -> float | None:
        """Steps per second after the first (for one prompt: tokens per second); None where there was only one."""
        return (self.steps - 1) / (self.last - self.first) if self.steps > 1 and self.last > self.first else None


@dataclass
class Stages:
    """Seconds by stage of a start: `with stages("load"): ...`. `listener` hears each name as the stage begins; `results` has what the
    stages found out on the way (the plan, the gate's verdict, warnings)."""

    listener: Listener | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.listener is not None:
            self.listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank's process. `resident` counts code and libraries too; ranks that are threads share one process."""

    rank: int
    resident: int
    parameters: int


def memory(model: Any, group: Group) -> list[RankMemory]:
    """Of every rank, on every rank: a collective."""
    from ..comm.collectives import gather_objects

    mine = RankMemory(group.rank, psutil.Process(os.getpid()).memory_info().rss, parameter_bytes(model))
    return gather_objects(mine, group, "engine.account")


def parameter_bytes(model: Any) -> int:
    """Of this rank, in the form in which they are kept."""
    from ..parallel import kept

    return sum(p.numel() * p.element_size() for p in model.parameters()) + kept.nbytes(model)


@dataclass(frozen=True)
class Traffic:
    """Collectives of decoding, per step: calls and bytes of the logical tensors, and those that were predicted."""

    calls: float
    logical_bytes: float
    predicted_calls: float
    predicted_bytes: float
    differing: tuple[str, ...]  # call sites where the two disagree

    @property
    def equal(self) -> bool:
        return not self.differing


def traffic(group: Group, predicted: Sequence[tuple[str, str, int, int]], steps: int) -> Traffic | None:
    """This rank's counters of phase "decode", against `predicted` (op, name, calls, logical bytes) for all of its `steps` steps together.

    None where nothing was decoded after the first token.
    """
    if steps <= 0:
        return None
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for (phase, op, name), tally in group.counters.sites.items():
        if phase == "decode":
            counted[op, name] = tally.calls, tally.logical_bytes
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    for op, name, calls, size in predicted:
        before = expected.get((op, name), (0, 0))
        expected[op, name] = before[0] + calls, before[1] + size
    differing = [key for key in sorted(counted.keys() | expected.keys()) if counted.get(key) != expected.get(key)]
    return Traffic(
        sum(calls for calls, _ in counted.values()) / steps,
        sum(size for _, size in counted.values()) / steps,
        sum(calls for calls, _ in expected.values()) / steps,
        sum(size for _, size in expected.values()) / steps,
        tuple(f"{op} {name}" for op, name in differing),
    )
