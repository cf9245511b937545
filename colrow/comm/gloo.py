"""The transport over gloo: processes that exchange messages, on one host or several. CPU tensors.

Every collective is made of messages between pairs of ranks (torch.distributed's isend and irecv), because gloo's own collectives add in an
order that depends on the algorithm, want equal sizes, hang or mix silently when ranks disagree, and are slower for small tensors.

A message is a header of 256 bytes and the first 64 KB of the payload; what is left follows when the header has been checked. The header
carries the number of the call, a digest of all that must agree, and the call in words, so that ranks that disagree fail at once with both
sides named. It costs no message of its own, so it is always on.

Bytes moved by a rank = payload sent + payload received, counted where the messages are made; headers (256 bytes a message), lengths of
objects and what TCP adds are not in it. With B bytes of the logical tensor on n ranks: all_reduce 2(n - 1)·B where B fits into first
messages or n = 2, else 4·B - 4·B/n in two steps (evenly cut); all_gather (n - 1)·own + (B - own); reduce_scatter (B - own part) +
(n - 1)·own part; broadcast (n - 1)·B for the source and B for the others.

Not here: how ranks find each other (dist.py), CUDA (native.py).
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankError
from .background import Worker
from .group import Call, Transport, deadline
from .reduce import reduce_in_order

HEADER = 256
FIRST = HEADER + 65536  # most bytes of a first message
_NUMBERS = struct.Struct("<Q16s")  # number of the call, digest
_FOREVER = timedelta(days=3650)


class GlooTransport:
    """`members` are the world's numbers of this group's ranks, ascending; `world_rank` is this process. Uses the process group `world`,
    for all sub-groups too: so a rank that enters a call of another group is seen as well."""

    kind = "gloo"

    def __init__(self, members: tuple[int, ...], world_rank: int, world: Any = None, worker: Worker | None = None) -> None:
        self.waited = 0.0
        self.worker: Worker | None = worker or Worker()
        self._members, self._rank, self._world = members, members.index(world_rank), world
        self._peers = [rank for rank in range(len(members)) if rank != self._rank]
        self._inbox = {peer: torch.empty(FIRST, dtype=torch.uint8) for peer in self._peers}
        self._number = 0
        self._among = "" if members == tuple(range(dist.get_world_size(world))) else f" among ranks {list(members)}"
        self._unfinished: list[Any] = []  # kept after a failure: gloo must not lose the memory it still sends from

    # ---- the interface of Transport ----

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        n = len(self._members)
        if n == 2 or x.nbytes <= FIRST - HEADER:
            parts = [x if rank == self._rank else torch.empty_like(x) for rank in range(n)]
            moved = self._swap(call, [x] * n, parts)
            reduce_in_order(parts, op, x)
            return moved
        pieces = list(x.view(-1).tensor_split(n))
        own = pieces[self._rank]
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(n)]
        moved = self._swap(call, pieces, parts)  # everybody gets everybody's part of its own piece ...
        reduce_in_order(parts, op, own)
        return moved + self._swap(call, [own] * n, pieces)  # ... and gives the sum to all

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        moved = self._swap(call, [x] * len(out), out)
        out[self._rank].copy_(x)
        return moved

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        found = [parts[self._rank] if rank == self._rank else torch.empty_like(out) for rank in range(len(parts))]
        moved = self._swap(call, parts, found)
        reduce_in_order(found, "sum", out)
        return moved

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        nothing = x.new_empty(0)
        ranks = range(len(self._members))
        if self._rank == source:
            return self._swap(call, [x for _ in ranks], [nothing for _ in ranks])
        return self._swap(call, [nothing for _ in ranks], [x if rank == source else nothing for rank in ranks])

    def gather_objects(self, value: Any, call: Call) -> list[Any]:
        data = pickle.dumps(value)
        sent = torch.frombuffer(bytearray(struct.pack("<Q", len(data)) + data), dtype=torch.uint8)
        firsts = self._meet(call, dict.fromkeys(self._peers, sent[: FIRST - HEADER]), patient=True)
        found = {self._rank: sent}
        for peer, first in firsts.items():
            (length,) = struct.unpack("<Q", _bytes(first[:8]))
            found[peer] = torch.empty(8 + length, dtype=torch.uint8)
            found[peer][: FIRST - HEADER] = first[: 8 + length]
        self._rest(call, dict.fromkeys(self._peers, sent), {peer: found[peer] for peer in self._peers})
        return [pickle.loads(_bytes(found[rank][8:])) for rank in range(len(self._members))]

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        members = tuple(self._members[rank] for rank in ranks)
        mine = self._members[self._rank]
        return GlooTransport(members, mine, self._world, self.worker) if mine in members else None

    def close(self) -> None:
        """Nothing to do: the connections are the process group's, which `dist.disconnect` ends."""

    # ---- messages ----

    def _swap(self, call: Call, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> int:
        """Sends `out[r]` to every peer r and receives its message in `into[r]`. Returns the bytes of both."""
        sends = {peer: _flat(out[peer]) for peer in self._peers}
        receives = {peer: _flat(into[peer]) for peer in self._peers}
        for peer, first in self._meet(call, {peer: data[: FIRST - HEADER] for peer, data in sends.items()}).items():
            head = receives[peer][: FIRST - HEADER]
            head.copy_(first[: len(head)])
        self._rest(call, sends, receives)
        return sum(len(data) for data in (*sends.values(), *receives.values()))

    def _meet(self, call: Call, payloads: dict[int, torch.Tensor], patient: bool = False) -> dict[int, torch.Tensor]:
        """First messages with every peer: what each sent behind its header, valid until the next call. Waits for the slowest and checks
        that all agree."""
        self._number += 1
        header = self._header(call)
        received = self._inbox
        messages = [(peer, torch.cat((header, payloads[peer]))) for peer in self._peers]
        start = time.perf_counter()
        works = self._start(call, received.items(), messages)
        for peer, work in works[: len(received)]:
            self._wait(call, peer, work, _FOREVER if patient else None)
            if not torch.equal(received[peer][:HEADER], header):
                theirs = _bytes(received[peer][_NUMBERS.size : HEADER]).rstrip(b"\0").decode(errors="replace")
                mine = _bytes(header[_NUMBERS.size :]).rstrip(b"\0").decode(errors="replace")
                me, other = self._members[self._rank], self._members[peer]
                raise RankError(f"ranks disagree: rank {me} is in {mine}, rank {other} in {theirs}")
        self.waited += time.perf_counter() - start
        for peer, work in works[len(received) :]:
            self._wait(call, peer, work)
        self._unfinished.clear()
        return {peer: message[HEADER:] for peer, message in received.items()}

    def _rest(self, call: Call, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """What did not fit into the first messages."""
        room = FIRST - HEADER
        long_receives = [(peer, data[room:]) for peer, data in receives.items() if len(data) > room]
        long_sends = [(peer, data[room:]) for peer, data in sends.items() if len(data) > room]
        for peer, work in self._start(call, long_receives, long_sends):
            self._wait(call, peer, work)
        self._unfinished.clear()

    def _start(
        self, call: Call, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]]
    ) -> list[tuple[int, Any]]:
        works = []
        for start, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, data in messages:
                try:
                    works.append((peer, start(data, self._members[peer], group=self._world)))
                except RuntimeError as error:
                    raise self._gone(call, peer, error) from error
                self._unfinished.append((works[-1], data))
        return works

    def _wait(self, call: Call, peer: int, work: Any, patience: timedelta | None = None) -> None:
        try:
            work.wait(patience or timedelta(seconds=deadline()))
        except RuntimeError as error:
            raise self._gone(call, peer, error) from error

    def _gone(self, call: Call, peer: int, error: RuntimeError) -> RankError:
        me, other = self._members[self._rank], self._members[peer]
        if "Timed out" in str(error):
            return RankError(f"rank {me} waited {deadline():.0f} s in {call} for rank {other}")
        return RankError(f"rank {me} lost rank {other} in {call}")

    def _header(self, call: Call) -> torch.Tensor:
        text = f"{call}{self._among}".encode()
        if len(text) > HEADER - _NUMBERS.size:
            text, full = text[: HEADER - _NUMBERS.size - 3] + b"...", text
        else:
            full = text
        digest = hashlib.blake2b(full, digest_size=16).digest()
        return torch.frombuffer(bytearray((_NUMBERS.pack(self._number, digest) + text).ljust(HEADER, b"\0")), dtype=torch.uint8)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return x.view(-1).view(torch.uint8)


def _bytes(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()
