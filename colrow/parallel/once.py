"""Parameters that are added to partial sums, such as the down-projection biases of experts: one rank uses them, the others use zeros.

Inside experts a bias is added to each rank's part of the product, and weighted by the router, before the parts are summed over ranks. Added
by every rank it would count once per rank. So the first rank adds it, and on the others the module reads zeros in its place, zeros made
from the parameter: every rank holds it, its gradient arrives everywhere (as zeros, but for the first rank) and is summed as it arrives
(gradients.py), so the copies stay equal in training.

Nothing about the module changes but what its forward reads as `self.name`. Not here: which parameters (`TensorPlan.once`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..comm.group import Group
from ..planning.plan import Plan

FIRST = 0  # the rank that uses them


def install(model: nn.Module, plan: Plan, group: Group) -> None:
    """Hooks the modules of such parameters, on every rank but the first."""
    if group.rank == FIRST:
        return
    for entry in plan.tensors.values():
        if entry.once:
            path, _, key = entry.name.rpartition(".")
            _hook(model.get_submodule(path), key)


def _hook(module: nn.Module, key: str) -> None:
    def before(*_: Any) -> None:  # of this module, whichever module has the hook (an adapter around it)
        parameter = module._parameters[key]
        if parameter is not None:
            vars(module)[key] = parameter * 0  # found before the parameter, which nn.Module looks up last

    def after(*_: Any) -> None:
        vars(module).pop(key, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
