"""Constants of a model's code with entries for all indices of a cut axis: which need nothing, and where a slice of them enters a module.

A mask filled with one number is made smaller by a smaller size. ALiBi's slopes are not: they differ from head to head, so every rank makes
all of them and takes its own where they enter an attention.
"""

from __future__ import annotations

import torch

from .factors import Node
from .flow import Flow
from .graph import Border, Graph
from .rules import COPIES, FOLLOWED
from .trace import Op

FACTORIES = ("zeros", "ones", "full", "empty")  # the same number everywhere


def alike(graph: Graph, chosen: frozenset[Node], value: int) -> bool:
    """A constant that is the same at every index of the cut axes: made of a size, so a slice of it is made by a smaller size."""
    if not graph.leaves[value] & chosen:
        return True
    made = graph.producer[value]
    if made is None:
        return False
    op = graph.op(made)
    if op.name in (*COPIES, *FOLLOWED, "slice"):  # what an expansion adds is the same all along
        return alike(graph, chosen, graph.inputs[made][0])
    return op.name in FACTORIES or (torch.Tag.pointwise in op.func.tags and all(alike(graph, chosen, v) for v in graph.inputs[made]))


def buffers(graph: Graph, chosen: frozenset[Node], value: int) -> set[int] | None:
    """The buffers from which a constant gets its entries for the cut axes, where their own modules use them, and what is made of them, on
    these axes only (a bias of the logits, multipliers of features, decays of heads): a rank holds its part. None where that is not so."""
    name, made = graph.trace.values[value].name, graph.producer[value]
    users = [graph.op(i) for i in graph.consumers[value]]
    if not all(any(graph.leaves[o] & chosen for o in user.outputs if o >= 0) for user in users):
        return None
    if name:
        return {value} if all(graph.trace.module_of(user) == name.rpartition(".")[0] for user in users) else None
    if made is None or not _entry_by_entry(graph.op(made)):
        return None
    found = [buffers(graph, chosen, v) for v in graph.inputs[made] if not alike(graph, chosen, v)]
    return set().union(*(f for f in found if f)) if found and None not in found else None


def _entry_by_entry(op: Op) -> bool:
    """An op through which axes are followed in constants: a slice of what it makes is made of slices."""
    return op.name in (*COPIES, *FOLLOWED, "slice") or torch.Tag.pointwise in op.func.tags


def entrance(graph: Graph, chosen: frozenset[Node], value: int, op: Op) -> Border | None:
    """Where a constant that `op` takes, or what it is made of, enters a module in which it is used on the cut axes only: there a slice of
    it enters instead (ALiBi's slopes)."""
    at = value
    while True:
        calls = [b for b in graph.entering[at] if graph.inside(op.index, graph.trace.calls[b.call])]
        for border in sorted(calls, key=lambda b: -graph.trace.calls[b.call].first):
            call = graph.trace.calls[border.call]
            users = (graph.op(i) for i in graph.consumers[at] if graph.inside(i, call))
            if all(any(graph.leaves[o] & chosen for o in user.outputs if o >= 0) for user in users):
                return border
        made = graph.producer[at]
        sources = [v for v in graph.inputs[made] if graph.leaves[v] & chosen] if made is not None else []
        if len(sources) != 1 or not graph.trace.values[sources[0]].constant:
            return None
        at = sources[0]


def whole_constants(graph: Graph, flow: Flow) -> set[int]:
    """Constants with cut axes that every rank makes whole all the same: slices of them are taken where they enter a module."""
    inside = [graph.trace.calls[call] for call, _ in flow.sliced]
    found = {v for leaf in flow.chosen for v in graph.values_with(leaf) if graph.trace.values[v].constant} if inside else set()
    made = {v: graph.producer[v] for v in found}
    return {
        v
        for v, op in made.items()
        if not alike(graph, flow.chosen, v) and not any(op is not None and graph.inside(op, call) for call in inside)
    }
