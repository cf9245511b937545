"""Factors: what the axes of tensors are made of, so that "the same axis" can be followed through views, slices and products.

A tensor dim is a list of nodes, outermost first; the product of their sizes is the size of the dim, and a dim of size 1 is the empty list.
A node may turn out to be a product (`kids`: heads x head_dim) or a concatenation (`segs`: q | k | v). A node that is neither is a leaf: an
axis in its own right, which can be cut. All knowledge is gained by unifying nodes, and unification is global and final, so the order in
which the ops of a model are read does not matter. A leaf with a `flag` must not be cut; the flag says why, in words.

Not here: what ops do (rules*.py), which leaves are cut (choose.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

from . import lengths
from .lengths import Length

COUNTS = "counts the segments of a fused tensor"  # a flag that says what a factor does, not what mixes it


class Node:
    """One factor. Use `find` before reading anything of it: a unified node lives on in another one."""

    __slots__ = ("flag", "id", "kids", "parent", "segs", "size", "symbol")

    def __init__(self, id: int, size: int, flag: str = "", symbol: Length = "") -> None:
        self.id, self.size, self.flag, self.symbol = id, size, flag, symbol
        self.parent: Node | None = None
        self.kids: tuple[Node, ...] = ()
        self.segs: tuple[Node, ...] = ()

    def __hash__(self) -> int:
        return self.id  # not the address, so that sets of nodes have the same order in every run

    def __repr__(self) -> str:
        return f"#{self.id}({self.size}{'!' if self.flag else ''})"


Dim: TypeAlias = Sequence[Node]


def find(node: Node) -> Node:
    """The node that stands for this one now."""
    while node.parent is not None:
        if node.parent.parent is not None:
            node.parent = node.parent.parent
        node = node.parent
    return node


def resolve(dim: Iterable[Node]) -> list[Node]:
    """The dim as it is known now: leaves and sums, no products, nothing of size 1."""
    out: list[Node] = []
    for node in dim:
        node = find(node)
        if node.kids:
            out.extend(resolve(node.kids))
        elif node.size != 1:
            out.append(node)
    return out


def segments(node: Node) -> list[Node]:
    """The segments of a sum as they are known now, sums within sums opened."""
    out: list[Node] = []
    for seg in find(node).segs:
        inner = resolve([seg])
        if len(inner) == 1 and inner[0].segs:
            out.extend(segments(inner[0]))
        else:
            out.append(find(seg))
    return out


def leaves(dim: Iterable[Node]) -> list[Node]:
    """All leaves in a dim, in order, those inside sums included, with repetitions."""
    out: list[Node] = []
    for node in resolve(dim):
        if node.segs:
            for seg in node.segs:
                out.extend(leaves([seg]))
        else:
            out.append(node)
    return out


def length(dim: Iterable[Node]) -> Length:
    """The size of a dim as it follows from the lengths of the inputs; a plain number where it does not."""
    return lengths.product(_length(node) for node in resolve(dim))


def _length(node: Node) -> Length:
    if node.symbol or not node.segs:
        return node.symbol or node.size
    return lengths.total(length([seg]) for seg in node.segs)


def size(dim: Iterable[Node]) -> int:
    return prod(find(n).size for n in dim)


class Factors:
    """Makes, splits, slices and unifies nodes. `why` is the text that flags get: whoever calls sets it to the op at hand."""

    def __init__(self) -> None:
        self.why = ""
        self.count = 0

    def node(self, size: int, flag: str = "", symbol: Length = "") -> Node:
        self.count += 1
        return Node(self.count, size, flag, symbol)

    def fresh(self, size: int, flagged: bool = False, symbol: Length = "") -> list[Node]:
        """A dim that is known to have nothing in common with others."""
        return [] if size == 1 else [self.node(size, self.why if flagged else "", symbol)]

    def flag(self, dim: Iterable[Node]) -> None:
        """These axes must not be cut."""
        for leaf in leaves(dim):
            leaf.flag = leaf.flag or self.why

    def wrap(self, dim: Dim) -> Node:
        """A dim as one node, to be a segment of a sum."""
        nodes = resolve(dim)
        if len(nodes) == 1:
            return nodes[0]
        out = self.node(prod(n.size for n in nodes), self.why if not nodes else "")
        out.kids = tuple(nodes)
        return out

    def concatenate(self, dims: Sequence[Dim]) -> list[Node]:
        """The dim made of these pieces one after the other."""
        pieces = [self.wrap(d) for d in dims if size(d) > 0]
        if len(pieces) <= 1:
            return list(dims[0]) if len(dims) == 1 else (pieces or self.fresh(0, flagged=True))
        out = self.node(sum(p.size for p in pieces))
        out.segs = tuple(pieces)
        out.segs = tuple(segments(out))
        return [out]

    def split(self, dim: Dim, inner: int) -> tuple[list[Node], list[Node]] | None:
        """Cut a dim into (outer, inner), the inner part of the given size, refining a node where necessary. None (all flagged) if
        misaligned."""
        left, right, have = resolve(dim), list[Node](), 1
        while have < inner:
            node = left[-1] if left else None
            if node is not None and inner % (have * node.size) == 0:
                right.insert(0, left.pop())
                have *= node.size
                continue
            need, rest = divmod(inner, have)
            if node is None or rest or node.size % need or not self.refine(node, need):
                self.flag([*left, *right])
                return None
            left, right = resolve(left), resolve(right)
            have = size(right)
        return left, right

    def refine(self, node: Node, inner: int) -> bool:
        """Make a node a product whose inner part has the given size. False (flagged) where a sum does not allow it."""
        node = find(node)
        if not node.segs:
            symbol: Length = ("//", node.symbol, inner) if node.symbol else ""
            node.kids = (self.node(node.size // inner, node.flag, symbol), self.node(inner, node.flag))
            return True
        parts = segments(node)
        if all(p.size % inner == 0 for p in parts):
            return self._refine_segments(node, parts, inner)
        if len({p.size for p in parts}) == 1 and inner % parts[0].size == 0:
            return self._refine_groups(node, parts, inner)
        self.flag([node])
        return False

    def _refine_segments(self, node: Node, parts: list[Node], inner: int) -> bool:
        """(q | k | v) = (q' | k' | v') x inner: the inner parts are one axis."""
        outers, inners = [], []
        for part in parts:
            pair = self.split([part], inner)
            if pair is None:
                self.flag([node])
                return False
            outers.append(pair[0])
            inners.append(pair[1])
        for other in inners[1:]:
            self.unify(inners[0], other)
        alone = all(not resolve(o) for o in outers)  # each segment is just `inner`: the outer part counts segments
        outer = [self.node(len(parts), COUNTS)] if alone else self.concatenate(outers)
        self._become(node, [*outer, *inners[0]])
        return True

    def _refine_groups(self, node: Node, parts: list[Node], inner: int) -> bool:
        """Equal segments taken several at a time: the outer part counts groups, the groups are one axis."""
        step = inner // parts[0].size
        groups = [self.concatenate([[p] for p in parts[i : i + step]]) for i in range(0, len(parts), step)]
        for other in groups[1:]:
            self.unify(groups[0], other)
        self._become(node, [self.node(len(groups), COUNTS), *groups[0]])
        return True

    def _become(self, node: Node, dim: list[Node]) -> None:
        """A node turns out to be this product; something may have been learnt about it meanwhile."""
        node = find(node)
        if node.kids:
            self.unify(node.kids, dim)
        else:
            node.kids, node.segs = tuple(dim), ()

    def slice(self, dim: Dim, start: int, stop: int) -> list[Node]:
        """The dim of x[start:stop]. A leaf becomes a sum cut there; a cut through the inside of a product is flagged."""
        nodes = resolve(dim)
        if start == 0 and stop == prod(n.size for n in nodes):
            return nodes
        if stop <= start:
            return self.fresh(0, flagged=True)
        if len(nodes) == 1:
            self.cut(nodes[0], (start, stop))
            if find(nodes[0]).kids:  # learnt on the way that it is a product
                return self.slice(nodes, start, stop)
            return self.concatenate([[p] for p, at in self._placed(nodes[0]) if start <= at < stop])
        inner = prod(n.size for n in nodes[1:])
        if start % inner or stop % inner:
            self.flag(nodes)
            return self.fresh(stop - start, flagged=True)
        return [*self.slice(nodes[:1], start // inner, stop // inner), *nodes[1:]]

    @staticmethod
    def _placed(node: Node) -> list[tuple[Node, int]]:
        parts = segments(node)
        return list(zip(parts, accumulate((p.size for p in parts), initial=0), strict=False))

    def cut(self, node: Node, points: Iterable[int]) -> None:
        """Make a leaf or sum a sum that has borders at `points`."""
        node, points = find(node), set(points)
        if not node.segs:
            edges = sorted({0, node.size} | points)
            if len(edges) > 2:
                node.segs = tuple(self.node(b - a, node.flag) for a, b in pairwise(edges))
            return
        out: list[Node] = []
        for part, at in self._placed(node):
            inside = sorted(p - at for p in points if at < p < at + part.size)
            edges = [0, *inside, part.size]
            out.extend(self.wrap(self.slice([part], a, b)) if inside else part for a, b in pairwise(edges))
        node = find(node)
        if not node.kids:
            node.segs = tuple(out)

    def unify(self, one: Dim, other: Dim) -> bool:
        """These two dims are the same axis. False (flagged) where their factors do not fit together."""
        a, b = resolve(one), resolve(other)
        while a and b:
            x, y = a[0], b[0]
            if x is y:
                a, b = a[1:], b[1:]
                continue
            if x.size == y.size:
                self._union(x, y)
                a, b = resolve(a[1:]), resolve(b[1:])
                continue
            large, small = (x, y) if x.size > y.size else (y, x)
            if small.size == 0 or large.size % small.size or not self.refine(large, large.size // small.size):
                break
            a, b = resolve(a), resolve(b)
        if a or b:
            self.flag([*a, *b])
        return not a and not b

    def _union(self, x: Node, y: Node) -> None:
        """Two different nodes of one size, neither a product, become one."""
        x.symbol = y.symbol = y.symbol or x.symbol
        if x.segs and y.segs:
            self.cut(x, (at for _, at in self._placed(y)))
            self.cut(y, (at for _, at in self._placed(x)))
            x, y = find(x), find(y)
            if x is y:
                return
            if x.kids or y.kids:
                self.unify([x], [y])
                return
            pairs = list(zip(segments(x), segments(y), strict=True))
            x.parent, y.symbol = y, y.symbol or x.symbol
            for s, t in pairs:
                self._same_segment(s, t)
            return
        if x.segs:
            x, y = y, x
        x.parent = y
        if x.flag:
            why, self.why = self.why, x.flag
            self.flag([y])
            self.why = why

    def _same_segment(self, s: Node, t: Node) -> None:
        if s.size == 1:  # invisible to `resolve`
            s, t = find(s), find(t)
            if s is not t and not (s.kids or t.kids):
                s.parent = t
            return
        self.unify([s], [t])

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[int]) -> list[list[Node]]:
        """view/reshape: the factors of all `dims` dealt out to dims of the given sizes. Misaligned: flagged, fresh dims."""
        rest: list[Node] = [n for d in dims for n in d]
        out: list[list[Node]] = []
        for n in reversed(sizes):
            pair = self.split(rest, n)
            if pair is None:
                self.flag(rest)
                return [self.fresh(n, flagged=True) for n in sizes]
            rest, inner = pair
            out.insert(0, inner)
        return out
