"""One process that imports what all ranks of this host need, once, and then becomes their parent by forking them.

Importing torch and transformers takes seconds of one core. Ranks that each did it would share the host's cores for it, and hold what was
imported as many times; ranks that are forked have it at once and share the memory. Where a fork is not safe, because an import has started
threads or a GPU's driver, ranks are started as new processes from here instead.

The nursery tells the parent (ranks.py) when a rank has ended, and kills all of them on child.END, which only the parent sends. It ends
when its last rank has. The store by which ranks find each other is here too, since it must outlive any one of them.

SIGINT and SIGTERM often reach a whole process group: from a terminal, `timeout`, an init system. What they mean is the parent's to say,
which may have work to finish first; here and in the ranks they are ignored from the first moment on.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from . import child

DRIVERS = (b"/libcuda.so", b"/libamdhip64.so")  # loaded: GPUs may be in use, and that does not survive a fork


@dataclass(frozen=True)
class Seed:
    """What a rank is started with. `stdin` of rank 0 is the parent's, of the others empty."""

    start: child.Start
    stdin: Connection | None
    jobs: Connection
    reports: Connection

    def close(self) -> None:
        for pipe in (self.stdin, self.jobs, self.reports):
            if pipe is not None:
                pipe.close()


def main(seeds: Sequence[Seed], ended: Connection) -> None:
    """Starts the ranks and sends (rank, exit code) of each that has ended over `ended`, whose other end the parent holds. Never returns."""
    code = 1
    try:
        child.leave_signals_to_the_parent()
        with _ending_with_the_parent(ended):
            _prepare(seeds[0].start)
        _grow(seeds, ended)
        code = 0
    except BaseException as error:
        child.fail(seeds[0].start, seeds[0].reports, error)
    finally:
        child.end(code)


@contextmanager
def _ending_with_the_parent(ended: Connection) -> Iterator[None]:
    """Inside, this process ends when the parent does, however that ends and whatever is done here: the kernel then sends SIGIO for the pipe
    whose other end it held. (A thread that waits for it would be in the way of forking.)"""
    fcntl.fcntl(ended, fcntl.F_SETOWN, os.getpid())
    before = fcntl.fcntl(ended, fcntl.F_GETFL)
    fcntl.fcntl(ended, fcntl.F_SETFL, before | os.O_ASYNC)
    if ended.poll():
        os._exit(1)
    yield
    fcntl.fcntl(ended, fcntl.F_SETFL, before)


def _prepare(start: child.Start) -> None:
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy, which would start its threads now
    child.bring(("torch.distributed", *start.imports))
    gc.freeze()  # what was imported stays: the ranks' collections need not look at it, which would copy its pages


def _grow(seeds: Sequence[Seed], ended: Connection) -> None:
    from torch.distributed import TCPStore

    sys.stdout.flush()
    sys.stderr.flush()
    start = _fork if _may_fork() else _spawn
    with socket.create_server(("127.0.0.1", 0)) as door, _held_back(child.END):
        port = door.getsockname()[1]
        ranks: dict[int, int] = {}
        for rank, seed in enumerate(seeds):
            others = [*(other.close for other in seeds if other is not seed), ended.close, door.close]
            ranks[start(seed, port, others)] = rank
        for seed in seeds:  # now only the rank holds them: they break when it ends
            seed.close()
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
        signal.signal(child.END, lambda *_: _kill(ranks))
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            with suppress(OSError):  # the parent is gone
                ended.send((ranks.pop(pid), os.waitstatus_to_exitcode(status)))
    del store


def _may_fork() -> bool:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return len(os.listdir("/proc/self/task")) == 1 and not any(driver in line for line in maps for driver in DRIVERS)
    except OSError:
        return False


def _fork(seed: Seed, port: int, others: Sequence[Callable[[], None]]) -> int:
    pid = os.fork()
    if pid == 0:
        for close in others:
            close()
        child.main(seed.start, port, seed.stdin, seed.jobs, seed.reports)
    return pid


def _spawn(seed: Seed, port: int, others: Sequence[Callable[[], None]]) -> int:
    process = multiprocessing.get_context("spawn").Process(target=child.main, args=(seed.start, port, seed.stdin, seed.jobs, seed.reports))
    process.start()
    assert process.pid is not None
    return process.pid


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
