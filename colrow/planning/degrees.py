"""The plans of several degrees at once, quickly: what `colrow plan` compares a plan with.

Layers that are alike are planned once: a plan of two layers is stretched to the model's number, and whether that is right is checked at the
degree for which the plan of the whole model is at hand. Where layers differ, each degree is derived in full. Not here: costs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from .derive import derive
from .plan import Attention, Edit, Plan, Region, TensorPlan

SHORT = 2  # layers of the plan that is stretched
Entry = TypeVar("Entry", TensorPlan, Region, Edit, Attention)


def plans(config: PreTrainedConfig, exact: Plan, degrees: Sequence[int]) -> dict[int, Plan]:
    """A plan for each degree, `exact` (of the whole model, for equal ranks or not) among them."""
    found = {exact.ranks: exact}
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    short = shortened(config) if layers > SHORT else None
    if short is not None and (exact.weights or not same(stretch(derive(short, exact.ranks), layers), exact)):
        short = None
    for degree in degrees:
        if degree not in found:
            found[degree] = derive(config, degree) if short is None else stretch(derive(short, degree), layers)
    return dict(sorted(found.items()))


def shortened(config: PreTrainedConfig, layers: int = SHORT) -> PreTrainedConfig | None:
    """The same model with fewer layers; None where that is no valid config."""
    small = copy.deepcopy(config)
    try:
        small.num_hidden_layers = layers
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:layers]
    except (AttributeError, TypeError, ValueError):
        return None
    return small


def stretch(plan: Plan, layers: int) -> Plan:
    """The plan with its last repeated layer (number SHORT - 1) copied until there are `layers`."""
    tensors = {t.name: t for t in _stretched(list(plan.tensors.values()), layers, "name")}
    regions = tuple(_stretched(plan.regions, layers, "module"))
    edits = tuple(_stretched(plan.edits, layers, "module"))
    attention = tuple(_stretched(plan.attention, layers, "module"))
    return replace(plan, tensors=tensors, regions=regions, edits=edits, attention=attention)


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans cut the same tensors alike and move the same values, whatever their order and their words."""
    return _content(one) == _content(other)


def _content(plan: Plan) -> tuple[Any, ...]:
    tensors = {(t.name, t.shape, t.partition, t.role, t.grad) for t in plan.tensors.values()}
    regions = {replace(r, reason="") for r in plan.regions}
    return tensors, regions, {(a.module, a.query, a.kv, a.kv_of) for a in plan.attention}


def _stretched(entries: Sequence[Entry], layers: int, key: str) -> Iterator[Entry]:
    """Entries of the last layer come again right after it, once for each further layer."""
    last = [e for e in entries if _numbered(e, SHORT - 1, key)]
    for entry in entries:
        yield entry
        if last and entry is last[-1]:
            for number in range(SHORT, layers):
                yield from (_renumbered(e, number) for e in last)


def _numbered(entry: Any, number: int, key: str) -> bool:
    return re.search(rf"\.{number}(\.|$)", getattr(entry, key)) is not None


def _renumbered(entry: Entry, number: int) -> Entry:
    """The entry with its layer's number changed, in names and in words."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(rf"(?<=\.){SHORT - 1}(?=\.|:|,|\s|$)", str(number), value)
        return tuple(changed(v) for v in value) if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else value

    return replace(entry, **{key: changed(value) for key, value in vars(entry).items()})
