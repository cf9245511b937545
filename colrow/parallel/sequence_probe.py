"""Which parameters meet slices of the sequence: seen by running the split model on meta tensors, with and without sequence parallelism.

Shapes tell: a module with a shorter input or output works on slices, and its whole parameters then have parts of their gradient on each
rank. The same run refuses what does not fit: code that compares positions of a slice with those of the whole does not run, and attention
that the plan left whole would look along a slice. Not here: the cut itself (sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..comm.group import Group
from ..errors import UserError
from ..planning.plan import Plan
from ..planning.record import THROUGH_INTERFACE, record
from ..planning.trace import Trace, empty_model
from .sequence import Mode
from .sites import Silent, at_present

WORKS = "training without sequence parallelism"


def partial_parameters(model: Any, plan: Plan, split: Callable[[nn.Module, Mode], nn.Module]) -> set[str]:
    """Names of the plan's whole parameters that are used on slices. `split(model, mode)` splits one on meta for rank 0."""
    _check_attention(model, plan)
    plain = _shapes(split(at_present(model), "off"), model)
    sliced = _shapes(split(at_present(model), "keep"), model)
    if plain.keys() != sliced.keys() or plain[""] != sliced[""]:
        raise UserError("sequence parallelism changes what the model computes", type(model).__name__, WORKS)
    found = set()
    for entry in plan.tensors.values():
        path = entry.name.rpartition(".")[0]
        while path and path not in plain:  # a plain attribute of a module that is not called by itself
            path = path.rpartition(".")[0]
        if entry.partition.is_whole and plain.get(path) != sliced.get(path):
            found.add(entry.name)
    return found


def _shapes(part: Any, model: Any) -> dict[str, list[tuple[int, ...]]]:
    """Of each module's inputs and outputs, call by call. Outputs are seen after a gather behind them, inputs after one before them."""
    try:
        found: Trace = record(part, bypasses=True)
    except Exception as error:
        raise UserError(f"sequence parallelism does not fit {type(model).__name__}", str(error).split("\n")[0], WORKS) from error
    out: dict[str, list[tuple[int, ...]]] = {}
    for call in found.calls:
        out.setdefault(call.module, []).extend(found.values[value].shape for value in (*call.inputs.values(), *call.outputs.values()))
    return out


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
