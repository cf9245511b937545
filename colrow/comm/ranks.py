"""Ranks as processes of this host, seen from the parent that starts, watches and ends them. The ranks' side is child.py.

    with Ranks(2) as ranks:                    # the processes start, import torch and connect in the background
        results = ranks.run(fn, args)          # fn(group, *args) on every rank
        for item in ranks.stream(fn, args):    # what rank 0's fn yields, as it comes

The first failure ends everything: the others are ended by the parent, wherever they are blocked, and its message is raised. Leaving the
`with`, a signal, an exception or the end of the program end all ranks too. Not here: torchrun (launch.py), several hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker, spawn
from typing import Any

from ..errors import ColrowError, RankError, UserError
from . import child

GRACE = 3.0  # seconds from SIGTERM to SIGKILL
BACKENDS = ("auto", "shm", "gloo", "nccl")
NOT_GUARDED = 77  # exit code
CAUSE = 0.5  # seconds in which a better explanation of a lost peer may come


class Ranks:
    """`size` processes that wait for jobs. `imports` are modules that they import while they wait. One job at a time. Jobs whose functions
    are not the program's own need no `main`: the ranks do not import the program's main module then."""

    def __init__(self, size: int, backend: str = "auto", imports: Sequence[str] = (), main: bool = True) -> None:
        check_size(size)
        if backend not in BACKENDS:
            raise UserError("there is no such way to connect ranks", backend, ", ".join(BACKENDS))
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            os._exit(NOT_GUARDED)  # this is a rank that imports the program; its parent tells what that code means
        self.size, self._open = size, True
        self._processes: list[Any] = []
        self._jobs: list[connection.Connection] = []
        self._reports: list[connection.Connection] = []
        self._ends: list[int] = []  # readable when the rank has ended
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the ranks
        try:
            with _sigint_held_back(), contextlib.nullcontext() if main else _main_left_alone():
                for rank in range(size):
                    self._start(rank, backend, tuple(imports))
            from torch.distributed import TCPStore  # only now: the ranks load torch while this process does

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: the kernel finds a free one
            self._send(str(self._store.port).encode())
        except BaseException:
            self.close(now=True)
            raise

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """`fn(group, *args)` on every rank; the results in rank order, which must be picklable."""
        results: list[Any] = [None] * self.size
        for rank, kind, value in self._do(fn, args, streaming=False):
            if kind == "result":
                results[rank] = value
        return results

    def stream(self, fn: Callable[..., Iterator[Any]], args: Sequence[Any] = ()) -> Iterator[Any]:
        """What `fn(group, *args)` yields on rank 0; it runs to its end on every rank. Ends the ranks if the caller stops early."""
        finished = False
        try:
            for _, kind, value in self._do(fn, args, streaming=True):
                if kind == "item":
                    yield value
            finished = True
        finally:
            if not finished:
                self.close(now=True)

    def close(self, now: bool = False) -> None:
        """Ends the ranks: politely when they are idle, else (`now`) by signals. Returns when none is left."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        if not now:
            self._send(b"")
        until = time.monotonic() + GRACE
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL)[now:]:
            for process in self._processes:
                if signal_number is not None and process.is_alive():
                    os.kill(process.pid, signal_number)
            for process in self._processes:
                process.join(max(until - time.monotonic(), 0.0) if signal_number != signal.SIGKILL else None)
            until = time.monotonic() + GRACE
        for pipe in (*self._jobs, *self._reports):
            pipe.close()
        for end in self._ends:
            os.close(end)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(now=kind is not None)

    # ---- starting and watching ----

    def _start(self, rank: int, backend: str, imports: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        take_jobs, jobs = context.Pipe(duplex=False)
        reports, give_reports = context.Pipe(duplex=False)
        self._jobs.append(jobs)
        self._reports.append(reports)
        cores, threads = share_of_cores(rank, self.size)
        start = child.Start(rank, self.size, backend, cores, threads, imports)
        given = (_stdin_for(rank), take_jobs, give_reports)
        process = context.Process(target=child.main, args=(start, *given), name=f"rank {rank}")
        process.start()
        self._processes.append(process)
        self._ends.append(_end_of(process))
        for pipe in given:  # now only the rank holds them: they break when it ends
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes) -> None:
        for jobs in self._jobs:
            with contextlib.suppress(OSError):  # a rank that has died is found by its broken pipe
                jobs.send_bytes(data)

    def _do(self, fn: Callable[..., Any], args: Sequence[Any], streaming: bool) -> Iterator[tuple[int, str, Any]]:
        """Starts a job and yields (rank, kind, value) of what the ranks report, until every rank has reported a result."""
        if not self._open:
            raise RankError("these ranks have ended")
        job = _pickled(fn, tuple(args), streaming)
        try:
            self._send(job)
            waiting = set(range(self.size))
            while waiting:
                reported = self._reported(waiting, None)
                if failures := [(rank, value) for rank, kind, value in reported if kind == "failure"]:
                    raise self._cause(failures, waiting)
                for rank, kind, value in reported:
                    if kind == "result":
                        waiting.remove(rank)
                    yield rank, kind, value
        except GeneratorExit:
            raise
        except BaseException:
            self.close(now=True)
            raise

    def _reported(self, ranks: set[int], patience: float | None) -> list[tuple[int, str, Any]]:
        """What some of the ranks have reported since; a rank that died without a word reports a failure with value None."""
        sources: dict[Any, int] = {self._reports[rank]: rank for rank in ranks} | {self._ends[rank]: rank for rank in ranks}
        out = []
        for rank in sorted({sources[ready] for ready in connection.wait(sources, patience)}):
            try:
                kind, value = pickle.loads(self._reports[rank].recv_bytes()) if self._reports[rank].poll() else ("failure", None)
            except (EOFError, OSError):
                kind, value = "failure", None
            out.append((rank, kind, value))
        return out

    def _cause(self, found: list[tuple[int, child.Failure | None]], ranks: set[int]) -> ColrowError:
        """The error to raise. A rank that only tells of its peers is not the cause if one of them fails by itself right after."""
        others = ranks - {rank for rank, _ in found}
        until = time.monotonic() + CAUSE
        while all(_tells_of_peers(failure) for _, failure in found) and others and (left := until - time.monotonic()) > 0:
            for rank, kind, value in self._reported(others, left):
                if kind == "failure":
                    found.append((rank, value))
                if kind != "item":
                    others = others - {rank}
        at, cause = next((f for f in found if not _tells_of_peers(f[1])), found[0])
        if cause is None:
            return self._death(at)
        error = cause.error if isinstance(cause.error, ColrowError) else RankError(cause.text)
        error.__cause__ = _Trace(f"\n{cause.trace}")
        return error

    def _death(self, rank: int) -> ColrowError:
        process = self._processes[rank]
        process.join(GRACE)
        code = process.exitcode
        if code is None:
            return RankError(f"rank {rank} closed its connection to the parent")
        if code == NOT_GUARDED:
            return UserError(
                "ranks import the program, and importing it starts ranks again", works='if __name__ == "__main__": around the start'
            )
        if code >= 0:
            return RankError(f"rank {rank} ended with exit code {code} before it was done")
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        return RankError(f"rank {rank} was killed by {name}" + (" (so does the kernel when memory runs out)" if name == "SIGKILL" else ""))


class _Trace(Exception):
    """The rank's own traceback, shown as the cause of the error that the parent raises."""


def _stdin_for(rank: int) -> connection.Connection | None:
    """This process's standard input for rank 0, so that a program can talk to its user there; nothing for the others.

    A copy, since multiprocessing closes 0 in what it starts; as a Connection, since those can be given to a process that is started."""
    try:
        return connection.Connection(os.dup(0), writable=False) if rank == 0 else None
    except OSError:  # this process has no standard input
        return None


def _end_of(process: Any) -> int:
    """A file that becomes readable when the process has ended."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # an old kernel; the sentinel, a pipe, stays silent while a child of the rank holds it open
        return os.dup(process.sentinel)


def _tells_of_peers(failure: child.Failure | None) -> bool:
    """Whether a failure may be the consequence of another rank's; a death without a word is not."""
    return failure is not None and failure.of_peers


def check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError("the number of ranks must be a whole number of at least 1", repr(size), "--tp 2")


def share_of_cores(rank: int, size: int) -> tuple[tuple[int, ...], int]:
    """The cores that a rank is pinned to and its number of threads. With fewer cores than ranks: not pinned, one thread."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // size
    return (tuple(cores[rank * each : (rank + 1) * each]), each) if each else ((), 1)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], streaming: bool) -> bytes:
    main = __import__("__main__")
    if getattr(fn, "__module__", None) == "__main__" and not os.path.exists(getattr(main, "__file__", None) or ""):
        raise UserError("a function that is in no file cannot be started in another process", fn, "a function of a module")
    try:
        return pickle.dumps((fn, args, streaming))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError("ranks need a function at the top level of a module, and arguments that can be pickled", error) from error


@contextlib.contextmanager
def _main_left_alone() -> Iterator[None]:
    """Processes started inside are not told where the program's main module is, so that they do not import it. (multiprocessing has no
    option for it; a plain script would have to guard what starts ranks.)"""
    tell = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {k: v for k, v in tell(name).items() if not k.startswith("init_main")}
    try:
        yield
    finally:
        spawn.get_preparation_data = tell


@contextlib.contextmanager
def _sigint_held_back() -> Iterator[None]:
    """Processes started inside begin with SIGINT blocked, so that Ctrl-C while they import prints no traceback of each."""
    resource_tracker.ensure_running()  # else it is started inside, and unblocks the signal for this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
