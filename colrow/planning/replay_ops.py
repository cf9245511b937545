"""What each op does to spread tensors when every rank runs it on what it holds: the local forms used by `replay.py`.

Five kinds. Movements (view, cat, slice, ...) are followed element by element: the op is run on element numbers, and a rank has of the
result what it can fill from its own elements. Pointwise ops and products meet on the indices that all operands have. Sums over an axis that
is spread leave partial sums, if each index is counted once. Ops that mix an axis need it whole. Everything else needs whole inputs.

An op is never helped along by communication here: what a rank does not have, it cannot use. That is what makes the replay a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .replay_products import CONTRACT
from .replay_tools import Inputs, as_sum, call, meeting, once, own, per_rank
from .spread import Held, ReplayError, Spread, counted_once, everywhere, full
from .trace import Op, Ref

# fmt: off
MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "repeat", "slice",
    "select", "split", "split_with_sizes", "unbind", "cat", "stack", "flip", "roll", "alias", "detach", "diagonal", "constant_pad_nd",
))
# fmt: on
CREATE = frozenset({"new_empty", "new_zeros", "new_ones", "new_full"})  # of an input they take no more than dtype and device
LINEAR_UNARY = frozenset({"neg", "_to_copy", "clone", "alias", "detach", "lift_fresh"})
POINTWISE_EXTRA = frozenset({"_to_copy", "clone", "copy", "masked_fill", "where", "native_dropout", "zeros_like", "ones_like"})
MIXES: dict[str, Callable[[tuple[Any, ...], int], list[int]]] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "logcumsumexp", "_safe_softmax"), lambda args, dims: [args[1]]),
    **dict.fromkeys(
        ("mean", "amax", "amin", "any", "all", "argmax", "argmin", "var", "std", "logsumexp", "linalg_vector_norm", "prod", "max", "min"),
        lambda args, dims: _reduced(args, dims),
    ),
    **dict.fromkeys(("topk", "sort"), lambda args, dims: [args[2] if len(args) > 2 else -1]),
    "native_layer_norm": lambda args, dims: list(range(dims - len(args[1]), dims)),
    "_fused_rms_norm": lambda args, dims: list(range(dims - len(args[1]), dims)),
}


def _reduced(args: tuple[Any, ...], dims: int) -> list[int]:
    """The dims of sum(x, dim), mean(x, [dims]), any(x): all of them where none is given."""
    given = args[1] if len(args) > 1 and isinstance(args[1], int | list | tuple) and not isinstance(args[1], bool) else None
    if given is None or (isinstance(given, list | tuple) and not given):
        return list(range(dims))
    return [d % dims for d in ([given] if isinstance(given, int) else given)] if dims else []


def run(op: Op, inputs: Inputs, where: str) -> list[Spread]:
    """The outputs of an op on spread inputs. ReplayError where the ranks' own pieces do not suffice."""
    if op.name in MOVES:
        return _move(op, inputs, where)
    if op.name in CONTRACT:
        return [CONTRACT[op.name](op, inputs, where)]
    if op.name == "embedding":
        return [_embedding(op, inputs, where)]
    if op.name.startswith("view_as_"):
        return [_pairs(op, inputs, where)]
    if op.name in CREATE:
        return [everywhere(call(op, {i: torch.zeros(s.shape).double() for i, s in inputs.items()}), next(iter(inputs.values())).ranks)]
    if op.name == "index":
        return [_index(op, inputs, where)]
    if op.name.rstrip("_") == "index_add":
        return [_index_add(op, inputs, where)]
    if op.name == "sum":
        return [_sum(op, inputs, where)]
    if op.name in MIXES:
        return _mix(op, inputs, where)
    if torch.Tag.pointwise in op.func.tags or op.name.rstrip("_") in POINTWISE_EXTRA:
        return [_pointwise(op, inputs, where)]
    for spread in inputs.values():
        if not spread.is_whole:
            raise ReplayError(f"{where} needs whole inputs, one is {spread.state()}")
    return per_rank(op, inputs)


def _move(op: Op, inputs: Inputs, where: str) -> list[Spread]:
    """Follow elements: number those of all inputs, let the op move the numbers, and look which of them a rank has."""
    offsets, total = {}, 0
    for i, spread in inputs.items():
        offsets[i] = total
        total += _numel(spread.shape)
    numbers = {i: torch.arange(offsets[i], offsets[i] + _numel(s.shape)).reshape(s.shape) for i, s in inputs.items()}
    padded = op.name == "constant_pad_nd"
    moved = op.func(numbers[op.inputs()[0]], op.args[1], total) if padded else call(op, numbers)
    partial = any(s.partial for s in inputs.values())
    if partial and not all(s.partial for s in inputs.values()):
        raise ReplayError(f"{where} puts a partial sum beside values that are not summands")
    ranks = next(iter(inputs.values())).ranks
    outs = []
    for out in moved if isinstance(moved, tuple | list) else [moved]:
        pieces = [_collect(op, inputs, numbers, out, rank, total, where) for rank in range(ranks)]
        outs.append(Spread(tuple(out.shape), tuple(p[0] for p in pieces), tuple(p[1] for p in pieces), partial))
    return outs


def _collect(
    op: Op, inputs: Inputs, numbers: dict[int, torch.Tensor], out: torch.Tensor, rank: int, total: int, where: str
) -> tuple[torch.Tensor, Held]:
    """What `rank` can fill of `out` (element numbers) from its own pieces: data and box."""
    place = torch.full((total + 1,), -1)
    flat: list[torch.Tensor] = []
    at = 0
    for i, spread in inputs.items():
        mine = numbers[i]
        for dim, have in enumerate(spread.held[rank]):
            mine = mine.index_select(dim, have)
        place[mine.reshape(-1)] = torch.arange(at, at + mine.numel())
        flat.append(spread.data[rank].reshape(-1))
        at += mine.numel()
    fill = float(op.args[2]) if op.name == "constant_pad_nd" and len(op.args) > 2 else 0.0
    line = torch.cat([*flat, flat[0].new_full((1,), fill)]) if len(flat) > 1 or op.name == "constant_pad_nd" else flat[0]
    place[total] = at
    source = place[out]
    filled = out == total  # by padding: every rank can, so where there is nothing else they tell nothing
    have = (source >= 0) & ~filled
    others = [[e for e in range(out.dim()) if e != d] for d in range(out.dim())]
    held = [(have.any(dim=rest) | filled.all(dim=rest) if rest else have | filled) for rest in others]
    box = tuple(h.nonzero().reshape(-1) for h in held) if out.numel() else full(out.shape)
    for dim, index in enumerate(box):
        source, filled = source.index_select(dim, index), filled.index_select(dim, index)
    if bool((source < 0).any()) or int(have.sum()) != int((~filled).sum()):
        raise ReplayError(f"{where}: what rank {rank} has of the result is not a box of indices")
    return line[source.reshape(-1)].reshape(source.shape), box


def _numel(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _pointwise(op: Op, inputs: Inputs, where: str) -> Spread:
    shape = tuple(torch.broadcast_shapes(*(s.shape for s in inputs.values())))
    ranks = next(iter(inputs.values())).ranks
    boxes = tuple(meeting(list(inputs.values()), shape, rank) for rank in range(ranks))
    partial = any(s.partial for s in inputs.values())
    if partial:
        _stays_partial(op, inputs, boxes, shape, where)
    data = []
    for rank in range(ranks):
        pieces = {i: s.narrow(rank, own(boxes[rank], s.shape)) for i, s in inputs.items()}
        if partial and op.name.rstrip("_") in ("add", "sub"):
            pieces = {i: p if inputs[i].partial else once(p, rank) for i, p in pieces.items()}
        data.append(call(op, pieces))
    return Spread(shape, tuple(data), boxes, partial)


def _stays_partial(op: Op, inputs: Inputs, boxes: Sequence[Held], shape: tuple[int, ...], where: str) -> None:
    """ReplayError unless this op of a partial sum is a partial sum again."""
    name = op.name.rstrip("_")
    summands = [s.partial for s in inputs.values()]
    tensors = [isinstance(a, Ref) for a in op.args[:2]]
    linear = (
        name in LINEAR_UNARY
        or (name in ("add", "sub") and all(tensors))
        or (name == "mul" and sum(summands) == 1)
        or (name == "div" and isinstance(op.args[0], Ref) and inputs[op.args[0].id].partial and sum(summands) == 1)
    )
    if not linear:
        raise ReplayError(f"{where}: a partial sum enters, which must be added up before")
    if any(len(i) != n for box in boxes for i, n in zip(box, shape, strict=True)):
        raise ReplayError(f"{where}: a partial sum meets a slice")


def _mix(op: Op, inputs: Inputs, where: str) -> list[Spread]:
    first = inputs[op.inputs()[0]]
    dims = len(first.shape)
    mixed = {d % dims for d in MIXES[op.name](op.args, dims)} if dims else set()
    if any(s.partial for s in inputs.values()):
        raise ReplayError(f"{where}: a partial sum enters, which must be added up before")
    busy = [rank for rank, x in enumerate(first.data) if x.numel() or not any(first.shape)]  # the others have other heads
    others = [s for s in inputs.values() if s is not first]
    if any(_lacks(first, rank, mixed) or any(_lacks(s, rank, range(len(s.shape))) for s in others) for rank in busy):
        raise ReplayError(f"{where} mixes an axis of which the ranks hold slices ({first.state()})")
    outs = per_rank(op, {i: _filled(s, busy) for i, s in inputs.items()})
    kept = [d for d in range(dims) if d not in mixed]
    return [_with_box(out, first, kept) for out in outs]


def _lacks(x: Spread, rank: int, dims: Iterable[int]) -> bool:
    return any(len(x.held[rank][d]) < x.shape[d] for d in dims)


def _filled(x: Spread, busy: list[int]) -> Spread:
    """Any numbers for the ranks that have nothing to do, so that the op runs there too."""
    return Spread(x.shape, tuple(d if r in busy else d.new_zeros(x.shape) for r, d in enumerate(x.data)), x.held, x.partial)


def _with_box(out: Spread, source: Spread, kept: list[int]) -> Spread:
    """An output of a mixing op holds along the dims that pass through what its input held."""
    dims = len(source.shape)
    shape, boxes = list(out.shape), [list(h) for h in out.held]
    places = {d: d for d in kept} if len(out.shape) == dims else {d: at for at, d in enumerate(kept)}
    for d, at in places.items():
        shape[at] = source.shape[d]
        for rank in range(source.ranks):
            boxes[rank][at] = source.held[rank][d]
    data = tuple(x[tuple(slice(len(b)) for b in box)] for x, box in zip(out.data, boxes, strict=True))  # nothing, where there was nothing
    return Spread(tuple(shape), data, tuple(tuple(b) for b in boxes))


def _sum(op: Op, inputs: Inputs, where: str) -> Spread:
    (x,) = inputs.values()
    dims = _reduced(op.args, len(x.shape))
    spread_dims = [d for d in dims if not x.is_full(d)]
    partial = any(counted_once([h[d] for h in x.held], x.shape[d], where) for d in spread_dims)
    kept = [d for d in range(len(x.shape)) if d not in dims]
    (out,) = per_rank(op, inputs)
    out = _with_box(out, x, kept)
    return as_sum(out, partial or x.partial, where)


def _embedding(op: Op, inputs: Inputs, where: str) -> Spread:
    """A lookup in the rows a rank has, zero for ids it has not: a partial sum where the rows are spread."""
    weight, ids = (inputs[i] for i in op.inputs())
    if not ids.is_whole or weight.partial:
        raise ReplayError(f"{where}: the ids must be whole, they are {ids.state()}")
    partial = counted_once([h[0] for h in weight.held], weight.shape[0], where)
    padding = op.args[2] if len(op.args) > 2 else -1
    data, boxes = [], []
    for rank in range(weight.ranks):
        rows, columns = weight.held[rank]
        found = torch.isin(ids.data[rank], rows)
        local = torch.searchsorted(rows, ids.data[rank]).clamp(max=max(len(rows) - 1, 0))
        table = weight.data[rank] if len(rows) else weight.data[rank].new_zeros(1, len(columns))
        out = table[local] * found.unsqueeze(-1)
        data.append(torch.where((ids.data[rank] == padding).unsqueeze(-1), out.detach(), out))  # the padding row gets no gradient
        boxes.append((*full(ids.shape), columns))
    return as_sum(Spread((*ids.shape, weight.shape[1]), tuple(data), tuple(boxes)), partial, where)


def _index_add(op: Op, inputs: Inputs, where: str) -> Spread:
    """Rows added to some rows of the first input: of summands, where that is one too (or all zeros)."""
    into, index, rows = (inputs[i] for i in op.inputs())
    partial = into.partial or rows.partial
    zero = [s.partial or not s.data[0].any() for s in (into, rows)]
    if not all(s.is_full_box for s in inputs.values()) or index.partial or (partial and not all(zero)):
        raise ReplayError(f"{where} adds {rows.state()} rows to a tensor that is {into.state()}")
    (out,) = per_rank(op, inputs)
    return Spread(into.shape, out.data, into.held, partial)


def _pairs(op: Op, inputs: Inputs, where: str) -> Spread:
    """The last dim, (real, imaginary), becomes one number, or comes from one."""
    (x,) = inputs.values()
    (out,) = per_rank(op, inputs)
    if op.name == "view_as_real":
        return Spread((*x.shape, 2), out.data, tuple((*held, torch.arange(2)) for held in x.held), x.partial)
    if not x.is_full(len(x.shape) - 1):
        raise ReplayError(f"{where} needs both parts of its numbers ({x.state()})")
    return Spread(x.shape[:-1], out.data, tuple(held[:-1] for held in x.held), x.partial)


def _index(op: Op, inputs: Inputs, where: str) -> Spread:
    """x[i] with whole index tensors: the indexed dims must be whole, the others hold what they held. Picks of summands are summands."""
    x, indices = inputs[op.args[0].id], list(op.args[1])
    picked = [d for d, i in enumerate(indices) if isinstance(i, Ref)]
    for d in picked:
        index = inputs[indices[d].id]
        if not index.is_whole or not x.is_full(d) or (index.data[0].dtype == torch.bool and not x.is_full_box):
            raise ReplayError(f"{where} picks along dim {d} of which the ranks hold slices ({x.state()})")
    (out,) = per_rank(op, inputs)
    rest = [d for d in range(len(x.shape)) if d not in picked]
    place = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0  # of the index tensors' dims in the result
    shape, boxes = list(out.shape), [list(h) for h in out.held]
    for k, d in enumerate(rest):
        at = k if k < place else k + len(out.shape) - len(rest)
        shape[at] = x.shape[d]
        for rank in range(x.ranks):
            boxes[rank][at] = x.held[rank][d]
    return Spread(tuple(shape), out.data, tuple(tuple(b) for b in boxes), x.partial)
