"""Group: the ranks that work together, and how they exchange bytes. Always an argument, never a global.

A `Group` is what every function that communicates takes. It has a `Transport` (threads, shared memory, gloo, NCCL) that moves flat
contiguous tensors, and `Counters` that say what was moved. The collectives themselves, with names and uneven sizes, are in
`collectives.py`; nothing outside comm/ calls a transport.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import UserError
from .background import Worker
from .counters import Counters

CPU = torch.device("cpu")


def deadline() -> float:
    """Seconds that a rank waits in a collective for one that lives but does not come: COLROW_DEADLINE, or 600."""
    text = os.environ.get("COLROW_DEADLINE", "600")
    try:
        return float(text)
    except ValueError:
        raise UserError("COLROW_DEADLINE must be a number of seconds", text, "600") from None


@dataclass(frozen=True)
class Call:
    """What a rank says about the collective it enters. Ranks whose headers differ fail at once, both named."""

    op: str  # all_reduce, all_gather, reduce_scatter, broadcast, barrier, object
    name: str  # the call site, such as "model.layers.3.mlp.down_proj.output"
    dtype: str = ""
    numel: int = 0  # of the logical tensor
    detail: str = ""  # what else must agree: the shape, sizes of an uneven gather, the source of a broadcast

    def __str__(self) -> str:
        about = f"{self.dtype}, {self.numel} elements, {self.detail}" if self.dtype else self.detail
        return f"{self.op} '{self.name}'" + (f" ({about})" if about else "")


class Transport(Protocol):
    """Moves bytes between the ranks of one group. Tensors are contiguous; every method is a collective of all ranks.

    bool tensors arrive here as uint8. A tensor may have no elements: the call is made all the same, since its header is checked.

    Every method returns the number of bytes THIS rank moved: wrote to where others read, plus read from what others wrote, counted where
    they are copied. It counts waiting apart in `waited` (seconds, added up since the transport was made).
    """

    kind: str  # "threads", "shm", "gloo", "nccl", "single"

    @property
    def worker(self) -> Worker | None:
        """Where collectives may run beside what the rank computes; None where that gains nothing."""

    @property
    def waited(self) -> float: ...

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        """In place. `op` is "sum" or "max". Same bits on all ranks; float16 and bfloat16 are summed in float32."""

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        """`out[r]` receives rank r's `x`; sizes may differ between ranks, and be 0."""

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        """`out` receives the sum over ranks of `parts[rank]`; sizes of parts may differ, and be 0."""

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        """In place, from rank `source` of the group."""

    def gather_objects(self, value: Any, call: Call) -> list[Any]:
        """Small picklable values of all ranks, in rank order. Also the barrier. Has no deadline: rank 0 may be waiting for its user."""

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        """A transport of some of the ranks, ascending. Called by ALL ranks of this group with the same argument; None on ranks outside."""

    def close(self) -> None: ...


class Alone:
    """The transport of a group of one rank. The collectives return before they use it, so it only has to exist."""

    kind = "single"
    waited = 0.0
    worker = None

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        return 0

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        out[0].copy_(x)
        return 0

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        out.copy_(parts[0])
        return 0

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        return 0

    def gather_objects(self, value: Any, call: Call) -> list[Any]:
        return [value]

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        return self if tuple(ranks) == (0,) else None

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Group:
    """`rank` of `size` ranks; `device` is where this rank computes. `ranks` are the members' numbers in the world's group."""

    rank: int
    size: int
    transport: Transport
    device: torch.device = CPU
    ranks: tuple[int, ...] = ()
    counters: Counters = field(default_factory=Counters)
    _subs: dict[tuple[int, ...], Group | None] = field(default_factory=dict, repr=False, compare=False)

    def sub(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of this group's ranks, made once and remembered. All ranks must ask, in the same order; counters are shared."""
        key = tuple(ranks)
        if key == tuple(range(self.size)):
            return self
        if key not in self._subs:
            transport = self.transport.sub(key)
            members = self.ranks or tuple(range(self.size))
            names = tuple(members[r] for r in key)
            if transport is None:
                self._subs[key] = None
            else:
                self._subs[key] = Group(key.index(self.rank), len(key), transport, self.device, names, self.counters)
        return self._subs[key]

    def __deepcopy__(self, memo: dict) -> Group:
        return self  # a connection, not data: a copied layer speaks over the same one

    def close(self) -> None:
        """Gives back what the transport holds: connections, memory, threads. Not a collective; the group cannot be used afterwards."""
        for group in self._subs.values():
            if group is not None:
                group.close()
        self.transport.close()


def single(device: torch.device | str = "cpu") -> Group:
    """A group of this process alone: every collective is the identity and nothing is counted."""
    return Group(0, 1, Alone(), torch.device(device), (0,))
