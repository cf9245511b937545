"""Lists of modules of which a rank runs some: those of its own entries of a cut axis (a norm for each head).

The others keep their names, with parameters of no rows, and are left out where the list is gone through. What such a list is:
planning/entries.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..comm.group import Group
from ..errors import UserError
from ..planning.plan import Plan


class OwnEntries(nn.ModuleList):
    """A ModuleList that looks as if there were only the entries `own` (their names, in order)."""

    own: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self._modules[name] for name in self.own)

    def __getitem__(self, index: Any) -> Any:
        found = self.own[index]
        return self._modules[found] if isinstance(found, str) else [self._modules[name] for name in found]


def lists(plan: Plan) -> dict[str, dict[str, list[bool]]]:
    """Path of each such list -> name of an entry -> whether each rank has it. UserError where parameters of one entry disagree."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(dict)
    for tensor in plan.tensors.values():
        if tensor.role != "entry":
            continue
        at = re.match(r"(.+)\.(\d+)\.", tensor.name)
        held = [tensor.partition.local_size(rank) for rank in range(plan.ranks)]
        if at is None or tensor.partition.dim != 0 or any(n not in (0, tensor.shape[0]) for n in held):
            works = "all of it or nothing on each rank, in a list of modules"
            raise UserError(f"{tensor.name} cannot be an entry", tensor.partition.pieces, works)
        has = found[at[1]].setdefault(at[2], [n > 0 for n in held])
        if has != [n > 0 for n in held]:
            raise UserError(f"{tensor.name} lies on other ranks than its entry", held, "all parameters of an entry on the same ranks")
    return found


def install(model: nn.Module, plan: Plan, group: Group) -> None:
    """Makes the lists of `model` those of the rank."""
    for path, held in lists(plan).items():
        module: Any = model.get_submodule(path)
        module.__class__ = OwnEntries
        module.own = tuple(name for name in module._modules if name not in held or held[name][group.rank])
