"""Units under sequence parallelism, run one by one: which of them the stream enters and leaves as the rank's slice of the sequence.

The first block cuts its input itself, and the stream is whole again behind the last block or at the copy that stands behind it
(parallel/sequence.py); what lies between is a slice. Not here: the comparison (stream.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..comm import collectives
from ..comm.group import Group
from ..parallel.sequence import DIM
from ..parallel.state import state_of
from ..partition import balance
from .units import floating, units


class Sliced:
    """Of a split model; nothing is sliced in one without sequence parallelism."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.group, self.sequence = group, state_of(model).sequence
        self.inputs, self.outputs = set[str](), set[str]()
        if self.sequence is None:
            return
        cut, names = self.sequence.cut, list(units(model))
        blocks = [name for name in names if name.rpartition(".")[0] == cut.first.rpartition(".")[0]]
        ends = {region.module for region in cut.regions if not any(f"{region.module}.".startswith(f"{b}.") for b in blocks)}
        inside = False
        for name in names:  # in the order of the model
            if inside:
                self.inputs.add(name)
            inside = (inside or name == cut.first) and name != cut.last and name not in ends
            if inside:
                self.outputs.add(name)

    def enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The unit's arguments as this rank is given them."""
        first = next(floating((args, kwargs)), None)
        if self.sequence is None or first is None or first.dim() <= DIM:
            return args, kwargs
        self.sequence.batch = first.shape[0]
        self.sequence.sizes = [stop - start for start, stop in balance(first.shape[DIM], self.group.size)]
        if name not in self.inputs:
            return args, kwargs
        return tree_map(lambda x: self.own(x) if x is first else x, (args, kwargs))

    def own(self, x: torch.Tensor) -> torch.Tensor:
        assert self.sequence is not None
        return x.split(self.sequence.sizes, DIM)[self.group.rank]

    def whole(self, x: torch.Tensor | None, sliced: bool) -> torch.Tensor | None:
        """What the ranks have of it, together. A collective."""
        if x is None or not sliced or self.sequence is None:
            return x
        return collectives.all_gather(x.detach().contiguous(), self.group, "stream.sequence", DIM, self.sequence.sizes)

    def forget(self) -> None:
        if self.sequence is not None:
            self.sequence.forget()
