"""Pieces: what the steps of a program read and look at, and how long each kind of them takes.

    work(program, length)                  # what planning/program.py predicts its time from, counted in the instructions themselves
    with timed(program) as seconds: ...    # afterwards seconds() by kind

Not here: how fast a machine is (pace.py), the prediction (planning/program.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Literal

from ..kernels.library import Op
from ..planning import cost
from ..planning.program import Work
from ..planning.timing import Time
from .program import Program
from .steps import Heads, Step

Kind = Literal["weights", "attention", "sums", "between", "beside"]
KINDS: tuple[Kind, ...] = ("weights", "attention", "sums", "between", "beside")
"""Products; attention; sums over ranks; all other instructions; what a step takes beside its instructions, in Python."""

_KINDS: dict[Op, Kind] = {Op.PRODUCT: "weights", Op.EXPERTS: "weights", Op.ATTEND: "attention", Op.REDUCE: "sums"}


def kind(step: Step) -> Kind:
    return _KINDS.get(step.op, "between")


def work(program: Program, length: int) -> Work:
    """Of one more token behind `length` others, and as many of an encoder. Experts count once for each token that chooses them."""
    read = operations = numbers = 0.0
    between = 0
    for step in program.compiled.steps:
        if step.op is Op.PRODUCT:
            read += sum(_bytes(w.values, w.beside) for w in step.weights)
            operations += 2 * sum(prod(w.shape) for w in step.weights)
        elif step.op is Op.EXPERTS:
            (matrix,) = step.weights
            share = step.entry / matrix.shape[0]
            read += share * _bytes(matrix.values, matrix.beside)
            operations += 2 * share * prod(matrix.shape)
        elif isinstance(step.entry, Heads):
            heads = step.entry
            seen = length if heads.source else min(length + 1, heads.window or length + 1)
            numbers += heads.heads * seen * (heads.head_dim + heads.value_dim)
        between += kind(step) == "between"
    return Work(read, operations, numbers, between, program.compiled.logits.shape[-1])


def sums(program: Program, ranks: int) -> list[cost.Predicted]:
    """Its sums over all ranks, for one sequence."""
    size, everyone = program.dtype.itemsize, tuple(range(ranks))
    found = [step.entry for step in program.compiled.steps if step.op is Op.REDUCE]
    return [cost.Predicted("all_reduce", entry.name, 1, entry.x.numel() * size, everyone, unit=size) for entry in found]


def predicted(time: Time) -> dict[Kind, float]:
    """A program's predicted seconds by kind."""
    at_work: dict[Kind, float] = {"weights": time.reading, "attention": time.computing, "sums": time.latency + time.moving}
    return {**at_work, "between": time.touching, "beside": time.starting}


def whole(spent: dict[Kind, float], seconds: float) -> dict[Kind, float]:
    """A step's `seconds` by kind, of which its instructions took `spent`."""
    return {**spent, "beside": max(seconds - sum(spent.values()), 0.0)}


@contextmanager
def timed(program: Program) -> Iterator[Callable[[], dict[Kind, float]]]:
    """Something to call for the seconds that the program's instructions took since the last call, by kind; without "beside"."""
    spent = program.watch(True)
    assert spent is not None

    def seconds() -> dict[Kind, float]:
        found: dict[Kind, float] = {name: 0.0 for name in KINDS if name != "beside"}
        for step, took in zip(program.compiled.steps, spent, strict=True):
            found[kind(step)] += took
        ctypes.memset(spent, 0, ctypes.sizeof(spent))
        return found

    try:
        yield seconds
    finally:
        program.watch(False)


def _bytes(*parts: object) -> int:
    return sum(x.nbytes for x in parts if x is not None)  # type: ignore[attr-defined]
