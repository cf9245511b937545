"""Predicted against measured time on this machine: decoding, prefill and a training step of three models at tp 1 and 2, shm and gloo.

    python bench/predict.py [--rounds 3] [--more] [--dtype bfloat16] [--only 85M:2:shm --keep results.json]

Calibration and runs take turns in the same processes, so that both see the same machine; medians over rounds are compared. "decode",
"prefill" and "train" are transformers' modules, as training and `verify` use them; "program" is a token as the engine decodes it, by its
program in C, up to where the ranks have agreed on it; the median of a dozen, since torch's threads spin on into the first ones behind a
prompt; "program 4" and "program 8" a token for each of so many sequences together, "decode 8" the same by the modules. In float32; or in
bfloat16, where ranks of one thread keep weights in 12 bits, as the engine does: then prompts and programs alone, which run so. --only
1.1B:2:shm is TinyLlama's shape. Bytes counted must equal bytes predicted exactly, on every rank. With --more also 4 ranks; more ranks than
cores are oversubscribed and stand outside the bound. Models have random weights: times do not depend on them. With --keep the rows are
added to a file, and the summary is over all of it: a case in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from colrow.comm import collectives, launch
from colrow.comm.group import Group
from colrow.engine import calibrate, pace
from colrow.engine.decoder import Decoder
from colrow.engine.exchange import Exchange
from colrow.engine.exchange import predicted as exchanged
from colrow.engine.forward import Forward, vocabulary
from colrow.engine.settings import Sampling
from colrow.engine.slots import Slot
from colrow.parallel import build
from colrow.parallel.compact import compact_layers
from colrow.parallel.head import sharded_logits
from colrow.planning import cost, program, timing, workload
from colrow.planning.derive import derive
from colrow.planning.links import Machine
from colrow.planning.plan import Plan

SIZES = {"20M": (512, 1408, 4, 8, 4), "85M": (1024, 2816, 6, 16, 8), "240M": (1536, 4096, 8, 16, 4)}  # hidden, inner, layers, heads, KV
LARGER = {"1.1B": (2048, 5632, 22, 32, 4)}
PROMPT, STEPS, VOCAB = 128, 12, 8192
BATCHES = (1, 4, 8)  # sequences together, of the program
MANY = 8  # and of the modules


def config(size: str) -> LlamaConfig:
    hidden, inner, layers, heads, kv = (SIZES | LARGER)[size]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaConfig(**sizes, num_key_value_heads=kv, vocab_size=VOCAB, tie_word_embeddings=False)


@dataclass(frozen=True)
class Round:
    """Seconds of each pass beside what was measured to predict it."""

    measured: calibrate.Measured
    paced: pace.Paced
    seconds: dict[str, float]


def _by_program(batch: int) -> str:
    return "program" if batch == 1 else f"program {batch}"


def run(
    group: Group, size: str, plan: Plan, rounds: int, dtype: torch.dtype
) -> tuple[list[Round], dict[tuple[str, str, str], tuple[int, int, int]], int]:
    """On every rank: rounds of calibration and runs; then what was counted, as calls, logical and moved bytes."""
    torch.manual_seed(0)
    model = build.split(build.empty(config(size), dtype), plan, group).to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p.data, std=0.02)
    for name, b in model.named_buffers():
        if "inv_freq" in name:
            b.copy_(1e4 ** (-torch.arange(len(b)) / len(b)))
    ids, decoder = torch.randint(0, VOCAB, (1, PROMPT)), Decoder(model.eval(), group)
    by_modules = dtype is not torch.bfloat16 or compact_layers(model) is None
    out = []
    for _ in range(rounds + 1):  # the first one warms up
        found, paced = calibrate.measure(group, dtype, 0.25), pace.measure(group, dtype, 0.15)
        decoder.prepare()
        group.counters.reset()
        out.append(Round(found, paced, _once(group, model, ids, decoder, by_modules)))
    counted = {site: (t.calls, t.logical_bytes, t.moved_bytes) for site, t in group.counters.sites.items()}
    return out[1:], counted, getattr(group.transport, "one_shot_limit", 0)


def _once(group: Group, model: Any, ids: torch.Tensor, decoder: Decoder, by_modules: bool) -> dict[str, float]:
    def timed(phase: str) -> float:
        group.counters.phase = ""
        collectives.barrier(group, "predict")
        group.counters.phase = phase
        return time.perf_counter()

    forward, exchange = Forward(model.eval()), Exchange(group, vocabulary(model), Sampling(0.0))
    start = timed("prefill")
    _, past = forward(ids, None, None)
    found = {"prefill": time.perf_counter() - start}
    for batch in BATCHES:
        slots, tokens, times = [Slot(past) for _ in range(batch)], [5] * batch, list[float]()
        goes_on: list[None] = [None] * batch
        timed(_by_program(batch))
        for number in range(STEPS):
            assert decoder.program is not None, decoder.why
            start = time.perf_counter()
            scores = decoder.program.run(tokens, slots)
            tokens = list(exchange.agree(scores, [[]] * batch, number, lambda _, rows=goes_on: rows).tokens)
            times.append(time.perf_counter() - start)
        found[_by_program(batch)] = median(times)
    if not by_modules:
        return found
    for batch in (1, MANY):
        group.counters.phase = ""
        _, past = forward(ids.expand(batch, -1), None, None)
        start = timed(_by_modules(batch))
        for _ in range(STEPS):
            _, past = forward(ids[:, :1].expand(batch, -1), None, past)
        found[_by_modules(batch)] = (time.perf_counter() - start) / STEPS
    model.train()
    start = timed("train_forward")
    with sharded_logits(model) if group.size > 1 else torch.enable_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
    group.counters.phase = "train_backward"
    loss.backward()
    found["train"] = time.perf_counter() - start
    model.zero_grad(set_to_none=True)  # as the trainer does
    return found


def _by_modules(batch: int) -> str:
    return "decode" if batch == 1 else f"decode {batch}"


def bytes_agree(
    plan: Plan, rank: int, kind: str, counted: dict[tuple[str, str, str], tuple[int, int, int]], limit: int, itemsize: int
) -> bool:
    """Every call site of every phase: calls, logical bytes, and bytes moved by the transport's own formula."""
    expected: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    everyone = tuple(range(plan.ranks))
    phases: list[tuple[str, cost.Phase, int, int]] = [("prefill", "prefill", 1, 1), ("train_forward", "train_forward", 1, 1)]
    phases += [("train_backward", "train_backward", 1, 1), *((_by_modules(batch), "decode", batch, STEPS) for batch in (1, MANY))]
    phases += [(_by_program(batch), "decode", batch, STEPS) for batch in BATCHES]
    made = {phase for phase, _, _ in counted}
    for phase, of_plan, batch, times in phases:
        if phase not in made:  # not by the modules where they make weights anew
            continue
        by_c = phase.startswith("program")
        chosen = exchanged(Sampling(0.0), batch, plan.ranks, VOCAB) if by_c else ()
        agreeing = [cost.Predicted(op, name, n, size, everyone, unit=8) for op, name, n, size in chosen]
        for p in (*cost.predict(plan, batch, PROMPT, of_plan, itemsize, whole_logits=False), *agreeing):
            if rank in p.ranks and not (phase == "prefill" and cost.of_vocabulary(p.name) and p.op == "all_gather"):
                calls, size, moved = expected.get((phase, p.op, p.name), (0, 0, 0))
                more = times * p.moved_bytes(kind, p.ranks.index(rank), limit)  # type: ignore[arg-type]
                if by_c and (kind, p.op) == ("shm", "all_reduce"):  # its part is written where the others read it
                    more -= times * p.logical_bytes
                expected[phase, p.op, p.name] = calls + times, size + times * p.logical_bytes, moved + more
    found = {site: count for site, count in counted.items() if site[0]}
    for site in sorted(found.keys() | expected.keys()):
        if found.get(site) != expected.get(site):
            print("differs:", site, "counted", found.get(site), "predicted", expected.get(site))
    return found == expected


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--more", action="store_true")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--only", nargs="*", help="SIZE:RANKS:TRANSPORT, such as 85M:2:shm")
    options.add_argument("--keep", type=Path, help="a file that rows are added to")
    arguments = options.parse_args()
    ways = [(1, "auto"), (2, "shm"), (2, "gloo"), *([(4, "shm")] if arguments.more else [])]
    cases = [(size, ranks, kind) for size in SIZES for ranks, kind in ways]
    if arguments.only:
        cases = [(size, int(ranks), kind) for size, ranks, kind in (only.split(":") for only in arguments.only)]
    rows: list[Row] = [Row(**row) for row in json.loads(arguments.keep.read_text())] if arguments.keep and arguments.keep.exists() else []
    print(f"{'model':<6}{'ranks':<14}{'pass':<11}{'predicted':>11}{'measured':>11}{'error':>8}")
    for case in cases:
        found = measured(*case, arguments.rounds, getattr(torch, arguments.dtype))
        rows = [row for row in rows if (row.size, row.ranks, row.kind) != case] + found
        if arguments.keep:
            arguments.keep.write_text(json.dumps([asdict(row) for row in rows], indent=1))
        for row in found:
            print(row, flush=True)
    if arguments.keep and len(rows) > len(cases):
        print("all together", *rows, sep="\n")
    inside = [abs(row.error) for row in rows if not row.oversubscribed]
    print(f"{len(inside)} predictions: median error {100 * median(inside):.0f} %, largest {100 * max(inside):.0f} %")


@dataclass(frozen=True)
class Row:
    """Seconds of one pass, predicted and measured."""

    size: str
    ranks: int
    kind: str
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def oversubscribed(self) -> bool:
        return self.ranks > (os.cpu_count() or 1)

    def __str__(self) -> str:
        times = f"{1e3 * self.predicted:>8.2f} ms{1e3 * self.measured:>8.2f} ms"
        over = "  oversubscribed" if self.oversubscribed else ""
        return f"{self.size:<6}{self.ranks} x {self.kind:<10}{self.what:<11}{times}{100 * self.error:>+6.0f} %{over}"


def measured(size: str, ranks: int, kind: str, rounds: int, dtype: torch.dtype) -> list[Row]:
    """One model on so many ranks: bytes checked, times predicted and measured."""
    plan = derive(config(size), ranks)
    results = launch.spawn(run, ranks, (size, plan, rounds, dtype), kind)
    if ranks > 1:
        agree = all(bytes_agree(plan, r, kind, counted, limit, dtype.itemsize) for r, (_, counted, limit) in enumerate(results))
        print(f"{size:<6}{ranks} x {kind:<10}bytes {'equal, all ranks and call sites' if agree else 'DIFFER'}")
    model = workload.of_config(config(size))
    return [Row(size, ranks, kind, *row) for row in compare(plan, model, kind, [r for r, _, _ in results], dtype)]


def compare(plan: Plan, model: workload.Model, kind: str, rounds: list[list[Round]], dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """Each pass predicted and measured: medians over rounds, the slowest rank's time, predicted from the round's own calibration."""
    predicted: dict[str, list[float]] = {}
    found: dict[str, list[float]] = {}
    size = dtype.itemsize
    for at_once in zip(*rounds, strict=True):
        machine = Machine(*calibrate.presets([r.measured for r in at_once], kind, 0.0))
        in_c = Machine(*pace.presets([r.paced for r in at_once], kind, 0.0))
        after = PROMPT + STEPS // 2
        times = {_by_modules(batch): timing.decode(plan, model, machine, batch, after, size) for batch in (1, MANY)}
        times |= {
            "prefill": timing.prefill(plan, model, machine, 1, PROMPT, size),
            "train": timing.train(plan, model, machine, 1, PROMPT, size),
        }
        times |= {_by_program(batch): program.decode(plan, model, in_c, batch, after, size) for batch in BATCHES}
        for key in at_once[0].seconds:
            time_ = times[key]
            predicted.setdefault(key, []).append(time_.total)
            found.setdefault(key, []).append(max(r.seconds[key] for r in at_once))
    return [(key, median(predicted[key]), median(found[key])) for key in predicted]


if __name__ == "__main__":
    main()
