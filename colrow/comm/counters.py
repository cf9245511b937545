"""What was communicated: ops, bytes of the logical tensor, bytes this rank moved, seconds waiting and seconds moving, per call site.

Filled by `collectives.py` and nobody else. `Counters` can be switched by phase ("forward", "backward", ...) so that a run can be compared
with a prediction. Not here: the formulas that predict (planning/cost.py); these numbers are counted where bytes are copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Sums over the calls of one op at one call site."""

    calls: int = 0
    logical_bytes: int = 0  # of the tensor as the reader of the model sees it
    moved_bytes: int = 0  # that this rank copied to or from where other ranks read or write
    waiting: float = 0.0  # seconds until the slowest rank arrived
    moving: float = 0.0  # seconds of copying and adding

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.logical_bytes += other.logical_bytes
        self.moved_bytes += other.moved_bytes
        self.waiting += other.waiting
        self.moving += other.moving


@dataclass(frozen=True)
class Event:
    """One collective of a rank. `end` in seconds since the epoch, so that ranks of one host can be put side by side."""

    phase: str
    op: str
    name: str
    end: float
    waiting: float
    moving: float
    logical_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class Span:
    """A step, or a part of one named `inside`: from `begin`, seconds since the epoch."""

    name: str
    begin: float
    seconds: float
    inside: str = ""


@dataclass
class Counters:
    """`sites[(phase, op, name)]` -> Tally. `phase` is whatever the caller set last. `events`: None, or a list that gets every single call
    (for traces: it grows without bound). `watch`: None, or a function that is told of each collective, with its tensor, and gives a context
    to run it in (who records a model's ops must see its sums, and not what a transport does)."""

    phase: str = ""
    sites: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    events: list[Event] | None = None
    watch: Callable[[Any, Any], AbstractContextManager[None]] | None = None

    def record(self, op: str, name: str, tally: Tally, ended: float | None = None) -> None:
        """`ended`: when, in seconds since the epoch; None: now."""
        if self.events is not None:
            times = (ended or time.time(), tally.waiting, tally.moving)
            self.events.append(Event(self.phase, op, name, *times, tally.logical_bytes, tally.moved_bytes))
        self.sites.setdefault((self.phase, op, name), Tally()).add(tally)

    def reset(self) -> None:
        self.sites.clear()

    def total(self, op: str | None = None, phase: str | None = None) -> Tally:
        """Sum over call sites, of one op and one phase or of all."""
        out = Tally()
        for (at_phase, at_op, _), tally in self.sites.items():
            if op in (None, at_op) and phase in (None, at_phase):
                out.add(tally)
        return out
