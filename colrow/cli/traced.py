"""What the ranks of `run` and `train` keep for --trace: every collective, every step, and what was predicted for each step.

The prediction is for this machine as it is just now: it is calibrated (engine/calibrate.py, engine/pace.py) before the first step. Times
are those of transformers' modules, but for tokens that a program in C decodes: of those the pieces are measured too. Not here: the file
itself (report/timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..comm.collectives import gather_objects
from ..comm.counters import Span
from ..comm.group import Group
from ..engine import calibrate, pace
from ..engine.program import Program
from ..planning import workload
from ..planning.links import Machine
from ..planning.plan import Plan
from .job import Stage, Traced

Predict = Callable[[int, Plan, workload.Model, Machine], Mapping[Any, float]]
"""predict(number, plan, model, machine): the seconds of a step by its parts, which add up; numbers count from 0."""


class Watch:
    """Of one rank. Without `wanted` it does nothing."""

    def __init__(self, group: Group, wanted: bool) -> None:
        self.group, self.wanted = group, wanted
        self.machine: Machine | None = None
        self.spans: list[Span] = []

    def begin(self, program: Program | None = None) -> Iterator[Stage]:
        """A collective of all ranks. Afterwards collectives are kept. With a `program` its pace is measured as well."""
        if not self.wanted:
            return
        if self.group.device.type == "cpu":
            yield Stage("calibrate")
            mine = calibrate.measure(self.group, torch.float32 if program is None else program.dtype, 0.1)
            paced = None if program is None else pace.measure(self.group, program.dtype, 0.1, program.int8, program.compact)
            found = gather_objects((mine, paced), self.group, "trace.calibrate")
            kind, programs = self.group.transport.kind, [p for _, p in found if p is not None]
            by_program = Machine(*pace.presets(programs, kind, 0.0)) if programs else None
            self.machine = replace(Machine(*calibrate.presets([m for m, _ in found], kind, 0.0)), program=by_program)
        self.group.counters.events = []

    def step(self, name: str, seconds: float, pieces: Mapping[Any, float] | None = None) -> None:
        """A step has just ended. `pieces`: its seconds by what they were for, one after the other in the trace."""
        if self.wanted:
            span = Span(name, time.time() - seconds, seconds)
            self.spans += [span, *_parts(span, pieces or {})]

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
        for number, span in enumerate(s for s in self.spans if not s.inside):
            parts = predict(number, plan, model, machine)
            whole = Span(span.name, span.begin, sum(parts.values()))
            yield whole
            yield from _parts(whole, parts)


def _parts(whole: Span, parts: Mapping[Any, float]) -> Iterator[Span]:
    begin = whole.begin
    for part, seconds in parts.items():
        if seconds:
            yield Span(part, begin, seconds, whole.name)
            begin += seconds
