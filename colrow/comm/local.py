"""Ranks as threads of one process: the same `Group`, for tests, the gate and debugging.

    results = run_threads(fn, 3, arg)      # fn(group, arg) on three threads; results in rank order

Nothing is faked: every rank holds its own tensors, posts copies of what it sends and adds what the others posted, in rank order, and each
call's header is compared. Since all ranks live here, a hang is seen at once and exactly: when a rank that others wait for has ended, or
when every rank waits, all of them fail with an error that names who waits where.

Not here: speed (Python's lock serialises the ranks), isolation (torch's global settings are common, so ranks that draw random numbers need
generators of their own), CUDA (autograd runs one backward thread per device, in which the ranks would block each other).
"""

from __future__ import annotations

import contextvars
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import RankError
from .background import Worker
from .group import Call, Group, Transport, deadline
from .reduce import reduce_in_order


def run_threads(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`fn(group, *args)` on `size` threads; the results in rank order. Raises what the first failing rank raised; the others are released.

    The threads start with the caller's grad mode, inference mode, autocast and context variables.
    """
    board = _Board(size)
    results: list[Any] = [None] * size
    settings = _Settings.of_this_thread()

    def run(rank: int) -> None:
        transport = LocalTransport(board, tuple(range(size)), rank)
        try:
            with settings.applied():
                results[rank] = fn(Group(rank, size, transport, ranks=tuple(range(size))), *args)
            board.finish(rank)
        except BaseException as error:  # whatever ends a rank must release the others
            board.fail(rank, error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not board.overdue():
                thread.join(1.0)
    except BaseException as error:  # Ctrl-C while waiting: let the ranks go
        board.fail(-1, error)
        raise
    if board.failure is not None:
        rank, failure = board.failure
        if not isinstance(failure, RankError):
            failure.add_note(f"raised on rank {rank} of {size}")
        raise failure
    return results


@dataclass(frozen=True)
class _Settings:
    """What torch keeps per thread and a rank must inherit."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None  # of the CPU; None = off

    @staticmethod
    def of_this_thread() -> _Settings:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return _Settings(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
                yield


class _Released(RankError):
    """What a rank raises because another one failed; never the first failure itself."""


@dataclass
class _Round:
    """One collective in the making: what has been posted so far."""

    call: Call
    first: int  # the rank that came first
    posts: dict[int, Any] = field(default_factory=dict)


class _Board:
    """Where the ranks of one world meet. Every change is made under one lock."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[tuple[tuple[int, ...], int], _Round] = {}
        self.waits: dict[int, tuple[tuple[int, ...], int]] = {}  # rank -> the round it waits for
        self.ended: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None
        self.failed_at = 0.0

    def exchange(self, members: tuple[int, ...], sequence: int, rank: int, call: Call, value: Any) -> tuple[list[Any], float]:
        """What all `members` posted for their `sequence`-th collective, in rank order, and the seconds waited."""
        key = members, sequence
        with self.changed:
            self._raise_if_failed()
            turn = self.rounds.setdefault(key, _Round(call, rank))
            if turn.call != call:
                raise self._set_failure(rank, RankError(f"ranks disagree: rank {turn.first} is in {turn.call}, rank {rank} in {call}"))
            turn.posts[rank] = value
            if len(turn.posts) == len(members):
                del self.rounds[key]
                for member in members:
                    self.waits.pop(member, None)
                self.changed.notify_all()
                return [turn.posts[member] for member in members], 0.0
            start, patient = time.perf_counter(), call.op in ("object", "barrier")
            self.waits[rank] = key
            self._look_for_hang()
            while len(turn.posts) < len(members):
                self._raise_if_failed()
                left = None if patient else deadline() - (time.perf_counter() - start)
                if not self.changed.wait(left) and len(turn.posts) < len(members):
                    missing = [member for member in members if member not in turn.posts]
                    raise self._set_failure(rank, RankError(f"rank {rank} waited {deadline():.0f} s in {call} for {_names(missing)}"))
            return [turn.posts[member] for member in members], time.perf_counter() - start

    def finish(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            if self.failure is None:
                self._look_for_hang()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.ended.add(rank)
            if self.failure is None:
                self._set_failure(rank, error)

    def overdue(self) -> bool:
        """Whether ranks still run long after the first failure: they are left to end with the process (threads cannot be killed)."""
        return self.failure is not None and time.monotonic() - self.failed_at > 30.0

    def _set_failure(self, rank: int, error: BaseException) -> BaseException:
        self.failure, self.failed_at = (rank, error), time.monotonic()
        self.changed.notify_all()
        return error

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            rank, error = self.failure
            if rank < 0:
                raise _Released(f"the run was ended: {type(error).__name__}")
            raise _Released(f"rank {rank} failed: {type(error).__name__}: {error}")

    def _look_for_hang(self) -> None:
        """Fails all ranks where no one can come any more: a missing rank has ended, or every rank waits for another."""
        for members, sequence in self.waits.values():
            turn = self.rounds[members, sequence]
            gone = [member for member in members if member not in turn.posts and member in self.ended]
            if gone or len(self.waits) + len(self.ended) == self.size:
                where = "; ".join(f"rank {rank} waits in {self.rounds[key].call}" for rank, key in sorted(self.waits.items()))
                reason = f"{_names(gone)} ended without it" if gone else "every rank waits for another"
                self._set_failure(turn.first, RankError(f"ranks disagree: {where}; {reason}"))
                return


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class LocalTransport:
    """Transport between threads. Moved bytes: the copy a rank posts, and what it reads of the others' copies.

    With B bytes of the logical tensor on n ranks: all_reduce n·B; all_gather own + (B - own); reduce_scatter B + (n - 1)·own part;
    broadcast B on every rank (the source writes it, the others read it).
    """

    kind = "threads"
    worker: Worker | None = None

    def __init__(self, board: _Board, members: tuple[int, ...], rank: int) -> None:
        self.waited = 0.0
        self._board, self._members, self._world_rank = board, members, rank
        self._rank = members.index(rank)
        self._sequence = 0

    def _exchange(self, value: Any, call: Call) -> list[Any]:
        self._sequence += 1
        posts, seconds = self._board.exchange(self._members, self._sequence, self._world_rank, call, value)
        self.waited += seconds
        return posts

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        posts = self._exchange(x.clone(), call)
        reduce_in_order(posts, op, x)
        return _nbytes(posts)

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        posts = self._exchange(x.clone(), call)
        for post, to in zip(posts, out, strict=True):
            to.copy_(post)
        return _nbytes(posts)

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        posts = self._exchange([part.clone() for part in parts], call)
        mine = [post[self._rank] for post in posts]
        reduce_in_order(mine, "sum", out)
        return _nbytes(parts) + _nbytes(mine) - _nbytes([out])

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        posts = self._exchange(x.clone() if self._rank == source else None, call)
        if self._rank != source:
            x.copy_(posts[source])
        return _nbytes([x])

    def gather_objects(self, value: Any, call: Call) -> list[Any]:
        return [pickle.loads(post) for post in self._exchange(pickle.dumps(value), call)]  # copies, as between processes

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        members = tuple(self._members[rank] for rank in ranks)
        return LocalTransport(self._board, members, self._world_rank) if self._world_rank in members else None

    def close(self) -> None:
        pass


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
