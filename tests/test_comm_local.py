"""Ranks as threads: failures release the others, hangs are named at once, settings are inherited."""

from __future__ import annotations

import contextvars
import time

import pytest
import torch

from colrow.comm import collectives, local
from colrow.comm.group import Group
from colrow.errors import RankError, UserError

SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("SETTING", default=0)


def test_results_in_rank_order() -> None:
    assert local.run_threads(lambda g, factor: g.rank * factor, 3, 10) == [0, 10, 20]


def test_a_failing_rank_releases_the_others_and_its_error_is_raised() -> None:
    seen: list[str] = []

    def work(g: Group) -> None:
        if g.rank == 1:
            raise UserError("no such file", "x.json")
        try:
            collectives.barrier(g, "wait")
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(UserError, match=r"no such file, got x\.json") as caught:
        local.run_threads(work, 3)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert seen == ["rank 1 failed: UserError: no such file, got x.json"] * 2


def test_a_rank_that_skips_a_collective_is_named_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 waits in barrier 'only 0'; rank 1 ended without it"):
        local.run_threads(lambda g: collectives.barrier(g, "only 0") if g.rank == 0 else None, 2)
    assert time.monotonic() - start < 60  # of a deadline of 600


def test_it_is_named_even_while_a_third_rank_still_computes() -> None:
    seen: list[bool] = []
    computed: list[bool] = []

    def work(g: Group) -> None:
        if g.rank == 2:
            time.sleep(1.0)
            computed.append(True)
        if g.rank == 0:
            try:
                collectives.barrier(g, "not for 1")
            finally:
                seen.append(bool(computed))

    with pytest.raises(RankError, match="rank 1 ended without it"):
        local.run_threads(work, 3)
    assert seen == [False]


def test_ranks_that_wait_in_different_groups_are_named() -> None:
    def work(g: Group) -> None:
        pair = g.sub((0, 1))
        collectives.barrier(pair if g.rank == 0 and pair else g, "meet")

    with pytest.raises(RankError, match="every rank waits for another"):
        local.run_threads(work, 3)


def test_a_rank_that_never_comes_hits_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLROW_DEADLINE", "0.2")
    with pytest.raises(RankError, match=r"rank 0 waited 0 s in all_reduce 'late' \(.*\) for rank 1"):
        local.run_threads(lambda g: collectives.all_reduce(torch.ones(3), g, "late") if g.rank == 0 else time.sleep(1.0), 2)


def test_objects_and_barriers_have_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLROW_DEADLINE", "0.1")

    def work(g: Group) -> list[int]:
        time.sleep(0.4 * g.rank)
        return collectives.gather_objects(g.rank, g, "late")

    assert local.run_threads(work, 2) == [[0, 1]] * 2


def test_a_rank_may_go_on_while_others_still_read() -> None:
    """What was given to a collective may be changed right after it returns."""

    def work(g: Group) -> torch.Tensor:
        x = torch.full((1000,), float(g.rank))
        out = []
        for _ in range(50):
            out.append(collectives.all_gather(x, g, "n", 0, (1000,) * g.size)[::1000].clone())
            x += g.size
        return torch.stack(out)

    found = local.run_threads(work, 4)
    wanted = torch.arange(200.0).view(50, 4)
    assert all(torch.equal(f, wanted) for f in found)


def test_objects_are_copies() -> None:
    def work(g: Group) -> list[int]:
        mine = [g.rank]
        got = collectives.gather_objects(mine, g, "o")
        mine.append(99)
        collectives.barrier(g, "after")
        return got[0]

    assert local.run_threads(work, 2) == [[0], [0]]


def test_threads_inherit_grad_mode_autocast_and_context() -> None:
    def work(g: Group) -> tuple[bool, bool, torch.dtype, int]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype, SETTING.get()

    assert local.run_threads(work, 2) == [(True, False, torch.float32, 0)] * 2
    token = SETTING.set(5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert local.run_threads(work, 2) == [(False, False, torch.bfloat16, 5)] * 2
    with torch.inference_mode():
        assert local.run_threads(work, 2) == [(False, True, torch.float32, 5)] * 2
    SETTING.reset(token)


def test_ctrl_c_releases_the_ranks() -> None:
    def work(g: Group) -> None:
        if g.rank == 1:
            raise KeyboardInterrupt
        collectives.barrier(g, "wait")

    with pytest.raises(KeyboardInterrupt):
        local.run_threads(work, 2)
