"""Programs that tests/test_comm_launch.py, _ends.py and _gloo.py run in real processes: `fn(group, ...)`, and a parent to be ended.

python -m tests.comm_ranks PROGRAM BACKEND      prints the ranks' process numbers, then waits in a collective for ever
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from colrow.comm import collectives, launch
from colrow.comm.group import Group
from colrow.errors import ColrowError, RankError, UserError


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


def origin(g: Group) -> tuple[int, bool]:
    """The process that started this rank, and whether it did so by forking: then both have one command line."""
    parent = os.getppid()
    return parent, Path("/proc/self/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()


def pages_of_scratch(g: Group) -> list[int]:
    """The pages that each of five rounds of three blocks of 20 MB took from the system; a round's blocks are freed together."""
    found = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del [bytearray(20 << 20) for _ in range(3)][:]
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def everything(g: Group) -> list[Any]:
    """All that is tested over threads, between processes."""
    from tests import test_comm_collectives as checks  # here, since pytest takes its time to import
    from tests import test_comm_regions as gradients

    checks.DTYPES = (torch.float32, torch.bfloat16, torch.bool)  # the others take the same way, and messages are slow where cores are few
    checks.SIZES = checks.SIZES[1:]
    for check in checks.CHECKS:
        check(g)
    gradients.feed_forward(Group(g.rank, g.size, g.transport), True)
    gradients.whole_consumers(g, 1)
    gradients.sequence_parallel(Group(g.rank, g.size, g.transport), 0)
    return checks.sub_groups(g)


def everything_by_queue(g: Group) -> None:
    """The calls of the transport for GPUs, over the process group that gloo has made; checked and not."""
    from colrow.comm.cuda import CudaTransport

    for checked in ("", "1"):
        os.environ["COLROW_CHECK"] = checked
        by_queue = Group(g.rank, g.size, CudaTransport(tuple(range(g.size)), g.rank))
        for sizes, dim in (((2, 2), 0), ((3, 1), 0), ((0, 4), 1)):
            shape = [5, 5]
            shape[dim] = 4
            x = torch.arange(20.0).view(shape)
            assert collectives.all_gather(x.split(sizes, dim)[g.rank], by_queue, "g", dim, sizes).equal(x)
            if len(set(sizes)) > 1:  # the version of torch may have no even reduce_scatter for gloo
                assert collectives.reduce_scatter(x * (g.rank + 1), by_queue, "s", dim, sizes).equal(3 * x.split(sizes, dim)[g.rank])
        assert collectives.all_reduce(torch.tensor([g.rank + 1.0]), by_queue, "r").item() == 3
        assert collectives.all_reduce(torch.tensor([g.rank == 1]), by_queue, "r", op="max").item()
        assert collectives.broadcast(torch.tensor([g.rank]), by_queue, "b", 1).item() == 1
        assert collectives.gather_objects(g.rank, by_queue, "o") == [0, 1]
        last = by_queue.sub((1,))
        assert (last is None) == (g.rank == 0)


def on_gpus(g: Group) -> None:
    assert g.transport.kind == "nccl"
    assert g.device.index == g.rank
    x = torch.arange(20.0, device=g.device).view(4, 5)
    assert collectives.all_reduce(x * (g.rank + 1), g, "r").equal(3 * x)
    for sizes in ((2, 2), (3, 1), (0, 4)):
        assert collectives.all_gather(x.split(sizes)[g.rank], g, "g", 0, sizes).equal(x)
        assert collectives.reduce_scatter(x * (g.rank + 1), g, "s", 0, sizes).equal(3 * x.split(sizes)[g.rank])
    assert collectives.broadcast(x * g.rank, g, "b", 1).equal(x)
    assert collectives.gather_objects(g.rank, g, "o") == [0, 1]


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


def without_shared_memory(g: Group, path: str) -> list[str]:
    """The ranks meet once more where shared memory cannot be had: what connects them, or what they are told."""
    from torch.distributed import FileStore

    from colrow.comm import dist, shm_setup
    from colrow.comm.shm import ShmTransport

    def refuse(*_: Any, **__: Any) -> ShmTransport:
        raise shm_setup.ShmUnavailable("no memory on this host")

    ShmTransport.create = refuse  # type: ignore[method-assign]
    found = [dist.join_ranks(g.rank, g.size, FileStore(path, g.size), "auto").transport.kind]
    for backend, one_host in (("shm", True), ("shm", False), ("nccl", True)):
        try:
            dist.join_ranks(g.rank, g.size, FileStore(path, g.size), backend, one_host=one_host)
        except UserError as error:
            found.append(str(error))
    return found


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
            case "killed" | "hidden":
                os.kill(os.getpid(), signal.SIGKILL)
            case "killed beside its child":
                if os.fork() == 0:
                    os.write(2, f"pid {os.getpid()}\n".encode())
                    time.sleep(60)
                    os._exit(0)
                time.sleep(1)  # until the worker has written
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "skips":
                return
            case "differs":
                collectives.all_gather(torch.ones(2), g, "other site", 0, (2,) * g.size)
    try:
        collectives.all_reduce(torch.ones(3), g, "a site")
    except RankError:
        if how == "hidden":  # by someone who does not know better
            raise ValueError("the step did not work") from None
        raise


def late(g: Group) -> None:
    """Rank 1 lives but does not come."""
    if g.rank == 1:
        time.sleep(60)
    collectives.all_reduce(torch.ones(3), g, "late site")


def forked_heeds_sigterm(g: Group) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(int(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


KEPT: list[Any] = []


def keeps_a_lock(g: Group) -> None:
    """One of multiprocessing's, which has a name in the system, as tqdm makes at its first bar."""
    KEPT.append(multiprocessing.RLock())


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


def minds() -> None:
    """A parent that has something else to do on SIGTERM and SIGINT than to end. Prints when it begins and what came out; then waits for the
    end of its input."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    print("starts", flush=True)
    totals = [about["total"] for about in launch.run(about, 2)]
    print(totals, not multiprocessing.active_children(), flush=True)
    sys.stdin.read()


def main() -> int:
    program, backend = sys.argv[1:]
    try:
        if program == "join":
            print([about["total"] for about in launch.run(about, 2, backend=backend)], flush=True)
        elif program == "minds":
            minds()
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
