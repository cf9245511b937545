"""Timeline: the collectives of all ranks as a trace that Chrome (chrome://tracing) and Perfetto open: computing, waiting, moving.

What lies between two collectives of a rank is called computing: products, and all that Python does around them. Times are those of each
rank's clock; ranks of one host share it. Not here: counting (comm/counters.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..comm.counters import Event


def timeline(ranks: Sequence[Sequence[Event]]) -> str:
    """The JSON text. One process a rank, in microseconds since the first collective began."""
    begins = [e.end - e.waiting - e.moving for events in ranks for e in events]
    start = min(begins, default=0.0)
    events = [entry for rank, found in enumerate(ranks) for entry in _of_rank(rank, found, start)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _of_rank(rank: int, events: Sequence[Event], start: float) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
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


def _entry(rank: int, name: str, kind: str, begin: float, end: float, start: float, about: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * (begin - start), 3), "dur": round(1e6 * (end - begin), 3)}
    return {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": 0, **times, "args": about}
