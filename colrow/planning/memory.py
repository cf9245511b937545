"""Memory of each rank: parameters, gradients, optimizer state, KV cache, activations, buffers; and what fits.

Parameters and cache follow from the plan to the byte. Activations come from a run on meta tensors (parallel/saved.py) where there is one;
beside it stand the formulas of Korthikanti et al. 2022 (arXiv:2205.05198, equations 1 to 6), which are about a GPT block with dropout. Not
here: what the allocator and the libraries take on top; `RESERVE` stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from . import cost
from .kept import Heads, cache_bytes
from .plan import Plan

RESERVE = 0.1  # share of a device's memory left for context, allocator and kernels' work space

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `opening`: at most while the model is read, where weights are kept in fewer bits only then (compact.py)."""

    parameters: int
    cache: int = 0
    activations: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    opening: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.cache + self.activations + self.gradients + self.optimizer + self.buffers

    @property
    def most(self) -> int:
        return max(self.total, self.opening)

    def fits(self, size: float) -> bool:
        """Whether it leaves the reserve free on a device of `size` bytes."""
        return self.most <= size * (1 - RESERVE)


def serving(
    plan: Plan,
    kept: tuple[Heads, ...],
    batch: int,
    context: int,
    dtype_bytes: int = 2,
    step: int | None = None,
    held: Sequence[int] | None = None,
) -> list[Memory]:
    """Of each rank when `batch` sequences have reached `context` tokens and `step` tokens go through at once (a prompt; the context, or a
    piece of 2048 if that is less). `held`: bytes of the parameters once they are kept in fewer bits than they are read in.

    Activations: the widest value that a block holds at once, input and output with it; buffers: the largest collective, twice.
    """
    rows = batch * min(step or context, 2048)
    cache = cache_bytes(plan, kept, context, dtype_bytes)
    parameters = cost.parameter_bytes(plan, dtype_bytes)
    width = plan.each(lambda rank: _width(plan, rank))
    moved = max((p.logical_bytes for p in cost.predict(plan, 1, rows, "prefill", dtype_bytes, whole_logits=False)), default=0)
    return [
        Memory(
            held[r] if held else parameters[r],
            cache[r] * batch,
            rows * width[r] * dtype_bytes,
            buffers=2 * moved if plan.ranks > 1 else 0,
            opening=parameters[r] if held else 0,
        )
        for r in range(plan.ranks)
    ]


def _width(plan: Plan, rank: int) -> int:
    """Elements per token of the two widest products of a layer and of three residual streams: what is alive at once."""
    outputs, hidden = [0, 0], 0
    for t in plan.tensors.values():
        if len(t.shape) == 2 and not cost.of_vocabulary(t.name):
            shape = t.partition.local_shape(t.shape, rank)
            outputs.append(max(shape))
            hidden = max(hidden, min(t.shape))
    return sum(sorted(outputs)[-2:]) + 3 * hidden


OPTIMIZERS: dict[str, int] = {"adamw": 12, "adamw-same": -2, "sgd": 0}
"""Bytes for each parameter; negative: so many numbers in the parameters' own dtype. adamw: mixed precision with a float32 copy of the
parameters and two float32 moments (Rajbhandari et al. 2020, section 3.1: with parameters and gradients 16 bytes)."""


def training(plan: Plan, dtype_bytes: int = 2, optimizer: str = "adamw", activations: list[int] | None = None) -> list[Memory]:
    """Of each rank in a training step; `activations` as measured on each rank, bytes."""
    each, out = OPTIMIZERS[optimizer], []
    for rank, size in enumerate(cost.parameter_bytes(plan, dtype_bytes)):
        state = each * (size // dtype_bytes) if each >= 0 else -each * size
        out.append(Memory(size, activations=(activations or [0] * plan.ranks)[rank], gradients=size, optimizer=state))
    return out


LONGEST = 1 << 31


def largest_context(
    plan: Plan, kept: tuple[Heads, ...], size: float, batch: int = 1, dtype_bytes: int = 2, held: Sequence[int] | None = None
) -> int:
    """Tokens of each of `batch` sequences that fit into `size` bytes on every rank; 0 where the model does not fit at all, `LONGEST` where
    nothing grows."""
    with_one = serving(plan, kept, batch, 1, dtype_bytes, 2048, held)
    first = cache_bytes(plan, kept, 1, dtype_bytes)

    def fits(context: int) -> bool:
        each = zip(with_one, first, cache_bytes(plan, kept, context, dtype_bytes), strict=True)
        return all(max(m.total + batch * (grown - one), m.opening) <= size * (1 - RESERVE) for m, one, grown in each)

    if not fits(1) or fits(LONGEST):
        return LONGEST if fits(1) else 0
    low, high = 1, LONGEST  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def activations_of_layer(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: Recompute = "none"
) -> float:
    """Bytes that a rank keeps of one layer in 16 bits: Korthikanti et al. 2022, table 2.

    s tokens, b sequences, h hidden size, a heads, t tensor-parallel ranks. "full" keeps the layer's input only.
    """
    scores = 0.0 if recompute == "selective" else 5 * a * s / h
    if recompute == "full":
        return 2 * s * b * h / (t if sequence_parallel else 1)
    if sequence_parallel:
        return s * b * h / t * (34 + scores)
    return s * b * h * (10 + 24 / t + scores / t)


def parameters_of(plan: Plan) -> int:
    """Elements of the whole model, tied ones once."""
    return sum(prod(t.shape) for t in plan.tensors.values())
