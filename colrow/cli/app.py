"""The commands. Each parses its options, refuses what cannot work before a process is started, calls one function and prints.

Only typer is imported at the top, so that `--help` and mistakes are quick; torch and transformers come with the command that needs them.
Here: plan, verify and bench. The commands that make text are in app_text.py, those of training in app_train.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.model_dir import find
from ..engine.settings import INT8, check_dtype
from ..errors import UserError
from ..planning import links, shapes
from .app_text import chat, run, serve
from .app_train import export, train
from .arguments import Backend, Dtype, Model, PlanFile, Split, Tp, Trust
from .interrupt import ending_at_once
from .options import Asked, check_writable, degree, read_bytes, read_plan, read_split

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


def verify(
    model: Model,
    tp: Tp = None,
    split: Split = None,
    plan_file: PlanFile = None,
    small: Annotated[bool, typer.Option("--small", help="Compare a small copy with random weights; reads no weights.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Layer by layer, for a model that fits into no single memory.")] = False,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Also loss, gradients and optimizer steps.")] = True,
    sequence: Annotated[bool, typer.Option("--sp", help="With sequence parallelism in training.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16; int8: how far its answers are away.")] = "float32",
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
    if check_dtype(dtype, int8=True) == INT8 and (small or stream or sequence or html_file):
        raise UserError(
            "int8 is compared with the files' own dtype, on real weights in memory",
            works="--dtype int8 without --small, --stream, --sp and --html",
        )
    with ending_at_once():
        from . import verify as command

    what = {"small": small, "stream": stream, "train": train, "backend": backend, "sequence": "again" if sequence else "off"}
    raise typer.Exit(command.show(files, ranks, shares, given, dtype, what, html_file))


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


for _command in (plan, verify, run, chat, train, export, serve, bench):
    app.command()(_command)
