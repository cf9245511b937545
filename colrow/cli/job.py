"""Job: what `run` and `chat` ask of the ranks, and what the ranks tell while they do it. Data and names only: the parent makes jobs before
it imports torch, and never imports transformers, which would take the cores that the starting ranks need for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.model_dir import ModelFiles
from ..engine.settings import Sampling

if TYPE_CHECKING:
    from ..comm.counters import Event, Span
    from ..engine.account import RankMemory, Traffic
    from ..planning.plan import Plan
    from ..train.settings import Settings


@dataclass(frozen=True)
class Opening:
    """How a model is opened. `started`: when the command was given, in seconds since the epoch."""

    files: ModelFiles
    started: float
    split: tuple[float, ...] = ()
    plan: Plan | None = None
    dtype: str = "auto"
    gate: bool = True
    trace: bool = False  # keep every collective for a trace
    adapter: Path | None = None  # a directory of PEFT's
    compact: bool = True


@dataclass(frozen=True)
class Training:
    """What is trained on `data` and, where there is another file for it, evaluated; what is left in the directory `out`; and where the loss
    curve is drawn besides."""

    settings: Settings
    data: Path
    evaluation: Path | None
    out: Path
    png: Path | None = None


@dataclass(frozen=True)
class OnRanks:
    """A function of run.py by its name: only who calls it imports it."""

    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(import_module(f"{__package__}.run"), self.name)(*args)


@dataclass(frozen=True)
class Wish:
    """How text is made."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False


@dataclass(frozen=True)
class Stage:
    """A stage of the start has begun, or come further: `done` of `total` elements."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Traced:
    """Every rank's collectives, in order of time; the steps as they were and as they were predicted, those with their parts."""

    ranks: tuple[tuple[Event, ...], ...]
    steps: tuple[Span, ...] = ()
    predicted: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Account:
    """What a generation cost. `first_token`: seconds from the command to the first token; `prefill`: of it, those for the prompt itself."""

    memory: tuple[RankMemory, ...]
    stages: tuple[tuple[str, float], ...]
    gate: str
    decoding: str
    warnings: tuple[str, ...]
    first_token: float
    prefill: float
    prompt_tokens: int
    new_tokens: int
    rate: float | None
    gathered: int  # steps that needed the full logits
    traffic: Traffic | None
