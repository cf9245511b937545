"""Decoding and reading prompts of a 1.1B model (TinyLlama's shape, random weights) by colrow and by others, beside what the machine allows.

    python bench/decode.py FOLDER [--peer NAME=PYTHON ...] [--tokens 24] [--results FILE --next] [--only NAME]

FOLDER gets the weights, once. Every contestant runs by itself; one that is asked for by several --next calls is shown by its medians.

colrow keeps bfloat16 weights in 12 bits, to the bit the same, where a rank has one thread; "16 bits" is colrow with --no-compact. Ranks
of two threads, and the modules, have 16 anyway.

* tokens/s after the first token, by the median of the steps; as a part of the floor: the tokens/s of which nothing but reading the bytes
  of the weights would be left, by bench/read.c: those that colrow's programs read, and of peers what their form of the weights takes.
  Memory is now faster, now slower where a machine is shared, so colrow's ranks (or threads) read other memory of that size in turns with
  their steps. Of peers it is what as many processes read just before and just after.
* prompt: tokens/s of a prompt of 512; as a part of what the model's own matrix products reach by themselves on the same ranks, in the run
  of each colrow contestant: their time for 512 tokens, one product after the other, without anything between them.
* together: tokens/s of 8 sequences in one step.

--peer llama.cpp=PYTHON, vLLM=PYTHON and DeepSpeed=PYTHON name the interpreters of the peers' own environments (bench/peers/); a peer that
has none, or whose interpreter lacks it, is left out with a line. transformers is colrow's own. llama.cpp gets GGUF files of those weights
(bench/gguf_model.py), in bfloat16 and, against colrow's int8, in Q8_0.

With --results, each call with --next runs the contestant that FILE has least of, and a call without it prints the table: so that a run can
be cut into pieces on a machine that is shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bandwidth import Reader, read_bandwidth
from gguf import GGMLQuantizationType
from gguf_model import write as write_gguf
from peers.timing import LONG, PROMPT, prompt, seconds
from random_model import write
from transformers import LlamaConfig

from colrow import api
from colrow.comm import collectives, launch
from colrow.comm.group import Group
from colrow.engine import pieces
from colrow.engine.account import Stages
from colrow.engine.forward import Forward
from colrow.engine.generate import generate
from colrow.engine.slots import Slot
from colrow.engine.stopping import Limits
from colrow.parallel.prompt_products import linear

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
TOGETHER = 8
PEERS = Path(__file__).parent / "peers"
Result = dict[str, Any]


def colrow(group: Group, folder: str, dtype: str, tokens: int, threads: int, program: bool = True, compact: bool = True) -> Result:
    """One rank's turn; rank 0's result counts."""
    torch.set_num_threads(threads)
    stages = Stages()
    engine = api.open_engine(folder, group, dtype=dtype, gate=False, compact=compact and program, stages=stages)
    decoder = engine.decoder if program else None
    assert engine.decoder.program is not None, engine.decoder.why
    work = pieces.work(engine.decoder.program, PROMPT)  # of its matrices, which are all but all that is read
    read = int(work.read)
    reader = Reader(read, threads)
    steps, reads = [], []
    answer = generate(engine.model, group, [prompt(PROMPT)], limits=Limits(tokens + 2), decoder=decoder)
    for _ in range(tokens + 2):
        start = time.perf_counter()
        next(answer)
        steps.append(time.perf_counter() - start)
        collectives.barrier(group, "bench.read")
        reads.append(reader.seconds())
        collectives.barrier(group, "bench.read")
    forward = Forward(engine.model)
    out: Result = {"rate": 1 / statistics.median(steps[2:]), "floor": 1 / statistics.median(reads[2:])}
    out["prefill"] = LONG / seconds(lambda: forward(torch.tensor([prompt(LONG)]), None, None))
    if dtype != "int8":
        out["products"] = LONG / products(engine.model, group)
    if decoder is not None and decoder.program is not None:
        past = forward(torch.tensor([prompt(PROMPT)]), None, None)[1]
        slots = [Slot(past) for _ in range(TOGETHER)]
        out["together"] = TOGETHER / seconds(lambda: decoder.program.run([5] * TOGETHER, slots), 9)  # type: ignore[union-attr]
    return {
        **out,
        "bytes": read * group.size,
        "plain": int(work.operations / 2) * next(engine.model.parameters()).element_size() * group.size,
        "how": stages.results["decoding"] if program else "the modules",
    }


@torch.inference_mode()
def products(model: Any, group: Group) -> float:
    """Seconds that the rank's products of LONG tokens take, while the other ranks make theirs. The head, of one token, is left out."""
    layers = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x is not model.get_output_embeddings()]
    given = {x.in_features: torch.randn(LONG, x.in_features).to(x.weight.dtype) for x in layers}

    def once() -> None:
        collectives.barrier(group, "bench.products")
        for layer in layers:
            linear(layer, given[layer.in_features], None)

    return seconds(once)


# ---- Contestants: name -> (processes or threads that read, what gives a result) ----


def contestants(folder: Path, dtype: str, tokens: int, peers: dict[str, str]) -> dict[str, tuple[int, Callable[[], Result]]]:
    def ranks(tp: int, threads: int, kind: str = dtype, program: bool = True, compact: bool = True) -> Callable[[], Result]:
        return lambda: launch.spawn(colrow, tp, (str(folder), kind, tokens, threads, program, compact))[0]

    def peer(name: str, script: str, *arguments: object, processes: int = 1) -> Callable[[], Result]:
        return lambda: run_peer(peers, name, script, [*map(str, arguments)], processes)

    def llama(kind: GGMLQuantizationType) -> Callable[[], Result]:
        file = folder / f"model-{kind.name}.gguf"
        return lambda: (
            file.exists() or "llama.cpp" not in peers or write_gguf(folder, file, kind),
            run_peer(peers, "llama.cpp", "llama_cpp_peer.py", [str(file), str(tokens), "2"]),
        )[1]

    return {
        "colrow tp=2, 1 thread each": (2, ranks(2, 1)),
        "llama.cpp BF16, 2 threads": (2, llama(GGMLQuantizationType.BF16)),
        "colrow tp=2, 16 bits": (2, ranks(2, 1, compact=False)),
        "colrow tp=1, 1 thread": (1, ranks(1, 1)),
        "colrow tp=1, 16 bits": (1, ranks(1, 1, compact=False)),
        "colrow tp=1, 2 threads": (2, ranks(1, 2)),
        "vLLM tp=2": (2, peer("vLLM", "vllm_peer.py", folder, tokens, dtype, 2)),
        "DeepSpeed tp=2": (2, peer("DeepSpeed", "torch_peer.py", folder, tokens, dtype, "deepspeed", processes=2)),
        "transformers alone, 2 threads": (2, peer("transformers", "torch_peer.py", folder, tokens, dtype, "alone", 2)),
        "transformers tp_plan=2, gloo": (2, peer("transformers", "torch_peer.py", folder, tokens, dtype, "tp_plan", processes=2)),
        "colrow tp=2 by modules": (2, ranks(2, 1, program=False)),
        "colrow tp=2, int8": (2, ranks(2, 1, "int8")),
        "llama.cpp Q8_0, 2 threads": (2, llama(GGMLQuantizationType.Q8_0)),
        "colrow tp=1, 2 threads, int8": (2, ranks(1, 2, "int8")),
    }


def run_peer(peers: dict[str, str], name: str, script: str, arguments: list[str], processes: int = 1) -> Result:
    """What the peer's script answers, in the peer's environment; under torchrun where it is several processes."""
    if name not in peers:
        return {"left out": f"not installed: no --peer {name}=PYTHON"}
    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    done = subprocess.run([peers[name], *several, str(PEERS / script), *arguments], capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"rate"')]
    return json.loads(answers[-1]) if answers else {"left out": _error(done.stderr)}


def _error(text: str) -> str:
    """The line that says most: the last one of the first traceback, or the last one of all."""
    found = [line for line in text.splitlines() if "Error: " in line]
    return (found or text.strip().splitlines() or ["no answer"])[0 if found else -1].strip()[:120]


def measured(name: str, readers: int, task: Callable[[], Result]) -> Result:
    """With the bandwidth of one and of two processes around it, GB/s."""
    before = [read_bandwidth(n) for n in (1, 2)]
    out = {"name": name, "readers": readers, **task()}
    if "rate" in out:
        after = [read_bandwidth(n) for n in (1, 2)]
        out["one"], out["two"] = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    return out


# ---- What is printed ----


def medians(results: list[Result]) -> list[Result]:
    """One result for each name, with the median of every number, in the order of the names' first coming."""
    out = []
    for name in dict.fromkeys(r["name"] for r in results):
        mine = [r for r in results if r["name"] == name and "rate" in r] or [r for r in results if r["name"] == name]
        out.append({key: statistics.median(r[key] for r in mine) if isinstance(v, float) else v for key, v in mine[-1].items()})
        out[-1]["runs"] = len(mine)
    return out


def lines(results: list[Result]) -> Iterator[str]:
    found = {r["name"]: r for r in medians(results)}
    sizes = {_int8(name): r["bytes"] if _int8(name) else r.get("plain", r["bytes"]) for name, r in found.items() if "bytes" in r}
    first = next((r for r in found.values() if "rate" in r), {"rate": 1.0, "prefill": 1.0})
    yield f"{'':30} runs tokens/s  ratio  of floor   prompt  ratio  of products  {TOGETHER} together  (ratio: to the first line)"
    for name, r in found.items():
        if "rate" not in r:
            yield f"{name:30} left out: {r['left out']}"
            continue
        known = r.get("bytes", sizes.get(_int8(name), 0))
        around = (r["one"] if r["readers"] == 1 else r["two"]) * 1e9 / known if known else 0
        floor = f"{r['rate'] / r.get('floor', around):8.2f}" if known else f"{'':8}"
        part = f"{r['prefill'] / r['products']:11.2f}" if "products" in r else f"{'':11}"
        together = f"{r['together']:8.1f} ({r['together'] / r['rate']:.1f}x)" if "together" in r else f"{'':15}"
        ratios = (r["rate"] / first["rate"], r["prefill"] / first["prefill"])
        yield (
            f"{name:30} {r['runs']:4} {r['rate']:8.2f} {ratios[0]:6.2f}  {floor} {r['prefill']:8.0f} {ratios[1]:6.2f}  {part}  {together}"
            f"  {r.get('how', '')}"
        )
    yield from _compared(found)


def _int8(name: str) -> bool:
    return "int8" in name or "Q8_0" in name


def _compared(found: dict[str, Result]) -> Iterator[str]:
    rates = {name: r["rate"] for name, r in found.items() if "rate" in r}
    first, alone = "colrow tp=2, 1 thread each", "colrow tp=1, 1 thread"
    pairs = [(first, "colrow tp=2, 16 bits"), (alone, "colrow tp=1, 16 bits"), (first, "llama.cpp BF16, 2 threads")]
    for mine, theirs in (*pairs, ("colrow tp=2, int8", "llama.cpp Q8_0, 2 threads")):
        if mine in rates and theirs in rates:
            yield f"{mine} is {rates[mine] / rates[theirs]:.2f} times {theirs}"
    if first in rates and alone in rates:
        growth = found[first]["floor"] / found[alone]["floor"]
        yield f"two processes read {growth:.2f} times as fast as one; tp=2 decodes {rates[first] / rates[alone]:.2f} times as fast as tp=1"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    options.add_argument("--results", type=Path)
    options.add_argument("--next", action="store_true")
    options.add_argument("--only")
    asked = options.parse_args()
    if not (asked.folder / "config.json").exists():
        write(LlamaConfig(**SHAPE, dtype="bfloat16"), asked.folder)
    peers = {"transformers": sys.executable} | dict(pair.split("=", 1) for pair in asked.peer)
    results = [json.loads(line) for line in asked.results.read_text().splitlines()] if asked.results and asked.results.exists() else []
    todo = contestants(asked.folder, asked.dtype, asked.tokens, peers)
    if asked.only:
        names = [asked.only]
    elif asked.next:
        names = [min(todo, key=[r["name"] for r in results].count)]
    else:
        names = [] if asked.results else list(todo)
    for name in names:
        results.append(measured(name, *todo[name]))
        if asked.results:
            asked.results.write_text("".join(json.dumps(r) + "\n" for r in results))
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
