"""What the ranks of `run` and `train` keep for --trace: every collective, every step, and what was predicted for each step.

The prediction is for this machine as it is just now: it is calibrated (engine/calibrate.py) before the first step. Times are those of
transformers' modules. Not here: the file itself (report/timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..comm.collectives import gather_objects
from ..comm.counters import Span
from ..comm.group import Group
from ..engine import calibrate
from ..planning import timing, workload
from ..planning.links import Machine
from ..planning.plan import Plan
from .job import Stage, Traced

Predict = Callable[[int, Plan, workload.Model, Machine], timing.Time]
"""predict(number, plan, model, machine): the time of a step; numbers count from 0."""


class Watch:
    """Of one rank. Without `wanted` it does nothing."""

    def __init__(self, group: Group, wanted: bool) -> None:
        self.group, self.wanted = group, wanted
        self.machine: Machine | None = None
        self.spans: list[Span] = []

    def begin(self) -> Iterator[Stage]:
        """A collective of all ranks. Afterwards collectives are kept."""
        if not self.wanted:
            return
        if self.group.device.type == "cpu":
            yield Stage("calibrate")
            mine = calibrate.measure(self.group, torch.float32, 0.1)
            self.machine = Machine(*calibrate.presets(gather_objects(mine, self.group, "trace.calibrate"), self.group.transport.kind, 0.0))
        self.group.counters.events = []

    def step(self, name: str, seconds: float) -> None:
        """A step has just ended."""
        if self.wanted:
            self.spans.append(Span(name, time.time() - seconds, seconds))

    def end(self, plan: Plan, config: object, predict: Predict | None) -> Iterator[Traced]:
        """A collective of all ranks. `predict` None: nothing can be said about these steps."""
        if not self.wanted:
            return
        mine, self.group.counters.events = tuple(self.group.counters.events or ()), None
        ranks = tuple(gather_objects(mine, self.group, "trace.events"))
        expected: tuple[Span, ...] = ()
        if predict is not None and self.machine is not None and self.group.rank == 0:
            model = workload.of_config(config)  # type: ignore[arg-type]
            expected = tuple(self._expected(plan, model, self.machine, predict))
        yield Traced(ranks, tuple(self.spans), expected)

    def _expected(self, plan: Plan, model: workload.Model, machine: Machine, predict: Predict) -> Iterator[Span]:
        """Each step's parts one after the other, from where the step began."""
        for number, span in enumerate(self.spans):
            found = predict(number, plan, model, machine)
            whole = Span(span.name, span.begin, found.total)
            yield whole
            for part, seconds in found.parts.items():
                if seconds:
                    yield replace(whole, name=part, seconds=seconds, inside=span.name)
                    whole = replace(whole, begin=whole.begin + seconds)
