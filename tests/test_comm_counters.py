"""What is counted is exact: calls, bytes of the logical tensor, bytes this rank moved, per call site and phase."""

from __future__ import annotations

import torch

from colrow.comm import collectives, local, regions
from colrow.comm.counters import Tally
from colrow.comm.group import Group


def counts(tally: Tally) -> tuple[int, int, int]:
    return tally.calls, tally.logical_bytes, tally.moved_bytes


def test_every_op_by_threads() -> None:
    def work(g: Group) -> dict[tuple[str, str, str], tuple[int, int, int]]:
        x = torch.ones(6, 2)  # 48 bytes
        for _ in range(3):
            collectives.all_reduce(x, g, "a")
        g.counters.phase = "later"
        collectives.all_gather(x[: g.rank], g, "b", 0, (0, 1, 2))  # 24 bytes
        collectives.reduce_scatter(x, g, "c", 0, (1, 2, 3))  # 48 bytes; parts of 8, 16 and 24
        collectives.broadcast(x.bfloat16(), g, "d", 1)  # 24 bytes
        collectives.gather_objects("text", g, "e")
        collectives.barrier(g, "f")
        assert all(tally.waiting >= 0 and tally.moving >= 0 for tally in g.counters.sites.values())
        return {key: counts(tally) for key, tally in g.counters.sites.items()}

    for rank, found in enumerate(local.run_threads(work, 3)):
        assert found == {
            ("", "all_reduce", "a"): (3, 3 * 48, 3 * 3 * 48),
            ("later", "all_gather", "b"): (1, 24, 24),
            ("later", "reduce_scatter", "c"): (1, 48, 48 + 2 * (8, 16, 24)[rank]),
            ("later", "broadcast", "d"): (1, 24, 24),
            ("later", "object", "e"): (1, 0, 0),
            ("later", "barrier", "f"): (1, 0, 0),
        }


def test_regions_count_backward_under_grad_and_sub_groups_in_the_same_counters() -> None:
    def work(g: Group) -> tuple[dict, int]:
        x = torch.ones(4, requires_grad=True)
        pair = g.sub((0, 1))
        y = regions.reduce_from(regions.copy_to(x, g, "f") * 2, g, "g")
        if pair is not None:
            y = regions.reduce_from(y, pair, "sub")
        y.sum().backward()
        return {name: tally.calls for (_, _, name), tally in g.counters.sites.items()}, g.counters.total("all_reduce").calls

    found = local.run_threads(work, 3)
    assert found[:2] == [({"g": 1, "sub": 1, "f.grad": 1}, 3)] * 2
    assert found[2] == ({"g": 1, "f.grad": 1}, 2)


def test_waiting_is_told_from_moving() -> None:
    def work(g: Group) -> float:
        if g.rank == 1:
            torch.randn(10, 10)
            import time

            time.sleep(0.1)
        collectives.barrier(g, "b")
        return g.counters.total().waiting

    first, late = local.run_threads(work, 2)
    assert first > 0.05
    assert late < first
