"""Faults to plant in a split model: those that the field's bug reports are made of. Each must turn every proof red.

Faults of the plan are planted in the plan; faults of the applier by wrapping its `split`, as a wrong applier would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from colrow.comm import collectives
from colrow.comm.group import Group
from colrow.planning.plan import Plan

Wrong = Callable[[nn.Module, Group], None]
"""Does harm to a model that has just been split."""


def without(plan: Plan, op: str, where: str) -> Plan:
    """The plan without the first region of this op whose module's name contains `where`."""
    gone = next(r for r in plan.regions if r.op == op and where in r.module)
    return replace(plan, regions=tuple(r for r in plan.regions if r is not gone))


def doubled_bias(at: str) -> Wrong:
    """A row-parallel layer whose bias is added once more, as when each of two ranks adds it before the sum."""

    def plant(model: nn.Module, group: Group) -> None:
        model.get_submodule(at).register_forward_hook(lambda layer, args, out: out + layer.bias)

    return plant


def rotated_heads(at: str) -> Wrong:
    """Each query head looks at the next head's keys."""

    def plant(model: nn.Module, group: Group) -> None:
        module = model.get_submodule(at)
        heads = module.colrow_heads
        module.colrow_heads = (*heads[1:], heads[0])

    return plant


def bias_per_rank(at: str) -> Wrong:
    """The bias gets the sum of all ranks' gradients although each rank has the whole one already."""

    def plant(model: nn.Module, group: Group) -> None:
        model.get_submodule(at).bias.register_hook(lambda grad: collectives.all_reduce(grad, group, "fault"))

    return plant


def replica_drifts(at: str) -> Wrong:
    """One rank's copy of a parameter gets a gradient of its own."""

    def plant(model: nn.Module, group: Group) -> None:
        model.get_parameter(at).register_hook(lambda grad: grad * (1 + 1e-14 * group.rank))

    return plant
