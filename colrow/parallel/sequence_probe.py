"""Which parameters meet slices of the sequence: seen by running the split model on meta tensors, with and without sequence parallelism.

Shapes tell: a module with a shorter input or output works on slices, and its whole parameters then have parts of their gradient on each
rank. The same run refuses what does not fit: code that compares positions of a slice with those of the whole does not run, and attention
that the plan left whole would look along a slice. And it shows where the code puts the rows of all sequences together, as experts do: a sum
there has no sequence to be scattered along, so it is taken behind. Not here: the cut itself (sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..comm.group import Group
from ..errors import UserError
from ..planning.plan import Plan
from ..planning.record import THROUGH_INTERFACE, record
from ..planning.sequence import with_partial_gradients
from ..planning.trace import Op, Trace, empty_model
from .borders import awaited
from .sequence import Mode, Sequence
from .sites import Silent, at_present

WORKS = "training without sequence parallelism"
RESHAPES = ("view", "_unsafe_view", "reshape")


def suited(model: Any, plan: Plan, split: Callable[[nn.Module, Plan, Mode], nn.Module]) -> Plan:
    """The plan as sequence parallelism needs it. `split(model, plan, mode)` splits a model on meta for rank 0."""
    _check_attention(model, plan)
    before = _run(split(at_present(model), plan, "off"), model)
    plan = _behind_reshapes(plan, before)
    part: Any = split(at_present(model), plan, "keep")
    found = _waiting(plan, part.colrow.sequence)
    plain, sliced = _shapes(before), _shapes(_run(part, model))
    if plain.keys() != sliced.keys() or plain[""] != sliced[""]:
        raise UserError("sequence parallelism changes what the model computes", type(model).__name__, WORKS)
    for entry in plan.tensors.values():
        path = entry.name.rpartition(".")[0]
        while path and path not in plain:  # a plain attribute of a module that is not called by itself
            path = path.rpartition(".")[0]
        if entry.partition.is_whole and plain.get(path) != sliced.get(path):
            found.add(entry.name)
    return with_partial_gradients(plan, found)


def _waiting(plan: Plan, sequence: Sequence | None) -> set[str]:
    """Biases that wait beside a partial sum (pending.py) until it is scattered, and are then added to slices."""
    found = set()
    for region in plan.regions:
        if region.op == "hold" and sequence is not None and awaited(plan, region) in sequence.cut.regions:
            found |= {f"{region.module}.bias"} & plan.tensors.keys()
    return found


def _run(part: Any, model: Any) -> Trace:
    try:
        return record(part, bypasses=True)
    except Exception as error:
        raise UserError(f"sequence parallelism does not fit {type(model).__name__}", str(error).split("\n")[0], WORKS) from error


def _shapes(found: Trace) -> dict[str, list[tuple[int, ...]]]:
    """Of each module's inputs and outputs, call by call. Outputs are seen after a gather behind them, inputs after one before them."""
    out: dict[str, list[tuple[int, ...]]] = {}
    for call in found.calls:
        out.setdefault(call.module, []).extend(found.values[value].shape for value in (*call.inputs.values(), *call.outputs.values()))
    return out


def _behind_reshapes(plan: Plan, found: Trace) -> Plan:
    """Sums of rows of all sequences together that are only put in order afterwards (experts) are taken behind that: there the sequence has
    a dim of its own again. The place of a sum among reshapes does not matter."""
    borders = {value: (call.module, key) for call in found.calls for key, value in call.outputs.items()}
    made = {(call.module, key): value for call in found.calls for key, value in call.outputs.items()}
    readers: dict[int, list[Op]] = {}
    for op in found.ops:
        for read in op.inputs() if op.name != "detach" else ():  # that is the collective itself
            readers.setdefault(read, []).append(op)
    regions = []
    for region in plan.regions:
        rows = made.get((region.module, region.arg)) if region.op == "reduce" and region.place == "output" else None
        value = rows
        while value is not None and len(found.values[value].shape) == 2:
            ops = readers.get(value, [])
            value = ops[0].outputs[0] if len(ops) == 1 and ops[0].name in RESHAPES else None
        if value is not None and value != rows and value in borders:
            module, arg = borders[value]
            region = replace(region, module=module, arg=arg)
        regions.append(region)
    names = {old.name: new.name for old, new in zip(plan.regions, regions, strict=True) if old.op == "reduce"}
    return replace(plan, regions=tuple(replace(r, shares=names.get(r.shares, r.shares)) if r.op == "hold" else r for r in regions))


def _check_attention(model: Any, plan: Plan) -> None:
    """UserError where the model attends in a module that the plan leaves whole, or bypasses transformers' attention interface."""
    try:
        attends = {call.module for call in record(empty_model(model.config, THROUGH_INTERFACE), bypasses=False).attention}
    except Exception:
        attends = set()
    whole = sorted(attends - {heads.module for heads in plan.attention})
    if not attends or whole:
        what = "sequence parallelism needs attention that is split by heads, through transformers' interface"
        raise UserError(what, whole[0] if whole else type(model).__name__, WORKS)


def lone(group: Group) -> Group:
    """Rank 0 of as many ranks, which says nothing to anyone."""
    return Group(0, group.size, Silent(0))
