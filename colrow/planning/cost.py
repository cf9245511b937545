"""What a plan costs: collectives and their bytes, parameters and cache per rank.

The counts come from the plan alone and must agree, call site by call site and byte by byte, with what `comm.counters` counted (proof/).
FSDP is by formula, because the plan does not describe it. Not here: sequence parallelism (sequence.py), seconds (timing.py), memory of
activations and optimizers (memory.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ..partition import Partition
from . import lengths
from .lengths import Length
from .plan import Plan, Region
from .wire import SHM_SLOT, Algorithm, equal_parts, moved

Phase = Literal["prefill", "decode", "train_forward", "train_backward"]
"""prefill: a forward pass over all tokens. decode: over one. Both return whole logits. train_forward: with the loss, the logits stay
slices."""

STEP: tuple[Phase, Phase] = ("train_forward", "train_backward")

Section = Literal["blocks", "vocabulary", "sampling"]
SECTIONS: tuple[Section, ...] = ("blocks", "vocabulary", "sampling")


@dataclass(frozen=True)
class Predicted:
    """`calls` collectives of one op at one call site among `ranks`, of `logical_bytes` in all: of the tensor as the model's reader sees
    it."""

    op: str
    name: str
    calls: int
    logical_bytes: int
    ranks: tuple[int, ...]
    parts: tuple[int, ...] = ()  # bytes of each rank's part of a gather or scatter, where they are not as equal as can be
    unit: int = 1  # bytes of an element

    def moved_bytes(self, algorithm: Algorithm = "ring", rank: int | None = None, limit: int = SHM_SLOT) -> int:
        """Bytes that the `rank`th of `ranks` sends, or moves (wire.py says which); of the rank that moves most where it is left out.
        `limit`: largest all-reduce that shared memory does in one step."""
        n, each_call = len(self.ranks), self.logical_bytes // self.calls
        parts = self.parts or equal_parts(each_call, n, self.unit)
        each = [
            self.calls * moved(algorithm, self.op, each_call, r, n, parts, self.unit, limit)
            for r in (range(n) if rank is None else (rank,))
        ]
        return max(each)

    @property
    def section(self) -> Section:
        """blocks: at a module with a number in its path, as repeated layers have. sampling: the engine's. vocabulary: embedding, final
        norm, head and loss."""
        if self.name.startswith("engine."):
            return "sampling"
        return "vocabulary" if of_vocabulary(self.name) else "blocks"


@dataclass(frozen=True)
class Sum:
    """Several collectives together. `sent`: bytes of the rank that sends most."""

    calls: int
    logical_bytes: int
    sent: int


def total(found: Iterable[Predicted], algorithm: Algorithm = "ring", section: Section | None = None) -> Sum:
    """The collectives of one section, or all, added up."""
    these = [p for p in found if section in (None, p.section)]
    return Sum(sum(p.calls for p in these), sum(p.logical_bytes for p in these), sum(p.moved_bytes(algorithm) for p in these))


def predict(
    plan: Plan,
    batch: int,
    seq: int,
    phase: Phase,
    dtype_bytes: int = 2,
    whole_logits: bool | None = None,
    source: int | None = None,
    loss: bool = True,
    rows: int | None = None,
) -> list[Predicted]:
    """The collectives of one pass over (batch, seq) tokens; in "decode" over (batch, 1), whatever `seq` is.

    `whole_logits`: whether every rank gets all columns; by default yes but in training. `source`: tokens of an encoder's input, by default
    `seq`. `loss`: whether a training pass computes its loss from labels, of as many `rows` as there are tokens unless the model's code
    takes others. In a group of one rank there are none.
    """
    source = seq if source is None else source
    seq = 1 if phase == "decode" else seq
    whole_logits = phase in ("prefill", "decode") if whole_logits is None else whole_logits
    found: list[Predicted] = []
    for region in plan.regions:
        if phase == "decode" and not region.steps:
            continue
        if phase == "train_backward" and not (region.trained and (region.scored or not loss)):
            continue
        ops = list(_backward(region) if phase == "train_backward" else _forward(region, whole_logits))
        sizes = {"B": batch, "S": seq, "E": source}
        for shape, n in ((region.shape, region.calls), *((shape, 1) for shape in region.further)):
            run = replace(region, shape=_step(shape) if phase == "decode" else shape)
            size, unit = size_of(run, sizes, dtype_bytes)
            if size == 0:  # padding where none is missing: the model's code leaves the run out
                continue
            parts, every = _parts(region, size), region.ranks or (tuple(range(plan.ranks)),)
            found += [Predicted(op, name, n, n * size, ranks, parts, unit) for op, name in ops for ranks in every]
    if phase == "train_forward" and loss:
        found += _loss(plan, batch * seq if rows is None else rows, max(dtype_bytes, 4))
    if phase == "train_backward":
        found += _gradients(plan, dtype_bytes)
    return [p for p in found if len(p.ranks) > 1]


def is_head(region: Region) -> bool:
    """Whether the region gathers the model's logits."""
    return region.op == "gather" and region.module == "" and region.place == "output"


def _forward(region: Region, whole_logits: bool) -> Iterator[tuple[str, str]]:
    if region.op == "gather" and (whole_logits or not is_head(region)):
        yield "all_gather", region.name
    if region.op in ("reduce", "mean", "row"):
        yield "all_reduce", region.name


def _backward(region: Region) -> Iterator[tuple[str, str]]:
    if region.op in ("copy", "mean") and not region.shares:
        yield "all_reduce", f"{region.name}.grad"


def _step(shape: tuple[Length, ...]) -> tuple[Length, ...]:
    """In a step with the cache the new tokens go by alone: what the first pass put beside them (a picture) is in the cache."""
    return tuple(lengths.step(n) for n in shape)


def size_of(region: Region, sizes: dict[str, int], dtype_bytes: int) -> tuple[int, int]:
    """Bytes of the region's whole tensor, and of one element. `sizes`: of the dims that have names ("B", "S", "E")."""
    shape = [lengths.value(n, sizes) for n in region.shape]
    unit = 4 if region.dtype == "float32" else max(dtype_bytes, 4) if region.op == "mean" else dtype_bytes
    return prod(shape) * unit, unit


def _parts(region: Region, size: int) -> tuple[int, ...]:
    """Bytes of each rank's slice of a gather."""
    cut = region.partition
    if region.op != "gather" or cut is None or cut.is_whole:
        return ()
    return tuple(size // cut.size * cut.local_size(r) for r in range(cut.ranks))


def _loss(plan: Plan, rows: int, dtype_bytes: int) -> list[Predicted]:
    """The loss over slices of the logits (parallel/loss.py): the maximum, then the sum of exponentials with the label's logit."""
    if not any(is_head(r) for r in plan.regions):
        return []
    ranks = tuple(range(plan.ranks))
    return [
        Predicted("all_reduce", "loss.max", 1, rows * dtype_bytes, ranks, unit=dtype_bytes),
        Predicted("all_reduce", "loss.sum", 1, 2 * rows * dtype_bytes, ranks, unit=dtype_bytes),
    ]


def _gradients(plan: Plan, dtype_bytes: int) -> Iterable[Predicted]:
    """Gradients that are summed as they arrive: of whole parameters that met split work, and of copied ranges (KV heads)."""
    for t in plan.tensors.values():
        if t.partition.is_whole and t.grad == "partial":
            yield Predicted("all_reduce", f"{t.name}.grad", 1, prod(t.shape) * dtype_bytes, tuple(range(plan.ranks)), unit=dtype_bytes)
        for ranks, length in _copied(t.partition).items():
            row = prod(n for dim, n in enumerate(t.shape) if dim != t.partition.dim)
            yield Predicted("all_reduce", f"{t.name}.copies.grad", 1, row * length * dtype_bytes, ranks, unit=dtype_bytes)


def _copied(partition: Partition) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for segment in partition.shared():
        found[segment.ranks] = found.get(segment.ranks, 0) + segment.stop - segment.start
    return found


def recomputed(plan: Plan, batch: int, seq: int, dtype_bytes: int = 2) -> list[Predicted]:
    """What full recomputation adds to the backward pass: the forward collectives of the blocks once more, but for the last one of each
    block, whose result nothing in it needs (torch.utils.checkpoint stops early). Selective recomputation adds none."""
    blocks: dict[str, list[Predicted]] = {}
    for p in predict(plan, batch, seq, "train_forward", dtype_bytes):
        if (block := block_of(p.name)) and p.op == "all_reduce":
            blocks.setdefault(block, []).append(replace(p, name=f"{p.name}.again"))
    return [p for found in blocks.values() for p in found[:-1]]


def fully_sharded(plan: Plan, dtype_bytes: int = 2, ranks: int | None = None) -> list[Predicted]:
    """The same training step with FSDP (Zhao et al. 2023) over as many ranks, by formula: weights move instead of activations. A block's
    parameters are gathered for the forward pass and again for the backward pass, and its gradients are reduce-scattered."""
    among = tuple(range(ranks or plan.ranks))
    units: dict[str, int] = {}
    for t in plan.tensors.values():
        units[block_of(t.name)] = units.get(block_of(t.name), 0) + prod(t.shape) * dtype_bytes
    moves = (("all_gather", ""), ("all_gather", ".again"), ("reduce_scatter", ".grad"))
    return [
        Predicted(op, f"{unit}.weights{end}" if unit else f"root{end}", 1, size, among, unit=dtype_bytes)
        for op, end in moves
        for unit, size in units.items()
    ]


def of_vocabulary(name: str) -> bool:
    """Whether a module, parameter or call site lies outside the repeated layers, which have a number in their path."""
    return not block_of(name)


def block_of(name: str) -> str:
    """ "model.layers.3" of a name below it; "" for what belongs to no repeated layer."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found.group() if found else ""


def parameter_bytes(plan: Plan, dtype_bytes: int) -> list[int]:
    """Bytes of the parameters that each rank holds; a tied one counts once."""
    return plan.each(lambda rank: sum(prod(t.partition.local_shape(t.shape, rank)) for t in plan.tensors.values()) * dtype_bytes)
