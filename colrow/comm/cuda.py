"""The transport over NCCL: one GPU a rank. Tensors by NCCL's own collectives; objects and barriers by gloo messages between the hosts.

NCCL adds in an order of its own: the same on all ranks, so all get the same bits, but 16-bit types are rounded at every addition, and the
result may differ from another transport's in the last place. Uneven sizes, which it does not know, become one broadcast or reduce a rank.

Work is queued on the GPU, so `waited` stays 0 and the time that the counters call moving is that of queuing. The bytes moved cannot be
counted where they are copied: they are computed, for NCCL's ring, sent plus received: all_reduce 4·B·(n - 1)/n; all_gather, reduce_scatter
and broadcast 2·B·(n - 1)/n (of a broadcast this is the mean over the ranks).

With COLROW_CHECK=1 a header goes ahead of every call over gloo, so that ranks that disagree fail with both sides named; it costs a round
trip between the hosts and is meant for looking for a hang. Without it NCCL's own watchdog ends a rank that waits too long.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .gloo import GlooTransport
from .group import Call, Transport

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class CudaTransport(GlooTransport):
    """`world` is a process group with gloo for CPU tensors and NCCL for CUDA tensors; `queue` the one of exactly the members."""

    kind = "nccl"

    def __init__(self, members: tuple[int, ...], world_rank: int, world: Any = None, queue: Any = None) -> None:
        super().__init__(members, world_rank, world)
        self.worker = None  # what is queued on the GPU runs beside the host anyway, and a thread would have streams of its own
        self._queue = world if queue is None else queue
        self._checked = os.environ.get("COLROW_CHECK", "") not in ("", "0")

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> int:
        self._check(call)
        dist.all_reduce(x, _OPS[op], group=self._queue)
        return 2 * self._ring(x.nbytes)

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        self._check(call)
        if len({piece.numel() for piece in out}) == 1:
            dist.all_gather(out, x, group=self._queue)
        else:
            out[self._rank].copy_(x)
            for source, piece in enumerate(out):
                if piece.numel():
                    dist.broadcast(piece, group_src=source, group=self._queue)
        return self._ring(sum(piece.nbytes for piece in out))

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        self._check(call)
        if len({part.numel() for part in parts}) == 1:
            dist.reduce_scatter(out, parts, group=self._queue)
        else:
            for target, part in enumerate(parts):
                if part.numel():
                    whole = part.clone()  # reduce may write into what it is given, on every rank
                    dist.reduce(whole, group_dst=target, group=self._queue)
                    if target == self._rank:
                        out.copy_(whole)
        return self._ring(sum(part.nbytes for part in parts))

    def broadcast(self, x: torch.Tensor, source: int, call: Call) -> int:
        self._check(call)
        dist.broadcast(x, group_src=source, group=self._queue)
        return self._ring(x.nbytes)

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        members = tuple(self._members[rank] for rank in ranks)
        mine = self._members[self._rank]
        if mine not in members:
            return None
        queue = dist.new_group(list(members), use_local_synchronization=True)
        return CudaTransport(members, mine, self._world, queue)

    def _ring(self, nbytes: int) -> int:
        n = len(self._members)
        return 2 * nbytes * (n - 1) // n

    def _check(self, call: Call) -> None:
        if self._checked:
            self._meet(call, {peer: torch.empty(0, dtype=torch.uint8) for peer in self._peers})
