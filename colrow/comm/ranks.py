"""Ranks as processes of this host, seen from the parent that starts, watches and ends them. Their side is nursery.py, then child.py.

    with Ranks(2) as ranks:                    # the processes import torch and connect in the background
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
from . import child, nursery

GRACE = 3.0  # seconds in which ranks end by themselves that are told to, or to which it happens
BACKENDS = ("auto", "shm", "gloo", "nccl")
NOT_GUARDED = 77  # exit code
CAUSE = 0.5  # seconds in which a better explanation of a lost peer may come


class Ranks:
    """`size` processes that wait for jobs. `imports` are modules that they have by then. One job at a time. Jobs whose functions
    are not the program's own need no `main`: the ranks do not import the program's main module then."""

    def __init__(self, size: int, backend: str = "auto", imports: Sequence[str] = (), main: bool = True) -> None:
        check_size(size)
        if backend not in BACKENDS:
            raise UserError("there is no such way to connect ranks", backend, ", ".join(BACKENDS))
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            os._exit(NOT_GUARDED)  # this is a rank that imports the program; its parent tells what that code means
        self.size, self._open = size, True
        self._jobs: list[connection.Connection] = []
        self._reports: list[connection.Connection] = []
        self._codes: dict[int, int] = {}  # the exit codes of ranks that have ended
        self._ended, ended = multiprocessing.Pipe()
        self._nursery: Any = None
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the ranks
        try:
            with _held_back(), contextlib.nullcontext() if main else _main_left_alone():
                self._start(backend, tuple(imports), ended)
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
        if self._nursery is not None and self._nursery.pid is not None:
            self._nursery.join(0 if now else GRACE)
            for number, patience in ((child.END, 2 * GRACE), (signal.SIGKILL, None)):
                if self._nursery.is_alive():
                    os.kill(self._nursery.pid, number)
                    self._nursery.join(patience)
        for pipe in (*self._jobs, *self._reports, self._ended):
            pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(now=kind is not None)

    # ---- starting and watching ----

    def _start(self, backend: str, imports: tuple[str, ...], ended: connection.Connection) -> None:
        context = multiprocessing.get_context("spawn")
        seeds = []
        for rank in range(self.size):
            take_jobs, jobs = context.Pipe(duplex=False)
            reports, give_reports = context.Pipe(duplex=False)
            self._jobs.append(jobs)
            self._reports.append(reports)
            start = child.Start(rank, self.size, backend, *share_of_cores(rank, self.size), imports)
            seeds.append(nursery.Seed(start, _stdin_for(rank), take_jobs, give_reports))
        self._nursery = context.Process(target=nursery.main, args=(seeds, ended), name="ranks")
        self._nursery.start()
        ended.close()
        for seed in seeds:  # now only the ranks hold these: they break when those end
            seed.close()

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
        sources = {self._reports[rank]: rank for rank in ranks}
        found = connection.wait([*sources, self._ended], 0.0 if ranks & self._codes.keys() else patience)
        if self._ended in found:
            self._hear_of_an_end()
        out = []
        for rank in sorted({sources[pipe] for pipe in found if pipe in sources} | ranks & self._codes.keys()):
            try:
                kind, value = pickle.loads(self._reports[rank].recv_bytes()) if self._reports[rank].poll() else ("failure", None)
            except (EOFError, OSError):
                kind, value = "failure", None
            out.append((rank, kind, value))
        return out

    def _hear_of_an_end(self) -> None:
        """The exit code of the next rank that has ended; those of all where the nursery has: what is left of them ends with this group."""
        try:
            rank, code = self._ended.recv()
            self._codes[rank] = code
        except (EOFError, OSError):
            self._nursery.join(GRACE)
            self._codes = dict.fromkeys(range(self.size), self._nursery.exitcode or 0) | self._codes

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
        until = time.monotonic() + GRACE
        while rank not in self._codes and self._ended.poll(max(until - time.monotonic(), 0.0)):
            self._hear_of_an_end()
        code = self._codes.get(rank)
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


def _tells_of_peers(failure: child.Failure | None) -> bool:
    """Whether a failure may be the consequence of another rank's; a death without a word is not."""
    return failure is not None and failure.of_peers


def check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError("the number of ranks must be a whole number of at least 1", repr(size), "--tp 2")


def share_of_cores(rank: int, size: int) -> tuple[tuple[int, ...], int]:
    """The cores that a rank is pinned to and its number of threads: one for each, or as few as OMP_NUM_THREADS says. With fewer cores than
    ranks: not pinned, one thread."""
    cores, asked = sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    each = len(cores) // size
    threads = min(each, int(asked)) if asked.isdecimal() and int(asked) else each
    return (tuple(cores[rank * each : (rank + 1) * each]), threads) if each else ((), 1)


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
def _held_back() -> Iterator[None]:
    """Processes started inside begin with these signals blocked, until the nursery has said that it ignores them."""
    resource_tracker.ensure_running()  # else it is started inside, and unblocks them for this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, child.TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
