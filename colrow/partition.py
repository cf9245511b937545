"""Partition: which ranges of one tensor each rank holds.

One frozen object describes every cut that colrow makes: even and uneven ones, fused tensors (q|k|v: three ranges a rank), interleaved
layouts, copied KV heads (ranges of two ranks overlap) and unequal devices. Loading, saving, gradients, norms and the planner all read it.

A partition is about ONE dim of a tensor. It holds no data and knows no ranks but by number. This module imports nothing of colrow.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

import torch

Range = tuple[int, int]  # half open: [start, stop)
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Segment:
    """A stretch [start, stop) of the cut dim that exactly `ranks` hold, in ascending order."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """`pieces[rank]` = the ascending, disjoint ranges along `dim` that the rank holds; `dim` None = every rank holds the whole tensor.

    Raises ValueError where ranges descend, touch nothing or leave a gap: every index up to the largest stop is held by some rank.
    """

    dim: int | None
    pieces: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        if self.dim is None:
            if any(self.pieces):
                raise ValueError("a whole tensor has no ranges")
            return
        for rank, ranges in enumerate(self.pieces):
            if any(start >= stop for start, stop in ranges) or any(a[1] > b[0] for a, b in pairwise(ranges)):
                raise ValueError(f"ranges of rank {rank} are not ascending and disjoint: {ranges}")
        reached = 0
        for start, stop in sorted(pair for ranges in self.pieces for pair in ranges):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached < self.size:
            raise ValueError(f"some elements along dim {self.dim} are held by no rank: {self.pieces}")

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @property
    def is_whole(self) -> bool:
        return self.dim is None

    @functools.cached_property
    def size(self) -> int:
        """Length of the whole tensor along `dim`."""
        return max((stop for ranges in self.pieces for _, stop in ranges), default=0)

    @property
    def granularity(self) -> int:
        """The largest number of indices such that every cut falls on a multiple of it: of 32, no block of 32 lies on two ranks."""
        inner = {edge for ranges in self.pieces for pair in ranges for edge in pair} - {self.size}
        return gcd(*inner) or self.size

    def local_size(self, rank: int) -> int:
        """Number of indices along `dim` that `rank` holds."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the rank's piece of a tensor of `shape`."""
        if self.dim is None:
            return tuple(shape)
        if shape[self.dim] != self.size:
            raise ValueError(f"the partition is for {self.size} indices along dim {self.dim}, the tensor has shape {tuple(shape)}")
        return tuple(self.local_size(rank) if d == self.dim else n for d, n in enumerate(shape))

    def split(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's piece of the whole `tensor`: a view where it is one range, else a new tensor."""
        if self.dim is None:
            return tensor
        self.local_shape(tensor.shape, rank)
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.pieces[rank]]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, self.dim) if parts else tensor.narrow(self.dim, 0, 0)

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from all ranks' pieces. Where several ranks hold an element, the lowest rank's value is taken."""
        if self.dim is None:
            return parts[0]
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = parts[0].new_empty(shape)
        for rank in reversed(range(self.ranks)):
            at = 0
            for start, stop in self.pieces[rank]:
                whole.narrow(self.dim, start, stop - start).copy_(parts[rank].narrow(self.dim, at, stop - start))
                at += stop - start
        return whole

    def segments(self) -> tuple[Segment, ...]:
        """The dim cut at every range border: each stretch with all the ranks that hold it."""
        if self.dim is None:
            return ()
        cuts = sorted({0} | {edge for ranges in self.pieces for pair in ranges for edge in pair})
        number = {edge: at for at, edge in enumerate(cuts)}
        holders: list[list[int]] = [[] for _ in cuts[1:]]
        for rank, ranges in enumerate(self.pieces):
            for start, stop in ranges:
                for at in range(number[start], number[stop]):
                    holders[at].append(rank)
        return tuple(Segment(a, b, tuple(ranks)) for (a, b), ranks in zip(pairwise(cuts), holders, strict=True))

    def shared(self) -> tuple[Segment, ...]:
        """The stretches that more than one rank holds (copied KV heads)."""
        return tuple(s for s in self.segments() if len(s.ranks) > 1)

    def owned(self, rank: int) -> Ranges:
        """The ranges of which `rank` is the lowest holder: over all ranks they cover each element exactly once."""
        return merge_ranges((s.start, s.stop) for s in self.segments() if s.ranks[0] == rank)

    def local_offset(self, rank: int, index: int) -> int | None:
        """Where the whole tensor's `index` along `dim` lies in the rank's piece; None if the rank does not hold it."""
        at = 0
        for start, stop in self.pieces[rank]:
            if start <= index < stop:
                return at + index - start
            at += stop - start
        return None

    def to_json(self) -> dict[str, Any]:
        return {"dim": self.dim, "pieces": [[list(r) for r in ranges] for ranges in self.pieces]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Partition:
        return Partition(data["dim"], tuple(tuple((int(a), int(b)) for a, b in ranges) for ranges in data["pieces"]))


def whole(ranks: int) -> Partition:
    """Every rank holds everything."""
    return Partition(None, ((),) * ranks)


def even(dim: int, size: int, ranks: int, weights: Sequence[float] | None = None, block: int = 1) -> Partition:
    """One contiguous range a rank, as equal as possible (or in proportion to `weights`) with all cuts on multiples of `block`."""
    return Partition(dim, tuple(((a, b),) if b > a else () for a, b in in_blocks(balance(-(-size // block), ranks, weights), block, size)))


def in_blocks(pieces: Iterable[Range], block: int, size: int) -> tuple[Range, ...]:
    """Ranges of blocks as ranges of the `size` indices in them; the last block may be short."""
    return tuple((min(a * block, size), min(b * block, size)) for a, b in pieces)


def balance(units: int, ranks: int, weights: Sequence[float] | None = None) -> tuple[Range, ...]:
    """Cut `units` indivisible things into one contiguous, possibly empty range a rank.

    Equal devices: sizes differ by at most one, larger ones first. With `weights`, by largest remainder, so that the sizes add up exactly.
    """
    share = [1.0] * ranks if weights is None else [float(w) for w in weights]
    if len(share) != ranks or min(share) < 0 or sum(share) <= 0:
        raise ValueError(f"need {ranks} weights of at least 0, not all 0, got {weights}")
    together = sum(share)
    exact = [units * w / together for w in share]
    sizes = [int(x) for x in exact]
    by_remainder = sorted(range(ranks), key=lambda r: (sizes[r] - exact[r], r))
    for rank in by_remainder[: units - sum(sizes)]:
        sizes[rank] += 1
    return in_row(sizes)


def in_row(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Ranges of these `sizes`, one after the other."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def lowest_alike(profiles: Iterable[Hashable]) -> tuple[int, ...]:
    """For each of the profiles, the number of the first one that is equal.

    >>> lowest_alike(["a", "b", "a", "a"])
    (0, 1, 0, 0)
    """
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(profile, number) for number, profile in enumerate(profiles))


def merge_ranges(ranges: Iterable[Range]) -> Ranges:
    """Ascending ranges with touching neighbours joined."""
    out: list[Range] = []
    for start, stop in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        elif stop > start:
            out.append((start, stop))
    return tuple(out)
