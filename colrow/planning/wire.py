"""Bytes that one rank moves for one collective, by algorithm. Exact for uneven parts.

"ring", "one-shot", "two-shot" and "tree" count what a rank SENDS, as the literature does (Thakur, Rabenseifner, Gropp 2005; Patarasuk and
Yuan 2009), with n ranks and B bytes of the logical tensor:

    all_reduce      ring and two-shot 2(n-1)/n·B, tree 2(n-1)/n·B on average over ranks, one-shot (n-1)·B
    all_gather      ring B minus the neighbour's part, one-shot (n-1) times the own part
    reduce_scatter  B minus the own part

"threads", "shm" and "gloo" count what colrow's own transports count: bytes a rank writes to where others read plus bytes it reads of
theirs; these agree with comm.counters to the byte. NCCL gives no count, so for GPUs there are formulas only. Not here: seconds (timing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import Literal

from ..partition import balance

Algorithm = Literal["ring", "one-shot", "two-shot", "tree", "threads", "shm", "gloo"]
SENT: tuple[Algorithm, ...] = ("ring", "one-shot", "two-shot", "tree")

SHM_SLOT = 1 << 19  # bytes, comm/shm.py; also the largest all-reduce in one step unless measured otherwise
GLOO_FIRST = 1 << 16  # payload of a first message, comm/gloo.py


def moved(
    algorithm: Algorithm, op: str, total: int, rank: int, ranks: int, parts: Sequence[int] = (), unit: int = 1, limit: int = SHM_SLOT
) -> int:
    """Bytes that `rank` of `ranks` sends (or moves, see above) for one `op` of `total` logical bytes.

    `parts`: bytes of each rank's part of a gather or scatter; equal ones where left out. `unit`: bytes of an element, which is never cut.
    `limit`: largest all-reduce that shared memory does in one step. ValueError for an unknown op.
    """
    n = ranks
    if n == 1 or total == 0:
        return 0
    sizes = parts or equal_parts(total, n, unit)
    own, after = sizes[rank], sizes[(rank + 1) % n]
    match op:
        case "all_reduce":
            return _all_reduce(algorithm, total, rank, n, own, after, unit, limit)
        case "all_gather":
            direct = {"threads": total, "shm": total, "gloo": (n - 1) * own + total - own, "one-shot": (n - 1) * own}
            return direct.get(algorithm, total - after)
        case "reduce_scatter":
            direct = {"threads": total + (n - 1) * own, "shm": total - own + (n - 1) * own, "gloo": total - own + (n - 1) * own}
            return direct.get(algorithm, total - own)
        case "broadcast":
            sends = total if rank < n - 1 else 0  # along a chain
            to_all = (n - 1) * total if rank == 0 else 0
            direct = {"threads": total, "shm": total, "gloo": to_all or total, "one-shot": to_all}
            return direct.get(algorithm, sends)
    raise ValueError(f"no such collective: {op}")


def equal_parts(total: int, ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Bytes of each rank's part where parts are as equal as can be."""
    return tuple((b - a) * unit for a, b in balance(total // unit, ranks))


def _all_reduce(algorithm: Algorithm, total: int, rank: int, n: int, own: int, after: int, unit: int, limit: int) -> int:
    match algorithm:
        case "ring":  # first all parts but the one that ends here, then all but the one that the neighbour made
            return total - own + total - after
        case "two-shot":
            return total - own + (n - 1) * own
        case "one-shot":
            return (n - 1) * total
        case "tree":
            return 2 * (n - 1) * total // n
        case "threads":
            return n * total
        case "gloo":
            once = n == 2 or total <= GLOO_FIRST
            return 2 * (n - 1) * total if once else 2 * (total - own) + 2 * (n - 1) * own
        case "shm":
            return n * total if total <= limit else 2 * total + (n - 2) * _shm_part(total, rank, n)
    raise ValueError(f"no such algorithm: {algorithm}")


def _shm_part(total: int, rank: int, n: int) -> int:
    """Bytes that a rank reduces in the two-step all-reduce: its stretch of every chunk, cut at cache lines (comm/shm.c)."""
    room = SHM_SLOT // n // 64 * 64
    chunks = ceil(total / (room * n))
    part = ceil(ceil(total / (chunks * n)) / 64) * 64
    found = 0
    for start in range(0, total, part * n):
        length = min(part * n, total - start)
        found += min((rank + 1) * part, length) - min(rank * part, length)
    return found


def steps(algorithm: Algorithm, op: str, ranks: int) -> int:
    """How often a rank waits for another one, one after the other: what latency is multiplied by."""
    if ranks == 1:
        return 0
    if algorithm == "tree":
        return (2 if op == "all_reduce" else 1) * ceil(log2(ranks))
    if algorithm == "ring":
        return (2 if op == "all_reduce" else 1) * (ranks - 1)
    return 2 if algorithm == "two-shot" and op == "all_reduce" else 1
