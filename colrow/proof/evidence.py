"""What one rank can say about its split model: its answers compared with the whole model's, digests of its bits, its counted collectives.

Runs on every rank alike, in a thread of the gate or in a process of its own. The last word is `judge`, which looks at the evidence of all
ranks together: copies must be bit-equal, counts must be those predicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.group import Group
from ..parallel.head import sharded_logits
from ..planning.plan import Plan
from . import compare
from .compare import Comparison, Item
from .counts import Site, count_items
from .exercise import ask, steps
from .precision import Float64, tolerance
from .reference import Reference, digest

Copies = dict[tuple[str, str, int], str]
"""(kind, parameter, start of the stretch along its cut dim or 0) -> digest: of everything that other ranks hold too."""


@dataclass(frozen=True)
class Evidence:
    comparison: Comparison
    copies: Copies
    sites: dict[Site, tuple[int, int, int]]  # calls, logical bytes, bytes moved
    seconds: float


def examine(model: nn.Module, group: Group, plan: Plan, reference: Reference) -> Evidence:
    """Asks the split model on this rank what the whole one was asked, and compares. A collective: all ranks must call it."""
    start = time.perf_counter()
    counters = group.counters
    counters.reset()

    def phase(name: str) -> None:
        counters.phase = name

    with Float64() if reference.dtype is torch.float64 else nullcontext():
        answers = ask(model, reference.asked, reference.answers.tokens, phase, lambda: sharded_logits(model))
    sites = {key: (t.calls, t.logical_bytes, t.moved_bytes) for key, t in counters.sites.items() if key[0]}
    items = list(_weights_and_answers(reference, answers))
    copies: Copies = {}
    if reference.asked.train:
        parameters = dict(model.named_parameters())
        items += _gradients(parameters, plan, group.rank, reference)
        copies |= _copies("gradients", {n: p.grad for n, p in parameters.items() if p.grad is not None}, plan, group.rank)
        items += _steps(model, parameters, plan, group.rank, reference)
        copies |= _copies("parameters after both steps", {n: p.detach() for n, p in parameters.items()}, plan, group.rank)
    return Evidence(Comparison(tuple(items)), copies, sites, time.perf_counter() - start)
