"""The commands. Each parses its options, refuses what cannot work before a process is started, calls one function and prints.

Only typer is imported at the top, so that `--help` and mistakes are quick; torch and transformers come with the command that needs them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.model_dir import find
from ..engine.prompts import check_text
from ..engine.settings import Sampling, check_dtype
from ..errors import UserError
from ..planning import links, shapes
from . import show
from .interrupt import ending_at_once
from .job import Opening, Wish
from .options import (
    Asked,
    at_least_1,
    check_adapter,
    check_peft,
    check_writable,
    degree,
    find_with_weights,
    read_bytes,
    read_plan,
    read_split,
)

app = typer.Typer(
    name="colrow",
    help="Split any Hugging Face transformer over several devices with tensor parallelism, and prove that it is still the same model.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"colrow {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end.")] = False,
) -> None:
    """Options without a command."""


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, a hub name, or demo.")]
Tp = Annotated[int | None, typer.Option("--tp", "--tensor-parallel-size", help="Number of ranks to split over.", show_default="1")]
Split = Annotated[str | None, typer.Option(help="Unequal ranks: their shares, such as 3,1.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan written by colrow plan --json; nothing is derived.")]
Dtype = Annotated[str, typer.Option(help="auto (that of the files; float32 for GGUF), float32, bfloat16, float16, float64.")]
Adapter = Annotated[Path | None, typer.Option(help="A LoRA adapter as PEFT writes it, merged into the weights as they are read.")]
Backend = Annotated[str, typer.Option(help="How ranks are connected: auto, shm, gloo, nccl.")]
Gate = Annotated[bool, typer.Option("--gate/--no-gate", help="Prove the plan on a small copy before weights are read.")]
Trace = Annotated[Path | None, typer.Option(help="Write a timeline of all ranks, for chrome://tracing or ui.perfetto.dev.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="Stop after so many tokens.", show_default="the context")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this probability together.")]
MinP = Annotated[float, typer.Option(help="Draw from tokens with at least this share of the likeliest one's probability.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: tokens that occurred are less likely.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, at any --tp.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text appears. May be given several times.")]


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, a hub name, demo, or a shape like llama-3-70b.")
    ],
    tp: Tp = None,
    split: Split = None,
    why: Annotated[str | None, typer.Option(help="Explain one parameter, by its name.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write plan, memory, traffic and time as one page.")] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, rtx3090, rtx4090, rtx5090, l40s, cpu, or a measured preset.")
    ] = "h100",
    link: Annotated[
        str, typer.Option(help="nvlink4, pcie5, ndr, 10gbe, shm, ..., or a measured preset.", show_default="that of the device")
    ] = "",
    between: Annotated[str, typer.Option(help="What joins hosts: ndr, hdr, 100gbe, ...")] = "ndr",
    per_host: Annotated[int, typer.Option(min=0, help="Devices of one host.", show_default="as many as the link joins")] = 0,
    memory: Annotated[str, typer.Option(help="Memory of one device, such as 8GB.", show_default="that of the device")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 4096,
    train: Annotated[bool, typer.Option("--train", help="Also a training step.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also every parameter, and memory and traffic of each rank.")] = False,
    plan_file: PlanFile = None,
    block: Annotated[int, typer.Option(help="Cut between blocks of so many elements: 32 to 256, as in quantized files.")] = 1,
    dtype: Dtype = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Show how MODEL is split, why, what it costs and whether it pays. Reads no weights: a config.json is enough.

    Example: colrow plan llama-3-70b --tp 4 --html plan.html
    """
    shares, given = read_split(split), read_plan(plan_file)
    ranks, room = degree(tp, shares, given), read_bytes(memory)
    check_writable(html_file, "--html plan.html")
    check_writable(json_file, "--json plan.json")
    known = shapes.known(model) and not Path(model).exists()
    files = None if known else find(model, trust_remote_code, weights=False)
    check_dtype(dtype)
    machine = links.machine(device, link, between, per_host)
    with ending_at_once():
        from . import plan as command

    config = shapes.config(model) if files is None else files.config()
    made = command.make(config, ranks, shares, given, json_file, block)
    if why is not None:
        command.explain(made, why, batch * seq, command.the_dtype(dtype, config).itemsize)
        return
    command.show(model, config, made, dtype, machine, Asked(batch, seq, train, room), html_file, full)


@app.command()
def verify(
    model: Model,
    tp: Tp = None,
    split: Split = None,
    plan_file: PlanFile = None,
    small: Annotated[bool, typer.Option("--small", help="Compare a small copy with random weights; reads no weights.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Layer by layer, for a model that fits into no single memory.")] = False,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Also loss, gradients and optimizer steps.")] = True,
    sequence: Annotated[bool, typer.Option("--sp", help="With sequence parallelism in training.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    backend: Backend = "auto",
    html_file: Annotated[Path | None, typer.Option("--html", help="Write every difference, module by module, as one page.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Prove that the split model equals the whole one, forward and backward. Exits with 0 only if it does.

    Example: colrow verify demo --tp 2
    """
    shares, given = read_split(split), read_plan(plan_file)
    ranks, files = degree(tp, shares, given), find(model, trust_remote_code)
    check_writable(html_file, "--html proof.html")
    with ending_at_once():
        from . import verify as command

    what = {"small": small, "stream": stream, "train": train, "backend": backend, "sequence": "again" if sequence else "off"}
    raise typer.Exit(command.show(files, ranks, shares, given, check_dtype(dtype), what, html_file))


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue or to answer.")],
    tp: Tp = None,
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")] = False,
    trace: Trace = None,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    trust_remote_code: Trust = False,
) -> None:
    """Generate text. Models with a chat template answer, others continue; then a short account on standard error.

    Example: colrow run demo --tp 2 -p "What is the capital of France?"
    """
    started = time.time()
    shares, given = read_split(split), read_plan(plan_file)
    ranks = degree(tp, shares, given)
    wish = Wish(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed), at_least_1(max_new_tokens), tuple(stop or ()), raw)
    if not prompt:
        raise UserError("the prompt is empty", works='-p "Once upon a time"')
    check_text(prompt)
    check_writable(trace, "--trace trace.json")
    opening = Opening(
        find_with_weights(model, trust_remote_code),
        started,
        shares,
        given,
        check_dtype(dtype, int8=True),
        gate,
        trace is not None,
        check_adapter(adapter),
    )
    show.run(ranks, backend, opening, prompt, wish, trace)


@app.command()
def chat(
    model: Model,
    tp: Tp = None,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    trust_remote_code: Trust = False,
) -> None:
    """Talk with a model in the terminal. An empty line or Ctrl-D ends the conversation.

    Example: colrow chat demo --tp 2
    """
    started = time.time()
    shares, given = read_split(split), read_plan(plan_file)
    ranks = degree(tp, shares, given)
    wish = Wish(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed), at_least_1(max_new_tokens))
    opening = Opening(
        find_with_weights(model, trust_remote_code),
        started,
        shares,
        given,
        check_dtype(dtype, int8=True),
        gate,
        adapter=check_adapter(adapter),
    )
    show.chat(ranks, backend, opening, system, wish)


@app.command()
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
    trace: Trace = None,
    trust_remote_code: Trust = False,
) -> None:
    """Train MODEL on your data. Started again with the same --out, it goes on where it was, at any --tp.

    Example: colrow train demo --tp 2 --data talks.jsonl --out run --steps 200
    """
    from ..train.settings import Settings

    started = time.time()
    shares, given = read_split(split), read_plan(plan_file)
    ranks = degree(tp, shares, given, dp)
    rest: dict[str, Any] = {"evaluate_every": eval_every, "save_every": save_every, "packed": pack, "recompute": recompute}
    check_peft(lora > 0)
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
    opening = Opening(find_with_weights(model, trust_remote_code), started, shares, given, check_dtype(dtype), gate, trace is not None)
    show.train(ranks * dp, backend, opening, settings, (data, evaluation), out, trace)


@app.command()
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


@app.command()
def serve(
    model: Model,
    tp: Tp = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="COLROW_API_KEY", help="Clients must send it as a bearer token.")] = None,
    cache: Annotated[str, typer.Option(help="Memory of a rank for KV caches, such as 2GB.", show_default="a share of what is free")] = "",
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more are refused (429).")] = 2048,
    restart: Annotated[bool, typer.Option("--restart", help="Start new ranks when one is lost, instead of ending with an error.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Decode requests together; company may change a token's rounding.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take, waiting included.")] = 600.0,
    drain: Annotated[float, typer.Option(min=1, help="Seconds in which requests may end after SIGTERM.")] = 30.0,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    trust_remote_code: Trust = False,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API, and a page to talk with it at /.

    Example: colrow serve demo --tp 2 --port 8000
    """
    started = time.time()
    shares, given = read_split(split), read_plan(plan_file)
    ranks = degree(tp, shares, given)
    from ..serve.messages import Limits
    from . import serve as command

    if api_key == "":
        raise UserError("the API key is empty", works="--api-key SECRET, or none")
    limits = Limits(
        int(read_bytes(cache, "--cache")) or None, running=max_running, queue=max_queue, seconds=timeout, drain=drain, fast=fast
    )
    opening = Opening(
        find_with_weights(model, trust_remote_code),
        started,
        shares,
        given,
        check_dtype(dtype, int8=True),
        gate,
        adapter=check_adapter(adapter),
    )
    raise typer.Exit(command.serve(ranks, backend, opening, limits, host, port, api_key, restart))


@app.command()
def bench(
    calibrate: Annotated[Path | None, typer.Option(help="Write a preset for --device and --link of colrow plan.")] = None,
    tp: Tp = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    backend: Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0.05, help="For each of the measurements.")] = 1.0,
) -> None:
    """Measure how fast the ranks of this machine read, multiply, start an op and exchange bytes.

    Example: colrow bench --tp 2 --calibrate machine.json
    """
    ranks = degree(tp, (), None)
    check_dtype(dtype)
    check_writable(calibrate, "--calibrate machine.json")
    from .bench import show as measured

    measured(ranks, backend, dtype, seconds, calibrate)
