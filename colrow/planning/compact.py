"""Compact: how many bytes the weights of a plan take where linear layers keep bfloat16 ones in twelve bits each, without loss.

    held(plan, model)             # of parameters on each rank while it decodes; parallel/compact.py makes it so
    saved(plan, model, rank)      # bytes that a decoding step reads less

Sizes by the rule of kernels/compact.py, of which tests see that it is the same. Not here: which machines do it (`Device.keeps_compact` in
links.py), and experts in one tensor, norms, biases and embeddings, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from . import cost
from .plan import Plan, TensorPlan
from .workload import Model

BLOCK, BLOCK_BYTES = 128, 192
WORTH = 0.875  # of a weight's bytes: what would not become smaller stays as it is
TABLE = 16
LISTED = 2e-4  # of a weight's bytes, those of a list of rare upper bytes; 1.4e-4 to 1.6e-4 of weights spread as normal numbers are
PLAIN = 2  # bytes of a bfloat16


def nbytes(rows: int, n: int) -> int:
    """Of a weight [rows, n] as a rank keeps it.

    >>> nbytes(1024, 1024) / (1024 * 1024) * 8  # bits
    12.0683...
    >>> nbytes(1024, 144) == 2 * 1024 * 144  # two blocks for a little more than one
    True
    """
    plain = PLAIN * rows * n
    compact = rows * -(-n // BLOCK) * BLOCK_BYTES + TABLE + 4 * (2 * rows + 1) + round(LISTED * plain)
    return compact if compact <= WORTH * plain else plain


def held(plan: Plan, model: Model) -> list[int]:
    """Bytes of the parameters that each rank holds while it decodes. A head that shares its weight with an embedding has its own rows."""
    before = cost.parameter_bytes(plan, PLAIN)

    def more(rank: int) -> int:
        sizes = [(t, shape) for t, shape in _linear(plan, model, rank) if _is_embedding(t, model)]
        return sum(PLAIN * prod(shape) for _, shape in sizes if nbytes(*shape) < PLAIN * prod(shape))

    less = plan.each(lambda rank: more(rank) - saved(plan, model, rank))
    return [size + change for size, change in zip(before, less, strict=True)]


def saved(plan: Plan, model: Model, rank: int) -> int:
    return sum(PLAIN * prod(shape) - nbytes(*shape) for _, shape in _linear(plan, model, rank))


def _linear(plan: Plan, model: Model, rank: int) -> Iterator[tuple[TensorPlan, tuple[int, int]]]:
    """Weights of linear layers with their [rows, n] on a rank: every matrix but those of which only rows are taken."""
    for t in plan.tensors.values():
        if len(t.shape) == 2 and t.name not in model.lookups:
            rows, n = t.partition.local_shape(t.shape, rank)
            yield t, (n, rows) if _transposed(t) else (rows, n)


def _transposed(t: TensorPlan) -> bool:
    """Of a Conv1D, which has its output features last: what is cut along them says so."""
    return (t.role, t.partition.dim) in (("column", 1), ("row", 0))


def _is_embedding(t: TensorPlan, model: Model) -> bool:
    return t.name in model.head and bool(t.aliases)
