"""Study: one model on one kind of machine at several degrees, ready to be printed, drawn or judged. Numbers only, no sentences.

    study = Study.of(config, plan, Machine(device, link), Question(batch=1, context=4096))
    study.rows[4].decode.tokens_per_second

Words are in verdict.py, the page in report/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from . import compact, cost, degrees, kept, memory, program, timing, workload
from .links import Machine
from .memory import Memory
from .plan import Plan

DEGREES = (1, 2, 4, 8, 16)
BATCHES = tuple(1 << k for k in range(11))

Sampling = Callable[[int, int], list[cost.Predicted]]
"""sampling(rows, ranks): the collectives by which ranks agree on the next tokens (the engine knows them)."""


Activations = Callable[[Plan], list[int]]
"""activations(plan): bytes that autograd keeps on each rank for a training step (parallel/saved.py measures them)."""


@dataclass(frozen=True)
class Question:
    """batch sequences of `context` tokens; `train`: also a training step; `dtype_bytes` of parameters and cache; two
    are bfloat16's, unless the machine is made `plain`."""

    batch: int = 1
    context: int = 4096
    train: bool = False
    dtype_bytes: int = 2
    memory: float = 0.0  # bytes of each device; 0: as the preset says


@dataclass(frozen=True)
class Row:
    """One degree. `memory` and `training` per rank. `decode` and `by_batch`: by the engine's program where the machine has a pace for it,
    and then `modules` is the time by the model's modules."""

    plan: Plan
    memory: tuple[Memory, ...]
    cache_per_token: tuple[int, ...]
    largest_context: int
    decode: timing.Time
    prefill: timing.Time
    by_batch: tuple[timing.Time, ...]  # decode at BATCHES
    traffic: tuple[cost.Predicted, ...]  # of one decoded step
    step: timing.Time | None = None
    training: tuple[Memory, ...] = ()
    modules: timing.Time | None = None
    compact: bool = False  # linear layers' weights are kept in 12 bits while it serves

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    def fits(self, size: float) -> bool:
        return all(m.fits(size) for m in self.training or self.memory)


@dataclass(frozen=True)
class Study:
    config: PreTrainedConfig
    ranks: int  # the degree that was asked for
    machine: Machine
    question: Question
    model: workload.Model
    rows: dict[int, Row]

    @property
    def row(self) -> Row:
        return self.rows[self.ranks]

    @property
    def size(self) -> float:
        """Bytes of memory of one device."""
        return self.question.memory or self.machine.device.memory

    @property
    def smallest_that_fits(self) -> int | None:
        return next((n for n, row in self.rows.items() if row.fits(self.size)), None)

    @staticmethod
    def of(
        config: PreTrainedConfig,
        plan: Plan,
        machine: Machine,
        question: Question,
        sampling: Sampling = lambda rows, ranks: [],
        activations: Activations = lambda plan: [0] * plan.ranks,
        others: Sequence[int] = DEGREES,
    ) -> Study:
        """Plans the other degrees, counts, and predicts. Seconds for a large model, most of them for the trace."""
        plans = degrees.plans(config, plan, others)
        model = workload.of_config(config)
        rows = {n: _row(p, model, machine, question, sampling, activations) for n, p in plans.items()}
        return Study(config, plan.ranks, machine, question, model, rows)


def _row(plan: Plan, model: workload.Model, machine: Machine, q: Question, sampling: Sampling, activations: Activations) -> Row:
    n, size = plan.ranks, q.dtype_bytes
    keeps_compact = size == compact.PLAIN and machine.keeps_compact(n)
    kept_in = compact.held(plan, model) if keeps_compact else None
    held = tuple(memory.serving(plan, model.heads, q.batch, q.context, size, held=kept_in))

    def by_modules(batch: int) -> timing.Time:
        return timing.decode(plan, model, machine, batch, q.context, size, sampling(batch, n))

    def decode(batch: int) -> timing.Time:
        if machine.program is None:
            return by_modules(batch)
        return program.decode(plan, model, machine.program, batch, q.context, size)

    traffic = (*cost.predict(plan, q.batch, 1, "decode", size, whole_logits=False), *sampling(q.batch, n))
    training = tuple(memory.training(plan, size, activations=activations(plan))) if q.train else ()
    state = [m.optimizer for m in training]
    return Row(
        plan,
        held,
        tuple(kept.cache_bytes_per_token(plan, model.heads, size)),
        memory.largest_context(plan, model.heads, q.memory or machine.device.memory, q.batch, size, kept_in),
        decode(q.batch),
        timing.prefill(plan, model, machine, q.batch, q.context, size),
        tuple(decode(b) for b in BATCHES),
        traffic,
        timing.train(plan, model, machine, q.batch, q.context, size, state) if q.train else None,
        training,
        by_modules(q.batch) if machine.program is not None else None,
        keeps_compact,
    )
