"""Replay: run the recorded ops of a model for all ranks in lock-step, with sliced parameters, and compare with the whole model.

This checks the derivation, not the applier: one process, float64, noise in every parameter, forward and backward. Each rank uses only what
it holds; tensors change hands only at the plan's regions (replay_borders.py). The states of activations are found from the ops alone
(spread.py, replay_ops.py), so a plan that was read from a file, or edited by hand, is checked as well as a derived one. An op that would
need what its rank lacks, or that takes a partial sum for a value, is named. Meant for small configs: all ranks' numbers exist at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from . import inputs, replay_means
from .plan import Plan
from .replay_borders import Borders, row
from .replay_memory import Memory, put
from .replay_ops import run
from .replay_tools import call
from .spread import ReplayError, Spread, cut, everywhere
from .trace import Trace, trace

TOLERANCE = 1e-9  # of the largest value; float64
VANISHING = 1e-4  # gradients that are 0 but for rounding (a key's bias, before softmax) are measured against this share of the largest


@dataclass(frozen=True)
class ReplayReport:
    """Largest differences from the whole model, as shares of the largest value: outputs by name, gradients by parameter. Infinite where
    one of the two is no number, or both are."""

    outputs: dict[str, float]
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        return max([*self.outputs.values(), *self.gradients.values()], default=0.0)

    @property
    def ok(self) -> bool:
        return self.worst <= TOLERANCE

    def __str__(self) -> str:
        wrong = [n for n, x in {**self.outputs, **self.gradients}.items() if x > TOLERANCE]
        return f"largest difference {self.worst:.1e}" + (f"; wrong: {', '.join(wrong[:5])}" if wrong else "")


def check(config: PreTrainedConfig | Trace, plan: Plan, backward: bool = True, seed: int = 0) -> ReplayReport:
    """Replay `plan`. ReplayError where it cannot be carried out; a report that is not `ok` where it computes something else."""
    t = config if isinstance(config, Trace) else trace(config)
    draw = torch.Generator().manual_seed(seed)
    start = _start_values(t, draw)
    whole = _run_whole(t, start)
    parameters = {name: _local_parameters(start[i], plan, name) for name, i in t.parameters.items()}
    spread = _run_ranks(t, plan, start, whole, parameters)
    outputs = {name: i for name, i in t.outputs.items() if whole[i].is_floating_point()}
    for name, i in outputs.items():
        if not spread[i].is_whole:
            raise ReplayError(f"output {name} is left {spread[i].state()}")
    differences = {n: max(_difference(d, whole[i]) for d in spread[i].data) for n, i in outputs.items()}
    return ReplayReport(differences, _gradients(t, plan, outputs, start, whole, spread, parameters, draw) if backward else {})


def _start_values(t: Trace, draw: torch.Generator) -> dict[int, torch.Tensor]:
    """Parameters, inputs and buffers, filled so that nothing hides: no zero biases, no unit norms."""
    vocabulary = inputs.vocabulary(t.config) or 2
    out = {}
    for v in t.values:
        if v.kind == "parameter":
            noise = torch.randn(v.shape, generator=draw, dtype=torch.float64)
            out[v.id] = (1 + 0.3 * noise if len(v.shape) == 1 else 0.2 * noise).requires_grad_()
        elif v.kind == "input":
            out[v.id] = v.data if v.data is not None else torch.randint(0, vocabulary, v.shape, generator=draw)
        elif v.kind == "buffer":
            out[v.id] = v.data if v.data is not None else _filled(v.shape, v.dtype, draw)
    return out


def _filled(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """A buffer whose content a meta trace does not know: any numbers do, the whole model and the ranks get the same."""
    return torch.rand(shape, generator=draw).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _run_whole(t: Trace, start: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    values, memory = dict(start), Memory(t)
    for op in t.ops:
        tensors = {i: values[i].double() if values[i].is_floating_point() else values[i] for i in op.inputs()}
        _store(op.outputs, call(op, tensors), values)
        for w in memory.targets(op) if op.mutates is not None else ():
            base, new = (everywhere(values[i], 1) for i in (w, op.outputs[0]))
            values[w] = put(base, memory.numbers(op.outputs[0]), new, t.where(op)).data[0]
    return values


def _store(outputs: tuple[int, ...], result: Any, values: dict[int, Any]) -> None:
    results = result if isinstance(result, tuple | list) else (result,)
    for i, tensor in zip([o for o in outputs if o >= 0], [r for r in results if isinstance(r, torch.Tensor)], strict=True):
        values[i] = tensor


def _local_parameters(whole: torch.Tensor, plan: Plan, name: str) -> list[torch.Tensor]:
    partition = plan.tensor(name).partition
    return [partition.split(whole.detach(), r).clone().requires_grad_() for r in range(plan.ranks)]


def _run_ranks(
    t: Trace,
    plan: Plan,
    start: dict[int, torch.Tensor],
    whole: dict[int, torch.Tensor],
    parameters: dict[str, list[torch.Tensor]],
) -> dict[int, Spread]:
    values: dict[int, Spread] = {i: everywhere(x, plan.ranks) for i, x in start.items()}
    for name, i in t.parameters.items():
        partition, shape = plan.tensor(name).partition, t.values[i].shape
        boxes = tuple(cut(shape, partition, r) for r in range(plan.ranks))
        data = parameters[name]
        if plan.tensor(name).once:
            data = [p if r == 0 else p * 0 for r, p in enumerate(data)]
        values[i] = Spread(shape, tuple(data), boxes, plan.tensor(name).once)
    borders = Borders(t, plan)
    memory = Memory(t)
    for op in t.ops:
        borders.cross(op.index, values)
        ids = op.inputs()
        if all(t.values[i].constant for i in (*ids, *(o for o in op.outputs if o >= 0))):
            for o in op.outputs:
                if o >= 0:
                    values[o] = everywhere(whole[o], plan.ranks)
            if op.mutates is not None:
                values.update((w, everywhere(whole[w], plan.ranks)) for w in memory.targets(op))
            continue
        if not ids:  # memory for what the code writes into it
            values[op.outputs[0]] = everywhere(call(op, {}), plan.ranks)
            continue
        seen = {i: borders.seen(i, op.index, values) for i in ids}
        if op.index in borders.rows:
            outs = [row(op, seen[ids[0]], t.where(op))]
        else:
            outs = (replay_means.run if op.index in borders.means else run)(op, seen, t.where(op))
        for o, out in zip([o for o in op.outputs if o >= 0], outs, strict=True):
            values[o] = out
        if op.mutates is not None:
            values[op.mutates] = outs[0]
            for w in memory.targets(op):
                values[w] = put(values[w], memory.numbers(op.outputs[0]), outs[0], t.where(op))
    borders.cross(len(t.ops), values)
    return values


def _gradients(
    t: Trace,
    plan: Plan,
    outputs: dict[str, int],
    start: dict[int, torch.Tensor],
    whole: dict[int, torch.Tensor],
    spread: dict[int, Spread],
    parameters: dict[str, list[torch.Tensor]],
    draw: torch.Generator,
) -> dict[str, float]:
    """A random linear function of the outputs is the loss: every rank computes it from its own copy, and all go backward together."""
    losses, loss = [torch.zeros(()).double() for _ in range(plan.ranks)], torch.zeros(()).double()
    for i in outputs.values():
        weight = torch.randn(whole[i].shape, generator=draw, dtype=torch.float64)
        loss = loss + (whole[i] * weight).sum()
        losses = [one + (spread[i].data[r] * weight).sum() for r, one in enumerate(losses)]
    loss.backward()
    torch.autograd.backward(losses)
    out = {}
    grads = {name: start[i].grad for name, i in t.parameters.items()}
    floor = VANISHING * max((_largest(g) for g in grads.values() if g is not None), default=1.0)
    for name, i in t.parameters.items():
        grad = grads[name]
        expected = torch.zeros_like(start[i]) if grad is None else grad
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters[name]]
        far = _gradient_difference(plan, name, found, expected)
        out[name] = far / max(_largest(expected), floor) if far < math.inf else far
    return out


def _gradient_difference(plan: Plan, name: str, found: list[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest difference after what the applier does: parts of whole parameters summed, copies summed over their holders."""
    entry = plan.tensor(name)
    if entry.partition.is_whole:
        if entry.grad == "partial":
            found = [torch.stack(found).sum(0)]
        return max(_largest(g - expected) for g in found)
    dim = entry.partition.dim or 0
    worst = 0.0
    for segment in entry.partition.segments():
        length = segment.stop - segment.start
        parts = [found[r].narrow(dim, entry.partition.local_offset(r, segment.start) or 0, length) for r in segment.ranks]
        total = torch.stack(parts).sum(0)
        worst = max(worst, _largest(total - expected.narrow(dim, segment.start, length)))
    return worst


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    far = _largest(one - other)
    return far / max(_largest(other), 1e-30) if far < math.inf else far


def _largest(x: torch.Tensor) -> float:
    """Infinite where one is NaN: max() of Python would lose it."""
    size = x.abs().max().item()
    return math.inf if math.isnan(size) else size
