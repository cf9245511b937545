"""What a plan costs: collectives and their bytes, parameters and cache per rank.

The counts come from the plan alone and must agree, call site by call site and byte by byte, with what `comm.counters` counted (proof/). Not
here: seconds (links.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ..partition import Partition
from .plan import Plan, Region

Phase = Literal["prefill", "decode", "train_forward", "train_backward"]
"""prefill: a forward pass over all tokens. decode: over one. Both return whole logits. train_forward: with the loss, the logits stay
slices."""

Algorithm = Literal["ring", "one-shot", "threads"]


@dataclass(frozen=True)
class Predicted:
    """`calls` collectives of one op at one call site among `ranks`, of `logical_bytes` in all: of the tensor as the model's reader sees
    it."""

    op: str
    name: str
    calls: int
    logical_bytes: int
    ranks: tuple[int, ...]

    def moved_bytes(self, algorithm: Algorithm = "ring") -> int:
        """Bytes that each rank sends (ring, one-shot), or posts and reads (threads: comm/local.py). Even slices are assumed."""
        n, size = len(self.ranks), self.logical_bytes
        if algorithm == "threads":
            return n * size if self.op == "all_reduce" else size
        if algorithm == "one-shot":
            return (n - 1) * size if self.op == "all_reduce" else (n - 1) * size // n
        return (2 if self.op == "all_reduce" else 1) * (n - 1) * size // n


def predict(plan: Plan, batch: int, seq: int, phase: Phase, dtype_bytes: int = 2, whole_logits: bool | None = None) -> list[Predicted]:
    """The collectives of one pass over (batch, seq) tokens; in "decode" over (batch, 1), whatever `seq` is.

    `whole_logits`: whether every rank gets all columns; by default yes but in training. In a group of one rank there are none.
    """
    seq = 1 if phase == "decode" else seq
    whole_logits = phase in ("prefill", "decode") if whole_logits is None else whole_logits
    found: list[Predicted] = []
    for region in plan.regions:
        ops = _backward(region) if phase == "train_backward" else _forward(region, whole_logits)
        for op, name in ops:
            size = _bytes(region, batch, seq, dtype_bytes)
            found += [Predicted(op, name, 1, size, ranks) for ranks in region.ranks or (tuple(range(plan.ranks)),)]
    if phase == "train_forward":
        found += _loss(plan, batch * seq, max(dtype_bytes, 4))
    if phase == "train_backward":
        found += _gradients(plan, dtype_bytes)
    return [p for p in found if len(p.ranks) > 1]


def is_head(region: Region) -> bool:
    """Whether the region gathers the model's logits."""
    return region.op == "gather" and region.module == "" and region.place == "output"


def _forward(region: Region, whole_logits: bool) -> Iterator[tuple[str, str]]:
    if region.op == "gather" and (whole_logits or not is_head(region)):
        yield "all_gather", region.name
    if region.op in ("reduce", "mean_square"):
        yield "all_reduce", region.name


def _backward(region: Region) -> Iterator[tuple[str, str]]:
    if region.op in ("copy", "mean_square"):
        yield "all_reduce", f"{region.name}.grad"


def _bytes(region: Region, batch: int, seq: int, dtype_bytes: int) -> int:
    sizes = {"B": batch, "S": seq}
    shape = [sizes[n] if isinstance(n, str) else n for n in region.shape]
    if region.op == "mean_square":
        shape[-1] = 1  # one statistic a row
    return prod(shape) * (4 if region.dtype == "float32" else dtype_bytes)


def _loss(plan: Plan, rows: int, dtype_bytes: int) -> list[Predicted]:
    """The loss over slices of the logits (parallel/loss.py): the maximum, then the sum of exponentials with the label's logit."""
    if not any(is_head(r) for r in plan.regions):
        return []
    ranks = tuple(range(plan.ranks))
    return [
        Predicted("all_reduce", "loss.max", 1, rows * dtype_bytes, ranks),
        Predicted("all_reduce", "loss.sum", 1, 2 * rows * dtype_bytes, ranks),
    ]


def _gradients(plan: Plan, dtype_bytes: int) -> Iterable[Predicted]:
    """Gradients that are summed as they arrive: of whole parameters that met split work, and of copied ranges (KV heads)."""
    for t in plan.tensors.values():
        if t.partition.is_whole and t.grad == "partial":
            yield Predicted("all_reduce", f"{t.name}.grad", 1, prod(t.shape) * dtype_bytes, tuple(range(plan.ranks)))
        for ranks, length in _copied(t.partition).items():
            row = prod(n for dim, n in enumerate(t.shape) if dim != t.partition.dim)
            yield Predicted("all_reduce", f"{t.name}.copies.grad", 1, row * length * dtype_bytes, ranks)


def _copied(partition: Partition) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for segment in partition.shared():
        found[segment.ranks] = found.get(segment.ranks, 0) + segment.stop - segment.start
    return found


def parameter_bytes(plan: Plan, dtype_bytes: int) -> list[int]:
    """Bytes of the parameters that each rank holds; a tied one counts once."""
    return [sum(prod(t.partition.local_shape(t.shape, rank)) for t in plan.tensors.values()) * dtype_bytes for rank in range(plan.ranks)]


def cache_bytes_per_token(plan: Plan, dtype_bytes: int) -> list[int]:
    """Bytes of keys and values that each rank keeps for one token of one sequence."""
    return [sum(2 * a.kv.local_size(rank) * a.head_dim for a in plan.attention) * dtype_bytes for rank in range(plan.ranks)]
