"""Options that several commands share, as typer reads them from signatures. What is checked about them is in options.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, a hub name, or demo.")]
Tp = Annotated[int | None, typer.Option("--tp", "--tensor-parallel-size", help="Number of ranks to split over.", show_default="1")]
Split = Annotated[str | None, typer.Option(help="Unequal ranks: their shares, such as 3,1.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan written by colrow plan --json; nothing is derived.")]
_DTYPES = "auto (that of the files; float32 for GGUF), float32, bfloat16, float16, float64"
Dtype = Annotated[str, typer.Option(help=f"{_DTYPES}.")]
TextDtype = Annotated[str, typer.Option(help=f"{_DTYPES}, or int8: linear layers' weights alone.")]
Adapter = Annotated[Path | None, typer.Option(help="A LoRA adapter as PEFT writes it, merged into the weights as they are read.")]
Backend = Annotated[str, typer.Option(help="How ranks are connected: auto, shm, gloo, nccl.")]
Gate = Annotated[bool, typer.Option("--gate/--no-gate", help="Prove the plan on a small copy before weights are read.")]
Compact = Annotated[
    bool, typer.Option("--compact/--no-compact", help="Keep bfloat16 weights in 12 bits, the same to the bit, where it is faster.")
]
Trace = Annotated[Path | None, typer.Option(help="Write a timeline of all ranks, for chrome://tracing or ui.perfetto.dev.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="Stop after so many tokens.", show_default="the context")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this probability together.")]
MinP = Annotated[float, typer.Option(help="Draw from tokens with at least this share of the likeliest one's probability.")]
Penalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1: tokens that occurred are less likely. [default: the generation config's, else 1]",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, at any --tp.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text appears. May be given several times.")]
