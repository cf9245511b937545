"""Collectives counted against collectives predicted from the plan: every call site, number of calls, bytes of the tensor, bytes moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ..comm.group import Group
from ..planning import cost, sequence, wire
from ..planning.inputs import DECODED, TOKENS, Example
from ..planning.plan import Plan
from ..planning.sequence import Cut
from .compare import Item
from .exercise import Questions

Site = tuple[str, str, str]  # phase, op, name
Count = tuple[int, int, int]  # calls, bytes of the logical tensors, bytes that the rank moved


def counted(group: Group) -> dict[Site, Count]:
    """What this rank has counted in phases that have a name; small objects and barriers are no tensors and are left out."""
    tallies = group.counters.sites.items()
    return {s: (t.calls, t.logical_bytes, t.moved_bytes) for s, t in tallies if s[0] and s[1] not in ("object", "barrier")}


def predicted(
    plan: Plan, asked: Questions, group: Group, dtype_bytes: int, cut: Cut | None = None, rows_of_loss: int | None = None
) -> dict[Site, Count]:
    """What this rank must count when a model that is split by `plan` answers the questions (exercise.ask), its stream cut where `cut` says,
    its loss of `rows_of_loss` rows of logits (by default all).

    Bytes moved are 0 for a transport that does not count them where they are copied.
    """
    batch, length, source = _sizes(asked.inputs)
    labelled = asked.labels is not None
    phases: list[tuple[str, cost.Phase, int, int, int, int]] = [("prefill", "prefill", batch, length, source, 1)]
    if asked.train:
        phases += [
            ("train_forward", "train_forward", batch, length, source, 1),
            ("train_backward", "train_backward", batch, length, source, 1),
        ]
    if asked.steps:
        phases.append(("decode_prompt", "prefill", *_sizes(asked.prompt), 1))
    if asked.steps > 1:
        phases.append(("decode", "decode", _sizes(asked.prompt)[0], 1, 1, asked.steps - 1))
    found: dict[Site, Count] = {}
    for name, phase, rows, columns, before, times in phases:
        whole_logits = None if labelled else True
        usual = cost.predict(plan, rows, columns, phase, dtype_bytes, whole_logits, before, labelled, rows_of_loss)
        for p in usual if cut is None else sequence.replaced(usual, plan, cut, rows, columns, phase, dtype_bytes):
            if group.rank in p.ranks:
                calls, size, moved = found.get((name, p.op, p.name), (0, 0, 0))
                more = _moved(p, group)
                found[name, p.op, p.name] = (calls + times * p.calls, size + times * p.logical_bytes, moved + times * more)
    return found


def _sizes(example: Example) -> tuple[int, int, int]:
    """Rows, length of the sequence that decoding makes longer, length of an encoder's tokens."""
    sequence, tokens = example.get(DECODED, example.get(TOKENS)), example.get(TOKENS)
    rows = len(next((x for x in (tokens, sequence) if x is not None), next(iter(example.values()))))  # a decoder may have several a row
    return rows, 0 if sequence is None else sequence.shape[1], 0 if tokens is None else tokens.shape[1]


def _moved(p: cost.Predicted, group: Group) -> int:
    kind = group.transport.kind
    if not _counts_moved(kind):
        return 0
    limit = getattr(group.transport, "one_shot_limit", wire.SHM_SLOT)
    rank, each = p.ranks.index(group.rank), p.logical_bytes // p.calls
    return p.calls * wire.moved(kind, p.op, each, rank, len(p.ranks), p.parts, p.unit, limit)  # type: ignore[arg-type]


def _counts_moved(kind: str) -> bool:
    return kind in get_args(wire.Algorithm) and kind not in wire.SENT


def count_items(expected: dict[Site, Count], found: dict[Site, Count], group: Group) -> Iterator[Item]:
    """One item a phase; its difference is the number of call sites where count and prediction disagree, its detail names the first."""
    if not _counts_moved(group.transport.kind):
        found = {site: (calls, size, 0) for site, (calls, size, _) in found.items()}
    sites = list(dict.fromkeys((*expected, *found)))
    for phase in dict.fromkeys(site[0] for site in sites):
        wrong = [s for s in sites if s[0] == phase and expected.get(s) != found.get(s)]
        calls = sum(n for s, (n, _, _) in found.items() if s[0] == phase)
        detail = _disagreement(wrong[0], expected, found) if wrong else f"{calls} calls"
        yield Item("collectives", phase, float(len(wrong)), 0.0, detail=detail)


def _disagreement(site: Site, expected: dict[Site, Count], found: dict[Site, Count]) -> str:
    def words(count: Count | None) -> str:
        return "none" if count is None else f"{count[0]} x {count[1] // max(count[0], 1):,} bytes ({count[2]:,} moved)"

    return f"{site[1]} at {site[2]}: predicted {words(expected.get(site))}, counted {words(found.get(site))}"
