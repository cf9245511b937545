"""Columns: which vocabulary ids a rank's logits are of, and the whole vocabulary's logits put together from all ranks'."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import all_gather
from ..comm.group import Group
from ..partition import Partition

LOGITS = "engine.logits"


def columns(cut: Partition | None, count: int, ranks: int) -> list[torch.Tensor]:
    """The ids of every rank's columns. Without a cut every rank has all `count` of them, and rank 0's count."""
    if cut is None or cut.is_whole:
        return [torch.arange(count if rank == 0 else 0) for rank in range(ranks)]
    empty = torch.empty(0, dtype=torch.int64)
    return [torch.cat([empty, *(torch.arange(a, b) for a, b in ranges)]) for ranges in cut.pieces]


def gathered(logits: torch.Tensor, ids: Sequence[torch.Tensor], group: Group) -> torch.Tensor:
    """[rows, vocabulary] from every rank's `logits` [rows, its columns], whose ids are `ids[rank]`. A collective."""
    side_by_side = all_gather(logits, group, LOGITS, 1, [len(own) for own in ids])
    whole = torch.empty_like(side_by_side)
    whole[:, torch.cat(list(ids))] = side_by_side
    return whole
