"""What the local forms of ops share (replay_ops.py, replay_products.py): running an op on pieces, where pieces meet, what counts once."""

from __future__ import annotations

from typing import Any

import torch

from .spread import Held, ReplayError, Spread, common, full
from .trace import Op, Ref

Inputs = dict[int, Spread]  # value id -> state


def call(op: Op, tensors: dict[int, torch.Tensor]) -> Any:
    """Run the op's function with these tensors. In-place ops work on a copy; everything runs on the CPU in the inputs' precision."""

    def fill(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return tensors[tree.id]
        if isinstance(tree, list | tuple):
            return type(tree)(fill(x) for x in tree)
        if isinstance(tree, dict):
            return {k: fill(v) for k, v in tree.items()}
        return torch.device("cpu") if isinstance(tree, torch.device) else tree

    args, kwargs = list(fill(op.args)), fill(op.kwargs)
    if op.mutates is not None:
        args[0] = args[0].clone()
    if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point and tensors:
        kwargs["dtype"] = torch.float64  # the replay is in one precision
    return op.func(*args, **kwargs)


def same_precision(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Float tensors in float64: products and norms want operands of one type, constants come in float32."""
    return {i: t.double() if t.is_floating_point() else t for i, t in tensors.items()}


def per_rank(op: Op, inputs: Inputs) -> list[Spread]:
    """Run on every rank on all that it has. The boxes of the outputs are all of what came out: the caller knows better."""
    results = []
    for rank in range(next(iter(inputs.values())).ranks):
        out = call(op, same_precision({i: s.data[rank] for i, s in inputs.items()}))
        results.append([t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)])
    return [Spread(tuple(ts[0].shape), ts, tuple(full(t.shape) for t in ts)) for ts in zip(*results, strict=True)]


def once(addend: torch.Tensor, rank: int) -> torch.Tensor:
    """What is added to a partial sum counts on one rank. Its gradient is the same on all, as if it were added after the reduction."""
    return addend if rank == 0 else addend - addend.detach()


def meeting(spreads: list[Spread], shape: tuple[int, ...], rank: int) -> Held:
    """The indices of the result for which `rank` has every operand."""
    box = list(full(shape))
    for s in spreads:
        skip = len(shape) - len(s.shape)
        for dim, have in enumerate(s.held[rank]):
            if s.shape[dim] != 1:
                box[skip + dim] = common(box[skip + dim], have)
    return tuple(box)


def own(box: Held, shape: tuple[int, ...]) -> Held:
    """The box of a broadcast result, for an operand of `shape`."""
    skip = len(box) - len(shape)
    return tuple(torch.arange(1) if n == 1 else box[skip + d] for d, n in enumerate(shape))


def as_sum(out: Spread, partial: bool, where: str) -> Spread:
    if partial and not out.is_full_box:
        raise ReplayError(f"{where}: the result would be both a partial sum and a slice")
    return Spread(out.shape, out.data, out.held, partial)
