"""Cuts: which indices of each cut axis every rank gets, and from that the ranges of any tensor dim made of these axes.

A cut is about one leaf, or about a pair (KV heads, repetitions) that is cut as ONE flat axis of query heads: the query heads are dealt out
evenly, and a rank holds the KV heads that its query heads use, so KV ranges of two ranks may overlap. Ranges of a fused or interleaved dim
follow from its factors: a product scales the ranges of its outer part, a concatenation shifts those of its segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..partition import Partition, Range, Ranges, balance, in_blocks, in_row, lowest_alike, merge_ranges, whole
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
    return in_row(counts)


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
        self._known: dict[tuple[Node, ...], tuple[Ranges, ...]] = {}
        self._partitions: dict[tuple[int, tuple[Ranges, ...]], Partition] = {}

    @property
    def leaves(self) -> frozenset[Node]:
        return frozenset(self.alone)

    def touches(self, dim: Dim) -> bool:
        return any(leaf in self.alone for leaf in leaves(dim))

    @functools.cached_property
    def like(self) -> tuple[int, ...]:
        """For each rank the lowest one that has as many indices of every cut as it has, and so of every dim."""
        sizes = [tuple(b - a for a, b in pieces) for cut in self.cuts for pieces in (*cut.ranges, cut.flat) if pieces]
        return lowest_alike(zip(*sizes, strict=True)) if sizes else (0,) * self.ranks

    def pieces(self, dim: Dim) -> tuple[Ranges, ...]:
        """What each rank holds of a dim. CutError where the layout does not allow the cut."""
        nodes = resolve(dim)
        key = tuple(nodes)
        if key not in self._known:
            self._known[key] = self._pieces(nodes)
        return self._known[key]

    def local(self, dim: Dim, rank: int) -> int:
        return sum(b - a for a, b in self.pieces(dim)[rank])

    def partition(self, dims: Sequence[Dim]) -> Partition:
        """Of a whole tensor. CutError where two of its dims would be cut."""
        cut = [d for d, dim in enumerate(dims) if self.touches(dim)]
        if not cut:
            return whole(self.ranks)
        if len(cut) > 1:
            raise CutError(f"dims {cut} of one tensor would be cut")
        return self.of_dim(cut[0], dims[cut[0]])

    def of_dim(self, number: int, dim: Dim) -> Partition:
        """Of a tensor whose dim of this `number` is `dim`."""
        pieces = self.pieces(dim)
        key = (number, pieces)
        if key not in self._partitions:
            self._partitions[key] = Partition(number, pieces)
        return self._partitions[key]

    @functools.cached_property
    def counted(self) -> Cuts:
        """What ranks count in sums."""
        fewer = [replace(c, flat=c.counted) if c.flat else replace(c, ranges=(c.counted,)) for c in self.cuts if c.counted]
        return Cuts(self.ranks, [*(c for c in self.cuts if not c.counted), *fewer])

    def entry(self, dim: Dim, number: int, rows: int) -> Partition:
        """Of a tensor of so many rows that belongs to one index of a dim: all of it on the ranks that hold the index."""
        held = (any(a <= number < b for a, b in ranges) for ranges in self.pieces(dim))
        return Partition(0, tuple(((0, rows),) if has else () for has in held))

    def _pieces(self, nodes: list[Node]) -> tuple[Ranges, ...]:
        """All ranks' together: how a dim is made is looked at once."""
        if not self.touches(nodes):
            return (((0, size(nodes)),),) * self.ranks
        pair = (nodes[0], nodes[1]) if len(nodes) > 1 else ()
        if pair in self.pairs:
            outer: tuple[Ranges, ...] = tuple((one,) for one in self.pairs[pair])
            rest = nodes[2:]
        else:
            outer, rest = self._of_node(nodes[0]), nodes[1:]
        width = size(rest)
        if not self.touches(rest):
            return tuple(merge_ranges((a * width, b * width) for a, b in own) for own in outer)
        return tuple(
            merge_ranges((i * width + a, i * width + b) for start, stop in own for i in range(start, stop) for a, b in inner)
            for own, inner in zip(outer, self._pieces(rest), strict=True)
        )

    def _of_node(self, node: Node) -> tuple[Ranges, ...]:
        if node.segs:
            parts: list[list[Range]] = [[] for _ in range(self.ranks)]
            at = 0
            for seg in node.segs:
                inner = resolve([seg])
                for part, ranges in zip(parts, self._pieces(inner), strict=True):
                    part.extend((at + a, at + b) for a, b in ranges)
                at += size(inner)
            return tuple(map(merge_ranges, parts))
        if node in self.inner:
            raise CutError("repetitions of KV heads lie apart from their KV heads")
        return tuple((own,) for own in self.alone[node]) if node in self.alone else (((0, node.size),),) * self.ranks
