"""Axes whose entries a model's code takes one by one: each goes through a module of its own, and all are put together again.

    cat([norm(x) for norm, x in zip(self.norms, split(x, 1, dim))], dim)        a norm for each head (StableLM)

What comes out at an entry depends on what went in at this entry and on its module, and on nothing else. So both sides are one axis,
though no tensor between has it. Cut along it, a rank runs the modules of its own entries only (parallel/entries.py). Not here: any cutting.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from .trace import Op, Ref, Trace


@dataclass(frozen=True)
class Entries:
    """`split` and `join` are ops (indices), `dim` that of the split. `width`: indices that make an entry. `members`: value -> entry, of all
    that is made between, and of the modules' parameters."""

    split: int
    join: int
    dim: int
    width: int
    members: dict[int, int]


def find(trace: Trace) -> list[Entries]:
    """All of them, in the order of their ops."""
    if not any(issubclass(cls, nn.ModuleList) for cls in trace.modules.values()):
        return []
    readers: dict[int, list[int]] = defaultdict(list)
    makers = {o: op for op in trace.ops for o in op.outputs}
    for op in trace.ops:
        for v in op.inputs():
            readers[v].append(op.index)
    owner = {at: name for name, at in trace.parameters.items()}
    found = (_entries(trace, op, makers, readers, owner) for op in trace.ops if op.name == "cat" and len(op.inputs()) > 1)
    return [entries for entries in found if entries is not None]


def _entries(trace: Trace, join: Op, makers: dict[int, Op], readers: dict[int, list[int]], owner: dict[int, str]) -> Entries | None:
    """What a `cat` puts together, where each operand comes from the module of its own number and one piece of a split."""
    heads, splits, members = set[str](), set[int](), dict[int, int]()
    inside = {join.index}
    for number, operand in enumerate(join.inputs()):
        todo = [operand]
        while todo:
            value = todo.pop()
            made = makers.get(value)
            members[value] = number
            if made is not None and made.name == "split":
                if made.outputs.index(value) != number:
                    return None
                splits.add(made.index)
            elif made is not None and (own := _place(trace, trace.module_of(made), number)):
                heads.add(own)
                inside.add(made.index)
                todo.extend(made.inputs())
            elif (own := _place(trace, owner.get(value, ""), number)) and not trace.aliases[owner[value]]:
                heads.add(own)
            else:
                return None
    if len(splits) != 1 or len(heads) != 1 or not all(set(readers[v]) <= inside for v in members):
        return None
    split = trace.ops[splits.pop()]
    width: Any = split.args[1]
    source = split.args[0]
    if not isinstance(source, Ref) or len(split.outputs) != len(join.inputs()) or not isinstance(width, int):
        return None
    dim = int(split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) % len(trace.values[source.id].shape)
    return Entries(split.index, join.index, dim, width, members) if trace.values[source.id].shape[dim] % width == 0 else None


def _place(trace: Trace, path: str, number: int) -> str:
    """The list of modules in whose entry `number` a path lies, or ""."""
    at = re.match(rf"(.*)\.{number}(\.|$)", path)
    return at[1] if at is not None and issubclass(trace.modules.get(at[1], object), nn.ModuleList) else ""
