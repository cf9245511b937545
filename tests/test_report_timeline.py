"""Traces: every collective of every rank once, nothing overlapping, and the file that the command writes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from colrow.comm import collectives
from colrow.comm.counters import Event, Span
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.report.timeline import timeline


def ranks() -> list[tuple[Event, ...]]:
    def rank(group: Group) -> tuple[Event, ...]:
        collectives.all_reduce(torch.ones(4), group, "unseen")
        group.counters.events = []
        for number in range(3):
            collectives.all_reduce(torch.ones(4), group, f"layers.{number}")
        return tuple(group.counters.events)

    return run_threads(rank, 2)


def test_every_collective_is_there_once_and_nothing_overlaps() -> None:
    entries = json.loads(timeline(ranks()))["traceEvents"]
    for rank in range(2):
        mine = [e for e in entries if e["pid"] == rank and e["ph"] == "X" and e["tid"] == 1]
        assert [e["name"] for e in mine if e["cat"] == "moving"] == ["layers.0", "layers.1", "layers.2"]
        assert {e["cat"] for e in mine} >= {"moving", "computing"}
        assert all(e["args"]["logical_bytes"] == 16 for e in mine if e["cat"] == "moving")
        for one, other in pairwise(mine):
            assert one["ts"] >= 0
            assert one["ts"] + one["dur"] <= other["ts"] + 0.5


def test_no_ranks_no_events() -> None:
    assert json.loads(timeline([]))["traceEvents"] == []


def test_steps_and_what_was_predicted_stand_side_by_side() -> None:
    events = ranks()
    begin = events[0][0].end - 1.0
    steps = [Span("prompt", begin, 0.4), Span("token 1", begin + 0.5, 0.2)]
    predicted = [Span("prompt", begin, 0.3), Span("reading", begin, 0.1, "prompt"), Span("latency", begin + 0.1, 0.2, "prompt")]
    entries = [e for e in json.loads(timeline(events, steps, predicted))["traceEvents"] if e["ph"] == "X"]
    measured = [e for e in entries if e["cat"] == "step" and e["pid"] == 0]
    assert [e["name"] for e in measured] == ["prompt", "token 1"]
    assert [n for e in measured for n in (e["ts"], e["dur"])] == pytest.approx([0, 4e5, 5e5, 2e5], abs=1)  # seconds since 1970 in 53 bits
    beside = [e for e in entries if e["pid"] == 2]
    assert beside[0]["args"] == {"measured_ms": 400.0, "predicted_ms": 300.0}
    assert [e["name"] for e in beside if e["cat"] == "part"] == ["reading", "latency"]
    assert sum(e["dur"] for e in beside if e["cat"] == "part") == pytest.approx(beside[0]["dur"], abs=1)
    assert min(e["ts"] for e in entries) == 0.0
