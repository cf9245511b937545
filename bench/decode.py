"""Decoding of a 1.1B model (TinyLlama's shape, random weights) by colrow and by others, beside the bound that memory sets.

    python bench/decode.py FOLDER [--dtype bfloat16] [--tokens 24] [--results FILE --next] [--only NAME]

FOLDER gets the weights, once. Every contestant runs by itself and prints one line: tokens per second after the first (median of the steps),
as a part of its own floor, tokens per second of a prompt of 512, and tokens per second of 8 sequences together where it can. The floor is
what a rank must read per token / the read bandwidth that bench/read.c measures with as many processes as there are ranks (or threads).
With --results, each call with --next runs one contestant that is not in FILE yet, and a call without it prints the table: so that a run can
be cut into pieces on a machine that is shared. Peers that are not installed are left out with a line.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from random_model import write
from transformers import AutoModelForCausalLM, LlamaConfig

from colrow import api
from colrow.comm import launch
from colrow.comm.group import Group, single
from colrow.engine import account
from colrow.engine.forward import Forward
from colrow.engine.generate import generate
from colrow.engine.slots import Slot
from colrow.engine.stopping import Limits
from colrow.native import compiler_command

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
PROMPT, LONG, TOGETHER = 32, 512, 8
Result = dict[str, Any]


def colrow(group: Group, folder: str, dtype: str, tokens: int, threads: int, program: bool = True) -> Result:
    """One rank's turn; rank 0's result counts."""
    torch.set_num_threads(threads)
    engine = api.open_engine(folder, group, dtype=dtype, gate=False)
    decoder = engine.decoder if program else None
    times = [time.perf_counter()]
    for _ in generate(engine.model, group, [prompt(PROMPT)], limits=Limits(tokens + 1), decoder=decoder):
        times.append(time.perf_counter())
    forward = Forward(engine.model)
    out: Result = {"rate": rate(times[2:]), "prefill": LONG / fastest(lambda: forward(torch.tensor([prompt(LONG)]), None, None))}
    if decoder is not None and decoder.program is not None:
        past = forward(torch.tensor([prompt(PROMPT)]), None, None)[1]
        slots = [Slot(past) for _ in range(TOGETHER)]
        out["together"] = TOGETHER / fastest(lambda: decoder.program.run([5] * TOGETHER, slots), 8)  # type: ignore[union-attr]
    rows = engine.model.get_input_embeddings().weight  # of it only one row is read, unless the head shares it
    shared = engine.model.config.tie_word_embeddings
    read = account.memory(engine.model, group)[0].parameters - (0 if shared else rows.numel() * rows.element_size())
    return {**out, "bytes": read, "how": engine.decoder.steps if program else "the modules"}


def alone(folder: str, dtype: str, tokens: int) -> Result:
    """transformers itself."""
    torch.set_num_threads(len(cpus()))
    return plain(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval(), tokens)


def by_plan(folder: str, dtype: str, tokens: int) -> Result:
    """transformers' own tensor parallelism over gloo; called by torchrun on every rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return plain(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), tp_plan="auto").eval(), tokens)


@torch.inference_mode()
def plain(model: Any, tokens: int) -> Result:
    """Greedy decoding with the model's own cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out, times = model(torch.tensor([prompt(PROMPT)]), use_cache=True), []
    for _ in range(tokens + 1):
        times.append(time.perf_counter())
        out = model(out.logits[:, -1:].argmax(-1), use_cache=True, **{name: out[name]})
    long = torch.tensor([prompt(LONG)])
    return {"rate": rate(times), "prefill": LONG / fastest(lambda: model(long, use_cache=True, logits_to_keep=1))}


def prompt(length: int) -> list[int]:
    return [7 * at % 31999 + 1 for at in range(length)]


def rate(times: list[float]) -> float:
    return 1 / statistics.median(after - before for before, after in itertools.pairwise(times))


def fastest(task: Callable[[], Any], times: int = 2) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) if times > 2 else min(seconds)


def cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


# ---- Contestants: name -> (processes or threads that read, what gives a result) ----


def contestants(folder: str, dtype: str, tokens: int) -> dict[str, tuple[int, Callable[[], Result]]]:
    def ranks(tp: int, threads: int, program: bool = True) -> Callable[[], Result]:
        asked = (folder, dtype, tokens, threads, program)
        return lambda: launch.spawn(colrow, tp, asked)[0] if tp > 1 else colrow(single(), *asked)

    return {
        "colrow tp=2, 1 thread each": (2, ranks(2, 1)),
        "colrow tp=1, 1 thread": (1, ranks(1, 1)),
        "colrow tp=1, 2 threads": (2, ranks(1, 2)),
        "colrow tp=2, int8": (2, lambda: launch.spawn(colrow, 2, (folder, "int8", tokens, 1, True))[0]),
        "colrow tp=1, 2 threads, int8": (2, lambda: colrow(single(), folder, "int8", tokens, 2)),
        "colrow tp=2 by modules": (2, ranks(2, 1, program=False)),
        "transformers alone, 2 threads": (2, lambda: alone(folder, dtype, tokens)),
        "transformers tp_plan=2, gloo": (2, lambda: torchrun(folder, dtype, tokens)),
        "llama.cpp": (2, lambda: missing("llama_cpp")),
        "vLLM CPU tp=2": (2, lambda: missing("vllm")),
        "DeepSpeed tp=2": (2, lambda: missing("deepspeed")),
    }


def torchrun(folder: str, dtype: str, tokens: int) -> Result:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable, __file__, folder]
    done = subprocess.run([*command, "--dtype", dtype, "--tokens", str(tokens), "--rank"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[0]) if lines else {"left out": (done.stderr.strip().splitlines() or ["no result"])[-1][:100]}


def missing(package: str) -> Result:
    return {"left out": f"{package} is not installed in this environment"}


def bandwidth(processes: int) -> float:
    """GB/s of all processes together."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "read"
        source = Path(__file__).parent / "read.c"
        subprocess.run([*compiler_command(), "-O3", "-march=native", "-std=gnu11", str(source), "-o", str(program)], check=True)
        done = subprocess.run(
            [str(program), str(512 << 20), "7", *map(str, cpus()[:processes])], capture_output=True, text=True, check=True
        )
    return sum(map(float, done.stdout.split()))


def measured(name: str, readers: int, task: Callable[[], Result]) -> Result:
    out = {"name": name, **task()}
    if "rate" in out:
        out["GB/s"] = bandwidth(readers)
    return out


def lines(results: list[Result]) -> Iterator[str]:
    of = {"int8" in r["name"]: r["bytes"] for r in results if r["name"].startswith("colrow tp=1") and "bytes" in r}
    yield f"{'':32} tokens/s  of floor  prefill  {TOGETHER} together"
    for r in results:
        if "rate" not in r:
            yield f"{r['name']:32} left out: {r['left out']}"
            continue
        known = of.get("int8" in r["name"], 0)
        floor = f"{r['rate'] * known / r['GB/s'] / 1e9:8.2f}" if known else f"{'':8}"
        together = f"{r['together']:8.1f} ({r['together'] / r['rate']:.1f}x)" if "together" in r else ""
        yield f"{r['name']:32} {r['rate']:8.2f}  {floor}  {r['prefill']:7.0f}  {together}  {r.get('how', '')}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--results", type=Path)
    options.add_argument("--next", action="store_true")
    options.add_argument("--only")
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.rank:
        result = by_plan(asked.folder, asked.dtype, asked.tokens)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(result), flush=True)
        return
    if not (Path(asked.folder) / "config.json").exists():
        write(LlamaConfig(**SHAPE, dtype="bfloat16"), Path(asked.folder))
    results = [json.loads(line) for line in asked.results.read_text().splitlines()] if asked.results and asked.results.exists() else []
    todo = contestants(asked.folder, asked.dtype, asked.tokens)
    if asked.results is None or asked.next or asked.only:
        for name, (readers, task) in todo.items():
            if name in {r["name"] for r in results} or asked.only not in (None, name):
                continue
            results.append(measured(name, readers, task))
            if asked.results:
                asked.results.write_text("".join(json.dumps(r) + "\n" for r in results))
            if asked.next:
                break
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
