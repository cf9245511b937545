"""Pace: measures how fast the engine's programs in C run on this machine, as calibrate.py does it for the models' modules.

All ranks measure at the same time, with as many threads as they decode with, and with the kernels that a program would use. Weights are
read by a program of products alone, in the form that a model's are kept in; sums follow products, as they do in a model; the rest is taken
from steps of a small model (calibrate's `REFERENCE`), between which so much is read that nothing is left in the caches, as after a step of
a large model. Not here: predictions (planning/program.py).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..checkpoint.pages import empty
from ..comm import collectives
from ..comm.group import Call, Group
from ..kernels import compact as kernel
from ..kernels.library import Op
from ..parallel import build
from ..parallel.compact import usable
from ..parallel.int8 import quantize
from ..planning.links import Device, Link
from . import calibrate, pieces
from .compiled import Compiled
from .decoder import Decoder
from .exchange import Exchange
from .forward import Forward, vocabulary
from .program import Program
from .settings import Sampling
from .slots import Slot
from .steps import Matrix, Step
from .tape import Added

WIDTH = 1024  # of the matrices that are read
READ = (64 << 20, 192 << 20, 384 << 20)  # bytes that all ranks read together, over and over again: caches keep some of the smaller ones
SIZES = (4 << 10, 64 << 10, 512 << 10)  # bytes of sums
SEQUENCES = 8  # in one step, to see what further ones cost
CONTEXT = 512
SCORES = 65536
TIMES = 6  # sums in one run


@dataclass(frozen=True)
class Paced:
    """Of one rank: bytes of weights read a second where all read `READ`, operations a second of further sequences, numbers of keys and
    values looked at a second, seconds of an instruction between products, of choosing for each score, of a step beside its instructions
    (behind the least and the most of `READ`) and of a further sequence there, and of sums of `SIZES` (none on one rank).
    `compact`: this processor can have bfloat16 weights in 12 bits each. `cores`: that the rank may run on; others may have others."""

    reads: tuple[float, ...]
    flops: float
    attend: float
    instruction: float
    score: float
    steps: tuple[float, float]
    row: float
    sums: tuple[float, ...]
    compact: bool = False
    cores: frozenset[int] = frozenset()


def measure(
    group: Group, dtype: torch.dtype = torch.float32, seconds: float = 0.5, int8: bool = False, compact: bool | None = None
) -> Paced:
    """For programs of models in `dtype`, a dtype that there are programs for; `int8`: with weights of eight bits; `compact`: of twelve, by
    default where the engine keeps them so. Takes about five times `seconds`. A collective of all ranks."""
    if compact is None:
        compact = dtype is torch.bfloat16 and not int8 and usable()
    weights = _weights(torch.int8 if int8 else dtype, READ[-1] // group.size, compact)
    readers = [_made([_product(w) for w in weights[: max(1, len(weights) * size // READ[-1])]], group, dtype) for size in READ]
    reads = tuple(_read(reader, group, seconds / 3) for reader in readers)
    flops = _further(readers[-1], group, seconds / 3)
    summed = tuple(_sum(group, weights, dtype, size, seconds / 3) for size in SIZES) if group.size > 1 else ()
    return Paced(reads, flops, *_reference(readers, group, dtype, seconds), summed, kernel.library() is not None, _cores())


def presets(results: list[Paced], kind: str, memory: float) -> tuple[Device, Link]:
    """As calibrate.presets, of what the ranks' programs were measured to do: the slowest rank counts."""
    n = len(results)
    source = f"programs in C, measured on {n} rank{'s' * (n > 1)}"
    flops, attend = (min(getattr(r, key) for r in results) for key in ("flops", "attend"))
    reads = tuple((float(size), n * min(r.reads[at] for r in results)) for at, size in enumerate(READ))
    instruction, score, row = (max(getattr(r, key) for r in results) for key in ("instruction", "score", "row"))
    device = replace(
        Device("here", "this machine", reads[-1][1], n * flops, memory, source, True, (1.0, 1.0), False),
        reads=reads,
        attend=attend,
        per_op=instruction,
        steps=tuple((float(READ[at]), max(r.steps[at] for r in results)) for at in (0, -1)),
        per_score=score,
        per_row=row,
        cores=max(len(frozenset().union(*(r.cores for r in results))), 1),
        compact=all(r.compact for r in results),
    )
    times = [(size, max(r.sums[at] for r in results)) for at, size in enumerate(SIZES)] if n > 1 else []
    return device, calibrate.link(n, kind, source, times)


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


# ---- Programs made by hand ----


@dataclass
class _NoCache:
    """Stands for a Slot where nothing is kept."""

    length: int = 0
    capacity: int = 1
    sources: int = 0

    def __post_init__(self) -> None:
        self.keys = self.values = self.source_keys = self.source_values = (ctypes.c_void_p * 1)()

    def reserve(self) -> None:
        pass


def _weights(dtype: torch.dtype, size: int, compact: bool = False) -> list[Matrix]:
    """As many as take `size` bytes, each with memory of its own, of the same random numbers: what is listed beside compact ones, and how
    long it takes, hangs on them."""
    drawn = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    numbers, beside = quantize(drawn) if dtype is torch.int8 else (drawn.to(dtype), None)
    if compact and (found := kernel.compact(numbers)) is not None:
        numbers, beside = found
    first = Matrix(numbers, drawn.shape, beside)
    return [replace(first, values=empty(numbers.shape, numbers.dtype).copy_(numbers)) for _ in range(max(1, size // numbers.nbytes))]


def _product(weight: Matrix) -> Step:
    rows, width = weight.shape
    return Step(Op.PRODUCT, [torch.empty(1, rows)], (torch.empty(1, width),), [weight])


def _made(steps: list[Step], group: Group, dtype: torch.dtype) -> Program:
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return Program(Compiled(steps, [], [], nothing, nothing, steps[0].outs[0]), group, dtype, torch.get_num_threads())


def _runs(program: Program, group: Group, seconds: float, sequences: int = 1) -> dict[pieces.Kind, float]:
    """Median seconds of each kind of instruction in a run; as many runs on every rank."""
    slots: list[Any] = [_NoCache() for _ in range(sequences)]

    def run() -> None:
        program.run([0] * sequences, slots)

    run()
    count, found = _count(run, group, seconds), list[dict[pieces.Kind, float]]()
    with pieces.timed(program) as spent:
        for _ in range(count):
            run()
            found.append(spent())
    return {key: median(f[key] for f in found) for key in found[0]}


def _count(run: Callable[[], object], group: Group, seconds: float) -> int:
    """How often to run in `seconds`, the same on every rank."""
    collectives.barrier(group, "calibrate")
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    return min(collectives.gather_objects(max(3, min(200, int(seconds / max(once, 1e-6)))), group, "calibrate.count") or [3])


# ---- What is measured ----


def _read(reader: Program, group: Group, seconds: float) -> float:
    return pieces.work(reader, 0).read / _runs(reader, group, seconds)["weights"]


def _further(reader: Program, group: Group, seconds: float) -> float:
    one, several = (_runs(reader, group, seconds / 2, n)["weights"] for n in (1, SEQUENCES))
    return (SEQUENCES - 1) * pieces.work(reader, 0).operations / max(several - one, one / 100)


def _sum(group: Group, weights: list[Matrix], dtype: torch.dtype, size: int, seconds: float) -> float:
    """Seconds of one sum of so many bytes behind a product, for which ranks do not take equally long."""
    x = torch.empty(1, size // dtype.itemsize)
    entry = Added("calibrate.sum", Call("all_reduce", "calibrate.sum"), x)
    steps = [step for at in range(TIMES) for step in (_product(weights[at % len(weights)]), Step(Op.REDUCE, [x], (x,), entry=entry))]
    return _runs(_made(steps, group, dtype), group, seconds)["sums"] / TIMES


def _reference(
    readers: list[Program], group: Group, dtype: torch.dtype, seconds: float
) -> tuple[float, float, float, tuple[float, float], float]:
    """Of a small model's steps what `Paced` names, from `attend` to `row`."""
    model, program = _small(group, dtype)
    past = _longer(Forward(model)(torch.zeros(1, 1, dtype=torch.int64), None, None)[1])
    slots = [Slot(past) for _ in range(SEQUENCES)]
    length, agreeing, choosing = slots[0].length, *(Exchange(group, cut, Sampling(0.0)) for cut in (vocabulary(model), None))

    def step(rows: int = 1) -> torch.Tensor:
        for slot in slots:
            slot.length = length
        return program.run([5] * rows, slots[:rows])

    def agree(exchange: Exchange, logits: torch.Tensor) -> None:
        exchange.agree(logits, [[5]] * len(logits), 0, lambda tokens: [None] * len(tokens))

    def behind(reader: Program, run: Callable[[], object]) -> float:
        reader.run([0], [_NoCache()])  # type: ignore[list-item]
        collectives.barrier(group, "calibrate")
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    few, found = step(), list[dict[pieces.Kind, float]]()
    besides: list[float] = []
    with pieces.timed(program) as spent:
        for reader, rows in ((readers[0], 1), (readers[-1], 1), (readers[0], SEQUENCES)):
            whole = []
            for _ in range(_count(lambda reader=reader, rows=rows: behind(reader, lambda: step(rows)), group, seconds)):  # type: ignore[misc]
                spent()
                took = behind(reader, lambda rows=rows: agree(agreeing, step(rows)))  # type: ignore[misc]
                kinds = spent()
                whole.append(took - sum(kinds.values()))
                if rows == 1:
                    found.append(kinds)
            besides.append(median(whole))
    times = []
    for scores in (few, torch.zeros(1, SCORES)):
        times.append(min(behind(readers[0], lambda scores=scores: agree(choosing, scores)) for _ in range(5)))  # type: ignore[misc]
    score = max(times[1] - times[0], 0.0) / (SCORES - few.shape[1])
    work = pieces.work(program, length)
    attention, between = (median(f[key] for f in found) for key in ("attention", "between"))
    least, most = (max(beside - score * few.shape[1], 1e-6) for beside in besides[:2])
    row = max((besides[2] - besides[0]) / (SEQUENCES - 1) - score * few.shape[1], 0.0)
    looked = work.numbers / attention if work.numbers else float("inf")  # of a rank without heads
    return looked, between / work.instructions, score, (least, most), row


def _small(group: Group, dtype: torch.dtype) -> tuple[Any, Program]:
    """The rank's part of the small model, and its program."""
    config, plan, _ = calibrate.reference(group.size)
    model: Any = build.empty(config, dtype)
    model = (build.split(model, plan, group) if group.size > 1 else model).to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor.data, 0.01)
    decoder = Decoder(model, group)
    decoder.prepare()
    if decoder.program is None:
        raise RuntimeError(f"the small model has no program: {decoder.why}")
    return model, decoder.program


def _longer(past: Any) -> Any:
    """A cache as of CONTEXT tokens, with nothing in it, of the heads that `past` has."""
    out = DynamicCache()
    for at, layer in enumerate(past.layers):
        keys, values = (x.new_zeros(1, x.shape[1], CONTEXT, x.shape[3]) for x in (layer.keys, layer.values))
        out.update(keys, values, at)
    return out
