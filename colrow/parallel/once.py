"""Parameters that are added to partial sums, such as the down-projection biases of experts: one rank uses them, the others use zeros.

Inside experts a bias is added to each rank's part of the product, and weighted by the router, before the parts are summed over ranks. Added
by every rank it would count once per rank. So the first rank adds it, and on the others the module reads zeros in its place, zeros made
from the parameter: every rank holds it, its gradient arrives everywhere (as zeros, but for the first rank) and is summed as it arrives
(gradients.py), so the copies stay equal in training.

Parameters keep their names and stay the module's own; what changes is what `module.name` reads. Not here: which ones (`TensorPlan.once`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..comm.group import Group
from ..planning.plan import Plan

FIRST = 0  # the rank that uses them


def install(model: nn.Module, plan: Plan, group: Group) -> None:
    """Gives the modules of such parameters a class that reads zeros for them, on every rank but the first."""
    if group.rank == FIRST:
        return
    names: dict[str, list[str]] = {}
    for entry in plan.tensors.values():
        if entry.once:
            owner, _, key = entry.name.rpartition(".")
            names.setdefault(owner, []).append(key)
    for path, own in names.items():
        module = model.get_submodule(path)
        module.__class__ = type(type(module).__name__, (type(module),), {key: property(_zeros(key)) for key in own})


def _zeros(key: str) -> Any:
    def read(module: nn.Module) -> torch.Tensor:
        parameter = module._parameters[key]
        assert parameter is not None
        return parameter * 0

    return read
