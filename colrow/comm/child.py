"""What one rank's process does, from its start to its end. The parent's side is ranks.py; nursery.py is where the process begins.

Only the standard library is imported at the top, so that threads can be settled before torch is loaded.

A rank ends when its parent does, however that ends: a thread reads the pipe from the parent, whose end only the parent holds open, and ends
the process when it breaks. The pipe carries the jobs too, so that ranks can start, import and connect before the first job is known. A
nursery that is killed takes its ranks along. SIGINT and SIGTERM are ignored, as in the nursery.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from . import heap

if TYPE_CHECKING:
    from .group import Group

TO_ALL = (signal.SIGINT, signal.SIGTERM)  # which a whole process group may get
END = signal.SIGUSR1  # to the nursery, which blocks it while it starts ranks: kill them
PR_SET_PDEATHSIG = 1  # sys/prctl.h
Job = tuple[Any, tuple[Any, ...], bool]  # fn, args, whether rank 0 hands on what fn yields


@dataclass(frozen=True)
class Start:
    """What a rank is told when it is started. `cores` () = not pinned. `imports`: modules that it has before its first job."""

    rank: int
    size: int
    backend: str  # "auto", "shm", "gloo", "nccl"
    cores: tuple[int, ...]
    threads: int
    imports: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """How a rank failed: the exception if it can be pickled and the parent should raise it as it is, and always the text. `of_peers`: it
    comes from an error about other ranks, so one of those may be the cause."""

    error: BaseException | None
    text: str
    trace: str
    of_peers: bool


def main(start: Start, port: int, stdin: Connection | None, jobs: Connection, reports: Connection) -> None:
    """Runs jobs until the parent says that there are no more. `port`: of the store by which ranks find each other. Never returns: the
    process ends here, with 0 unless a job failed."""
    code = 1
    try:
        inbox = _settle(start, stdin, jobs)
        bring(start.imports)
        group = _connect(start, port)
        while (data := inbox.get()) is not None:
            _report(reports, "result", _run(pickle.loads(data), group, reports))
        group.close()
        code = 0
    except BaseException as error:  # the parent decides what to make of it
        fail(start, reports, error)
    finally:
        end(code)


def end(code: int) -> NoReturn:
    """Ends this process without interpreter shutdown, in which threads of gloo may abort it. What multiprocessing would have given back
    there, such as semaphores (tqdm makes one), is given back here: its resource tracker warns of those that are left."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        util._run_finalizers(0)  # type: ignore[attr-defined]  # multiprocessing has no other name for it
    finally:
        os._exit(code)


def bring(modules: Sequence[str]) -> None:
    """Imports them without the garbage collector, which would look through hundreds of thousands of new objects again and again."""
    gc.disable()
    for name in modules:
        __import__(name)
    gc.enable()


def fail(start: Start, reports: Connection, error: BaseException) -> None:
    """Tells the parent, and waits until it ends this process: peers must not see a lost connection before it has the reason."""
    _report(reports, "failure", _failure(start, error))
    threading.Event().wait(5.0)


def _settle(start: Start, stdin: Connection | None, jobs: Connection) -> queue.SimpleQueue[bytes | None]:
    """Signals, input, cores and threads; starts the thread that watches the parent and returns where it puts the jobs."""
    leave_signals_to_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
    os.register_at_fork(after_in_child=_heeds_sigterm)
    _end_with_the_nursery()
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(jobs, inbox), name="parent", daemon=True).start()
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open as long as the process)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    heap.keep()
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    import torch

    torch.set_num_threads(start.threads)
    return inbox


def leave_signals_to_the_parent() -> None:
    """Ignores those of TO_ALL, which are blocked until then (ranks.py), so that there is no moment in which one ends this process."""
    for number in TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_ALL)


def _heeds_sigterm() -> None:
    """A worker that a rank forks (of a data loader, say) is ended by SIGTERM as anywhere: its parent may count on that."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_the_nursery() -> None:
    """Where the nursery dies, which keeps the store, the kernel kills this rank at once: before torch writes pages about the lost store."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(jobs: Connection, inbox: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while (data := jobs.recv_bytes()) != b"":  # b"": no more jobs
            inbox.put(data)
        inbox.put(None)
        jobs.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone


def _connect(start: Start, port: int) -> Group:
    """The group, by way of the store on `port`. Gloo stays on the loopback interface unless told otherwise."""
    from torch.distributed import TCPStore

    from . import dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return dist.join_ranks(start.rank, start.size, TCPStore("127.0.0.1", port, is_master=False), start.backend)


def _run(job: Job, group: Group, reports: Connection) -> Any:
    """One job on this rank. Ends with a barrier, so that a rank that skipped a collective is named by those that wait for it."""
    from . import collectives

    fn, args, streaming = job
    result = fn(group, *args)
    if streaming:
        result = _stream(iter(result), group, reports)
    collectives.barrier(group, "the end of the program")
    return result


def _stream(items: Iterator[Any], group: Group, reports: Connection) -> Any:
    """Every rank takes every step; rank 0's items go to the parent as they come. Returns what the generator returns."""
    while True:
        try:
            item = next(items)
        except StopIteration as end:
            return end.value
        if group.rank == 0:
            _report(reports, "item", item)


def _report(reports: Connection, kind: str, value: Any) -> None:
    reports.send_bytes(pickle.dumps((kind, value)))


def _failure(start: Start, error: BaseException) -> Failure:
    from ..errors import ColrowError, RankError

    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    kept: BaseException | None = None
    if isinstance(error, ColrowError):
        try:
            kept = pickle.loads(pickle.dumps(error))
        except Exception:  # an error class of someone else's whose arguments cannot be pickled: its text will do
            kept = None
    link: BaseException | None = error
    while link is not None and not isinstance(link, RankError):
        link = link.__cause__ or link.__context__
    return Failure(kept, f"rank {start.rank} failed: {text}", "".join(traceback.format_exception(error)), of_peers=link is not None)
