"""Is the split model equal to the whole one? On real weights (or a small copy), with real processes, forward and backward.

The whole model runs first, in this process, and leaves its answers in temporary files; then the ranks load their slices and compare
(evidence.py). Memory: the whole model with gradients and its float64 copy first, then what the ranks need; never both. Not here: the words
(report.py), models too large for one memory (stream.py).
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint import model_dir
from ..checkpoint.model_dir import ModelFiles
from ..comm import launch
from ..comm.group import Group
from ..comm.local import run_threads
from ..errors import UserError
from ..parallel import build, load, room
from ..parallel.save import quiet
from ..parallel.sequence import Mode
from ..planning import inputs
from ..planning.derive import check_made_for, derive
from ..planning.models import require_text
from ..planning.plan import Plan
from . import trail, whole
from .evidence import Evidence, examine, judge
from .exercise import Questions, ask, questions
from .noise import add_noise
from .precision import ALLOWANCE, FLOOR, computing_in, tolerance
from .reference import Exact, Reference, exact, gradients_of, in_file, reference
from .report import Report, describe
from .shrink import shrink
from .stream import examine as examine_units
from .units import WholeUnits

Progress = Callable[[str], None]
TOKENS = 16  # greedily decoded


@dataclass(frozen=True)
class Task:
    """What a rank needs to make its split model."""

    files: ModelFiles
    config: PreTrainedConfig
    plan: Plan
    dtype: torch.dtype
    sequence: Mode = "off"

    def split(self, group: Group) -> PreTrainedModel:
        return self.loaded(group)[0]

    def loaded(self, group: Group) -> tuple[PreTrainedModel, tuple[str, ...]]:
        """The split model with its weights, and what reading them gave to warn of (tensors that the model does not use)."""
        room.check(self.plan, self.dtype, group)
        model = build.empty(self.config, self.dtype)
        build.split(model, self.plan, group, self.sequence)
        source = self.files.source()
        try:
            warnings = load.from_source(model, source, self.dtype, group.device)
        finally:
            source.close()
        return model.eval(), warnings


@dataclass(frozen=True)
class Result:
    evidence: Evidence
    transport: str
    seconds: float
    peak_bytes: int
    warnings: tuple[str, ...]


def verify(
    files: ModelFiles,
    ranks: int,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    small: bool = False,
    train: bool = True,
    stream: bool = False,
    plan: Plan | None = None,
    progress: Progress | None = None,
    sequence: Mode = "off",
) -> Report:
    """Compares the model split over `ranks` with itself as a whole. `report.exit_code` is 0 only if they are equal.

    `backend` as in comm.launch, or "threads": ranks as threads of this process. `small`: a small copy of the config with random weights;
    no weights are read. `stream`: layer by layer (stream.py). `train` False leaves out loss, gradients and optimizer steps. `plan`: another
    plan than the derived one. `sequence`: with that mode of sequence parallelism.
    """
    say = progress or (lambda text: None)
    if sequence != "off" and not train:
        raise UserError("sequence parallelism cuts the stream in training only, which this would not compare", works="no --no-train")
    config = files.config()
    if plan:
        check_made_for(plan, config)
    with tempfile.TemporaryDirectory(prefix="colrow-verify-") as name:
        folder = Path(name)
        title = f"{files.name} split over {ranks} ranks, {str(dtype).removeprefix('torch.')}"
        title += "" if sequence == "off" else ", sequence parallel in training"
        if small:
            say("searching a small copy")
            copied = shrink(config, ranks, weights, plan)
            files, config, plan = _save_copy(copied.config, folder), copied.config, copied.plan
            title = f"a small copy of {title} ({copied})"
        plan = plan or derive(config, ranks, weights)
        task = Task(files, config, plan, dtype, sequence)
        if stream:
            say(f"{ranks} ranks, layer by layer")
            return _streamed(title, task, train, backend)
        say("the whole model")
        start = time.perf_counter()
        expected, measured = _whole_answers(task, train, folder)
        whole_seconds = time.perf_counter() - start
        if expected.unfit:
            raise UserError("nothing can be proven beside a whole model that gives no numbers", expected.unfit, _otherwise(dtype))
        say(f"{ranks} ranks")
        results: list[Result] = on_ranks(_rank, task, backend, expected)
        comparison = judge([r.evidence for r in results])
        finding = "" if comparison.ok else describe(comparison, lambda: _parting(task, expected, backend))
    notes = _notes(task, results, f"; whole model {whole_seconds:.1f} s", measured)
    return Report(title, comparison, finding, notes, _finer(dtype))


def _streamed(title: str, task: Task, train: bool, backend: str) -> Report:
    require_text(task.config, "verify --stream")
    with torch.device("meta"):
        empty = whole.build(task.config, task.dtype)
    if next(inputs.examples(empty, 1, 2)).keys() != {inputs.TOKENS}:
        raise UserError("verify --stream compares models of token ids alone", type(empty).__name__, "colrow verify MODEL, or --small")
    asked = questions(empty, steps=0, train=train)
    results: list[Result] = on_ranks(_rank_streamed, task, backend, asked)
    comparison = judge([r.evidence for r in results])
    finding = "" if comparison.ok else describe(comparison, lambda: None)
    finer = _finer(task.dtype)
    return Report(f"{title}, layer by layer", comparison, finding, _notes(task, results, "", True, finer), finer)


def on_ranks(fn: Callable[..., Any], task: Task, backend: str, *args: Any) -> list[Any]:
    if backend == "threads":
        return run_threads(fn, task.plan.ranks, task, *args)
    return launch.run(fn, task.plan.ranks, (task, *args), backend)


def _save_copy(config: PreTrainedConfig, folder: Path) -> ModelFiles:
    """A directory with random weights, as anyone would save it: what reads it is the real loader."""
    model = whole.build(config, torch.float32)
    add_noise(model)
    with quiet():
        model.save_pretrained(folder / "copy")
    return model_dir.find(str(folder / "copy"))


def _whole_answers(task: Task, train: bool, folder: Path) -> tuple[Reference, bool]:
    """The reference, and whether the whole model's own error was measured. Nothing of the model is left in memory afterwards."""
    model = whole.load(task.files, task.config, task.dtype)
    asked = questions(model, steps=TOKENS, train=train)
    measure = task.dtype is not torch.float64 and _fits_in_float64(model, asked.train)
    truth = partial(_exact, model, asked) if measure else None
    found = reference(model, task.plan, asked, in_file(folder / "gradients.safetensors"), truth)
    del model, truth
    gc.collect()
    return found, measure


def _exact(model: PreTrainedModel, asked: Questions) -> Exact:
    """A float64 copy answers; the gradients that `model` holds are not copied along."""
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    doubled = copy.deepcopy(model).double()
    for name, grad in gradients.items():
        model.get_parameter(name).grad = grad
    return exact(doubled, asked)


def _fits_in_float64(model: PreTrainedModel, train: bool) -> bool:
    """Weights and gradients in float64, and half as much again for what passes through."""
    needed = 8 * sum(p.numel() for p in model.parameters()) * (2 if train else 1)
    return psutil.virtual_memory().available > 1.5 * needed


def _rank(group: Group, task: Task, expected: Reference) -> Result:
    start = time.perf_counter()
    model, warnings = task.loaded(group)
    evidence = examine(model, group, task.plan, expected)
    return Result(evidence, group.transport.kind, time.perf_counter() - start, room.peak_bytes(), warnings)


def _rank_streamed(group: Group, task: Task, asked: Questions) -> Result:
    start = time.perf_counter()
    (model, warnings), source = task.loaded(group), task.files.source()
    try:
        attention = model.config._attn_implementation
        wholes = WholeUnits(task.config, attention, task.dtype, task.plan, source, group.device)
        evidence = examine_units(model, group, task.plan, asked, wholes)
    finally:
        source.close()
    return Result(evidence, group.transport.kind, time.perf_counter() - start, room.peak_bytes(), warnings)


def _parting(task: Task, expected: Reference, backend: str) -> trail.Parting | None:
    """Both models once more, with everything that passes between modules written down, over a few tokens."""
    asked = expected.asked.briefly()
    model = whole.load(task.files, task.config, task.dtype)
    with computing_in(task.dtype), trail.recording(model) as passed:
        tokens = ask(model, asked).tokens
    del model
    found = on_ranks(_trail, task, backend, asked, tokens)
    return trail.first_difference(passed, found, task.plan, tolerance(task.dtype, expected.own_error("logits", "logits")))


def _trail(group: Group, task: Task, asked: Questions, tokens: tuple[int, ...]) -> trail.Trail:
    model = task.split(group)
    with computing_in(task.dtype), trail.recording(model) as found:
        ask(model, asked, tokens)
    return found


def _notes(task: Task, results: Sequence[Result], more: str, measured: bool, exact: str = "float64") -> tuple[str, ...]:
    gib = 1024**3
    peaks = ", ".join(f"{r.peak_bytes / gib:.1f}" for r in results)
    seconds = max(r.seconds for r in results)
    notes = [f"ranks over {results[0].transport}, {seconds:.1f} s, peak memory {peaks} GiB{more}"]
    if task.dtype is torch.float64:
        notes.append("float64 throughout, also where the model casts to float32")
    elif measured:
        notes.append(f"allowed: {ALLOWANCE:g} times the whole model's own error against {exact}, at least {FLOOR[task.dtype]:.0e}")
    else:
        notes.append("the whole model's own rounding was not measured: its float64 copy does not fit into memory")
    notes += [f"warning: {text}" for text in results[0].warnings]
    return tuple(notes)


def _otherwise(dtype: torch.dtype) -> str:
    overflows = f", or --dtype {_finer(dtype)} where {str(dtype).removeprefix('torch.')} overflows"
    return "weights without NaN" + (overflows if dtype.itemsize < 8 else "")


def _finer(dtype: torch.dtype) -> str:
    """The dtype that would show more, and in which what is done in `dtype` is measured unit by unit."""
    return "float32" if dtype.itemsize < 4 else "float64"
