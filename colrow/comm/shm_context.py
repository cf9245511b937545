"""The context that shm.c keeps for one rank, from Python: opened, called, asked for errors, closed. The collectives are in shm.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import RankError
from .group import Call
from .shm_setup import Mapping

_SITES = 4096  # call sites remembered before the table starts anew
_AGAIN = -1


class _Context(ctypes.Structure):
    """The first fields of `Group` in shm.h."""

    _fields_ = (
        ("waited", ctypes.c_double),
        ("deadline", ctypes.c_double),
        ("one_shot_limit", ctypes.c_uint64),
        ("seq", ctypes.c_uint64),
        ("failed_rank", ctypes.c_int64),
        ("error", ctypes.c_char * 640),
    )


def _number(field: str, about: str) -> property:
    """An attribute that is a number of the C side's."""
    return property(lambda self: getattr(self._context, field), lambda self, value: setattr(self._context, field, value), doc=about)


class _Sites(dict[tuple[str, str], int]):
    """(name, detail) -> the number that the C side gave this call site. Forgets all when full, since details may hold changing shapes."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle
        self.forgotten = 0  # times

    def __missing__(self, key: tuple[str, str]) -> int:
        self.make_room(1)
        name, detail = key
        number = self[key] = self._library.cr_site(self._handle, (f"{name} ({detail})" if detail else name).encode())
        return number

    def make_room(self, count: int) -> None:
        if len(self) + count > _SITES:
            self.clear()
            self.forgotten += 1
            self._library.cr_forget_sites(self._handle)


class ShmContext:
    """One rank's view of a mapping that all ranks of a group share. After a failure it is of no further use."""

    def __init__(self, mapping: Mapping, rank: int, deadline: float) -> None:
        self.rank, self.size = rank, len(mapping.pids)
        self.mapping = mapping
        self._library = mapping.library
        watched = [pid if peer != rank else 0 for peer, pid in enumerate(mapping.pids)]
        self._pidfds = [_pidfd(pid) for pid in watched]
        numbers = ctypes.c_int * self.size
        self._handle: int = self._library.cr_open(
            mapping.base, rank, self.size, mapping.slot_bytes, numbers(*watched), numbers(*self._pidfds), mapping.crowded
        )
        if not self._handle:
            raise MemoryError("no memory for the context of a shared-memory group")
        self._context = _Context.from_address(self._handle)
        self._context.deadline = deadline
        self._sites = _Sites(self._library, self._handle)
        self._pointers = (ctypes.c_void_p * self.size)()
        self._sizes = (ctypes.c_uint64 * self.size)()
        self._c_all_reduce = self._library.cr_all_reduce
        self._lent: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._open = True

    def close(self) -> None:
        """Gives the memory back. Peers that still wait for this rank fail at once, with its name."""
        if self._open:
            self._open = False
            self._waited = self._context.waited
            self._library.cr_close(self._handle)
            if not self._lent:  # a tensor from buffer() may still be used: then the mapping stays until the process ends
                self._library.cr_unmap(self.mapping.base, self.mapping.nbytes)
            for file in self._pidfds:
                if file >= 0:
                    os.close(file)

    # ---- Memory that is reduced from where it is ----

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in shared memory that the coming `all_reduce_into` reads, so that a product can be computed where it is reduced from.

        It is meant for the very next collective of this group: ask anew each time. At most `mapping.slot_bytes` large.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        at = self._library.cr_buffer(self._handle, nbytes)
        if at is None:
            raise ValueError(f"a shared buffer has at most {self.mapping.slot_bytes} bytes, {nbytes} were asked for")
        key = (at, numel, dtype)
        if key not in self._lent:
            self._lent[key] = torch.frombuffer((ctypes.c_char * nbytes).from_address(at), dtype=dtype, count=numel)
        return self._lent[key]

    def _check_lent(self, at: int, nbytes: int, call: Call) -> None:
        if self._in_slots(at) and at != self._library.cr_buffer(self._handle, nbytes):
            raise ValueError(f"{call.op} '{call.name}': this buffer was lent for an earlier call")

    def _in_slots(self, at: int) -> bool:
        return self.mapping.base <= at < self.mapping.base + self.mapping.nbytes

    # ---- For C that calls C ----

    def raw(self) -> tuple[int, tuple[int | None, int | None]]:
        """The context, and the addresses of shm.c's `cr_all_reduce` and `cr_buffer`, for C code that makes its sums itself. What these
        return is said in shm.c; after CR_FAILED `failure` has the reason."""
        functions = [ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value for name in ("cr_all_reduce", "cr_buffer")]
        return self._handle, (functions[0], functions[1])

    def sites(self, keys: Sequence[tuple[str, str]]) -> list[int]:
        """The numbers of call sites (name, detail) for C; they may change when this transport is used for another."""
        self._sites.make_room(len(keys))
        return [self._sites[key] for key in keys]

    @property
    def forgotten(self) -> int:
        """How often all call sites have been forgotten: as long as it stays, so do their numbers."""
        return self._sites.forgotten

    def give_up(self, why: str) -> None:
        """Tells the others that this rank does not come back, so that they do not wait for it."""
        self._library.cr_give_up(self._handle, why.encode())

    def failure(self) -> RankError:
        return RankError(self._context.error.decode(errors="replace"))

    # ---- Settings and figures ----

    @property
    def waited(self) -> float:
        return self._context.waited if self._open else self._waited

    deadline = _number("deadline", "Seconds that a rank waits for one that is alive but does not come; 0 is for ever.")
    one_shot_limit = _number("one_shot_limit", "All-reduces of at most so many bytes take one step. Equal on all ranks.")

    def __str__(self) -> str:
        mib = self.mapping.nbytes / 2**20
        return f"shared memory of {self.size} ranks: {mib:.1f} MiB, one-step all-reduce up to {self.one_shot_limit >> 10} KiB"

    # ---- Calling ----

    def _run(self, function: Callable[..., int], *arguments: Any) -> int:
        moved = function(self._handle, *arguments)
        return moved if moved >= 0 else self._finish(function, (self._handle, *arguments), moved)

    def _finish(self, function: Callable[..., int], arguments: tuple[Any, ...], status: int) -> int:
        """Goes on waiting, with a look at Python's signals now and then; raises what went wrong."""
        try:
            while status == _AGAIN:
                status = function(*arguments)
        except BaseException as error:  # Ctrl-C: the others must not wait for a rank that does not come back
            with contextlib.suppress(Exception):
                self.give_up(type(error).__name__)
            raise
        if status < 0:
            raise self.failure()
        return status


def _pidfd(pid: int) -> int:
    """A file that tells when the process has ended, -1 where the kernel has none (then /proc is read)."""
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
