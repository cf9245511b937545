"""The structure of a plan: what remains of it when sizes and the number of equal layers are left out.

Two plans of equal structure make the applier do the same things: the same roles and cuts in each kind of layer, the same regions, edits and
head maps. Head counts are part of it, widths are not.
"""

from __future__ import annotations

import re
from typing import Any

from ..partition import Partition
from ..planning.plan import Plan
from .probe import numbered

Entry = tuple[Any, ...]
Structure = frozenset[tuple[str, frozenset[Entry]]]
"""(list of layers, what one kind of its layers has); ("", ...) is what lies outside of layers."""


def structure(plan: Plan) -> Structure:
    return frozenset((stem, entries) for (stem, _), entries in _layers(plan).items())


def layer_kinds(plan: Plan) -> dict[int, frozenset[tuple[str, frozenset[Entry]]]]:
    """By layer number, what the plan has for the layers of that number (of all lists of layers)."""
    found: dict[int, set[tuple[str, frozenset[Entry]]]] = {}
    for (stem, number), entries in _layers(plan).items():
        if number >= 0:
            found.setdefault(number, set()).add((stem, entries))
    return {number: frozenset(kinds) for number, kinds in found.items()}


def _layers(plan: Plan) -> dict[tuple[str, int], frozenset[Entry]]:
    found: dict[tuple[str, int], set[Entry]] = {}

    def add(name: str, what: str, *entry: Any) -> None:
        stem, number, rest = numbered(name)
        found.setdefault((stem, number), set()).add((what, rest, *entry))

    for t in plan.tensors.values():
        add(t.name, "tensor", t.role, t.grad, cut(t.partition), len(t.shape), t.aliases, tuple(dict.fromkeys(map(_anonymous, t.path))))
    for r in plan.regions:
        add(f"{r.module}.", "region", r.place, r.arg, r.op, cut(r.partition), r.ranks, r.dtype, len(r.shape))
    for e in plan.edits:
        add(f"{e.module}.", "edit", e.attribute, len(set(e.values)) > 1, e.values == (e.whole,) * plan.ranks)
    for a in plan.attention:
        add(f"{a.module}.", "attention", a.query, a.kv, a.kv_of)
    return {layer: frozenset(entries) for layer, entries in found.items()}


def cut(partition: Partition | None) -> Entry:
    """A partition without sizes: the dim, which ranks hold each stretch in turn, and whether all ranks hold equally much."""
    if partition is None or partition.is_whole:
        return ()
    sizes = {partition.local_size(r) for r in range(partition.ranks)}
    return (partition.dim, tuple(s.ranks for s in partition.segments()), len(sizes) == 1)


def _anonymous(text: str) -> str:
    """Without layer numbers."""
    return re.sub(r"\.\d+\b", ".N", text)
