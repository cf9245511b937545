"""Time: how long a rank reads, multiplies, waits and sends. A latency-bandwidth model, nothing fitted.

One pass takes max(bytes read / bandwidth, products / flops) on the slowest rank, plus for each collective `start` + steps * `hop` + bytes
sent / bandwidth with the best algorithm that the link has; nothing overlaps. It is a bound for good code, and a split is never flattered.
Efficiencies come with the device (links.py). Not here: what follows from it (verdict.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from . import cost, memory, wire
from .links import Link, Machine
from .plan import Plan, TensorPlan
from .trace import Trace


@dataclass(frozen=True)
class Model:
    """What time depends on beside the plan: what attention keeps, which parameters are only looked up, how many experts a token uses."""

    heads: tuple[memory.Heads, ...]
    queries: int  # query heads of all layers times their width
    lookups: frozenset[str]
    active_experts: int  # 0: no experts
    ops: int = 0  # that a forward pass starts

    @staticmethod
    def of(trace: Trace) -> Model:
        tables = {op.inputs()[0] for op in trace.ops if op.name == "embedding"}
        products = {i for op in trace.ops if op.name != "embedding" for i in op.inputs()}
        lookups = frozenset(name for name, i in trace.parameters.items() if i in tables and i not in products)
        width = {call.module: prod(trace.values[call.q].shape[1::2]) for call in trace.attention}
        experts = next((n for key in ("num_experts_per_tok", "moe_top_k", "top_k_experts") if (n := getattr(trace.config, key, 0))), 0)
        return Model(memory.heads(trace), sum(width.values()), lookups, int(experts), len(trace.ops))


Rules = Literal["reading", "computing", "latency", "moving", "starting"]


@dataclass(frozen=True)
class Time:
    """Seconds of one pass on the slowest rank."""

    ranks: int
    tokens: int  # that come out of it or go through it
    reading: float
    computing: float
    latency: float
    moving: float
    starting: float = 0.0  # of ops, where a processor starts them one by one

    @property
    def total(self) -> float:
        return max(self.reading, self.computing) + self.latency + self.moving + self.starting

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def rules(self) -> Rules:
        """What takes longest."""
        times: dict[Rules, float] = {
            "reading": self.reading if self.reading >= self.computing else 0.0,
            "computing": self.computing if self.computing > self.reading else 0.0,
            "latency": self.latency,
            "moving": self.moving,
            "starting": self.starting,
        }
        return max(times, key=lambda k: times[k])


def collective(found: cost.Predicted, link: Link) -> tuple[float, float]:
    """Seconds of latency and of moving bytes, with the quickest algorithm of the link."""
    n, ways = len(found.ranks), []
    for algorithm in link.algorithms:
        steps = wire.steps(algorithm, found.op, n)
        ways.append((found.calls * (link.start + steps * link.hop), found.moved_bytes(algorithm) / link.bandwidth))
    return min(ways, key=sum)


def collectives(found: Iterable[cost.Predicted], machine: Machine) -> tuple[float, float]:
    """Of all together. Equal ones are computed once."""
    seen: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    latency = moving = 0.0
    for p in found:
        key = (p.op, p.calls, p.logical_bytes, len(p.ranks))
        if key not in seen:
            seen[key] = collective(p, machine.joins(len(p.ranks)))
        latency, moving = latency + seen[key][0], moving + seen[key][1]
    return latency, moving


def decode(
    plan: Plan, model: Model, machine: Machine, batch: int, context: int, dtype_bytes: int = 2, sampling: Sequence[cost.Predicted] = ()
) -> Time:
    """One token for each of `batch` sequences of `context` tokens. `sampling`: how the ranks agree on the next token."""
    found = [*cost.predict(plan, batch, context, "decode", dtype_bytes, whole_logits=False), *sampling]
    return _pass(plan, model, machine, batch, batch, context, dtype_bytes, found, cached=True)


def prefill(plan: Plan, model: Model, machine: Machine, batch: int, length: int, dtype_bytes: int = 2) -> Time:
    """A prompt of `length` tokens for each of `batch` sequences."""
    found = cost.predict(plan, batch, length, "prefill", dtype_bytes, whole_logits=False)
    return _pass(plan, model, machine, batch, batch * length, length / 2, dtype_bytes, found, cached=False)


def train(plan: Plan, model: Model, machine: Machine, batch: int, length: int, dtype_bytes: int = 2) -> Time:
    """Forward and backward of a step: three times the products of a forward pass. The optimizer is left out."""
    found = [p for phase in cost.STEP for p in cost.predict(plan, batch, length, phase, dtype_bytes)]
    once = _pass(plan, model, machine, batch, batch * length, length / 2, dtype_bytes, found, cached=False)
    return replace(once, reading=3 * once.reading, computing=3 * once.computing, starting=3 * once.starting)


def _pass(
    plan: Plan,
    model: Model,
    machine: Machine,
    batch: int,
    tokens: int,
    context: float,
    dtype_bytes: int,
    found: list[cost.Predicted],
    cached: bool,
) -> Time:
    device = machine.device
    sharing = plan.ranks if device.shared else 1
    read_rate, flops_rate = device.read * device.efficiency[0] / sharing, device.flops * device.efficiency[1] / sharing
    cache = memory.cache_bytes_per_token(plan, model.heads, dtype_bytes)
    whole_cache = max(1, sum((h.key + h.value) * h.kv for h in model.heads) * dtype_bytes)
    reading = computing = 0.0
    for rank in range(plan.ranks):
        size, products = _weights(plan.tensors.values(), model, rank, tokens)
        read = size * dtype_bytes + (cache[rank] * batch * context if cached else 0)
        share = cache[rank] / whole_cache if model.heads else 1 / plan.ranks
        attention = 4 * tokens * context * model.queries * min(1.0, share)
        reading = max(reading, read / read_rate)
        computing = max(computing, (products + attention) / flops_rate)
    return Time(plan.ranks, tokens, reading, computing, *collectives(found, machine), model.ops * device.per_op)


def _weights(tensors: Iterable[TensorPlan], model: Model, rank: int, tokens: int) -> tuple[float, float]:
    """Elements that a rank reads for a pass over `tokens` tokens, and operations: two for each element of a matrix and token. Of experts,
    those that at least one token uses if all are equally liked."""
    read = operations = 0.0
    for t in tensors:
        if t.name in model.lookups:
            continue
        size = prod(t.partition.local_shape(t.shape, rank))
        if len(t.shape) == 3 and 0 < model.active_experts < t.shape[0]:
            share = model.active_experts / t.shape[0]
            read += size * (1 - (1 - share) ** tokens)
            operations += 2 * size * share * tokens
        else:
            read += size
            operations += 2 * size * tokens if len(t.shape) > 1 else 0
    return read, operations
