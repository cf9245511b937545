"""Traces: every collective of every rank once, nothing overlapping, and the file that the command writes."""

from __future__ import annotations

import json
from itertools import pairwise

import torch

from colrow.comm import collectives
from colrow.comm.counters import Event
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
        mine = [e for e in entries if e["pid"] == rank and e["ph"] == "X"]
        assert [e["name"] for e in mine if e["cat"] == "moving"] == ["layers.0", "layers.1", "layers.2"]
        assert {e["cat"] for e in mine} >= {"moving", "computing"}
        assert all(e["args"]["logical_bytes"] == 16 for e in mine if e["cat"] == "moving")
        for one, other in pairwise(mine):
            assert one["ts"] >= 0
            assert one["ts"] + one["dur"] <= other["ts"] + 0.5


def test_no_ranks_no_events() -> None:
    assert json.loads(timeline([]))["traceEvents"] == []
