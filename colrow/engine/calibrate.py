"""Measures what planning/links.py's presets state, on this machine: how fast ranks read, multiply, run a model's code and exchange bytes.

    python -m colrow bench --calibrate machine.json --tp 2      then      colrow plan MODEL --device machine.json

All ranks measure at the same time; each number is a median. Reading, multiplying and exchanging are measured by themselves, with torch's
own products and in turn, as a split model runs them. The rest is what a small split model (`REFERENCE`) takes longer than these explain:
decoding gives seconds an op, a prompt what lies between products, a training step what gradients cost. The path is that of transformers'
modules. Not here: predictions (planning/timing.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from ..comm import collectives
from ..comm.group import Group
from ..parallel import build
from ..parallel.head import sharded_logits
from ..planning import cost, timing, workload
from ..planning.derive import derive
from ..planning.links import Device, Link, Machine
from ..planning.plan import Plan
from ..planning.trace import trace
from ..planning.wire import Algorithm
from .forward import Forward

SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)  # bytes of the all-reduces that are measured
ROWS = 128  # of products with many rows, and tokens of the reference's prompt
REFERENCE: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Measured:
    """Of one rank: bytes read and products per second, seconds of all-reduces of `SIZES` (none on one rank), and seconds of the reference
    model's decoded token, prompt and training step."""

    read: float
    flops: float
    exchange: tuple[float, ...]
    decode: float
    prefill: float
    train: float
    itemsize: int = 4


def measure(group: Group, dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> Measured:
    """Takes about six times `seconds`. A collective of all ranks."""
    read, flops = _read(group, dtype, seconds), _flops(group, dtype, seconds)
    exchange = tuple(_exchange(group, size, seconds / 4) for size in SIZES) if group.size > 1 else ()
    _matrices.cache_clear()
    return Measured(read, flops, exchange, *_reference(group, dtype, seconds), dtype.itemsize)


def _timed(group: Group, run: Callable[[], object], seconds: float) -> float:
    """Median time of `run`, which is as often called on every rank."""
    run()
    collectives.barrier(group, "calibrate")
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    count = min(collectives.gather_objects(max(3, min(2000, int(seconds / max(once, 1e-7)))), group, "calibrate.count") or [3])
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


@cache
def _matrices(dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Matrices that together fit into no cache."""
    return [torch.zeros(size, size, dtype=dtype) for _ in range((192 << 20) // (size * size * dtype.itemsize))]


def _read(group: Group, dtype: torch.dtype, seconds: float) -> float:
    """Bytes per second of products with one row."""
    weights, x = _matrices(dtype, 2048), torch.ones(1, 2048, dtype=dtype)
    with torch.inference_mode():
        return sum(w.nbytes for w in weights) / _timed(group, lambda: [F.linear(x, w) for w in weights], seconds)


def _flops(group: Group, dtype: torch.dtype, seconds: float) -> float:
    """Operations per second of products with many rows, each with a matrix that was not read before; what reading takes is left out."""
    weights = cycle(_matrices(dtype, 1024))
    x, one = (torch.ones(rows, 1024, dtype=dtype) for rows in (ROWS, 1))
    with torch.inference_mode():
        many = _timed(group, lambda: F.linear(x, next(weights)), seconds)
        few = _timed(group, lambda: F.linear(one, next(weights)), seconds / 4)
    return 2 * ROWS * 1024 * 1024 / max(many - few, many / 10)


def _exchange(group: Group, size: int, seconds: float) -> float:
    """Seconds that an all-reduce adds to the product before it: ranks do not arrive at the same time, and the memory is not at hand."""
    weights, x, moved = cycle(_matrices(torch.float32, 1024)), torch.ones(1, 1024), torch.ones(size // 4)

    def product() -> None:
        F.linear(x, next(weights))

    def both() -> None:
        product()
        collectives.all_reduce(moved, group, "calibrate.link", inplace=True)

    with torch.inference_mode():
        alone = _timed(group, product, seconds / 2)
        return max(_timed(group, both, seconds) - alone, 1e-7)


@cache
def reference(ranks: int) -> tuple[LlamaConfig, Plan, workload.Model]:
    """The small model, its plan, and what time depends on."""
    config = LlamaConfig(**REFERENCE)
    return config, derive(config, ranks), workload.of(trace(config))


def _reference(group: Group, dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
    """Seconds of a decoded token, a prompt and a training step."""
    config, plan, _ = reference(group.size)
    model: Any = build.empty(config, dtype)
    model = (build.split(model, plan, group) if group.size > 1 else model).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor.data, 0.01)
    forward, ids = Forward(model.eval()), torch.zeros(1, ROWS, dtype=torch.int64)
    _, past = forward(ids, None, None)

    def step() -> None:
        forward(ids[:, :1], None, past)
        past.crop(-1)

    def training() -> None:
        with sharded_logits(model) if group.size > 1 else torch.enable_grad():
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    decode, prefill = _timed(group, step, seconds), _timed(group, lambda: forward(ids, None, None), seconds)
    model.train()
    return decode, prefill, _timed(group, training, seconds)


def presets(results: list[Measured], kind: str, memory: float) -> tuple[Device, Link]:
    """A device and a link from what the ranks of one host measured: the slowest rank counts, since the others wait for it.

    `shared` is set, with the host's sums: fewer or more ranks share the same memory and cores. Beyond the number of ranks that measured
    it, the link is described by its smallest and its largest all-reduce.
    """
    n = len(results)
    read, flops = (n * min(getattr(r, key) for r in results) for key in ("read", "flops"))
    source = f"measured on {n} rank{'s' * (n > 1)} with {os.cpu_count()} cores"
    device = Device("here", "this machine", read, flops, memory, source, True, (1.0, 1.0), False)
    joined = link(n, kind, source, [(size, max(r.exchange[i] for r in results)) for i, size in enumerate(SIZES)] if n > 1 else [])
    return explained(device, joined, results), joined


def link(n: int, kind: str, source: str, times: list[tuple[int, float]]) -> Link:
    """What joins n ranks on this machine, of measured (bytes, seconds) of all-reduces by rising size; none of one rank."""
    if n == 1:
        return Link("here", f"{kind} on this machine", 1e12, 0.0, 0.0, source, 0, ("one-shot",))
    times = [(size, max(s for _, s in times[: i + 1])) for i, (size, _) in enumerate(times)]  # none shorter than a smaller one
    (_, small), (size, large) = times[0], times[-1]
    sent = (n - 1) * size if n == 2 else 2 * (n - 1) * size / n
    rate = sent / max(large - small, 1e-9)
    algorithm: tuple[Algorithm, ...] = ("two-shot",) if n > 2 else ("one-shot",)
    return Link("here", f"{kind} on this machine", rate, 0.0, small, source, 0, algorithm, tuple(times), n)


def explained(device: Device, joined: Link, results: list[Measured]) -> Device:
    """The device with what the reference model took longer than its products and collectives explain."""
    n, size = len(results), results[0].itemsize
    _, plan, model = reference(n)
    decode, prefill, train = (max(getattr(r, key) for r in results) for key in ("decode", "prefill", "train"))

    def left(seconds: float, predicted: timing.Time) -> float:
        """Never nothing, so that what was measured cannot turn into "does not matter"."""
        return max(seconds - predicted.total, seconds / 1000)

    whole, cut = model.touched
    for _ in range(8):  # starting ops and touching numbers have a part in both times; a large one in one of them, so this comes to an end
        device = replace(device, per_op=0.0)
        device = replace(device, per_op=left(decode, timing.decode(plan, model, Machine(device, joined), 1, ROWS, size)) / model.ops)
        between = left(prefill, timing.prefill(plan, model, Machine(replace(device, touch=0.0), joined), 1, ROWS, size))
        device = replace(device, touch=n * ROWS * size * (whole + cut / n) / between)
    gradients = left(train, timing.train(plan, model, Machine(device, joined), 1, ROWS, size))
    made = max(cost.parameter_bytes(plan, size))
    return replace(device, gradient=n * made / gradients)
