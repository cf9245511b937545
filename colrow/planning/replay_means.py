"""Means over an axis of which each rank holds a slice, in a replay: the ranks' sums are added inside the op that takes the mean.

Each index counts once, however many ranks hold it. Which ops may do that, the plan says; every other mean over a spread axis is an error
(replay_ops.py).
"""

from __future__ import annotations

from math import prod

import torch

from .means import SPREADS, averaged, unbiased
from .replay_borders import Copy, Reduce
from .spread import Held, ReplayError, Spread
from .trace import Op, Ref


def run(op: Op, inputs: dict[int, Spread], where: str) -> list[Spread]:
    """The outputs of a mean, or of a norm: of that the first one only, the others are its statistics, which the model does not use."""
    x = inputs[op.inputs()[0]]
    dims = averaged(op, len(x.shape))
    if x.partial or all(x.is_full(d + len(x.shape)) for d in dims):
        raise ReplayError(f"{where}: takes a mean over all ranks of what is {x.state()}")
    if op.name == "mean":
        keep = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim"))
        return [_mean(x, x.data, dims, keep, where)]
    if op.name in SPREADS:
        return [_spread(op, x, dims, where)]
    out = list(x.data)
    if "layer_norm" in op.name:
        out = [d - m for d, m in zip(out, _mean(x, out, dims, True, where).data, strict=True)]
    square = _mean(x, [d.square() for d in out], dims, True, where)
    epsilon = op.args[4] if "layer_norm" in op.name else op.args[3]
    out = [d * torch.rsqrt(s + epsilon) for d, s in zip(out, square.data, strict=True)]
    weight, bias = (inputs[a.id] if isinstance(a, Ref) else None for a in (op.args[2], op.args[3] if "layer_norm" in op.name else None))
    if weight is not None:
        out = [d * w for d, w in zip(out, weight.data, strict=True)]
    if bias is not None:
        out = [d + b for d, b in zip(out, bias.data, strict=True)]
    return [Spread(x.shape, tuple(out), x.held), *(square for o in op.outputs[1:] if o >= 0)]


def _spread(op: Op, x: Spread, dims: tuple[int, ...], where: str) -> Spread:
    """Variance or standard deviation: the mean square of what is left when the mean is taken away."""
    left = [d - m for d, m in zip(x.data, _mean(x, x.data, dims, True, where).data, strict=True)]
    square = _mean(x, [d.square() for d in left], dims, bool(op.kwargs.get("keepdim")), where)
    more = unbiased(op, prod(x.shape[d] for d in dims))
    data = (s * more for s in square.data)
    return Spread(square.shape, tuple(d.sqrt() if op.name == "std" else d for d in data), square.held)


def _mean(x: Spread, data: list[torch.Tensor] | tuple[torch.Tensor, ...], dims: tuple[int, ...], keep: bool, where: str) -> Spread:
    """The mean of what lies on the ranks as `x` does."""
    parts, size = [], 1
    for d in dims:
        size *= x.shape[d]
    for rank, own in enumerate(data):
        part = own
        for d in dims:
            share = 1 / _holders(x, d, where)[x.held[rank][d]]
            part = part * share.view(-1, *(1,) * (-d - 1))
        parts.append(part.sum(dims, keepdim=keep) / size)
    rest = tuple(d - len(x.shape) not in dims for d in range(len(x.shape)))
    shape = tuple(n if kept else 1 for n, kept in zip(x.shape, rest, strict=True) if kept or keep)
    boxes: tuple[Held, ...] = tuple(
        tuple(h if kept else torch.arange(1) for h, kept in zip(held, rest, strict=True) if kept or keep) for held in x.held
    )
    return Spread(shape, Copy.apply(*Reduce.apply(*parts)), boxes)


def _holders(x: Spread, dim: int, where: str) -> torch.Tensor:
    """How many ranks hold each index along a dim."""
    count = torch.zeros(x.shape[dim], dtype=torch.float64)
    for held in x.held:
        count[held[dim]] += 1
    if not bool(count.all()):
        raise ReplayError(f"{where}: takes a mean over an axis of which no rank holds some indices")
    return count
