"""What test_planning_cost.py runs on ranks. Imports little, since every process imports it."""

from __future__ import annotations

import torch

from colrow.comm import collectives
from colrow.comm.group import Group


def ask_transport(group: Group) -> list[tuple[str, int, int, int]]:
    """(op, logical bytes, moved bytes, rank) of some collectives with even and odd sizes."""
    for numel in (1, 999, 16_000, 500_001):
        collectives.all_reduce(torch.ones(numel), group, f"all_reduce.{numel}")
        sizes = [numel // (r + 1) for r in range(group.size)]
        collectives.all_gather(torch.ones(sizes[group.rank]), group, f"all_gather.{numel}", 0, sizes)
        collectives.reduce_scatter(torch.ones(sum(sizes)), group, f"reduce_scatter.{numel}", 0, sizes)
        collectives.broadcast(torch.ones(numel), group, f"broadcast.{numel}")
    limit = getattr(group.transport, "one_shot_limit", 0)
    return [(name, t.logical_bytes, t.moved_bytes, limit) for (_, _, name), t in group.counters.sites.items()]
