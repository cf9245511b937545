"""Time of decoded tokens where the engine runs a step as a program in C (engine/program.py). As timing.py, a sum over what a step does:

    bytes of weights / bandwidth + numbers of keys and values looked at / rate + sums over ranks by their measured table
    + instructions between products * seconds + what a step takes beside them (Python, choosing and agreeing on the token)

Nothing overlaps. `Machine.program` has the rates. What a program does is estimated from the plan here (`works`); of one that exists, it is
known exactly (engine/pieces.py). Not here: whether the engine accepts a program for the model, which only the engine can find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import compact, cost
from .links import Machine
from .plan import Plan
from .timing import Time, collectives, looked_at, weights
from .workload import Model

MOST = 64  # sequences in one call of C


@dataclass(frozen=True)
class Work:
    """Of one rank, for one token of one sequence, or as said. `read`: bytes of the weights that one step reads for all its sequences;
    `operations`: in products, for a sequence; `numbers`: of keys and values that its heads look at; `scores`: that it makes."""

    read: float
    operations: float
    numbers: float
    instructions: int
    scores: float


def works(plan: Plan, model: Model, batch: int, context: int, dtype_bytes: int, keeps_compact: bool = False) -> list[Work]:
    """Of every rank, as the plan says it. Behind `context` tokens. `keeps_compact`: its weights are bfloat16, linear layers' in 12 bits."""

    def work(rank: int) -> Work:
        elements, operations = weights(plan.tensors.values(), model, rank, batch, batch)
        numbers = looked_at(plan, model, rank, context + 1, latents=True)
        head = [t for t in plan.tensors.values() if t.name in model.head]
        scores = head[0].partition.local_shape(head[0].shape, rank)[0] if head else 0
        less = compact.saved(plan, model, rank) if keeps_compact else 0
        return Work(elements * dtype_bytes - less, operations / batch, numbers, model.instructions, scores)

    return plan.each(work)


def time(found: Sequence[Work], sums: Sequence[cost.Predicted], machine: Machine, batch: int = 1) -> Time:
    """Of a step of `batch` sequences on the slowest rank; `machine` is a `Machine.program`. More than MOST sequences read weights again."""
    device, ranks = machine.device, len(found)
    sharing = ranks if device.shared else 1
    every = sum(w.read for w in found)
    read_rate, flops_rate = device.reading(every) / sharing, device.flops * device.efficiency[1] / sharing
    calls = -(-batch // MOST)
    reading = max(calls * w.read / read_rate for w in found)
    crowd = max(1.0, ranks / device.cores) if device.cores else 1.0
    computing = max(batch * w.numbers / device.attend * crowd + (batch - calls) * w.operations / flops_rate for w in found)
    between = max(batch * w.instructions * device.per_op for w in found)
    beside = device.beside(every) + (batch - 1) * device.per_row + max(batch * w.scores * device.per_score for w in found)
    return Time(ranks, batch, reading, computing, *collectives(sums, machine), touching=between, starting=beside, overlap=False)


def decode(plan: Plan, model: Model, machine: Machine, batch: int, context: int, dtype_bytes: int = 2) -> Time:
    """One token for each of `batch` sequences behind `context` tokens; how ranks agree on it is in `Device.steps`. Weights of two bytes are
    bfloat16, unless the machine is made `plain`."""
    sums = cost.predict(plan, batch, context, "decode", dtype_bytes, whole_logits=False)
    keeps_compact = dtype_bytes == compact.PLAIN and machine.device.keeps_compact(plan.ranks)
    return time(works(plan, model, batch, context, dtype_bytes, keeps_compact), sums, machine, batch)
