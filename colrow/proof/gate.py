"""The gate: before a weight is read, the real applier splits a small copy of the model, and the copy must equal the whole one.

The deriver is checked by planning/replay; here everything after it is: build, regions, head maps, loss, cache, gradients and optimizer
steps, with ranks as threads, in float64, with noise in every parameter. A pass is remembered (gate_cache.py) per architecture, config,
plan, and versions of everything that takes part. Not here: real weights and real processes (verify.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..comm.group import Group
from ..comm.local import run_threads
from ..errors import UserError
from ..parallel import build, load
from ..parallel.sequence import Mode
from ..planning.plan import Plan
from . import gate_cache, trail
from . import whole as whole_model
from .compare import Comparison
from .evidence import Evidence, examine, judge
from .exercise import Questions, ask, questions
from .noise import add_noise
from .precision import FLOOR, Float64
from .reference import Reference, reference
from .report import describe
from .shrink import Small, shrink

DTYPE = torch.float64
State = dict[str, torch.Tensor]
REPORT_IT = "another number of ranks, and please report this"


class GateRefused(UserError):
    """The split of a small copy differs from the copy, or could not be made. The message names the first thing that differs."""


@dataclass(frozen=True)
class GateResult:
    """A pass. `comparison` is empty where it came from the cache; `seconds` are those spent now."""

    cached: bool
    seconds: float
    copy: str
    checks: int
    largest: float
    comparison: Comparison = Comparison()

    def __str__(self) -> str:
        if self.cached:
            return f"gate: passed before ({self.checks} checks, kept in the cache)"
        return f"gate: passed in {self.seconds:.1f} s, {self.checks} checks on a copy ({self.copy}), largest difference {self.largest:.0e}"


def gate(
    config: PreTrainedConfig, plan: Plan, *, weights: Sequence[float] | None = None, cache: bool = True, sequence: Mode = "off"
) -> GateResult:
    """Raises GateRefused where the plan, carried out by the applier, does not compute what the whole model computes. `sequence`: with that
    mode of sequence parallelism."""
    start = time.perf_counter()
    key = gate_cache.key(config, plan, sequence)
    known = gate_cache.read(key) if cache else None
    if known:
        return GateResult(True, time.perf_counter() - start, known.copy, known.checks, known.largest)
    try:
        small = shrink(config, plan.ranks, weights or plan.weights or None, plan)
    except UserError as error:
        raise GateRefused(error.what, error.value, error.works) from error
    comparison = prove(small, sequence)
    checks, largest = len(comparison.items), max(i.difference for i in comparison.items)
    if cache:
        gate_cache.write(key, gate_cache.Pass(str(small), checks, largest))
    return GateResult(False, time.perf_counter() - start, str(small), checks, largest, comparison)


def prove(small: Small, sequence: Mode = "off") -> Comparison:
    """Splits the small copy and compares it with itself as a whole. GateRefused where they differ."""
    name = small.plan.architecture or small.plan.model_type
    try:
        whole = _exact(whole_model.build(small.config, DTYPE))
        add_noise(whole)
        asked = questions(whole, length=max(13, small.plan.ranks, small.plan.tokens))  # a position for every rank
        state = {key: t.detach().clone() for key, t in whole.state_dict().items()}
        expected = reference(whole, small.plan, asked)
        if expected.unfit:
            raise ArithmeticError(expected.unfit)
    except Exception as error:
        raise GateRefused(f"a small copy of {name} does not run as a whole", f"{type(error).__name__}: {error}", REPORT_IT) from error
    try:
        comparison = judge(run_threads(_rank, small.plan.ranks, small, state, expected, sequence))
    except UserError as error:
        raise GateRefused(f"the plan for {name} cannot be carried out: {error.what}", error.value, error.works) from error
    except Exception as error:
        raise GateRefused(f"splitting a small copy of {name} fails", f"{type(error).__name__}: {error}", REPORT_IT) from error
    if not comparison.ok:
        found = describe(comparison, lambda: _parting(small, state, asked))
        raise GateRefused(f"a small copy of {name}, split over {small.plan.ranks} ranks, differs from the whole", found, REPORT_IT)
    return comparison


def _exact(model: PreTrainedModel) -> PreTrainedModel:
    """Every parameter in float64, those too that the model's code makes in float32 (routers): their gradients would show its rounding."""
    for p in model.parameters():
        p.data = p.data.to(DTYPE)
    return model


def _rank(group: Group, small: Small, state: State, expected: Reference, sequence: Mode) -> Evidence:
    return examine(_split(group, small, state, sequence), group, small.plan, expected)


def _split(group: Group, small: Small, state: State, sequence: Mode = "off") -> PreTrainedModel:
    model = _exact(whole_model.simple_experts(build.empty(small.config, DTYPE, "eager")))
    build.split(model, small.plan, group, sequence)
    load.from_whole(model, state, DTYPE)
    return model.eval()


def _parting(small: Small, state: State, asked: Questions) -> trail.Parting | None:
    """Both models once more, with everything that passes between modules written down."""
    asked = asked.briefly()
    whole = _exact(whole_model.build(small.config, DTYPE))
    whole.load_state_dict(state)
    with Float64(), trail.recording(whole) as expected:
        tokens = ask(whole, asked).tokens
    found = run_threads(_trail, small.plan.ranks, small, state, asked, tokens)
    return trail.first_difference(expected, found, small.plan, FLOOR[DTYPE])


def _trail(group: Group, small: Small, state: State, asked: Questions, tokens: tuple[int, ...]) -> trail.Trail:
    model = _split(group, small, state)
    with Float64(), trail.recording(model) as found:
        ask(model, asked, tokens)
    return found
