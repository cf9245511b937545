"""Measures what planning/links.py's presets state, on this machine: how fast ranks read, multiply, start an op and exchange bytes.

    python -m colrow bench --calibrate machine.json --tp 2      then      colrow plan MODEL --device machine.json

Four numbers for a rank while all ranks do the same, and two for the link; each is a median. They are measured with torch's own products,
as the split model runs them, so they are reached and not assumed. Not here: predictions (planning/timing.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from ..comm import collectives
from ..comm.group import Group
from ..parallel import build
from ..planning.links import Device, Link
from ..planning.trace import trace
from .forward import Forward

SMALL, LARGE = 4096, 4 << 20  # bytes of the all-reduces that give latency and bandwidth


@dataclass(frozen=True)
class Measured:
    """Of one rank: bytes read and products per second, seconds of an op, seconds of a small and of a large all-reduce (0 on one rank)."""

    read: float
    flops: float
    per_op: float
    small: float
    large: float


def measure(group: Group, dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> Measured:
    """Takes about five times `seconds`. A collective of all ranks."""
    read, flops, per_op = (part(group, dtype, seconds) for part in (_read, _flops, _per_op))
    return Measured(read, flops, per_op, *_exchange(group, seconds))


def _timed(group: Group, run: Callable[[], object], seconds: float) -> float:
    """Median time of `run`, which is as often called on every rank."""
    run()
    collectives.barrier(group, "calibrate")
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    (count,) = {min(collectives.gather_objects(max(3, min(2000, int(seconds / max(once, 1e-7)))), group, "calibrate.count") or [3])}
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def _read(group: Group, dtype: torch.dtype, seconds: float) -> float:
    """Bytes per second of products with one row, of many matrices that together fit into no cache."""
    weights = [torch.zeros(2048, 2048, dtype=dtype) for _ in range(512 // (4 * dtype.itemsize))]
    x = torch.ones(1, 2048, dtype=dtype)
    with torch.inference_mode():
        return sum(w.nbytes for w in weights) / _timed(group, lambda: [F.linear(x, w) for w in weights], seconds)


def _flops(group: Group, dtype: torch.dtype, seconds: float) -> float:
    x, w = torch.ones(256, 1536, dtype=dtype), torch.ones(1536, 1536, dtype=dtype)
    with torch.inference_mode():
        return 2 * 256 * 1536 * 1536 / _timed(group, lambda: F.linear(x, w), seconds)


def _per_op(group: Group, dtype: torch.dtype, seconds: float) -> float:
    """Seconds of an op on next to nothing, with what Python, torch and transformers' modules add to it: a decoding step of a tiny model
    divided by the ops of its trace."""
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    forward = Forward(build.empty(config, dtype).to_empty(device="cpu").eval())
    _, past = forward(torch.zeros(1, 8, dtype=torch.int64), None, None)
    one = torch.zeros(1, 1, dtype=torch.int64)

    def step() -> None:
        forward(one, None, past)
        past.crop(-1)

    return _timed(group, step, seconds) / len(trace(config).ops)


def _exchange(group: Group, seconds: float) -> tuple[float, float]:
    if group.size == 1:
        return 0.0, 0.0
    times = []
    for size in (SMALL, LARGE):
        x = torch.ones(size // 4)
        times.append(_timed(group, lambda x=x: collectives.all_reduce(x, group, "calibrate.link", inplace=True), seconds))  # type: ignore[misc]
    return times[0], times[1]


def presets(results: list[Measured], kind: str, memory: float) -> tuple[Device, Link]:
    """A device and a link from what the ranks of one host measured: the slowest rank counts, since the others wait for it.

    `shared` is set, with the host's sums: fewer or more ranks share the same memory and cores. The link's bandwidth is what makes the
    model's formula give the time of the large all-reduce.
    """
    n = len(results)
    read, flops = (n * min(getattr(r, key) for r in results) for key in ("read", "flops"))
    source = f"measured on {n} rank{'s' * (n > 1)} with {os.cpu_count()} cores"
    device = Device("here", "this machine", read, flops, memory, source, True, (1.0, 1.0), max(r.per_op for r in results))
    small, large = (max(getattr(r, key) for r in results) for key in ("small", "large"))
    sent = (n - 1) * LARGE if n == 2 else 2 * (n - 1) * LARGE / n
    bandwidth = sent / max(large - small, 1e-9) if n > 1 else 1e12
    return device, Link("here", f"{kind} on this machine", bandwidth, 0.0, small, source, 0, ("two-shot",) if n > 2 else ("one-shot",))
