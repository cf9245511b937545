"""Writes through views in a replay: `x[..., :n].copy_(y)` changes x, which other ops read later.

The replay keeps a tensor per value, and views in it are tensors of their own. A trace says for each op in place which other values lie in
the memory that it writes to (`Op.writes`); here such a write is carried out on the value that the view was taken of: by element numbers
(the number of each element goes through the same views), out of place, so that gradients follow. What a rank does not have of what is
written, it no longer has of the value either.
"""

from __future__ import annotations

import torch

from .spread import Held, ReplayError, Spread, common
from .trace import Op, Ref, Trace


class Memory:
    """Which values are views of which, through which ops, and which op reads a value last."""

    def __init__(self, t: Trace) -> None:
        self.t = t
        self.root: dict[int, int] = {}
        self.path: dict[int, tuple[tuple[Op, int], ...]] = {}
        self.last_read: dict[int, int] = dict.fromkeys(t.outputs.values(), len(t.ops))
        for op in t.ops:
            for i in op.inputs():
                self.last_read[i] = max(self.last_read.get(i, -1), op.index)
            for at, o in enumerate(op.outputs):
                source = op.mutates if op.mutates is not None else op.inputs()[0] if _is_view(op) else None
                if source is not None and o >= 0:
                    self.root[o] = self.root.get(source, source)
                    self.path[o] = self.path.get(source, ()) + (() if op.mutates is not None else ((op, at),))

    def targets(self, op: Op) -> list[int]:
        """Values that a write changes and that are read later. ReplayError where they are views that lie beside the written one."""
        out = [w for w in op.writes if self.last_read.get(w, -1) > op.index]
        for w in out:
            if self.path.get(w) or w != self.root.get(op.mutates or 0):
                raise ReplayError(f"{self.t.where(op)} writes into memory that another view reads, which the replay cannot follow")
        return out

    def numbers(self, view: int) -> torch.Tensor:
        """For each element of a view, its number in the value that it was taken of."""
        shape = self.t.values[self.root[view]].shape
        out = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for op, at in self.path[view]:
            moved = op.func(*(out if isinstance(a, Ref) else a for a in op.args), **op.kwargs)
            out = moved[at] if isinstance(moved, tuple | list) else moved
        return out


def _is_view(op: Op) -> bool:
    returns = op.func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and op.mutates is None


def put(base: Spread, numbers: torch.Tensor, new: Spread, where: str) -> Spread:
    """The tensor after `new` was written to its elements `numbers` (the shape of `new`)."""
    if base.partial or new.partial:
        raise ReplayError(f"{where} writes a partial sum into memory that is read later")
    data, boxes = list[torch.Tensor](), list[Held]()
    for rank in range(base.ranks):
        mine = numbers
        for dim, have in enumerate(new.held[rank]):
            mine = mine.index_select(dim, have)
        places, written = (torch.unravel_index(n.reshape(-1), base.shape) for n in (mine, numbers))
        box: list[torch.Tensor] = []
        for have, own, every in zip(base.held[rank], places, written, strict=True):
            box.append(have[~torch.isin(have, every) | torch.isin(have, own)])
            if len(common(box[-1], own.unique())) != len(own.unique()):
                raise ReplayError(f"{where} writes where rank {rank} has nothing")
        piece = base.narrow(rank, tuple(box)).double()
        at = torch.zeros(mine.numel(), dtype=torch.long)
        for index, own in zip(box, places, strict=True):
            at = at * len(index) + torch.searchsorted(index, own.contiguous())
        flat = piece.reshape(-1).index_put((at,), new.data[rank].double().reshape(-1))
        data.append(flat.reshape(piece.shape))
        boxes.append(tuple(box))
    return Spread(base.shape, tuple(data), tuple(boxes))
