"""Cuts: which indices of each cut axis every rank gets, and from that the ranges of any tensor dim made of these axes.

A cut is about one leaf, or about a pair (KV heads, repetitions) that is cut as ONE flat axis of query heads: the query heads are dealt out
evenly, and a rank holds the KV heads that its query heads use, so KV ranges of two ranks may overlap. Ranges of a fused or interleaved dim
follow from its factors: a product scales the ranges of its outer part, a concatenation shifts those of its segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..partition import Partition, Range, Ranges, balance, in_blocks, merge_ranges, whole
from .factors import Dim, Node, leaves, resolve, size


class CutError(Exception):
    """A tensor is laid out so that the cut has no ranges in it."""


@dataclass(frozen=True)
class Cut:
    """`ranges[i][rank]` of `leaves[i]`. `flat[rank]`: of the product of two leaves, where it is not the product of their ranges.

    `counted[rank]`: what the rank counts of what it holds, where that differs (`cut_fewer`)."""

    leaves: tuple[Node, ...]
    ranges: tuple[tuple[Range, ...], ...]
    flat: tuple[Range, ...] = ()
    counted: tuple[Range, ...] = ()

    @property
    def overlaps(self) -> bool:
        """Some indices of the first leaf are held by several ranks."""
        return sum(b - a for a, b in self.ranges[0]) > self.leaves[0].size


def deal(units: int, ranks: int, weights: Sequence[float] | None, least: int = 0) -> tuple[Range, ...]:
    """`balance`, with at least `least` units a rank (there must be enough): taken from the ranks that have most."""
    counts = [b - a for a, b in balance(units, ranks, weights)]
    while min(counts) < least:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    starts = [sum(counts[:r]) for r in range(ranks)]
    return tuple((a, a + n) for a, n in zip(starts, counts, strict=True))


def cut_axis(leaf: Node, ranks: int, weights: Sequence[float] | None, least: int = 0, unit: int = 1) -> Cut:
    """Dealt out in units of `unit` indices, where the size is a multiple of it and every rank gets one; else in halves of it, and so on."""
    while unit > 1 and (leaf.size % unit or leaf.size < unit * ranks):
        unit //= 2
    pieces = deal(leaf.size // unit, ranks, weights, least)
    return Cut((leaf,), (tuple((a * unit, b * unit) for a, b in pieces),))


def cut_blocks(leaf: Node, ranks: int, weights: Sequence[float] | None, least: int, block: int) -> Cut:
    """Dealt out in whole blocks, at least `least` a rank; the last one may be short."""
    return Cut((leaf,), (in_blocks(deal(-(-leaf.size // block), ranks, weights, least), block, leaf.size),))


def cut_heads(kv: Node, repeat: Node, ranks: int, weights: Sequence[float] | None, block: int = 1) -> Cut:
    """Query heads, kv x repeat of them, dealt out evenly (in whole blocks); each rank gets the KV heads that its query heads use.

    Where every border falls between KV heads, it is simply a cut of the KV heads."""
    heads = kv.size * repeat.size
    flat = in_blocks(deal(-(-heads // block), ranks, weights, least=1), block, heads)
    of_kv = tuple((a // repeat.size, -(-b // repeat.size)) for a, b in flat)
    if all(a % repeat.size == 0 for a, _ in flat):
        return Cut((kv,), (of_kv,))
    return Cut((kv, repeat), (of_kv, ((0, repeat.size),) * ranks), flat)


def cut_fewer(leaves: tuple[Node, ...], ranks: int) -> Cut:
    """Of an axis (or KV heads and repetitions) with fewer indices than ranks: one a rank, and those without any hold a copy of the last,
    for views of no elements are not possible; they leave it out of sums, so it counts once."""
    first, repeat = leaves[0], leaves[1].size if len(leaves) == 2 else 1
    total = first.size * repeat
    held = tuple((min(r, total - 1), min(r, total - 1) + 1) for r in range(ranks))
    counted = tuple(own if r < total else (total, total) for r, own in enumerate(held))
    of_first = tuple((a // repeat, a // repeat + 1) for a, _ in held)
    if len(leaves) == 1:
        return Cut(leaves, (of_first,), counted=counted)
    return Cut(leaves, (of_first, ((0, repeat),) * ranks), held, counted)


class Cuts:
    """All cuts of a plan together."""

    def __init__(self, ranks: int, cuts: Iterable[Cut] = ()) -> None:
        self.ranks = ranks
        self.cuts = tuple(cuts)
        self.alone = {leaf: r for cut in self.cuts for leaf, r in zip(cut.leaves, cut.ranges, strict=True)}
        self.pairs = {cut.leaves: cut.flat for cut in self.cuts if cut.flat}
        self.inner = {cut.leaves[1] for cut in self.cuts if cut.flat}

    @property
    def leaves(self) -> frozenset[Node]:
        return frozenset(self.alone)

    def touches(self, dim: Dim) -> bool:
        return any(leaf in self.alone for leaf in leaves(dim))

    def ranges(self, dim: Dim, rank: int) -> Ranges:
        """What a rank holds of a dim. CutError where the layout does not allow the cut."""
        return self._ranges(resolve(dim), rank)

    def local(self, dim: Dim, rank: int) -> int:
        return sum(b - a for a, b in self.ranges(dim, rank))

    def partition(self, dims: Sequence[Dim]) -> Partition:
        """Of a whole tensor. CutError where two of its dims would be cut."""
        cut = [d for d, dim in enumerate(dims) if self.touches(dim)]
        if not cut:
            return whole(self.ranks)
        if len(cut) > 1:
            raise CutError(f"dims {cut} of one tensor would be cut")
        pieces = tuple(self.ranges(dims[cut[0]], rank) for rank in range(self.ranks))
        return Partition(cut[0], pieces)

    def counted(self) -> Cuts:
        """What ranks count in sums."""
        fewer = [replace(c, flat=c.counted) if c.flat else replace(c, ranges=(c.counted,)) for c in self.cuts if c.counted]
        return Cuts(self.ranks, [*(c for c in self.cuts if not c.counted), *fewer])

    def entry(self, dim: Dim, number: int, rows: int) -> Partition:
        """Of a tensor of so many rows that belongs to one index of a dim: all of it on the ranks that hold the index."""
        held = (any(a <= number < b for a, b in self.ranges(dim, rank)) for rank in range(self.ranks))
        return Partition(0, tuple(((0, rows),) if has else () for has in held))

    def _ranges(self, nodes: list[Node], rank: int) -> Ranges:
        total = size(nodes)
        if not self.touches(nodes):
            return ((0, total),)
        pair = (nodes[0], nodes[1]) if len(nodes) > 1 else ()
        if pair in self.pairs:
            outer: Ranges = (self.pairs[pair][rank],)
            rest = nodes[2:]
        else:
            outer, rest = self._of_node(nodes[0], rank), nodes[1:]
        width = size(rest)
        inner = self._ranges(rest, rank) if rest else ((0, 1),)
        if inner == ((0, width),):
            return merge_ranges((a * width, b * width) for a, b in outer)
        return merge_ranges((i * width + a, i * width + b) for start, stop in outer for i in range(start, stop) for a, b in inner)

    def _of_node(self, node: Node, rank: int) -> Ranges:
        if node.segs:
            out: list[Range] = []
            at = 0
            for seg in node.segs:
                inner = resolve([seg])
                out.extend((at + a, at + b) for a, b in self._ranges(inner, rank))
                at += size(inner)
            return merge_ranges(out)
        if node in self.inner:
            raise CutError("repetitions of KV heads lie apart from their KV heads")
        return (self.alone[node][rank],) if node in self.alone else ((0, node.size),)
