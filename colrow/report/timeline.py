"""Timeline: steps and collectives of all ranks as a trace that Chrome (chrome://tracing) and Perfetto open: computing, waiting, moving;
beside them the steps as they were predicted. Parts of a step that were measured stand below it, one after the other, as sums of them have
no other place.

What lies between two collectives of a rank is called computing: products, and all that Python does around them. Times are those of each
rank's clock; ranks of one host share it. Not here: counting (comm/counters.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..comm.counters import Event, Span


def timeline(ranks: Sequence[Sequence[Event]], steps: Sequence[Span] = (), predicted: Sequence[Span] = ()) -> str:
    """The JSON text, in microseconds since the first step or collective began. One process a rank; `steps` stand above the collectives of
    the first rank, `predicted` ones, with their parts below them, in a process of their own."""
    begins = [e.end - e.waiting - e.moving for events in ranks for e in events] + [s.begin for s in steps]
    start = min(begins, default=0.0)
    events = [entry for rank, found in enumerate(ranks) for entry in _of_rank(rank, found, start)]
    if steps:
        events += [_named("thread_name", 0, "steps", STEPS), *(_span(0, s, start, {}, PIECES) for s in steps)]
        if any(s.inside for s in steps):
            events.append(_named("thread_name", 0, "parts of steps", PIECES))
    if predicted:
        events.append(_named("process_name", len(ranks), "predicted"))
        took = {(s.inside, s.name): s.seconds for s in steps}
        for s in predicted:
            measured = took.get((s.inside, s.name))
            about = {} if measured is None else {"measured_ms": round(1e3 * measured, 3), "predicted_ms": round(1e3 * s.seconds, 3)}
            events.append(_span(len(ranks), s, start, about, PARTS))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


STEPS, COLLECTIVES, PARTS, PIECES = 0, 1, 1, 2


def _named(what: str, process: int, name: str, thread: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(process: int, s: Span, start: float, about: dict[str, Any], below: int) -> dict[str, Any]:
    kind, thread = ("part" if below == PARTS else "piece", below) if s.inside else ("step", STEPS)
    return _entry(process, s.name, kind, s.begin, s.begin + s.seconds, start, about, thread)


def _of_rank(rank: int, events: Sequence[Event], start: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", rank, f"rank {rank}")
    yield _named("thread_name", rank, "collectives", COLLECTIVES)
    before: float | None = None
    for e in events:
        begin = e.end - e.waiting - e.moving
        if before is not None and begin > before:
            yield _entry(rank, "computing", "computing", before, begin, start, {"phase": e.phase, "before": e.name})
        about = {"phase": e.phase, "op": e.op, "logical_bytes": e.logical_bytes, "moved_bytes": e.moved_bytes}
        if e.waiting > 0:
            yield _entry(rank, f"waiting for {e.name}", "waiting", begin, begin + e.waiting, start, about)
        yield _entry(rank, e.name, "moving", e.end - e.moving, e.end, start, about)
        before = e.end


def _entry(
    process: int, name: str, kind: str, begin: float, end: float, start: float, about: dict[str, Any], thread: int = COLLECTIVES
) -> dict[str, Any]:
    times = {"ts": round(1e6 * (begin - start), 3), "dur": round(1e6 * (end - begin), 3)}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times, "args": about}
