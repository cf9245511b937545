"""Programs that tests/test_comm_launch.py and test_comm_gloo.py run in real processes: `fn(group, ...)`, and a parent to be ended.

python -m tests.comm_ranks PROGRAM BACKEND      prints the ranks' process numbers, then waits in a collective for ever
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from colrow.comm import collectives, launch
from colrow.comm.group import Group
from colrow.errors import ColrowError, UserError


def about(g: Group) -> dict[str, Any]:
    total = collectives.all_reduce(torch.tensor([g.rank + 1.0]), g, "n").item()
    kind, cores = g.transport.kind, sorted(os.sched_getaffinity(0))
    return {
        "rank": g.rank,
        "size": g.size,
        "kind": kind,
        "total": total,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "pid": os.getpid(),
    }


def everything(g: Group) -> list[Any]:
    """All that is tested over threads, between processes."""
    from tests import test_comm_collectives as checks  # here, since pytest takes its time to import
    from tests import test_comm_regions as gradients

    for check in checks.CHECKS:
        check(g)
    gradients.feed_forward(Group(g.rank, g.size, g.transport), True)
    gradients.whole_consumers(g, 1)
    gradients.sequence_parallel(Group(g.rank, g.size, g.transport), 0)
    return checks.sub_groups(g)


def counted(g: Group) -> dict[tuple[str, str], tuple[int, int, int]]:
    """What test_comm_counters counts over threads, and an all-reduce too large for first messages."""
    x = torch.ones(6, 2)
    collectives.all_reduce(x, g, "a")
    collectives.all_reduce(torch.ones(300_000), g, "large")
    collectives.all_gather(x[: g.rank], g, "b", 0, (0, 1, 2)[: g.size])
    collectives.reduce_scatter(x, g, "c", 0, (1, 2, 3) if g.size == 3 else (2, 4))
    collectives.broadcast(x, g, "d", 1)
    collectives.gather_objects("text" * 50_000, g, "e")
    collectives.barrier(g, "f")
    return {(op, name): (t.calls, t.logical_bytes, t.moved_bytes) for (_, op, name), t in g.counters.sites.items()}


def steps(g: Group, count: int) -> Iterator[tuple[int, int]]:
    for step in range(count):
        yield g.rank, step + collectives.broadcast_object(step if g.rank == 0 else None, g, "step")


def fails(g: Group, how: str) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    if g.rank == 1:
        match how:
            case "user":
                raise UserError("no such model", "x", "demo")
            case "bug":
                raise ZeroDivisionError("on purpose")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "skips":
                return
            case "differs":
                collectives.all_gather(torch.ones(2), g, "other site", 0, (2,) * g.size)
    collectives.all_reduce(torch.ones(3), g, "a site")


def late(g: Group) -> None:
    """Rank 1 lives but does not come."""
    if g.rank == 1:
        time.sleep(60)
    collectives.all_reduce(torch.ones(3), g, "late site")


def reads_stdin(g: Group) -> str:
    return sys.stdin.read()


def unpicklable(g: Group) -> Any:
    return lambda: g


def waits(g: Group) -> None:
    """Rank 1 sleeps; the others are blocked in a collective."""
    os.write(2, f"pid {os.getpid()}\n".encode())  # in one piece, whatever the other rank writes
    if g.rank == 1:
        time.sleep(600)
    collectives.all_reduce(torch.ones(3), g, "wait")


def computes(g: Group) -> None:
    """No rank listens to anything."""
    os.write(2, f"pid {os.getpid()}\n".encode())  # in one piece, whatever the other rank writes
    while True:
        torch.ones(400, 400) @ torch.ones(400, 400)


def main() -> int:
    program, backend = sys.argv[1:]
    try:
        if program == "join":
            print([about["total"] for about in launch.run(about, 2, backend=backend)], flush=True)
        else:
            launch.spawn(globals()[program], 2, backend=backend)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ColrowError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
