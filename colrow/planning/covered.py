"""How chosen leaves lie in the dims of one tensor: how many of them index an element, how much of a dim they cover, what is a whole dim."""

from __future__ import annotations

from collections.abc import Sequence

from .factors import Dim, Node, leaves, resolve, size


def count(dims: Sequence[Dim], wanted: set[Node]) -> int:
    """How many of the leaves one element of a tensor is indexed by; the most of any segment of a concatenation."""
    nodes = (node for dim in dims for node in resolve(dim))
    return sum(max(count([[s]], wanted) for s in node.segs) if node.segs else int(node in wanted) for node in nodes)


def covered(dim: Dim, wanted: set[Node]) -> int:
    """How many indices of a dim lie in segments that contain one of the leaves."""
    nodes = resolve(dim)
    total = size(nodes)
    if any(not n.segs and n in wanted for n in nodes):
        return total
    parts = [sum(covered([s], wanted) for s in n.segs) * total // n.size for n in nodes if n.segs]
    return max(parts, default=0)


def is_alone(dim: Dim, leaf: Node) -> bool:
    """Whether a leaf, if it is in a dim at all, is the whole dim or a whole segment of it."""
    nodes = resolve(dim)
    if len(nodes) != 1:
        return leaf not in leaves(dim)
    return nodes[0] is leaf or all(is_alone([s], leaf) for s in nodes[0].segs)
