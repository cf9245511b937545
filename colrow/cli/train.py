"""What the ranks do for `train`, and what the user sees of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import api
from ..checkpoint.model_dir import ModelFiles
from ..comm.collectives import barrier
from ..comm.decide import on_rank_0
from ..comm.group import Group
from ..engine import account
from ..engine.account import RankMemory, Stages
from ..engine.stopping import context_limit
from ..errors import UserError
from ..parallel.adapter_files import peft
from ..parallel.adapters import add_adapter, every_linear_layer
from ..parallel.state import state_of
from ..planning import cost, timing, workload
from ..planning.links import Machine
from ..planning.models import require_text
from ..planning.plan import Plan
from ..train import curve, data
from ..train.data import Row
from ..train.export import export
from ..train.journal import Journal
from ..train.replicas import Replicas
from ..train.settings import Settings
from ..train.trainer import Evaluation, Event, Resumed, SavedAt, Step, Trainer, keeps_documents_apart
from .job import Opening, Stage, Traced, Training
from .opening import told
from .screen import Screen, note, say
from .traced import Predict, Watch
from .units import nbytes


@dataclass(frozen=True)
class Begun:
    """Documents, rows and tokens of the data; `words` about how it is used."""

    documents: int
    rows: int
    tokens: int
    words: str


@dataclass(frozen=True)
class Finished:
    model: Path
    points: tuple[tuple[int, float], ...]
    memory: tuple[RankMemory, ...]


def train(world: Group, opening: Opening, asked: Training) -> Iterator[Stage | Begun | Event | Traced | Finished]:
    """Stages of the start, then what the trainer tells, then the end. `world`: all ranks, those of the first replica first."""
    settings, stages = asked.settings, Stages()
    replicas = Replicas.single(world) if settings.dp == 1 else Replicas.of(world, settings.dp)
    group = replicas.group

    def open_model(tell: Any) -> Any:
        stages.listener = lambda name: tell(Stage(name))
        on_rank_0(lambda: require_text(opening.files.config(), "train"), group, "train.kind")
        return api.load(
            opening.files,
            group,
            plan=opening.plan,
            split=opening.split,
            dtype=opening.dtype,
            gate=opening.gate and replicas.index == 0,
            stages=stages,
            progress=lambda name, done, total: tell(Stage("load", done, total)),
            sequence=settings.sequence,  # type: ignore[arg-type]
        )

    model = yield from told(lambda tell: replicas.together(lambda: open_model(tell), "train.open"))
    if settings.lora:
        add_adapter(model, lora_config(settings, opening.files, model), settings.seed)
    yield Stage("tokenizer")
    tokenizer = opening.files.tokenizer()
    yield Stage("data")
    apart = settings.packed and keeps_documents_apart(model, model.config.get_text_config().vocab_size)
    settings = Settings(**vars(settings) | {"packed": apart})
    words = ["documents share rows" if apart else "one document a row"]
    documents = data.read(asked.data, tokenizer, settings.length, words.append)
    rows = data.pack(documents, settings.length, settings.packed)
    others = data.read(asked.evaluation, tokenizer, settings.length) if asked.evaluation else []
    evaluation = data.pack(others, settings.length, settings.packed)
    _check_length(rows + evaluation, model)
    yield Begun(len(documents), len(rows), sum(len(row.ids) for row in rows), "; ".join(words))
    padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    trainer = Trainer(model, rows, settings, asked.out, evaluation, padding, tokenizer.save_pretrained, replicas)
    journal = Journal(asked.out, opening.files.name, asked.png) if world.rank == 0 else None
    watch = Watch(world, opening.trace)
    yield from watch.begin()
    for event in trainer.run():
        if isinstance(event, Step):
            watch.step(f"step {event.step}", event.seconds)
        if journal is not None:
            journal.add(event)
        yield event
    yield from watch.end(state_of(model).plan, model.config, _predicting(settings, model))
    memory = tuple(account.memory(model, world))
    if journal is not None:
        journal.draw()
        result = asked.out / ("adapter" if settings.lora else "model")
        shutil.rmtree(result, ignore_errors=True)
        export(asked.out, result, adapter=bool(settings.lora))
        yield Finished(result, tuple(journal.points(Step)), memory)
    barrier(world, "train.exported")


def _check_length(rows: Sequence[Row], model: Any) -> None:
    """UserError where rows are longer than the model was made for: tables of positions end there, and the others were not trained on."""
    longest, limit = max(len(row.ids) for row in rows), context_limit(model.config)
    if limit is not None and longest > limit:
        raise UserError(f"there are rows of {longest} tokens, and the model was made for {limit}", longest, f"--length {limit}")


def _predicting(settings: Settings, model: Any) -> Predict | None:
    """Steps of full rows, with AdamW; none with an adapter, recomputation or replicas, of which the model of time knows nothing."""
    if settings.lora or settings.recompute or settings.dp > 1:
        return None
    element = next(model.parameters()).element_size()
    each = 8 if element == 4 else 12  # two moments, and a float32 copy where the model computes in 16 bits

    def predict(number: int, plan: Plan, work: workload.Model, machine: Machine) -> Mapping[Any, float]:
        at = (plan, work, machine, settings.batch, settings.length, element)
        state = [size // element * each for size in cost.parameter_bytes(plan, element)]
        one = timing.train(*at, state)
        parts = {part: getattr(one, part) * (1 if part == "updating" else settings.accumulate) for part in timing.PARTS}
        return replace(one, tokens=one.tokens * settings.accumulate, **parts).parts

    return predict


def lora_config(settings: Settings, files: ModelFiles, model: Any) -> Any:
    """PEFT's config of the adapter that `settings` ask for, with where its model lies, for `colrow export`."""
    local = files.name == "demo" or Path(files.name).expanduser().exists()
    return peft().LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha or 2 * settings.lora,
        target_modules=list(settings.lora_targets) or every_linear_layer(model),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(files.path.resolve()) if local else files.name,
    )


def show(stream: Any, screen: Screen, opening: Opening, asked: Training) -> Traced | None:
    """Runs `train` on the ranks behind `stream` and prints what comes; returns the trace, if one was asked for."""
    terminal, traced = screen.is_terminal, None
    last: Step | None = None
    saved = 0  # the step of the last checkpoint
    begun = False  # never on those ranks of torchrun that have nothing to tell
    try:
        for item in stream(train, opening, asked):
            match item:
                case Stage():
                    screen.show(item.name, item.done, item.total)
                case Begun():
                    begun = True
                    screen.clear()
                    note(f"{'data':12} {item.documents} documents, {item.rows} rows, {item.tokens} tokens; {item.words}")
                case Step():
                    last = item
                    if terminal:
                        screen.show(step_words(item), item.step, item.steps)
                    elif item.step in (1, item.steps) or item.step % max(1, item.steps // 20) == 0:
                        note(step_words(item))
                case Resumed() | SavedAt():
                    saved = item.step
                    screen.clear()
                    note(f"{'resumed' if isinstance(item, Resumed) else 'saved':12} {item.path}")
                case Evaluation():
                    screen.clear()
                    note(f"{'evaluation':12} step {item.step}: loss {item.loss:.4f}")
                case Traced():
                    traced = item
                case Finished():
                    screen.clear()
                    finish(item, asked)
    except KeyboardInterrupt:
        screen.clear()
        if last is not None:
            begins = f"goes on from step {saved}" if saved else "begins again, since nothing was saved (--save-every 100)"
            note(f"{'stopped':12} after step {last.step} of {last.steps}; the same command {begins}")
        raise
    if begun and last is None:
        note("nothing left to do: the run in this directory is at its end")
    return traced


def step_words(step: Step) -> str:
    words = f"step {step.step}/{step.steps}"
    return f"{words:12} loss {step.loss:.4f}  norm {step.norm:.3g}  rate {step.rate:.2e}  {step.tokens / step.seconds:.0f} tokens/s"


def finish(item: Finished, asked: Training) -> None:
    picture = curve.terminal(item.points)
    if picture:
        note(picture)
    for m in item.memory:
        note(f"{'memory' if m.rank == 0 else '':12} rank {m.rank}: {nbytes(m.resident)} resident, {nbytes(m.parameters)} of it parameters")
    note(f"{'loss':12} {', '.join(map(str, filter(None, (asked.out / 'loss.html', asked.png, asked.out / 'log.jsonl'))))}")
    say(str(item.model))


@torch.no_grad()
def write_export(directory: Path, out: Path, max_shard_size: str, adapter: bool) -> None:
    path = export(directory, out, max_shard_size, adapter)
    if adapter:
        note(f"{'exported':12} the adapter, as PEFT writes it")
        say(str(path))
        return
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    note(f"{'exported':12} {', '.join(config.get('architectures') or ['?'])}, {nbytes(size)} of weights, a plain Hugging Face directory")
    say(str(path))
