"""Spread: one tensor over all ranks, in one process: what each rank holds of it, as index sets along each dim, and the numbers themselves.

This is the state that `replay.py` keeps for every value of a trace. It is found anew from the ops, without the deriver's factors, so that
the two can disagree. Not here: what an op does (replay_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..partition import Partition

Held = tuple[torch.Tensor, ...]  # for each dim the ascending indices of the whole tensor that the rank holds


class ReplayError(Exception):
    """The plan does not compute what the model computes. The text names the module, the op and the state of the tensor."""


@dataclass(frozen=True)
class Spread:
    """`data[rank]` is what the rank holds of a tensor of `shape`: the box `held[rank]`. `partial`: the ranks' values are summands."""

    shape: tuple[int, ...]
    data: tuple[torch.Tensor, ...]
    held: tuple[Held, ...]
    partial: bool = False

    @property
    def ranks(self) -> int:
        return len(self.data)

    def is_full(self, dim: int) -> bool:
        """Every rank holds all indices along `dim`."""
        return all(len(held[dim]) == self.shape[dim] for held in self.held)

    @property
    def is_full_box(self) -> bool:
        return all(self.is_full(d) for d in range(len(self.shape)))

    @property
    def is_whole(self) -> bool:
        return not self.partial and self.is_full_box

    def state(self) -> str:
        """In words, for messages."""
        cut = [d for d in range(len(self.shape)) if not self.is_full(d)]
        return ("partial" if self.partial else "") + (f"a slice along dim {cut}" if cut else "" if self.partial else "whole")

    def narrow(self, rank: int, wanted: Held) -> torch.Tensor:
        """The rank's numbers at the indices `wanted`, which it holds."""
        out = self.data[rank]
        for dim, (have, want) in enumerate(zip(self.held[rank], wanted, strict=True)):
            if len(have) != len(want):
                out = out.index_select(dim, torch.searchsorted(have, want))
        return out


def full(shape: Sequence[int]) -> Held:
    """All indices of every dim."""
    return tuple(torch.arange(n) for n in shape)


def everywhere(tensor: torch.Tensor, ranks: int) -> Spread:
    """The same whole tensor on every rank."""
    shape = tuple(tensor.shape)
    return Spread(shape, (tensor,) * ranks, (full(shape),) * ranks)


def cut(shape: Sequence[int], partition: Partition, rank: int) -> Held:
    """The box that a partition gives to a rank."""
    held = list(full(shape))
    if partition.dim is not None:
        held[partition.dim] = torch.cat([torch.arange(0)] + [torch.arange(a, b) for a, b in partition.pieces[rank]])
    return tuple(held)


def common(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Indices in both of two ascending index sets."""
    return one if len(one) == len(other) and torch.equal(one, other) else one[torch.isin(one, other)]


def counted_once(sets: Sequence[torch.Tensor], size: int, where: str) -> bool:
    """Is a sum over an axis of which each rank holds `sets[rank]` a partial sum? False where every rank has all of it. ReplayError where
    some index would be counted twice, or never."""
    if all(len(s) == size for s in sets):
        return False
    counts = torch.zeros(size, dtype=torch.long)
    for s in sets:
        counts[s] += 1
    if not bool((counts == 1).all()):
        raise ReplayError(f"{where}: sums over an axis whose indices are held by {counts.min()} to {counts.max()} ranks")
    return True
