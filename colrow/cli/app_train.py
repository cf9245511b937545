"""The commands of training: train and export. What they do is in train.py; here their options are read, and checked before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import show
from .arguments import Backend, Dtype, Gate, Model, PlanFile, Split, Tp, Trace, Trust
from .job import Training
from .options import check_peft, check_png, check_writable, opened


def train(
    model: Model,
    data: Annotated[Path, typer.Option(help="Text (.txt) or JSONL: text, prompt and completion, or messages.")],
    out: Annotated[Path, typer.Option(help="Directory for checkpoints, log, loss curve and the trained model. A run in it goes on.")],
    tp: Tp = None,
    dp: Annotated[int, typer.Option(help="Replicas of the split model, which share the rows of a step: tp x dp ranks.")] = 1,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Data to evaluate on, never trained on.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimizer.", show_default="from --epochs")] = None,
    epochs: Annotated[int, typer.Option(help="How often the data is gone through.")] = 1,
    batch: Annotated[int, typer.Option(help="Rows that go through the model together.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Such batches in one step; weighted by their tokens.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 2e-5,
    warmup: Annotated[int, typer.Option(help="Steps until the learning rate is reached.")] = 0,
    schedule: Annotated[str, typer.Option(help="How it falls afterwards: cosine, linear, constant.")] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="Of AdamW; biases and norms do not decay.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient; 0: as it comes.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the data's order and of dropout; the same run at any --tp.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end.")] = 0,
    sequence: Annotated[bool, typer.Option("--sp", help="Sequence parallelism: norms and residuals on slices of the sequence.")] = False,
    keep_gathered: Annotated[
        bool, typer.Option("--sp-keep", help="The same, and keep what was gathered instead of gathering again.")
    ] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute activations again instead of keeping them.")] = False,
    lora: Annotated[int, typer.Option(help="Train a LoRA adapter of this rank beside the frozen model.", show_default="no")] = 0,
    lora_alpha: Annotated[float, typer.Option(help="Its scale times its rank.", show_default="twice the rank")] = 0.0,
    lora_targets: Annotated[str, typer.Option(help="The layers it adapts, such as q_proj,o_proj.", show_default="all linear ones")] = "",
    label_smoothing: Annotated[float, typer.Option(help="Share of each target that goes to all tokens alike.")] = 0.0,
    z_loss: Annotated[float, typer.Option(help="Weight of (log of the sum of exp logits) squared, such as 1e-4.")] = 0.0,
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Let short documents share a row; none sees another.")] = True,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    curve: Annotated[Path | None, typer.Option(help="Draw the loss curve as a PNG too (matplotlib); --out has SVG and HTML.")] = None,
    trace: Trace = None,
    trust_remote_code: Trust = False,
) -> None:
    """Train MODEL on your data. Started again with the same --out, it goes on where it was, at any --tp.

    Example: colrow train demo --tp 2 --data talks.jsonl --out run --steps 200
    """
    from ..train.settings import Settings

    rest: dict[str, Any] = {"evaluate_every": eval_every, "save_every": save_every, "packed": pack, "recompute": recompute}
    check_peft(lora > 0)
    check_png(curve)
    check_writable(trace, "--trace trace.json")
    rest |= {"lora": lora, "lora_alpha": lora_alpha, "lora_targets": tuple(filter(None, lora_targets.split(",")))}
    rest |= {"dp": dp, "smoothing": label_smoothing, "z_loss": z_loss}
    rest["sequence"] = "keep" if keep_gathered else "again" if sequence else "off"
    settings = Settings(
        steps,
        epochs,
        batch,
        accumulate,
        length,
        lr,
        warmup=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        **rest,
    )
    ranks, opening = opened(model, tp, split, plan_file, dtype, gate, trust_remote_code, trace=trace is not None, int8=False, dp=dp)
    show.train(ranks * dp, backend, opening, Training(settings, data, evaluation, out, curve), trace)


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of colrow train, or one checkpoint in it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "50GB",
    adapter: Annotated[bool, typer.Option("--adapter", help="Of a run with --lora: the adapter alone, else it is merged.")] = False,
) -> None:
    """Write a training checkpoint as a plain Hugging Face directory: the bytes that the unsplit model would have saved.

    Example: colrow export run exported
    """
    from .train import write_export

    write_export(directory, out, max_shard_size, adapter)
