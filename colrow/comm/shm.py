"""The transport over shared memory: the ranks are processes of one host. Python's side of shm.c.

    transport = ShmTransport.create(rank, size, rendezvous)     # ShmUnavailable, on all ranks alike, where it cannot be used

Bytes are counted in C where they are copied: written to this rank's slots, and read from its peers'. With B bytes of the logical tensor on
n ranks that is: all_reduce B + (n-1)·B in one step below `one_shot_limit`, above it (two steps) B - p + p written and (n-1)·p + B - p read
for an own part of p ≈ B/n; all_gather own + (B - own); reduce_scatter (B - own part) + (n-1)·own part; broadcast B on every rank.

A rank that dies, closes or disagrees makes the operation fail on every other rank with a RankError that names it, the call site and the
operation's number. One that lives but does not come is named after `deadline` seconds; while it waits for objects, which an idle server's
ranks do for hours, only one that is stopped. After a failure the group is of no further use.
One thread at a time may use a transport.

Not here: how the memory is made (shm_setup.py), names, counters and dims (collectives.py), several hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import RankError, UserError
from .group import Call
from .shm_setup import Mapping, Rendezvous, ShmUnavailable, exchange_over, share

SLOT_BYTES = 1 << 19  # two per rank; larger payloads go through in pieces of this size, which stay in the cache
DEADLINE = 600.0  # seconds
_OBJECT = 2048  # bytes of a pickled object that travel in its first step
_SITES = 4096  # call sites remembered before the table starts anew
_AGAIN = -1

_OPS = {"sum": 0, "max": 1}
_GATHER, _OBJECTS, _BARRIER = 2, 5, 6
_BYTES = 6
_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: _BYTES,
}


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


class _Sites(dict[tuple[str, str], int]):
    """(name, detail) -> the number that the C side gave this call site. Forgets all when full, since details may hold changing shapes."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle

    def __missing__(self, key: tuple[str, str]) -> int:
        if len(self) >= _SITES:
            self.clear()
            self._library.cr_forget_sites(self._handle)
        name, detail = key
        number = self[key] = self._library.cr_site(self._handle, (f"{name} ({detail})" if detail else name).encode())
        return number


class ShmTransport:
    """See `group.Transport`. Tensors are contiguous and on the CPU."""

    kind = "shm"

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

    @classmethod
    def create(
        cls, rank: int, size: int, rendezvous: Rendezvous, *, slot_bytes: int = SLOT_BYTES, deadline: float = DEADLINE
    ) -> ShmTransport:
        """The transport of all ranks that use this rendezvous (a torch Store, for one). A collective.

        ShmUnavailable, with the same line on all ranks, where one of them cannot build, open or reserve the memory, or where the self-test
        finds a wrong result. `deadline` in seconds, 0 for none; `slot_bytes` a multiple of 4096. Needs 2·size·slot_bytes and a bit.
        """
        from .shm_check import prepare

        exchange = exchange_over(rendezvous, rank, size)
        transport = cls(share(rank, size, slot_bytes, exchange), rank, deadline)
        prepare(transport, exchange)
        return transport

    # ---- What a transport does ----

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        dtype = _DTYPES.get(x.dtype)
        if dtype is None or not x.is_contiguous():
            return self._all_reduce_wide(x, op, call)
        at = x.data_ptr()
        site = self._sites[call.name, call.detail]
        moved: int = self._c_all_reduce(self._handle, at, at, x.numel(), dtype, _OPS[op], site)
        return moved if moved >= 0 else self._finish(self._c_all_reduce, (self._handle, at, at, x.numel(), dtype, _OPS[op], site), moved)

    def _all_reduce_wide(self, x: torch.Tensor, op: str, call: Call) -> int:
        """int8 and int16 travel as int32, which wraps the same."""
        if x.dtype not in (torch.int8, torch.int16) or not x.is_contiguous():
            raise ValueError(f"all_reduce '{call.name}': shared memory takes contiguous tensors of numbers, got {_about(x)}")
        wide = x.to(torch.int32)
        moved = self.all_reduce(wide, op, call)
        x.copy_(wide)
        return moved

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        for rank, piece in enumerate(out):
            self._pointers[rank], self._sizes[rank] = _address(piece, call), piece.nbytes
        if x.nbytes != out[self.rank].nbytes:
            raise ValueError(f"all_gather '{call.name}': rank {self.rank} has {_about(x)}, its place is {_about(out[self.rank])}")
        count = sum(piece.numel() for piece in out)
        return self._gather(_address(x, call), _DTYPES.get(x.dtype, _BYTES), count, _GATHER, call)

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        dtype = _DTYPES.get(out.dtype)
        if dtype is None:
            raise ValueError(f"reduce_scatter '{call.name}': there is no sum of {out.dtype} over shared memory")
        for rank, part in enumerate(parts):
            self._pointers[rank], self._sizes[rank] = _address(part, call), part.nbytes
        if out.nbytes != parts[self.rank].nbytes:
            raise ValueError(f"reduce_scatter '{call.name}': rank {self.rank}'s part is {_about(parts[self.rank])}, out is {_about(out)}")
        count, site = sum(part.numel() for part in parts), self._sites[call.name, call.detail]
        return self._run(self._library.cr_reduce_scatter, self._pointers, self._sizes, _address(out, call), dtype, count, site)

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        dtype, count = (_DTYPES[x.dtype], x.numel()) if x.dtype in _DTYPES else (_BYTES, x.nbytes)
        return self._run(self._library.cr_broadcast, _address(x, call), count, dtype, source, self._sites[call.name, call.detail])

    def gather_objects(self, value: Any, call: Call) -> list[Any]:
        if call.op == "barrier" and value is None:
            self._gather_bytes(b"", [0] * self.size, _BARRIER, call)
            return [None] * self.size
        text = pickle.dumps(value)
        head = (len(text).to_bytes(8, "little") + text)[:_OBJECT].ljust(_OBJECT, b"\0")
        heads = self._gather_bytes(head, [_OBJECT] * self.size, _OBJECTS, call)
        lengths = [int.from_bytes(peer[:8], "little") for peer in heads]
        texts = [peer[8 : 8 + length] for peer, length in zip(heads, lengths, strict=True)]
        rest = [max(length - (_OBJECT - 8), 0) for length in lengths]
        if any(rest):
            tails = self._gather_bytes(text[_OBJECT - 8 :], rest, _OBJECTS, call)
            texts = [start + tail for start, tail in zip(texts, tails, strict=True)]
        return [pickle.loads(peer) for peer in texts]

    def sub(self, ranks: Sequence[int]) -> ShmTransport | None:
        """See `group.Transport`. The sub-group has memory of its own; operations of different groups do not see each other."""
        ranks = tuple(ranks)
        member = self.rank in ranks
        call = Call("object", "sub-group", detail=str(ranks))

        def exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
            values = self.gather_objects(value if member else {}, call)
            return [values[rank] for rank in ranks]

        if not member:  # takes part in both exchanges of `share`, and that is all
            for _ in range(2):
                exchange({})
            return None
        try:
            mapping = share(ranks.index(self.rank), len(ranks), self.mapping.slot_bytes, exchange)
        except ShmUnavailable as error:
            raise UserError(f"ranks {list(ranks)} cannot share memory among themselves: {error}", works="gloo") from None
        sub = ShmTransport(mapping, ranks.index(self.rank), self.deadline)
        sub.one_shot_limit = self.one_shot_limit
        return sub

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

    # ---- Without a copy ----

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

    def all_reduce_into(self, x: torch.Tensor, out: torch.Tensor, op: str, call: Call) -> int:
        """`out` receives the sum or maximum of all ranks' `x`. `x` may be what `buffer` lent for this call; then it is not copied."""
        if x.numel() != out.numel() or x.dtype != out.dtype:
            raise ValueError(f"all_reduce_into '{call.name}': x is {_about(x)}, out is {_about(out)}")
        at, site = _address(x, call), self._sites[call.name, call.detail]
        self._check_lent(at, x.nbytes, call)
        return self._run(self._c_all_reduce, at, _address(out, call), x.numel(), _DTYPES[x.dtype], _OPS[op], site)

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, call: Call
    ) -> int:
        """all_reduce(sum) of `x`, residual addition and RMSNorm in one pass, as they follow each other when decoding.

        `residual` += sum, in place; `out` = weight · residual / sqrt(mean(residual²) + eps) over the last dim, rounded where a Llama
        block's modules round. All of one dtype (float32, bfloat16, float16); x, residual and out of one shape [..., width]; a row fits into
        a slot. `x` may be what `buffer` lent for this call. Knows no gradients.
        """
        dtype, width = _DTYPES.get(x.dtype, _BYTES), weight.numel()
        tensors = (x, residual, weight, out)
        if dtype > 2 or any(t.dtype != x.dtype or not t.is_contiguous() or not t.is_cpu for t in tensors):
            raise ValueError(f"all_reduce_norm '{call.name}': contiguous float32, bfloat16 or float16 tensors of one dtype are needed")
        if not x.numel() == residual.numel() == out.numel() or x.shape[-1] != width or width * x.itemsize > self.mapping.slot_bytes:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise ValueError(
                f"all_reduce_norm '{call.name}': x, residual, weight, out have shapes {shapes}; a row is too long or they differ"
            )
        places = [t.data_ptr() for t in tensors]
        self._check_lent(places[0], x.nbytes, call)
        site = self._sites[call.name, call.detail]
        return self._run(self._library.cr_reduce_norm, *places, x.numel() // width, width, dtype, eps, site)

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
        if len(self._sites) + len(keys) > _SITES:
            self._sites.clear()
            self._library.cr_forget_sites(self._handle)
        return [self._sites[key] for key in keys]

    def give_up(self, why: str) -> None:
        """Tells the others that this rank does not come back, so that they do not wait for it."""
        self._library.cr_give_up(self._handle, why.encode())

    def failure(self) -> RankError:
        return RankError(self._context.error.decode(errors="replace"))

    # ---- Settings and figures ----

    @property
    def waited(self) -> float:
        return self._context.waited if self._open else self._waited

    @property
    def deadline(self) -> float:
        """Seconds that a rank waits for one that is alive but does not come; 0 is for ever."""
        return self._context.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._context.deadline = seconds

    @property
    def one_shot_limit(self) -> int:
        """All-reduces of at most so many bytes take one step. Equal on all ranks."""
        return self._context.one_shot_limit

    @one_shot_limit.setter
    def one_shot_limit(self, nbytes: int) -> None:
        self._context.one_shot_limit = nbytes

    def __str__(self) -> str:
        mib = self.mapping.nbytes / 2**20
        return f"shared memory of {self.size} ranks: {mib:.1f} MiB, one-step all-reduce up to {self.one_shot_limit >> 10} KiB"

    # ---- Calling C ----

    def _gather(self, at: int, dtype: int, count: int, op: int, call: Call) -> int:
        site = self._sites[call.name, call.detail]
        return self._run(self._library.cr_all_gather, at, self._pointers, self._sizes, dtype, count, op, site)

    def _gather_bytes(self, mine: bytes, sizes: list[int], op: int, call: Call) -> list[bytes]:
        buffers = [ctypes.create_string_buffer(size or 1) for size in sizes]
        for rank, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
            self._pointers[rank], self._sizes[rank] = ctypes.addressof(buffer), size
        source = ctypes.create_string_buffer(mine, len(mine) + 1)
        self._gather(ctypes.addressof(source), _BYTES, sum(sizes), op, call)
        return [buffer.raw[:size] for buffer, size in zip(buffers, sizes, strict=True)]

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


def _address(x: torch.Tensor, call: Call) -> int:
    if not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{call.op} '{call.name}': shared memory takes contiguous tensors on the CPU, got {_about(x)}")
    return x.data_ptr()


def _about(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} with strides {x.stride()} on {x.device}"
