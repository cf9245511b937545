"""State: what a split model knows about its split. It hangs on the model as `model.colrow`.

Everything that works on a split model (load, collect, the loss, train, engine) takes the plan and the group from here, never from a global.
Not here: tensors. The parameters stay where transformers put them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..planning.plan import Plan, Region
from . import overlap
from .overlap import Deferred

if TYPE_CHECKING:
    from .adapters import Adapters
    from .fused import Promises
    from .gradients import GradientSums
    from .random import Masks
    from .sequence import Sequence

REMEMBERED = 4  # tensors whose f is kept: those that several modules of one block share


class Copies:
    """One f per tensor, however many modules ask for it: q, k and v share one all-reduce of the gradient, not three.

    A tensor counts as the same while it is the same object and was not changed in place. Where no gradient is wanted nothing is remembered.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.Tensor], int, Group, torch.Tensor]] = []
        self._deferred: dict[str, Deferred] = {}  # of the last pass

    def copy(self, x: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """f(x), made at the first call and reused by the others. Counted under the first caller's name."""
        if group.size == 1 or not x.requires_grad or not torch.is_grad_enabled():
            return x
        for known, version, at_group, copied in self._known:
            if known() is x and version == x._version and at_group is group:
                return copied
        copied = self.new(x, group, name)
        self._known = [*self._known[1 - REMEMBERED :], (weakref.ref(x), x._version, group, copied)]
        return copied

    def new(self, x: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        """f(x), whose all-reduce runs beside weight gradients where that gains time."""
        if group.size == 1 or group.transport.worker is None or not (x.requires_grad and torch.is_grad_enabled()):
            return regions.copy_to(x, group, name)
        copied, self._deferred[name] = overlap.copy_to(x, group, name, self._deferred.get(name))
        return copied

    def forget(self) -> None:
        """Lets go of the remembered tensors, which would keep a finished graph alive."""
        self._known.clear()


@dataclass(eq=False)
class State:
    """The plan that was applied, the ranks it was applied on, and what changes from call to call."""

    plan: Plan
    group: Group
    copies: Copies = field(default_factory=Copies)
    sharded_logits: bool = False  # inside head.sharded_logits(model)
    sums: GradientSums | None = None  # the gradients that are summed as they arrive
    masks: Masks | None = None  # of dropout
    sequence: Sequence | None = None  # where the residual stream is cut along the sequence
    promises: Promises | None = None  # inside fused.promising: logits that are not to be made
    terms: dict[str, float] = field(default_factory=dict)  # of the loss, inside head.loss_terms
    plain: bool = True  # nothing was found to stand between the head and the loss
    adapters: Adapters | None = None  # LoRA beside the model's layers; the plan then has its matrices too

    @property
    def base(self) -> Plan:
        """The plan of the model without its adapter."""
        return self.plan if self.adapters is None else self.adapters.base

    def __deepcopy__(self, memo: dict) -> State:
        raise UserError(
            "a split model cannot be copied: its hooks would still speak of the first", None, "copy the whole model, split the copy"
        )

    @property
    def head(self) -> Region | None:
        """The gather that makes the model's logits whole; None where every rank computes all of them."""
        return next((r for r in self.plan.regions if is_head(r)), None)


def is_head(region: Region) -> bool:
    """Whether the region makes the whole model's logits from the ranks' slices."""
    return (region.op, region.module, region.place, region.arg) == ("gather", "", "output", "logits")


def state_of(model: nn.Module) -> State:
    """The model's State. UserError where the model was not split by colrow."""
    state = getattr(model, "colrow", None)
    if not isinstance(state, State):
        raise UserError("the model was not split", type(model).__name__, "colrow.load(...) or colrow.parallelize(model, ...)")
    return state


@contextmanager
def sharded(state: State) -> Iterator[None]:
    """Within, the model's logits are the rank's slice of the vocabulary."""
    before, state.sharded_logits = state.sharded_logits, True
    try:
        yield
    finally:
        state.sharded_logits = before
