"""The trail of a forward pass: what went into and came out of every module, in order, and where two trails part first.

Used only after a comparison has failed. On a rank a tensor may be whole, a slice or a partial sum; which of them it is is not asked of the
applier, whose word is in doubt, but tried: all ranks equal to the whole; side by side they are the whole, cut as some partition of the plan
cuts; added up they are the whole, except where the plan has them added up already. The first tensor that is none of these is the finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..parallel.pending import Pending
from ..partition import Partition
from ..planning.plan import Plan
from .compare import difference

Key = tuple[str, str, int, str]
"""Module, "input" or "output", number of the call, which tensor of the arguments or results."""

Trail = dict[Key, torch.Tensor]
"""In the order in which they were seen."""


@contextmanager
def recording(model: nn.Module) -> Iterator[Trail]:
    """Fills the trail with copies of all floating tensors that enter and leave modules. Hooks that the model has already run before
    these."""
    trail: Trail = {}
    calls: Counter[tuple[str, str]] = Counter()

    def note(module: str, place: str, values: Any) -> None:
        calls[module, place] += 1
        for which, tensor in _tensors(values):
            trail[module, place, calls[module, place], which] = tensor.detach().clone()

    handles = []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, "input", {**dict(enumerate(args)), **kwargs}), with_kwargs=True
            )
        )
        handles.append(module.register_forward_hook(lambda _, args, out, name=name: note(name, "output", out)))
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, Pending):
        value = value.summand()
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for at, entry in enumerate(value):
            yield from _tensors(entry, f"{path}.{at}" if path else str(at))


@dataclass(frozen=True)
class Parting:
    """Where the split model leaves the whole one."""

    module: str
    place: str
    call: int
    difference: float
    after: str  # the last module whose output was seen to be right before

    def __str__(self) -> str:
        where = f"the {self.place} of {self.module or 'the model'}" + (f" (call {self.call})" if self.call > 1 else "")
        before = f"; the last right output before it is that of {self.after}" if self.after else ""
        return f"{where}, {self.difference:.1e} of its largest element{before}"


def first_difference(whole: Trail, ranks: Sequence[Trail], plan: Plan, tolerance: float) -> Parting | None:
    """The first tensor, in the order of execution, that is wrong by more than `tolerance` (relative to its largest element).

    Tensors that not every rank has, or whose cut no partition of the plan explains, are passed over. None where all are right.
    """
    cuts = plan_cuts(plan)
    reduced = {(r.module, r.place) for r in plan.regions if r.op in ("reduce", "gather")}
    after = ""
    for key, expected in whole.items():
        module, place, call, _ = key
        if not all(key in trail for trail in ranks):
            continue
        far = _distance(expected, [trail[key] for trail in ranks], cuts, may_be_partial=(module, place) not in reduced)
        if far is None:
            continue
        if not far <= tolerance:
            return Parting(module, place, call, far, after)
        if place == "output" and module:
            after = module
    return None


def plan_cuts(plan: Plan) -> list[Partition]:
    """Every way in which the plan cuts something, in a fixed order."""
    heads = {cut for a in plan.attention for cut in (a.query, a.kv)}
    return sorted({t.partition for t in plan.tensors.values() if t.partition.dim is not None} | heads, key=repr)


def _distance(whole: torch.Tensor, parts: list[torch.Tensor], cuts: list[Partition], may_be_partial: bool) -> float | None:
    """The smallest relative difference over all readings of the parts; None where there is no reading."""
    found: list[float] = []
    if all(p.shape == whole.shape for p in parts):
        found.append(max(difference(whole, p)[0] for p in parts))
        if may_be_partial and len(parts) > 1:
            found.append(difference(whole, torch.stack([p.double() for p in parts]).sum(0))[0])
    else:
        for cut in cuts:
            for dim in range(whole.dim()):
                expected = slices(whole, dim, cut)
                if expected and all(e.shape == p.shape for e, p in zip(expected, parts, strict=True)):
                    scale = float(whole.detach().abs().max()) if whole.numel() else 0.0
                    found.append(max(difference(e, p, scale)[0] for e, p in zip(expected, parts, strict=True)))
    return min(found) if found else None


def slices(whole: torch.Tensor, dim: int, cut: Partition) -> list[torch.Tensor]:
    """The ranks' pieces of `whole` if `cut` cut its `dim`; none where that has another size."""
    if cut.size != whole.shape[dim]:
        return []
    moved = Partition(dim, cut.pieces)
    return [moved.split(whole, rank) for rank in range(cut.ranks)]
