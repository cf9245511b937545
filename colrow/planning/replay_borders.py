"""Where tensors change hands in a replay: the plan's regions at the borders of module calls, for all ranks of one process at once.

f, g and the gather are autograd functions over the ranks' tensors together, so that one backward pass goes through all ranks in lock-step.
What happens between borders is in replay_ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .means import numbered
from .plan import Plan, Region
from .spread import ReplayError, Spread, full
from .trace import Call, Op, Trace


class Reduce(torch.autograd.Function):
    """g over all ranks of one process: forward the sum, backward identity."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.stack(parts).sum(0)
        return tuple(total.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


class Copy(torch.autograd.Function):
    """f over all ranks of one process: forward identity, backward the sum."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(p.clone() for p in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.stack(grads).sum(0)
        return tuple(total.clone() for _ in grads)


class Gather(torch.autograd.Function):
    """Slices put together on every rank; backward, each rank keeps its own slice of its own gradient."""

    @staticmethod
    def forward(ctx: Any, dim: int, size: int, places: list[torch.Tensor], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.places = dim, places
        shape = list(parts[0].shape)
        shape[dim] = size
        whole = parts[0].new_empty(shape)
        for place, part in zip(places, parts, strict=True):
            whole.index_copy_(dim, place, part)
        return tuple(whole.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, *(g.index_select(ctx.dim, p) for g, p in zip(grads, ctx.places, strict=True)))


def apply(region: Region, x: Spread) -> Spread:
    """The tensor after a region. ReplayError where the tensor is not in the state that the region changes."""
    if x.ranks == 1:  # one rank has everything
        return x
    if region.op == "gather":
        dims = [d for d in range(len(x.shape)) if not x.is_full(d)]
        if x.partial or len(dims) != 1:
            raise ReplayError(f"{region.name}: gathers a tensor that is {x.state()}")
        data = Gather.apply(dims[0], x.shape[dims[0]], [h[dims[0]] for h in x.held], *x.data)
        return Spread(x.shape, tuple(data), (full(x.shape),) * x.ranks)
    if region.op == "once":
        if x.partial or not x.is_whole:
            raise ReplayError(f"{region.name}: a value that counts once must be whole, it is {x.state()}")
        return Spread(x.shape, tuple(d if r == 0 else d * 0 for r, d in enumerate(x.data)), x.held, partial=True)
    if region.op == "reduce" and not x.partial:
        raise ReplayError(f"{region.name}: adds up values that are no summands, they are {x.state()}")
    if region.op == "copy" and x.partial:
        raise ReplayError(f"{region.name}: copies a tensor that is {x.state()}")
    change = Reduce if region.op == "reduce" else Copy
    data = list(x.data)
    for ranks in region.ranks or (tuple(range(x.ranks)),):
        for rank, tensor in zip(ranks, change.apply(*(x.data[r] for r in ranks)), strict=True):
            data[rank] = tensor
    return Spread(x.shape, tuple(data), x.held, partial=False)


class Borders:
    """The regions of a plan in the order of a trace. `cross` carries out those that lie before an op, `seen` is a value as it sees it."""

    def __init__(self, t: Trace, plan: Plan) -> None:
        calls: dict[str, list[Call]] = {}
        for c in t.calls:
            calls.setdefault(c.module, []).append(c)
        # a slice of a constant needs nothing here: where a whole one meets slices, a rank uses its own part of it; nor does a summand
        # that waits, which is followed as a partial sum like any other
        entries = [
            (region, c) for region in plan.regions if region.op in ("copy", "reduce", "gather", "once") for c in _calls_of(region, calls)
        ]
        self.means = {i for region in plan.regions if region.op == "mean" for i in _means_of(region, t, calls)}
        self.rows = {i for region in plan.regions if region.op == "row" for i in _rows_of(region, t, calls)}
        # where several borders fall together: what leaves a module before what enters one, inner modules first, sums before copies of them
        self.todo = sorted(entries, key=lambda e: (_at(*e), e[0].place == "input", e[0].op == "copy", -e[1].index))
        self.inside: list[tuple[int, int, int]] = []  # (value, first, last): these ops see the value behind an f
        self.copies: dict[int, Spread] = {}  # one f per value, whoever asks for it

    def cross(self, op: int, values: dict[int, Spread]) -> None:
        """Carry out the regions between the op before `op` and `op`."""
        while self.todo and _at(*self.todo[0]) <= op:
            region, c = self.todo.pop(0)
            if region.place == "output":
                value = c.outputs[region.arg]
                values[value] = apply(region, values[value])
            elif region.op == "copy":
                value = c.inputs[region.arg]
                if value not in self.copies:
                    self.copies[value] = apply(region, values[value])
                self.inside.append((value, c.first, c.last))
            elif region.op in ("reduce", "once"):  # for all that use the value: nobody has before
                values[c.inputs[region.arg]] = apply(region, values[c.inputs[region.arg]])
            else:
                raise ReplayError(f"{region.name}: {region.op} at an input cannot be replayed")

    def seen(self, value: int, op: int, values: dict[int, Spread]) -> Spread:
        behind = any(v == value and first <= op < last for v, first, last in self.inside)
        return self.copies[value] if behind else values[value]


def _means_of(region: Region, t: Trace, calls: dict[str, list[Call]]) -> Iterator[int]:
    """The ops that take the mean of a region, one in each call of its module."""
    for c in calls.get(region.module, []):
        found = [i for i, means in numbered(t, c).items() if region.arg in {str(m.number) for m in means}]
        if not found:
            raise ReplayError(f"{region.name}: the module takes no such mean")
        yield from found


def _rows_of(region: Region, t: Trace, calls: dict[str, list[Call]]) -> Iterator[int]:
    """The ops that read a row of a region's table in its module."""
    table = t.parameters.get(region.arg)
    ops = (op for c in calls.get(region.module, []) for op in t.ops[c.first : c.last] if op.call == c.index)
    found = [op.index for op in ops if op.name == "select" and op.inputs() == [table] and op.args[1] == 0]
    if not found:
        raise ReplayError(f"{region.name}: the module reads no row of it")
    yield from found


def row(op: Op, table: Spread, where: str) -> Spread:
    """One row of a table, from the rank that holds it."""
    index = op.args[2] % table.shape[0]
    found = [(held[0] == index).nonzero() for held in table.held]
    if sum(len(at) for at in found) != 1:
        raise ReplayError(f"{where}: row {index} lies on {sum(len(at) for at in found)} ranks")
    shape = table.shape[1:]
    parts = [data[int(at)] if len(at) else data.new_zeros(shape) for data, at in zip(table.data, found, strict=True)]
    return Spread(shape, tuple(Reduce.apply(*parts)), (full(shape),) * table.ranks)


def _at(region: Region, c: Call) -> int:
    return c.first if region.place == "input" else c.last


def _calls_of(region: Region, calls: dict[str, list[Call]]) -> list[Call]:
    """The calls of a region's module. ReplayError where the trace has none, or no such argument."""
    if region.module not in calls:
        raise ReplayError(f"{region.name}: the model never runs a module {region.module!r}")
    for c in calls[region.module]:
        side = c.inputs if region.place == "input" else c.outputs
        if region.arg not in side:
            raise ReplayError(f"{region.name}: the module has no {region.place} {region.arg!r}, only {', '.join(side)}")
    return calls[region.module]
