"""The transport over shared memory: the ranks are processes of one host. Python's side of shm.c.

    transport = ShmTransport.create(rank, size, rendezvous)     # ShmUnavailable, on all ranks alike, where it cannot be used

Bytes are counted in C where they are copied: written to this rank's slots, and read from its peers'. With B bytes of the logical tensor on
n ranks that is: all_reduce B + (n-1)·B in one step below `one_shot_limit`, above it (two steps) B - p + p written and (n-1)·p + B - p read
for an own part of p ≈ B/n; all_gather own + (B - own); reduce_scatter (B - own part) + (n-1)·own part; broadcast B on every rank.

A rank that dies, closes or disagrees makes the operation fail on every other rank with a RankError that names it, the call site and the
operation's number. One that lives but does not come is named after `deadline` seconds; while it waits for objects, which an idle server's
ranks do for hours, only one that is stopped. After a failure the group is of no further use.
One thread at a time may use a transport.

Not here: how the memory is made (shm_setup.py), the context in C and its errors (shm_context.py), names, counters and dims
(collectives.py), several hosts.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UserError
from .group import Call
from .shm_context import ShmContext
from .shm_setup import Rendezvous, ShmUnavailable, exchange_over, share

SLOT_BYTES = 1 << 19  # two per rank; larger payloads go through in pieces of this size, which stay in the cache
DEADLINE = 600.0  # seconds
_OBJECT = 2048  # bytes of a pickled object that travel in its first step

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


class ShmTransport(ShmContext):
    """See `group.Transport`. Tensors are contiguous and on the CPU."""

    kind = "shm"
    worker = None

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

    # ---- Without a copy ----

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


def _address(x: torch.Tensor, call: Call) -> int:
    if not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{call.op} '{call.name}': shared memory takes contiguous tensors on the CPU, got {_about(x)}")
    return x.data_ptr()


def _about(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} with strides {x.stride()} on {x.device}"
