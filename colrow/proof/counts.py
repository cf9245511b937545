"""Collectives counted against collectives predicted from the plan: every call site, number of calls and bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ..planning import cost
from ..planning.plan import Plan
from .compare import Item
from .exercise import Questions

Site = tuple[str, str, str]  # phase, op, name
Count = tuple[int, int]  # calls, logical bytes


def predicted(plan: Plan, asked: Questions, rank: int, dtype_bytes: int) -> dict[Site, Count]:
    """What `rank` must count when a model that is split by `plan` answers the questions (exercise.ask)."""
    batch, length = asked.ids.shape
    phases: list[tuple[str, cost.Phase, int, int, int]] = [("prefill", "prefill", batch, length, 1)]
    if asked.train:
        phases += [("train_forward", "train_forward", batch, length, 1), ("train_backward", "train_backward", batch, length, 1)]
    if asked.steps:
        phases.append(("decode_prompt", "prefill", *asked.prompt.shape, 1))
    if asked.steps > 1:
        phases.append(("decode", "decode", 1, 1, asked.steps - 1))
    found: dict[Site, Count] = {}
    for name, phase, rows, columns, times in phases:
        for p in cost.predict(plan, rows, columns, phase, dtype_bytes):
            if rank in p.ranks:
                site = (name, p.op, p.name)
                calls, size = found.get(site, (0, 0))
                found[site] = (calls + times * p.calls, size + times * p.logical_bytes)
    return found


def count_items(plan: Plan, asked: Questions, rank: int, dtype_bytes: int, counted: dict[Site, Count]) -> Iterator[Item]:
    """One item a phase; its difference is the number of call sites where count and prediction disagree, its detail names the first."""
    expected = predicted(plan, asked, rank, dtype_bytes)
    counted = {site: count for site, count in counted.items() if site[1] not in ("object", "barrier")}
    for phase in dict.fromkeys(site[0] for site in (*expected, *counted)):
        sites = [s for s in dict.fromkeys((*expected, *counted)) if s[0] == phase]
        wrong = [s for s in sites if expected.get(s, (0, 0)) != counted.get(s, (0, 0))]
        calls, size = (sum(n[i] for s, n in counted.items() if s[0] == phase) for i in (0, 1))
        detail = _disagreement(wrong[0], expected, counted) if wrong else f"{calls} calls, {size:,} bytes"
        yield Item("collectives", phase, float(len(wrong)), 0.0, detail=detail)


def _disagreement(site: Site, expected: dict[Site, Count], counted: dict[Site, Count]) -> str:
    def words(count: Count | None) -> str:
        return "none" if count is None else f"{count[0]} x {count[1] // max(count[0], 1):,} bytes"

    return f"{site[1]} at {site[2]}: predicted {words(expected.get(site))}, counted {words(counted.get(site))}"
