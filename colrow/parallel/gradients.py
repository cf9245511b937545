"""Gradients that are parts: summed over the ranks concerned, as they arrive.

Two kinds of parameter need it. A WHOLE parameter that met split work (a router, a norm under sequence parallelism) has on each rank a part
of its gradient: the parts are summed over all ranks. A COPIED range (a KV head that several ranks hold, because their query heads use it)
has a part for each rank's query heads: each such stretch is summed over exactly the ranks that hold it, and over no others.

The sum is taken of the incoming gradient, by a hook on the parameter, and never of `.grad`: under accumulation that would count what was
summed before once more. After it all copies have the same bits, so they stay equal under any optimizer that works element by element.

Not here: gradients of activations (f and g), norms and clipping.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..comm import collectives
from ..comm.group import Group
from ..partition import Partition
from ..planning.plan import Plan, TensorPlan

Sum = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Stretch:
    """Local ranges along `dim` that the ranks of `group` hold alike."""

    group: Group
    dim: int
    ranges: tuple[tuple[int, int], ...]


def stretches(partition: Partition, group: Group) -> tuple[Stretch, ...]:
    """The rank's copied ranges, those with the same holders together. Makes the groups: every rank must call this in the same order."""
    out = []
    for ranks in sorted({segment.ranks for segment in partition.shared()}):
        members = group.sub(ranks)
        if members is not None:
            assert partition.dim is not None
            segments = [s for s in partition.shared() if s.ranks == ranks]
            starts = [partition.local_offset(group.rank, s.start) or 0 for s in segments]
            ranges = tuple((at, s.stop - s.start) for at, s in zip(starts, segments, strict=True))
            out.append(Stretch(members, partition.dim, ranges))
    return tuple(out)


def sum_over(grad: torch.Tensor, shared: Sequence[Stretch], name: str) -> torch.Tensor:
    """The gradient with each copied stretch summed over its holders: one all-reduce for each set of holders."""
    out = grad.clone(memory_format=torch.contiguous_format)
    for stretch in shared:
        pieces = [out.narrow(stretch.dim, start, length) for start, length in stretch.ranges]
        total = collectives.all_reduce(torch.cat(pieces, stretch.dim), stretch.group, name, inplace=True)
        for piece, summed in zip(pieces, total.split([length for _, length in stretch.ranges], stretch.dim), strict=True):
            piece.copy_(summed)
    return out


def sum_of(partition: Partition, partial: bool, group: Group, name: str) -> Sum | None:
    """What has to be done to the incoming gradient of a parameter; None where it is complete as it comes."""
    shared = stretches(partition, group)
    if partition.is_whole and partial and group.size > 1:
        return lambda grad: collectives.all_reduce(grad, group, f"{name}.grad")
    if shared:
        return lambda grad: sum_over(grad, shared, f"{name}.copies.grad")
    return None


def sum_copies(parameter: nn.Parameter, partition: Partition, group: Group, name: str) -> None:
    """For a layer outside a plan: its copied ranges get the sum of their gradients."""
    add = sum_of(partition, False, group, name)
    if add is not None and parameter.requires_grad:
        parameter.register_hook(add)


@dataclass
class GradientSums:
    """The sums of a split model. `ensure` hooks them where the model has another parameter object than last time (a loader's, PEFT's)."""

    sums: list[tuple[nn.Module, str, Sum]]
    _hooked: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)

    def ensure(self) -> None:
        for index, (module, key, add) in enumerate(self.sums):
            parameter = module._parameters.get(key)
            hooked = self._hooked.get(index)
            if parameter is None or not parameter.requires_grad or (hooked is not None and hooked() is parameter):
                continue
            parameter.register_hook(add)
            self._hooked[index] = weakref.ref(parameter)

    def add(self, more: list[tuple[nn.Module, str, Sum]]) -> None:
        """Those of parameters that came later."""
        self.sums.extend(more)
        self.ensure()

    def drop(self, modules: Container[int]) -> None:
        """Forgets the last ones, those of modules with these ids."""
        while self.sums and id(self.sums[-1][0]) in modules:
            self.sums.pop()
            self._hooked.pop(len(self.sums), None)


def install(model: nn.Module, plan: Plan, group: Group) -> GradientSums:
    """Finds and hooks the gradients that must be summed. A collective where ranges are copied: sub-groups are made, in the plan's order."""
    out = GradientSums(sums_of(model, plan.tensors.values(), group))
    out.ensure()
    return out


def sums_of(model: nn.Module, entries: Iterable[TensorPlan], group: Group) -> list[tuple[nn.Module, str, Sum]]:
    """(module, its parameter's key, what to do to the gradient) of each parameter that needs it. A collective like `install`."""
    sums = []
    for entry in entries:
        add = sum_of(entry.partition, entry.grad == "partial", group, entry.name)
        if add is not None:
            module, _, key = entry.name.rpartition(".")
            sums.append((model.get_submodule(module), key, add))
    return sums
