"""The transport over gloo between real processes: the same checks as over threads, exact counts, disagreement and deadlines named."""

from __future__ import annotations

import pytest

from colrow.comm import launch
from colrow.errors import RankError
from tests import comm_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_and_region(size: int) -> None:
    wanted = {2: [[None], [1.0, None]], 3: [[None], [3.0, [1, 2]], [3.0, [1, 2]]]}
    assert launch.spawn(comm_ranks.everything, size, backend="gloo") == wanted[size]


def test_counts_are_exact() -> None:
    """Payload sent plus received: see the formulas in comm/gloo.py."""
    for rank, found in enumerate(launch.spawn(comm_ranks.counted, 3, backend="gloo")):
        own_gathered, own_part, large = (0, 8, 16)[rank], (8, 16, 24)[rank], 1_200_000
        assert found == {
            ("all_reduce", "a"): (1, 48, 4 * 48),
            ("all_reduce", "large"): (1, large, 4 * large - 4 * large // 3),
            ("all_gather", "b"): (1, 24, 2 * own_gathered + 24 - own_gathered),
            ("reduce_scatter", "c"): (1, 48, 48 - own_part + 2 * own_part),
            ("broadcast", "d"): (1, 48, 2 * 48 if rank == 1 else 48),
            ("object", "e"): (1, 0, 0),
            ("barrier", "f"): (1, 0, 0),
        }


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("differs", "rank 0 is in all_reduce 'a site' (float32, 3 elements, sum of 3), rank 1 in all_gather 'other site'"),
        ("skips", "rank 0 is in all_reduce 'a site' (float32, 3 elements, sum of 3), rank 1 in barrier 'the end of the program'"),
    ],
)
def test_ranks_that_disagree_are_both_named(how: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        launch.spawn(comm_ranks.fails, 2, (how,), backend="gloo")
    first, second = text.removeprefix("rank 0 is in ").split(", rank 1 in ")
    mirrored = f"rank 1 is in {second}"
    assert text in str(caught.value) or (mirrored in str(caught.value) and f"rank 0 in {first}" in str(caught.value))


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLROW_DEADLINE", "2")
    with pytest.raises(RankError, match=r"rank 0 waited 2 s in all_reduce 'late site' \(float32, 3 elements, sum of 3\) for rank 1"):
        launch.spawn(comm_ranks.late, 2, backend="gloo")
