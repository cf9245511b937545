"""Ranks that die, stop, close, disagree or find no memory: always a named error in time, never a hang, never anything left behind.

COLROW_FAULT_RUNS sets how often each fault is repeated at random moments (default 1).
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from colrow.comm import shm_setup
from colrow.comm.group import Call
from colrow.comm.shm import ShmTransport
from tests.shm_ranks import Ended, Ranks, mark, run_ranks

PROMISE = 1.0  # seconds within which a killed rank is named
SLACK = 1.0 if "COLROW_FAULT_RUNS" in os.environ else 20.0  # an ordinary test run must not fail because the machine is busy
RUNS = int(os.environ.get("COLROW_FAULT_RUNS", "1"))

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """No file that stays: other programs' files come and go, so a new one counts only if it is still there after a while."""
    before = set(Path("/dev/shm").iterdir())
    yield
    limit = time.monotonic() + 30.0
    while (new := set(Path("/dev/shm").iterdir()) - before) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not new


def busy(transport: ShmTransport) -> None:
    """Mixed operations without end."""
    x, turn = torch.ones(60_000), 0
    mark(transport, f"busy {transport.rank}")
    while True:
        turn += 1
        numel = 1 + turn * 7919 % x.numel()
        transport.all_reduce(x[:numel], "max", Call("all_reduce", f"layers.{turn % 5}.mlp"))
        if turn % 3 == 0:
            transport.broadcast(x[:numel], turn % transport.size, Call("broadcast", "tokens"))
        if turn % 10 == 0:
            transport.gather_objects(turn, Call("object", "steps"))


def start(fn: Any, size: int, *args: Any, **options: Any) -> Ranks:
    ranks = Ranks(fn, size, *args, **options)
    for rank in range(size):
        ranks.until(f"busy {rank}")
    return ranks


def named(end: Ended, rank: int) -> bool:
    return end.error == "RankError" and f"rank {rank} " in end.text and "operation " in end.text and "' (" in end.text


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_in_time(size: int) -> None:
    chance = random.Random(size)
    for _ in range(RUNS):
        ranks = start(busy, size)
        time.sleep(chance.uniform(0, 0.1))
        victim = chance.randrange(size)
        os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        for rank, end in enumerate(ranks.wait(60.0)):
            if rank == victim:
                assert end.exitcode == -signal.SIGKILL
            else:
                assert named(end, victim), end
                assert end.at - killed < PROMISE * SLACK, end.at - killed


def test_nothing_is_left_when_all_are_killed_at_any_moment() -> None:
    chance = random.Random(3)
    for run in range(RUNS):
        ranks = Ranks(busy, 3)
        if run % 2:
            ranks.until("busy 0")
        time.sleep(chance.uniform(0, 0.3))  # while they start, make the memory, test it, or work
        pids = [process.pid for process in ranks.processes]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [end.exitcode for end in ranks.wait(60.0)] == [-signal.SIGKILL] * 3
        assert not any(Path(f"/proc/{pid}/maps").exists() and "memfd:colrow" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def test_a_stopped_rank_is_named_after_the_deadline() -> None:
    chance = random.Random(5)
    for _ in range(RUNS):
        ranks = start(busy, 3, deadline=0.7)
        time.sleep(chance.uniform(0, 0.1))
        victim = chance.randrange(3)
        os.kill(ranks.processes[victim].pid, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            others = [r for r in range(3) if r != victim]
            for rank in others:
                assert ranks.pipes[rank].poll(60.0), "hang"
                end = ranks.pipes[rank].recv()
                assert named(end, victim), end
                assert "stopped" in end.text
                assert 0.5 < end.at - stopped < 3.0 * SLACK
        finally:
            os.kill(ranks.processes[victim].pid, signal.SIGCONT)
        end = ranks.wait(60.0)[victim]
        assert end.error == "RankError"  # awake again, it learns that the others have given up
        assert "the group has failed" in end.text or "has closed" in end.text, end


def test_a_pause_shorter_than_the_deadline_is_no_failure() -> None:
    ranks = start(until_told, 2, deadline=30.0)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(ranks.processes[1].pid, signal.SIGCONT)
    assert [end.value for end in ranks.wait(30.0)] == [3000, 3000]


def until_told(transport: ShmTransport) -> int:
    x = torch.ones(500)
    mark(transport, f"busy {transport.rank}")
    for _ in range(3000):
        transport.all_reduce(x, "max", Call("all_reduce", "layer"))
    return 3000


def disagree(transport: ShmTransport, kind: str, after: int) -> None:
    x, odd = torch.ones(64), transport.rank == transport.size - 1
    for _ in range(after):
        transport.all_reduce(x, "sum", Call("all_reduce", "before"))
    name = "layers.3.mlp" if not odd or kind != "name" else "layers.4.mlp"
    if odd and kind == "op":
        transport.broadcast(x, 0, Call("broadcast", name))
    elif odd and kind == "count":
        transport.all_reduce(x[:63], "sum", Call("all_reduce", name))
    elif odd and kind == "dtype":
        transport.all_reduce(x.int(), "sum", Call("all_reduce", name))
    elif odd and kind == "max":
        transport.all_reduce(x, "max", Call("all_reduce", name))
    elif kind == "sizes":
        sizes = [32] * transport.size if not odd else [31, 33] + [32] * (transport.size - 2)
        transport.all_gather(torch.ones(sizes[transport.rank]), [torch.ones(n) for n in sizes], Call("all_gather", name))
    elif kind == "source":
        transport.broadcast(x, int(odd), Call("broadcast", name))
    else:
        transport.all_reduce(x, "sum", Call("all_reduce", name))


@pytest.mark.parametrize("kind", ["op", "count", "dtype", "name", "max", "sizes", "source"])
def test_ranks_that_disagree_fail_at_once_and_name_both(kind: str) -> None:
    for run in range(RUNS):
        size = 2 + run % 3 if RUNS > 1 else 3
        began = time.monotonic()
        for end in Ranks(disagree, size, kind, 7 * run).wait(60.0):
            assert end.error == "RankError", end
            assert "ranks disagree" in end.text
            assert f"rank {size - 1} " in end.text
            assert end.text.count("operation ") == 2, end.text
            assert ("layers.4.mlp" in end.text) == (kind == "name")
        assert time.monotonic() - began < 15.0 * SLACK


def one_leaves(transport: ShmTransport, how: str) -> None:
    x = torch.ones(10)
    transport.all_reduce(x, "sum", Call("all_reduce", "together"))
    if transport.rank == 1:
        if how == "raise":
            raise ValueError("a fault of the model")
        return
    transport.all_reduce(x, "sum", Call("all_reduce", "alone"))


@pytest.mark.parametrize("how", ["raise", "return"])
def test_a_rank_that_leaves_is_named(how: str) -> None:
    first, second, third = Ranks(one_leaves, 3, how).wait(60.0)
    assert second.error == ("ValueError" if how == "raise" else "")
    for end in (first, third):
        assert named(end, 1), end
        assert "has closed the group" in end.text
        assert "'alone'" in end.text


def late(transport: ShmTransport) -> float:
    """Ranks of which one comes half a second late, far beyond spinning and yielding."""
    x = torch.ones(10)
    for rank in range(transport.size):
        if transport.rank == rank:
            time.sleep(0.5)
        transport.all_reduce(x, "sum", Call("all_reduce", "late"))
    assert transport.waited > 0.4 * (transport.size - 1)
    return x[0].item()


def test_a_late_rank_is_waited_for_and_the_time_is_counted() -> None:
    assert run_ranks(late, 3, deadline=20.0) == [27.0] * 3


def idle(transport: ShmTransport) -> list[Any]:
    """Rank 1 has work only after several deadlines."""
    mark(transport, f"busy {transport.rank}")
    if transport.rank == 1:
        time.sleep(1.5)
    return transport.gather_objects(transport.rank, Call("object", "work"))


def test_an_idle_rank_may_wait_for_objects_beyond_the_deadline() -> None:
    assert run_ranks(idle, 2, deadline=0.3) == [[0, 1]] * 2
    ranks = start(idle, 2, deadline=0.3)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)  # but not for one that is stopped
    try:
        assert ranks.pipes[0].poll(60.0), "hang"
        end = ranks.pipes[0].recv()
        assert named(end, 1), end
        assert "stopped" in end.text
    finally:
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        ranks.wait(60.0)


def interrupted(transport: ShmTransport) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x = torch.ones(10)
    if transport.rank == 1:
        mark(transport, "busy 1")
        time.sleep(3.0)
    try:
        mark(transport, f"busy {transport.rank}")
        transport.all_reduce(x, "sum", Call("all_reduce", "layer"))
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


def test_ctrl_c_ends_a_waiting_rank_and_releases_the_others() -> None:
    ranks = start(interrupted, 2)
    time.sleep(0.5)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    first, second = ranks.wait(60.0)
    assert first.value == "interrupted"
    assert second.error == "RankError"
    assert "rank 0 gave up in all_reduce(sum) of 10 float32 at 'layer'" in second.text
    assert "KeyboardInterrupt" in second.text


def test_too_little_memory_is_one_line_on_every_rank() -> None:
    for _ in range(RUNS):
        for end in Ranks(busy, 3, slot_bytes=1 << 44).wait(60.0):
            assert end.error == "ShmUnavailable"
            assert "rank 0: 3 ranks need" in end.text
            assert "are available" in end.text


def short_of(transport: ShmTransport, what: str, rank: int) -> str:
    """One rank may not have more address space, open files or large files: a second mapping fails on all, a third works."""
    kind = getattr(resource, f"RLIMIT_{what}")
    before = resource.getrlimit(kind)
    now = {"AS": int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (1 << 20), "NOFILE": 3, "FSIZE": 4096}[what]
    call = Call("object", "again")

    def exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
        return transport.gather_objects(value, call)

    if transport.rank == rank:
        resource.setrlimit(kind, (now, before[1]))
    with pytest.raises(shm_setup.ShmUnavailable) as caught:
        shm_setup.share(transport.rank, 3, 4 << 20, exchange)
    resource.setrlimit(kind, before)
    again = ShmTransport(shm_setup.share(transport.rank, 3, 4096, exchange), transport.rank, 10.0)
    assert hardly_any(again) == [3.0]
    again.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [("AS", 1, "24.0 MiB of shared memory could not be mapped"), ("NOFILE", 0, "Too many open files"), ("FSIZE", 0, "File too large")],
)
def test_a_limit_on_one_rank_is_told_to_all(what: str, rank: int, says: str) -> None:
    first, *others = run_ranks(short_of, 3, what, rank)
    assert f"rank {rank}: {says}" in first
    assert others == [first, first]


def hardly_any(transport: ShmTransport) -> list[float]:
    x = torch.ones(100)
    transport.all_reduce(x, "sum", Call("all_reduce", "layer"))
    return x[:1].tolist()


def test_the_memory_is_passed_over_a_socket_where_proc_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(without_proc, 2) == ["passed"] * 2


def without_proc(transport: ShmTransport) -> str:
    """In the ranks themselves: a second transport, made while /proc does not let anybody in."""

    def closed(offer: dict[str, Any]) -> int:
        raise PermissionError(13, "Permission denied")

    shm_setup._open_through_proc = closed
    call = Call("object", "again")
    mapping = shm_setup.share(transport.rank, 2, 4096, lambda value: transport.gather_objects(value, call))
    again = ShmTransport(mapping, transport.rank, 10.0)
    assert hardly_any(again) == [2.0]
    again.close()
    shm_setup._receive = closed
    with pytest.raises(shm_setup.ShmUnavailable, match=r"rank 1: .* could not be opened: Permission denied"):
        shm_setup.share(transport.rank, 2, 4096, lambda value: transport.gather_objects(value, call))
    return "passed"


def test_the_memory_has_no_name_and_no_open_file() -> None:
    for names, files in run_ranks(mapped, 2):
        assert names == ["/memfd:colrow (deleted)"]
        assert files == 0


def mapped(transport: ShmTransport) -> tuple[list[str], int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[5] for line in lines if f"{transport.mapping.base:x}-" in line]
    links = [os.readlink(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{file}")]
    return names, sum("colrow" in link for link in links)


def wrong_results(transport: ShmTransport) -> str:
    from colrow.comm import shm_check

    shm_check.ordered_sum = lambda inputs: inputs[0]  # as if the library added wrongly
    with pytest.raises(shm_setup.ShmUnavailable, match="self-test of shared memory failed: all_reduce of 1 float32 on rank 0"):
        shm_check.prepare(transport, lambda value: _votes(value, transport))
    return "refused"


def _votes(value: dict[str, Any], transport: ShmTransport) -> list[dict[str, Any]]:
    return transport.gather_objects(value, Call("object", "vote"))


def test_a_library_that_adds_wrongly_is_not_used() -> None:
    assert run_ranks(wrong_results, 2) == ["refused"] * 2
