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
from colrow.parallel import borders, gradients, linear, pending
from colrow.partition import Partition
from colrow.planning.plan import Attention

FORWARD = ("drop g", "bias on every rank", "rotated head map")  # logits differ
BACKWARD = ("drop f", "drop the sum of copied heads")  # logits are right, gradients are not
FAULTS = (*FORWARD, *BACKWARD)
Region = Callable[..., torch.Tensor]
OF_OTHERS = (
    *("rotated slices", "constants of the first rank", "flat segments", "add up twice", "mean over the slice"),
    "residual on every rank",
)  # not all with Llama


@contextmanager
def plant(fault: str, at: str = "") -> Iterator[list[str]]:
    """`at` chooses the call site of a dropped f or g: the first whose name contains it. Yields a list that says where the fault took place,
    empty where the model gives it no place.

    `bias on every rank` needs a row-parallel bias; `rotated head map` a rank with two KV heads; the copies KV heads on two ranks; `flat
    segments` a fused tensor, of which a rank then gets one stretch of the right length.
    """
    done: list[str] = []
    place: dict[str, tuple[Any, str, Any]] = {
        "drop g": (regions, "reduce_from", _without_one(regions.reduce_from, at, done)),
        "drop f": (regions, "copy_to", _without_one(regions.copy_to, at, done)),
        "add up twice": (regions, "reduce_from", _twice_at_one(regions.reduce_from, at, done)),
        "bias on every rank": (linear, "_add_up", _bias_then_sum(linear._add_up, done)),
        "rotated head map": (Attention, "local_map", _rotated(Attention.local_map, done)),
        "rotated slices": (borders, "own_part", _of_another_rank(borders.own_part, lambda rank, ranks: (rank + 1) % ranks, done)),
        "constants of the first rank": (borders, "own_part", _of_another_rank(borders.own_part, lambda rank, ranks: 0, done)),
        "flat segments": (Partition, "split", _flat(Partition.split, done)),
        "drop the sum of copied heads": (gradients, "stretches", _no_stretches(gradients.stretches, done)),
        "residual on every rank": (pending.Pending, "settle", _whole_then_sum(done)),
        "mean over the slice": (regions, "sum_over", _own_sum(done)),
    }
    target, name, broken = place[fault]
    with patch.object(target, name, broken):
        yield done


def _without_one(original: Region, at: str, done: list[str]) -> Region:
    """The region does nothing at one call site and works everywhere else."""

    def region(x: torch.Tensor, group: Group, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not done and at in name:
            done.append(name)
        return x if name in done else original(x, group, name, *args, **kwargs)

    return region


def _twice_at_one(original: Region, at: str, done: list[str]) -> Region:
    """What was added up is added up again at one call site."""

    def region(x: torch.Tensor, group: Group, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not done and at in name:
            done.append(name)
        out = original(x, group, name, *args, **kwargs)
        return original(out, group, name) if name in done else out

    return region


def _bias_then_sum(original: Region, done: list[str]) -> Region:
    """Where a layer adds up its partial sums itself; elsewhere they wait, with what is whole beside them ("residual on every rank")."""

    def add_up(layer: Any, partial: torch.Tensor) -> torch.Tensor:
        if layer.bias is None or layer.name is None or layer.due is not None:
            return original(layer, partial)
        done.append(layer.name)
        return regions.reduce_from(partial + layer.bias, layer.group, layer.name)

    return add_up


def _whole_then_sum(done: list[str]) -> Callable[[pending.Pending], torch.Tensor]:
    """What is whole in a sum that waits (the residual, a bias) is added before the ranks' parts are."""

    def settle(self: pending.Pending) -> torch.Tensor:
        if self.whole is None:
            return self.due.add_up(self.partial)
        done.append(self.due.name)
        return self.due.add_up(self.partial + self.whole)

    return settle


def _of_another_rank(original: Region, whose: Callable[[int, int], int], done: list[str]) -> Region:
    def own_part(partition: Partition, rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
        other = whose(rank, partition.ranks)
        if other != rank and partition.local_size(other) == partition.local_size(rank):
            done.append(name)
            return original(partition, other, name, x)
        return original(partition, rank, name, x)

    return own_part


def _rotated(original: Callable[..., tuple[int, ...]], done: list[str]) -> Callable[..., tuple[int, ...]]:
    def local_map(self: Attention, rank: int) -> tuple[int, ...]:
        right = original(self, rank)
        wrong = (*right[1:], *right[:1])
        if wrong != right:
            done.append(self.module)
        return wrong

    return local_map


def _flat(original: Region, done: list[str]) -> Region:
    def split(self: Partition, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if self.dim is None or len(self.pieces[rank]) < 2:
            return original(self, tensor, rank)
        done.append(str(self.pieces[rank]))
        start = sum(self.local_size(r) for r in range(rank))
        size = self.local_size(rank)
        return tensor.narrow(self.dim, min(start, tensor.shape[self.dim] - size), size)

    return split


def _no_stretches(original: Callable[..., Any], done: list[str]) -> Callable[..., Any]:
    def stretches(partition: Partition, group: Group) -> Any:
        if original(partition, group):
            done.append(str(partition.pieces))
        return ()

    return stretches


def _own_sum(done: list[str]) -> Region:
    """The statistic of a rank's own features, as wide as all of them."""

    def sum_over(x: torch.Tensor, group: Group, name: str, *_: Any, **__: Any) -> torch.Tensor:
        done.append(name)
        return x * group.size

    return sum_over
