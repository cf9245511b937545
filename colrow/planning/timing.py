"""Time: how long a rank reads, multiplies, waits and sends. A latency-bandwidth model, nothing fitted.

One pass takes max(bytes read / bandwidth, products / flops) on the slowest rank (their sum on a CPU, where a product reads its matrix and
then multiplies), plus for each collective `start` + steps * `hop` + bytes sent / bandwidth with the best algorithm that the link has;
collectives do not overlap with work, and over several hosts go through both links. Where a machine was measured, what ops between
products cost comes on top. Efficiencies come with the device (links.py). What the model is, beside its plan, is in workload.py. Not here:
what follows from it (verdict.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Literal

from . import cost, kept, wire
from .links import Device, Link, Machine
from .plan import Plan, TensorPlan
from .workload import Model

Part = Literal["reading", "computing", "latency", "moving", "touching", "starting", "updating"]
PARTS: tuple[Part, ...] = ("reading", "computing", "latency", "moving", "touching", "starting", "updating")


@dataclass(frozen=True)
class Time:
    """Seconds of one pass on the slowest rank."""

    ranks: int
    tokens: int  # that come out of it or go through it
    reading: float  # weights and cache
    computing: float  # products
    latency: float  # of collectives
    moving: float  # their bytes
    touching: float = 0.0  # what lies between products, and gradients, where that was measured
    starting: float = 0.0  # of ops, where a processor starts them one by one
    updating: float = 0.0  # parameters and the optimizer's state
    overlap: bool = True  # reading and computing go on at once

    @property
    def parts(self) -> dict[Part, float]:
        """What adds up to the total: of reading and computing at once only the longer one."""
        hidden = ("computing" if self.reading >= self.computing else "reading") if self.overlap else ""
        return {part: 0.0 if part == hidden else getattr(self, part) for part in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def rules(self) -> Part:
        """What takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


def collective(found: cost.Predicted, machine: Machine) -> tuple[float, float]:
    """Seconds of latency and of moving bytes, with the quickest algorithm of the link; of both links over several hosts."""
    n, link = len(found.ranks), machine.link
    if machine.hosts(n) > 1:
        return _over_hosts(found, machine)
    if link.times and n == link.among:
        return _measured(found, link)
    ways = []
    for algorithm in link.algorithms:
        steps = wire.steps(algorithm, found.op, n)
        ways.append((found.calls * (link.start + steps * link.hop), found.moved_bytes(algorithm) / link.bandwidth))
    return min(ways, key=sum)


def _over_hosts(found: cost.Predicted, machine: Machine) -> tuple[float, float]:
    """A ring through all devices, or chains inside hosts and a tree between them, as NCCL weighs them (src/graph/tuning.cc). Rings run side
    by side, one for each of a host's adapters; bytes go at the pace of the slower link."""
    n, hosts = len(found.ranks), machine.hosts(len(found.ranks))
    inside, between, each = machine.link, machine.between, ceil(n / hosts)
    start, twice = max(inside.start, between.start), 2 if found.op == "all_reduce" else 1
    rate = min(inside.bandwidth, between.bandwidth * (each if between.each else 1))
    ring = twice * ((n - 1 - (hosts - 1)) * inside.hop + hosts * between.hop)
    tree = twice * ((each - 1) * inside.hop + ceil(log2(hosts)) * between.hop)
    moving = found.moved_bytes("ring") / rate
    return min((found.calls * (start + ring), moving), (found.calls * (start + tree), moving * n / (n - 1)), key=sum)


def _measured(found: cost.Predicted, link: Link) -> tuple[float, float]:
    """Between the sizes that were measured in proportion; other ops by what they send beside an all-reduce."""
    size = found.logical_bytes / found.calls * (1.0 if found.op == "all_reduce" else 0.5)
    least = link.times[0][1]
    points = link.times if len(link.times) > 1 else (*link.times, (2 * link.times[0][0], least))
    after = next((i for i in range(1, len(points) - 1) if size <= points[i][0]), len(points) - 1)
    (a, one), (b, other) = points[after - 1], points[after]
    seconds = max(least, one + (size - a) * (other - one) / (b - a))
    return found.calls * least, found.calls * (seconds - least)


def collectives(found: Iterable[cost.Predicted], machine: Machine) -> tuple[float, float]:
    """Of all together. Equal ones are computed once."""
    seen: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    latency = moving = 0.0
    for p in found:
        key = (p.op, p.calls, p.logical_bytes, len(p.ranks))
        if key not in seen:
            seen[key] = collective(p, machine)
        latency, moving = latency + seen[key][0], moving + seen[key][1]
    return latency, moving


def decode(
    plan: Plan, model: Model, machine: Machine, batch: int, context: int, dtype_bytes: int = 2, sampling: Sequence[cost.Predicted] = ()
) -> Time:
    """One token for each of `batch` sequences of `context` tokens. `sampling`: how the ranks agree on the next token."""
    found = [*cost.predict(plan, batch, context, "decode", dtype_bytes, whole_logits=False), *sampling]
    return _time(plan, model, machine, _Pass(batch, batch, context, batch, cached=batch), dtype_bytes, found)


def prefill(plan: Plan, model: Model, machine: Machine, batch: int, length: int, dtype_bytes: int = 2) -> Time:
    """A prompt of `length` tokens for each of `batch` sequences; logits of the last one only."""
    found = cost.predict(plan, batch, length, "prefill", dtype_bytes, whole_logits=False)
    return _time(plan, model, machine, _Pass(batch * length, batch * length, length / 2, batch), dtype_bytes, found)


def train(plan: Plan, model: Model, machine: Machine, batch: int, length: int, dtype_bytes: int = 2, state: Sequence[int] = ()) -> Time:
    """A step: forward and backward, three times the products of a forward pass; with `state`, the bytes of the optimizer's state on each
    rank, also its update, which reads and writes them, the parameters and the gradients once."""
    found = [p for phase in cost.STEP for p in cost.predict(plan, batch, length, phase, dtype_bytes)]
    tokens, sizes = batch * length, cost.parameter_bytes(plan, dtype_bytes)
    touched = [2 * (size + other) + size for size, other in zip(sizes, state, strict=True)] if state else []
    return _time(
        plan, model, machine, _Pass(tokens, tokens, length / 2, tokens, 3, max(sizes), max(touched, default=0)), dtype_bytes, found
    )


@dataclass(frozen=True)
class _Pass:
    """`tokens` go through, `counted` come out or go in, each looking back at `context`; the head makes `heads` rows. `times`: how often
    the work of a forward pass is done; `cached`: sequences whose cache is read."""

    tokens: int
    counted: int
    context: float
    heads: int
    times: int = 1
    gradients: int = 0  # bytes made
    updated: int = 0  # bytes read and written by the optimizer
    cached: int = 0


def _time(plan: Plan, model: Model, machine: Machine, now: _Pass, dtype_bytes: int, found: list[cost.Predicted]) -> Time:
    device, moved = machine.device, collectives(found, machine)
    sharing = plan.ranks if device.shared else 1
    read_rate, flops_rate = device.read * device.efficiency[0] / sharing, device.flops * device.efficiency[1] / sharing
    cache = kept.cache_bytes(plan, model.heads, int(now.context), dtype_bytes) if now.cached else [0] * plan.ranks
    reading = computing = 0.0
    for rank in set(plan.like):
        size, products = weights(plan.tensors.values(), model, rank, now.tokens, now.heads)
        attention = 2 * now.tokens * looked_at(plan, model, rank, now.context)
        reading = max(reading, (size * dtype_bytes + cache[rank] * now.cached) / read_rate)
        computing = max(computing, (products + attention) / flops_rate)
    return Time(
        plan.ranks,
        now.counted,
        now.times * reading,
        now.times * computing,
        *moved,
        _between(plan, model, device, now, dtype_bytes, max(cache)) * sharing,
        now.times * model.ops * device.per_op,
        now.updated / read_rate,
        device.overlap,
    )


def _between(plan: Plan, model: Model, device: Device, now: _Pass, dtype_bytes: int, cache: int) -> float:
    """Seconds of what a forward pass does between products, once and where gradients are made twice more, and of the gradients. A `cache`,
    of so many bytes a sequence, is read and written once to make it longer by a token, as transformers' caches do it."""
    if not device.touch:
        return 0.0
    whole, cut = model.touched
    size = now.times * now.tokens * (whole + cut / plan.ranks) * dtype_bytes + 2 * cache * now.cached
    return size / device.touch + (now.gradients / device.gradient if device.gradient else 0.0)


def looked_at(plan: Plan, model: Model, rank: int, context: float, latents: bool = False) -> float:
    """Numbers of keys and values that a rank's query heads look at for one token behind `context` others. `latents`: where those are kept,
    they are looked at as they are, and no keys are made of them."""
    queries = {a.module: a.query for a in plan.attention}
    found = 0.0
    for a in model.attention:
        cut = queries.get(a.module)
        share = cut.local_size(rank) / (cut.size or 1) if cut is not None else 1.0
        found += min(context, a.window or context) * (a.latent if latents and a.latent else a.width) * share
    return found


def weights(tensors: Iterable[TensorPlan], model: Model, rank: int, tokens: int, heads: int) -> tuple[float, float]:
    """Elements that a rank reads for `tokens`, of which the head gets `heads`, and operations: two for each element of a matrix and token.
    Of experts, those that at least one token uses if all are equally liked."""
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
            operations += 2 * size * (heads if t.name in model.head else tokens) if len(t.shape) > 1 else 0
    return read, operations
