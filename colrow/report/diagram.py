"""The block as a diagram: for each split axis a row of boxes on every rank, from whole through slice and partial to whole again, with f
and g where they stand. Built from the plan alone: tensors that share an axis have the same path, and that is all that is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..partition import Partition
from ..planning import cost
from ..planning.plan import Attention, Plan, Region, TensorPlan
from ..planning.why import copy_before
from .html import Safe, join, size, tag

SHOWN = 8  # ranks that are drawn; of more the first ones and the last


@dataclass(frozen=True)
class Axis:
    """One split axis of a layer: made in `made` (column-parallel), touched by `work`, summed away in `summed` (row-parallel)."""

    made: tuple[TensorPlan, ...]
    work: tuple[str, ...]
    summed: tuple[TensorPlan, ...]
    f: Region | None
    g: Region | None
    heads: Attention | None

    @property
    def title(self) -> str:
        modules = dict.fromkeys(t.name.rsplit(".", 2)[-2] for t in (*self.made, *self.summed) if len(t.shape) > 1)
        return ", ".join(modules)


def layer(plan: Plan) -> str:
    """The first layer of the kind that most layers are of: "model.layers.0"; "" where nothing is split."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    blocks: dict[str, list[object]] = {}
    for t in plan.tensors.values():
        if block := cost.block_of(t.name):
            blocks.setdefault(block, []).append((t.name.removeprefix(block), t.role, t.shape))
    for name, content in blocks.items():
        kinds.setdefault(tuple(content), []).append(name)
    return max(kinds.values(), key=len)[0] if kinds else ""


def axes(plan: Plan, block: str) -> list[Axis]:
    """The axes that are made and summed away inside a layer, in the order in which they are computed."""
    groups: dict[tuple[str, ...], list[TensorPlan]] = {}
    for t in plan.tensors.values():
        if t.name.startswith(f"{block}.") and t.path and t.partition.dim is not None:
            groups.setdefault(t.path, []).append(t)
    out = []
    for path, members in groups.items():
        summed = tuple(t for t in members if t.role == "row")
        made = tuple(t for t in members if t.role != "row")
        ends = {t.name.rpartition(".")[0] for t in summed}
        g = next((r for r in plan.regions if r.op == "reduce" and any(end == r.module for end in ends)), None)
        g = g or next(
            (r for r in plan.regions if r.op == "reduce" and r.module and any(end.startswith(f"{r.module}.") for end in ends)), None
        )
        f = next((found for t in made if (found := copy_before(plan, t))), None)
        makers = {t.name.rpartition(".")[0] for t in members if len(t.shape) > 1}
        work = dict.fromkeys(op for where, op in (step.split(": ") for step in path) if where not in makers)
        heads = next((a for a in plan.attention if any(t.name.startswith(f"{a.module}.") for t in members)), None)
        out.append(Axis(made, tuple(work), summed, f, g, heads))
    return out


def block(plan: Plan, batch: int, seq: int, dtype_bytes: int) -> Safe:
    """The diagram of one layer, forward and backward, with the bytes of `batch` x `seq` tokens."""
    name = layer(plan)
    found = [a for a in axes(plan, name) if a.summed] if name else []
    if plan.ranks == 1 or not found:
        return tag("p", "Nothing is split: every rank computes the whole block.", class_="quiet")
    out = [tag("p", join("Layer ", tag("code", name), f", {batch} x {seq:,} tokens. "), class_="quiet")]
    out += [_axis(plan, a, batch, seq, dtype_bytes) for a in found]
    return tag("div", *out, class_="diagram")


def _axis(plan: Plan, axis: Axis, batch: int, seq: int, dtype_bytes: int) -> Safe:
    shown = list(range(plan.ranks)) if plan.ranks <= SHOWN else [*range(SHOWN - 2), plan.ranks - 1]
    rows = len(shown) + (plan.ranks > SHOWN)
    wide = next((r.shape[-1] for r in (axis.f, axis.g) if r is not None), max(axis.summed[0].shape))
    whole = f"[{batch}, {seq}, {wide}]"
    makers = [t for t in axis.made if len(t.shape) > 1] or list(axis.made)
    head = ("input", "f", "each rank's", "column-parallel", "on the rank", "row-parallel", "each rank's", "g", "output")
    cells = [tag("div", text, class_=f"head c{i}") for i, text in enumerate(head)]
    for line, rank in enumerate(shown, 2):
        row = f"grid-row:{line + (plan.ranks > SHOWN and rank == plan.ranks - 1)}"
        width = sum(t.partition.local_size(rank) for t in axis.summed[:1])
        cells += [
            tag("div", tag("b", f"rank {rank}"), tag("small", whole), class_="box whole c0", style=row),
            *_turns("whole", "partial", "X", "part of dX", "c2", row),
            tag("div", *(_matrix(t, rank) for t in makers), class_="box slice c3", style=row),
            tag("div", *_work(axis, rank), tag("small", f"[{batch}, {seq}, {width}]"), class_="box slice c4", style=row),
            tag("div", *(_matrix(t, rank) for t in axis.summed if len(t.shape) > 1), class_="box slice c5", style=row),
            *_turns("partial", "whole", "summand", "dO", "c6", row),
            tag("div", tag("b", "whole"), tag("small", whole), class_="box whole c8", style=row),
        ]
    if plan.ranks > SHOWN:
        cells.append(tag("div", f"... {plan.ranks - SHOWN + 1} more ranks", class_="more", style=f"grid-row:{SHOWN}"))
    span = f"grid-row:2 / span {rows}"
    cells.append(_bar("f", axis.f, plan, batch, seq, dtype_bytes, span))
    cells.append(_bar("g", axis.g, plan, batch, seq, dtype_bytes, span))
    grid = tag("div", *cells, class_="lanes")
    return tag("section", tag("h3", axis.title), tag("div", grid, class_="scroll"), class_="axis")


def _turns(forward: str, backward: str, value: str, gradient: str, column: str, row: str) -> list[Safe]:
    """The state of a value, and of its gradient, in one cell: one of them is shown."""
    return [
        tag("div", tag("b", state), tag("small", what), class_=f"box {state} {column} {way}", style=row)
        for way, state, what in (("forward", forward, value), ("backward", backward, gradient))
    ]


def _bar(which: str, region: Region | None, plan: Plan, batch: int, seq: int, dtype_bytes: int, span: str) -> Safe:
    """The collective across all ranks, in the direction in which it happens; the other direction is the identity."""
    phase: cost.Phase = "train_backward" if which == "f" else "train_forward"
    wanted = "" if region is None else region.name + (".grad" if which == "f" else "")
    found = next((p for p in cost.predict(plan, batch, seq, phase, dtype_bytes) if p.name == wanted), None)
    kind = f"bar-{which} c{1 if which == 'f' else 7}"
    if found is None:
        return tag("div", tag("b", which), tag("small", "none here"), class_=f"across {kind} idle", style=span)
    busy = join(tag("b", "all-reduce"), tag("small", f"{size(found.logical_bytes)}, ring sends {size(found.moved_bytes('ring'))}"))
    idle = join(tag("b", which), tag("small", "identity"))
    forward, backward = (idle, busy) if which == "f" else (busy, idle)
    where = f"{region.name}: {region.reason}" if region else ""
    words = (tag("div", forward, class_="forward"), tag("div", backward, class_="backward"))
    return tag("div", *words, class_=f"across {kind}", style=span, title=where)


def _matrix(t: TensorPlan, rank: int) -> Safe:
    """A weight's name, the rank's shape and where its part lies in the whole."""
    local = "x".join(map(str, t.partition.local_shape(t.shape, rank)))
    name = t.name.rsplit(".", 2)[-2] if t.name.endswith((".weight", ".bias")) else t.name.rsplit(".", 1)[-1]
    return tag("div", tag("b", name), tag("small", local), strip(t.partition, rank), class_="matrix", title=t.reason)


def strip(partition: Partition, rank: int) -> Safe:
    """The cut axis as a thin line with the rank's ranges on it."""
    whole = partition.size or 1
    marks = [
        tag("rect", x=f"{100 * a / whole:.2f}", width=f"{100 * (b - a) / whole:.2f}", y=0, height=4) for a, b in partition.pieces[rank]
    ]
    return tag(
        "svg", *marks, viewBox="0 0 100 4", preserveAspectRatio="none", class_="strip", role="img", aria_label=f"part of rank {rank}"
    )


def _work(axis: Axis, rank: int) -> Sequence[Safe]:
    if axis.heads is not None:
        q, kv = axis.heads.query.local_size(rank), axis.heads.kv.local_size(rank)
        return [tag("b", "attention"), tag("small", f"{q} query, {kv} KV head{'s' * (kv != 1)}")]
    plain = [w for w in axis.work if w not in ("mm", "bmm", "view", "t")]
    return [tag("b", ", ".join(plain[:3]) or "nothing")]
