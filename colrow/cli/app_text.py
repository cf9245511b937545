"""The commands that make text: run, chat, serve. Each refuses what cannot work before a process is started, and calls one function."""

from __future__ import annotations

from typing import Annotated

import typer

from ..engine.prompts import check_text
from ..engine.settings import Sampling
from ..errors import UserError
from . import show
from .arguments import (
    Adapter,
    Backend,
    Compact,
    Gate,
    MaxNew,
    MinP,
    Model,
    Penalty,
    PlanFile,
    Seed,
    Split,
    Stop,
    Temperature,
    TextDtype,
    TopK,
    TopP,
    Tp,
    Trace,
    Trust,
)
from .job import Wish
from .options import at_least_1, check_origins, check_writable, opened, read_bytes


def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue or to answer.")],
    tp: Tp = None,
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = None,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")] = False,
    trace: Trace = None,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: TextDtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    compact: Compact = True,
    trust_remote_code: Trust = False,
) -> None:
    """Generate text. Models with a chat template answer, others continue; then a short account on standard error.

    Example: colrow run demo --tp 2 -p "What is the capital of France?"
    """
    wish = Wish(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed), at_least_1(max_new_tokens), tuple(stop or ()), raw)
    if not prompt:
        raise UserError("the prompt is empty", works='-p "Once upon a time"')
    check_text(prompt)
    check_writable(trace, "--trace trace.json")
    ranks, opening = opened(model, tp, split, plan_file, dtype, gate, trust_remote_code, adapter, trace is not None, compact=compact)
    show.run(ranks, backend, opening, prompt, wish, trace)


def chat(
    model: Model,
    tp: Tp = None,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = None,
    seed: Seed = 0,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: TextDtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    compact: Compact = True,
    trust_remote_code: Trust = False,
) -> None:
    """Talk with a model in the terminal. Ctrl-C ends an answer, an empty line or Ctrl-D the conversation.

    Example: colrow chat demo --tp 2
    """
    wish = Wish(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed), at_least_1(max_new_tokens))
    ranks, opening = opened(model, tp, split, plan_file, dtype, gate, trust_remote_code, adapter, compact=compact)
    show.chat(ranks, backend, opening, system, wish)


def serve(
    model: Model,
    tp: Tp = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="COLROW_API_KEY", help="Clients must send it as a bearer token.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A web site whose pages may ask this server; * for all.")] = None,
    cache: Annotated[str, typer.Option(help="Memory of a rank for KV caches, such as 2GB.", show_default="a share of what is free")] = "",
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more are refused (429).")] = 2048,
    beside: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts in a step that others wait for.", show_default="64 or 128")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start new ranks when one is lost, instead of ending with an error.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Decode requests together; company may change a token's rounding.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take, waiting included.")] = 600.0,
    drain: Annotated[float, typer.Option(min=1, help="Seconds in which requests may end after SIGTERM.")] = 30.0,
    adapter: Adapter = None,
    split: Split = None,
    plan_file: PlanFile = None,
    dtype: TextDtype = "auto",
    backend: Backend = "auto",
    gate: Gate = True,
    compact: Compact = True,
    trust_remote_code: Trust = False,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API, and a page to talk with it at /.

    Example: colrow serve demo --tp 2 --port 8000
    """
    from ..serve.messages import Limits
    from . import serve as command

    if api_key == "":
        raise UserError("the API key is empty", works="--api-key SECRET, or none")
    origins = check_origins(allow_origin)
    memory = int(read_bytes(cache, "--cache")) or None
    limits = Limits(memory, beside=beside, running=max_running, queue=max_queue, seconds=timeout, drain=drain, fast=fast)
    ranks, opening = opened(model, tp, split, plan_file, dtype, gate, trust_remote_code, adapter, compact=compact)
    raise typer.Exit(command.serve(ranks, backend, opening, limits, host, port, api_key, restart, origins))
