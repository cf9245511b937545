"""Partition: every element held, split and merge are inverse, cuts are as even as they can be."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colrow.partition import Partition, balance, even, merge_ranges, whole

SIZES = st.integers(0, 60)
RANKS = st.integers(1, 9)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Any partition at all: each index gets a non-empty set of ranks."""
    ranks, size = draw(st.integers(1, 5)), draw(st.integers(1, 24))
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(size)]
    pieces = tuple(merge_ranges((i, i + 1) for i in range(size) if rank in holders[i]) for rank in range(ranks))
    return Partition(draw(st.integers(0, 1)), pieces)


@given(partitions())
def test_split_and_merge_are_inverse(p: Partition) -> None:
    shape = [3, 3]
    shape[p.dim] = p.size
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    parts = [p.split(tensor, rank) for rank in range(p.ranks)]
    assert [tuple(part.shape) for part in parts] == [p.local_shape(shape, rank) for rank in range(p.ranks)]
    assert torch.equal(p.merge(parts), tensor)


@given(partitions())
def test_owned_ranges_cover_each_index_once(p: Partition) -> None:
    covered = sorted(i for rank in range(p.ranks) for start, stop in p.owned(rank) for i in range(start, stop))
    assert covered == list(range(p.size))


@given(partitions())
def test_segments_name_exactly_the_holders(p: Partition) -> None:
    for segment in p.segments():
        for index in range(segment.start, segment.stop):
            assert segment.ranks == tuple(r for r in range(p.ranks) if p.local_offset(r, index) is not None)


@given(partitions())
def test_local_offset_finds_the_element_that_split_puts_there(p: Partition) -> None:
    line = Partition(0, p.pieces)
    for rank in range(p.ranks):
        part = line.split(torch.arange(p.size), rank)
        for index in range(p.size):
            at = line.local_offset(rank, index)
            assert (index in part.tolist()) if at is not None else (index not in part.tolist())
            assert at is None or part[at] == index


@given(partitions())
def test_json_round_trip(p: Partition) -> None:
    assert Partition.from_json(json.loads(json.dumps(p.to_json()))) == p


@given(SIZES, RANKS)
def test_equal_devices_differ_by_at_most_one(size: int, ranks: int) -> None:
    cuts = balance(size, ranks)
    lengths = [b - a for a, b in cuts]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1
    assert all(a[1] == b[0] for a, b in pairwise(cuts))


@given(SIZES, st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_weighted_cuts_are_within_one_of_their_share(size: int, weights: list[int]) -> None:
    lengths = [b - a for a, b in balance(size, len(weights), weights)]
    assert sum(lengths) == size
    assert all(abs(n - size * w / sum(weights)) < 1 for n, w in zip(lengths, weights, strict=True))


def test_fused_tensor_holds_a_range_of_each_segment() -> None:
    """q|k|v of 4 rows each on 2 ranks: three ranges a rank."""
    p = Partition(0, (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))))
    assert p.split(torch.arange(12), 1).tolist() == [2, 3, 6, 7, 10, 11]


def test_copied_heads_overlap_and_are_owned_by_the_lowest_rank() -> None:
    p = Partition(0, (((0, 128),), ((64, 192),)))
    assert [(s.start, s.stop, s.ranks) for s in p.shared()] == [(64, 128, (0, 1))]
    assert p.owned(1) == ((128, 192),)


def test_merge_takes_the_lowest_rank_where_copies_differ() -> None:
    p = Partition(0, (((0, 2),), ((1, 3),)))
    assert p.merge([torch.tensor([1, 2]), torch.tensor([9, 3])]).tolist() == [1, 2, 3]


def test_one_range_is_a_view_and_whole_is_the_tensor_itself() -> None:
    tensor = torch.zeros(6, 2)
    assert even(0, 6, 2).split(tensor, 1).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert whole(3).split(tensor, 2) is tensor


def test_more_ranks_than_units_leaves_empty_pieces() -> None:
    p = even(0, 2, 3)
    assert [p.local_size(r) for r in range(3)] == [1, 1, 0]
    assert p.split(torch.arange(2), 2).shape == (0,)


@pytest.mark.parametrize("pieces", [(((0, 2),), ((3, 4),)), (((2, 4), (0, 2)),), (((0, 3), (2, 4)),), (((1, 1),),)])
def test_gaps_and_disorder_are_refused(pieces: tuple) -> None:
    with pytest.raises(ValueError, match="ranges|held by no rank"):
        Partition(0, pieces)


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="6 indices along dim 0"):
        even(0, 6, 2).split(torch.zeros(7), 0)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [-1.0, 2.0]])
def test_senseless_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="need 2 weights"):
        balance(4, 2, weights)


@given(SIZES, RANKS, st.sampled_from([1, 2, 32, 256]))
def test_cuts_between_blocks(size: int, ranks: int, block: int) -> None:
    """As even as blocks allow; the last one may be short."""
    size *= 11
    p = even(0, size, ranks, block=block)
    assert p.size == size
    assert not size or p.granularity % block == 0 or p.granularity == size
    counts = [-(-p.local_size(rank) // block) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


def test_granularity() -> None:
    assert Partition(0, (((0, 64),), ((64, 96),))).granularity == 64
    assert Partition(0, (((0, 64), (96, 128)), ((64, 96),))).granularity == 32
    assert Partition(0, (((0, 96),), ((64, 100),))).granularity == 32
    assert whole(2).granularity == 0
