"""Sequence parallelism as the plan says it: where the residual stream is cut along the sequence, and the collectives that this makes.

Inside the blocks each `reduce` of the stream becomes a reduce-scatter and each `copy` an all-gather, and the other way round backward; a
norm or a bias that meets slices has a part of its gradient on each rank (Korthikanti et al., arXiv:2205.05198, section 4.2.2). Predictions
agree with what is counted to the byte, uneven slices included. Not here: doing it (parallel/sequence.py), and finding out which parameters
meet slices, which needs the split model (parallel/sequence_probe.py); `assumed` is a plan that guesses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..partition import balance
from . import cost
from .cost import Phase, Predicted
from .plan import Plan, Region


@dataclass(frozen=True)
class Cut:
    """`regions`: those of the stream. It is cut at the input of `first`, and made whole at the output of `last` ("": a copy does that).

    `again`: what was gathered forward is not kept but gathered once more backward, where anything would keep it.
    """

    regions: frozenset[Region]
    first: str
    last: str
    again: bool


def cut(plan: Plan, again: bool = True) -> Cut | None:
    """None where attention or MLP of the plan's blocks are not split, or their streams are not of one shape."""
    blocks = _blocks(plan)
    stream = {
        r
        for r in plan.regions
        if r.op in ("copy", "reduce") and r.shape[:2] == ("B", "S") and len(r.shape) == 3 and not (r.ranks or r.further)
    }
    before = ("reduce", "input", blocks[0] if blocks else "")  # of tokens and positions
    inside = {r for r in stream if _block(r.module) in blocks and (r.op, r.place, r.module) != before}
    if not inside or not plan.attention or len({r.shape for r in inside}) > 1:
        return None
    behind = max(i for i, r in enumerate(plan.regions) if r in inside)  # a copy before the first block is of a stream that is not cut yet
    after = {r for r in plan.regions[behind:] if r in stream and r.op == "copy" and not _block(r.module)}
    return Cut(frozenset(inside | after), blocks[0], "" if after else blocks[-1], again)


def with_partial_gradients(plan: Plan, names: set[str]) -> Plan:
    """The plan in which those whole parameters have parts of their gradient on each rank."""
    return replace(plan, tensors={n: replace(t, grad="partial") if n in names else t for n, t in plan.tensors.items()})


def assumed(plan: Plan, at: Cut) -> Plan:
    """The plan whose whole parameters in blocks, and in the module whose output ends the cut, have partial gradients."""
    end = {r.module for r in at.regions if not _block(r.module)}
    names = {t.name for t in plan.tensors.values() if t.partition.is_whole and (cost.block_of(t.name) or t.name.rpartition(".")[0] in end)}
    return with_partial_gradients(plan, names)


def predict(plan: Plan, at: Cut, batch: int, seq: int, phase: Phase, dtype_bytes: int = 2) -> list[Predicted]:
    """As cost.predict, with the stream cut in training. `plan`: with the partial gradients of its norms and biases."""
    return replaced(cost.predict(plan, batch, seq, phase, dtype_bytes), plan, at, batch, seq, phase, dtype_bytes)


def replaced(found: list[Predicted], plan: Plan, at: Cut, batch: int, seq: int, phase: Phase, dtype_bytes: int) -> list[Predicted]:
    """What cost.predict has found, with the stream's collectives in training replaced by those of its slices."""
    if phase not in cost.STEP or plan.ranks == 1:
        return found
    names = {f"{r.name}{end}" for r in at.regions for end in ("", ".grad")}
    out = [p for p in found if p.name not in names]
    stream = next(r for r in plan.regions if r in at.regions)
    for op, name, region in _forward(plan, at, stream) if phase == "train_forward" else _backward(plan, at, stream):
        size, unit = cost.size_of(region, {"B": batch, "S": seq}, dtype_bytes)
        parts = tuple((stop - start) * (size // seq) for start, stop in balance(seq, plan.ranks))
        out.append(Predicted(op, name, 1, size, tuple(range(plan.ranks)), parts, unit))
    return out


def _forward(plan: Plan, at: Cut, stream: Region) -> Iterator[tuple[str, str, Region]]:
    for region in _own(plan, at):
        yield "reduce_scatter" if region.op == "reduce" else "all_gather", region.name, region
    if at.last:
        yield "all_gather", f"{at.last}.output.sequence", stream


def _backward(plan: Plan, at: Cut, stream: Region) -> Iterator[tuple[str, str, Region]]:
    for region in _own(plan, at):
        yield "all_gather" if region.op == "reduce" else "reduce_scatter", f"{region.name}.grad", region
        if at.again and region.op == "copy" and region.kept:
            yield "all_gather", f"{region.name}.again", region
    yield "all_gather", f"{at.first}.input.sequence.grad", stream


def _own(plan: Plan, at: Cut) -> Iterator[Region]:
    """The cut's regions in the plan's order; of those that share one copy the first. One before the cut shares nothing with them."""
    names = {r.name for r in at.regions}
    return (r for r in plan.regions if r in at.regions and r.shares not in names)


def _block(module: str) -> str:
    """The repeated block that a module is or lies in; "" for none."""
    return cost.block_of(f"{module}.")


def _blocks(plan: Plan) -> list[str]:
    return list(dict.fromkeys(block for t in plan.tensors.values() if (block := cost.block_of(t.name))))
