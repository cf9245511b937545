"""Factors: split, slice, concatenate, unify and regroup dims, whatever the order in which facts are learnt."""

from __future__ import annotations

from itertools import permutations

from colrow.planning.factors import Dim, Factors, Node, find, leaves, resolve, segments


def sizes(dim: Dim) -> list[object]:
    """A dim as nested lists: [3, 8] a product, ("+", ...) a concatenation."""
    return [("+", *(sizes([s]) for s in segments(n))) if n.segs else n.size for n in resolve(dim)]


def test_split_refines_a_leaf_everywhere() -> None:
    f = Factors()
    dim = f.fresh(12)
    other = list(dim)
    pair = f.split(dim, 4)
    assert pair is not None
    assert sizes(pair[0]) == [3]
    assert sizes(pair[1]) == [4]
    assert sizes(other) == [3, 4]


def test_split_that_does_not_divide_is_flagged() -> None:
    f = Factors()
    f.why = "view in m"
    dim = f.fresh(12)
    assert f.split(dim, 5) is None
    assert [n.flag for n in leaves(dim)] == ["view in m"]


def test_regroup_deals_factors_out() -> None:
    f = Factors()
    a, b = f.fresh(6), f.fresh(8)
    parts = f.regroup([a, b], [2, 24])
    assert [sizes(p) for p in parts] == [[2], [3, 8]]
    assert sizes(a) == [2, 3]
    back = f.regroup(parts, [6, 8])
    assert sizes(back[0]) == [2, 3]
    assert resolve(back[1]) == resolve(b)


def test_size_one_has_no_factor() -> None:
    f = Factors()
    assert f.fresh(1) == []
    assert f.regroup([f.fresh(5)], [1, 5, 1])[0] == []


def test_fused_tensor_learns_its_heads_in_any_order() -> None:
    """q|k|v: cut into segments, each seen as heads x 8, all heads the same axis; the outcome does not depend on what is learnt first."""
    for order in permutations(range(4)):
        f = Factors()
        fused, heads = f.fresh(72), f.fresh(3)
        parts: list[list[Node]] = []
        for step in order:
            if step == 3:
                parts = parts or [f.slice(fused, 24 * i, 24 * i + 24) for i in range(3)]
                f.unify(parts[0], parts[1])
                continue
            pair = f.split(f.slice(fused, 24 * step, 24 * step + 24), 8)
            assert pair is not None
            f.unify(pair[0], heads)
        assert sizes(fused) == [("+", [3, 8], [3, 8], [3, 8])]
        assert all(resolve([s])[0] is find(heads[0]) for s in segments(resolve(fused)[0]))


def test_view_of_a_concatenation_then_slice() -> None:
    """(2 query heads | 1 key | 1 value) x 8 seen as 4 heads: each segment keeps its heads."""
    f = Factors()
    q, k, v = f.fresh(16), f.fresh(8), f.fresh(8)
    fused = f.concatenate([q, k, v])
    pair = f.split(fused, 8)
    assert pair is not None
    outer, inner = pair
    assert sizes(inner) == [8]
    assert sizes(q) == [2, 8]
    assert sizes(k) == [8]
    assert resolve(f.slice(outer, 0, 2)) == resolve(q)[:1]


def test_equal_segments_as_a_product() -> None:
    f = Factors()
    half = f.concatenate([f.fresh(6), f.fresh(6)])
    pair = f.split(half, 6)
    assert pair is not None
    assert sizes(pair[1]) == [6]
    assert all(n.flag for n in leaves(pair[0])), "which segment it is must not be cut"


def test_rotary_halves_are_one_axis() -> None:
    """q * cos + cat(-q[half:], q[:half]) * sin."""
    f = Factors()
    q = f.fresh(8)
    a, b = f.slice(q, 0, 4), f.slice(q, 4, 8)
    assert f.unify(q, f.concatenate([b, a]))
    assert resolve(a) == resolve(b)


def test_unify_sums_at_each_others_borders() -> None:
    f = Factors()
    one = f.concatenate([f.fresh(4), f.fresh(8)])
    other = f.concatenate([f.fresh(6), f.fresh(6)])
    assert f.unify(one, other)
    assert sizes(one) == [("+", [4], [2], [6])]
    assert resolve(one) == resolve(other)


def test_misaligned_products_are_flagged() -> None:
    f = Factors()
    f.why = "mul in m"
    one, other = [*f.fresh(4), *f.fresh(3)], [*f.fresh(3), *f.fresh(4)]
    assert not f.unify(one, other)
    assert any(n.flag for n in leaves(one))


def test_slice_through_a_product_is_flagged() -> None:
    f = Factors()
    f.why = "slice in m"
    dim = [*f.fresh(3), *f.fresh(4)]
    assert sizes(f.slice(dim, 0, 8)) == [2, 4]
    f.slice(dim, 0, 6)
    assert all(n.flag for n in leaves(dim))


def test_flags_survive_unification() -> None:
    f = Factors()
    a, b = f.fresh(5), f.fresh(5)
    f.why = "unknown op"
    f.flag(a)
    f.unify(a, b)
    assert all(n.flag for n in leaves(b))
