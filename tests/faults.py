"""The classic faults of tensor parallelism, planted on purpose: a comparison that stays green under one of them proves nothing.

    with plant("drop g"): ...      ranks as threads, in this process; undone at the end

Each breaks exactly one thing in the code that really runs. They are chosen so that no rank hangs and no shape changes: only numbers tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from colrow.comm import regions
from colrow.comm.group import Group
from colrow.parallel import borders, gradients, linear
from colrow.partition import Partition
from colrow.planning.plan import Attention

FORWARD = ("drop g", "bias on every rank", "rotated head map")  # logits differ
BACKWARD = ("drop f", "drop the sum of copied heads")  # logits are right, gradients are not
FAULTS = (*FORWARD, *BACKWARD)
OF_OTHERS = ("rotated slices",)  # not to be had with Llama's plan


@contextmanager
def plant(fault: str, at: str = "") -> Iterator[None]:
    """`at` chooses the call site of a dropped f or g: the first whose name contains it.

    `bias on every rank` needs a row-parallel bias; `rotated head map` a rank with two KV heads; the copies KV heads on two ranks.
    """
    place = {
        "drop g": (regions, "reduce_from", _without_one(regions.reduce_from, at)),
        "drop f": (regions, "copy_to", _without_one(regions.copy_to, at)),
        "bias on every rank": (linear, "_add_up", _bias_then_sum),
        "rotated head map": (Attention, "local_map", _rotated(Attention.local_map)),
        "rotated slices": (borders, "own_part", _of_the_next_rank(borders.own_part)),
        "drop the sum of copied heads": (gradients, "stretches", lambda partition, group: ()),
    }
    target, name, broken = place[fault]
    with patch.object(target, name, broken):
        yield


def _without_one(original: Callable[..., torch.Tensor], at: str) -> Callable[..., torch.Tensor]:
    """The region does nothing at one call site and works everywhere else."""
    skipped: list[str] = []

    def region(x: torch.Tensor, group: Group, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not skipped and at in name:
            skipped.append(name)
        return x if name in skipped else original(x, group, name, *args, **kwargs)

    return region


def _bias_then_sum(partial: torch.Tensor, bias: torch.Tensor | None, group: Group, name: str | None, *_: Any) -> torch.Tensor:
    if bias is not None:
        partial = partial + bias
    return regions.reduce_from(partial, group, name or "")


def _of_the_next_rank(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def own_part(partition: Partition, rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return original(partition, (rank + 1) % partition.ranks, name, x)

    return own_part


def _rotated(original: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    def local_map(self: Attention, rank: int) -> tuple[int, ...]:
        right = original(self, rank)
        return (*right[1:], *right[:1])

    return local_map
