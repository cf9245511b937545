"""Predicted against measured time on this machine: decoding, prefill and a training step of three models at tp 1 and 2, shm and gloo.

    python bench/predict.py [--rounds 3] [--more]

Calibration and runs take turns in the same processes, so that both see the same machine; medians over rounds are compared. Bytes counted
must equal bytes predicted exactly, on every rank. With --more also 4 ranks; more ranks than cores are oversubscribed and stand outside the
bound. Models have random weights: times do not depend on them.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from colrow.comm import collectives, launch
from colrow.comm.group import Group
from colrow.engine import calibrate
from colrow.engine.forward import Forward
from colrow.parallel import build
from colrow.parallel.head import sharded_logits
from colrow.planning import cost, timing
from colrow.planning.derive import derive
from colrow.planning.links import Machine
from colrow.planning.plan import Plan
from colrow.planning.trace import trace

SIZES = {"20M": (512, 1408, 4, 8, 4), "85M": (1024, 2816, 6, 16, 8), "240M": (1536, 4096, 8, 16, 4)}  # hidden, inner, layers, heads, KV
PROMPT, STEPS, VOCAB = 128, 12, 8192


def config(size: str) -> LlamaConfig:
    hidden, inner, layers, heads, kv = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaConfig(**sizes, num_key_value_heads=kv, vocab_size=VOCAB, tie_word_embeddings=False)


@dataclass(frozen=True)
class Round:
    measured: calibrate.Measured
    decode: float
    prefill: float
    train: float


def run(group: Group, size: str, plan: Plan, rounds: int) -> tuple[list[Round], dict[tuple[str, str, str], tuple[int, int, int]], int]:
    """On every rank: rounds of calibration and runs; then what was counted, as calls, logical and moved bytes."""
    torch.manual_seed(0)
    model = build.split(build.empty(config(size), torch.float32), plan, group).to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p.data, std=0.02)
    for name, b in model.named_buffers():
        if "inv_freq" in name:
            b.copy_(1e4 ** (-torch.arange(len(b)) / len(b)))
    ids = torch.randint(0, VOCAB, (1, PROMPT))
    out = []
    for _ in range(rounds + 1):  # the first one warms up
        found = calibrate.measure(group, seconds=0.25)
        group.counters.reset()
        out.append(Round(found, *_once(group, model, ids)))
    counted = {site: (t.calls, t.logical_bytes, t.moved_bytes) for site, t in group.counters.sites.items()}
    return out[1:], counted, getattr(group.transport, "one_shot_limit", 0)


def _once(group: Group, model: Any, ids: torch.Tensor) -> tuple[float, float, float]:
    def timed(phase: str) -> float:
        group.counters.phase = ""
        collectives.barrier(group, "predict")
        group.counters.phase = phase
        return time.perf_counter()

    forward = Forward(model.eval())
    start = timed("prefill")
    _, past = forward(ids, None, None)
    prefill = time.perf_counter() - start
    start = timed("decode")
    for _ in range(STEPS):
        _, past = forward(ids[:, :1], None, past)
    decode = (time.perf_counter() - start) / STEPS
    model.train()
    start = timed("train_forward")
    with sharded_logits(model) if group.size > 1 else torch.enable_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
    group.counters.phase = "train_backward"
    loss.backward()
    train = time.perf_counter() - start
    model.zero_grad(set_to_none=False)  # fresh memory for gradients would be timed as page faults
    return decode, prefill, train


def bytes_agree(plan: Plan, rank: int, kind: str, counted: dict[tuple[str, str, str], tuple[int, int, int]], limit: int) -> bool:
    """Every call site of every phase: calls, logical bytes, and bytes moved by the transport's own formula."""
    expected: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for phase, times in (("prefill", 1), ("decode", STEPS), ("train_forward", 1), ("train_backward", 1)):
        for p in cost.predict(plan, 1, PROMPT, phase, 4, whole_logits=False):  # type: ignore[arg-type]
            if rank in p.ranks and not (phase == "prefill" and cost.of_vocabulary(p.name) and p.op == "all_gather"):
                calls, size, moved = expected.get((phase, p.op, p.name), (0, 0, 0))
                more = times * p.moved_bytes(kind, p.ranks.index(rank), limit)  # type: ignore[arg-type]
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
    options.add_argument("--sizes", nargs="*", default=list(SIZES))
    arguments = options.parse_args()
    cores, errors = os.cpu_count() or 1, []
    print(f"{'model':<6}{'ranks':<14}{'pass':<9}{'predicted':>11}{'measured':>11}{'error':>8}")
    for size in arguments.sizes:
        model = timing.Model.of(trace(config(size)))
        for ranks, kind in [(1, "auto"), (2, "shm"), (2, "gloo"), *([(4, "shm")] if arguments.more else [])]:
            plan = derive(config(size), ranks)
            results = launch.spawn(run, ranks, (size, plan, arguments.rounds), kind)
            if ranks > 1:
                agree = all(bytes_agree(plan, r, kind, counted, limit) for r, (_, counted, limit) in enumerate(results))
                print(f"{size:<6}{ranks} x {kind:<10}bytes {'equal, all ranks and call sites' if agree else 'DIFFER'}")
            for row, error in compare(plan, model, ranks, kind, [r for r, _, _ in results]):
                over = ranks > cores
                print(f"{size:<6}{ranks} x {kind:<10}{row} {100 * error:>+6.0f} %{'  oversubscribed' if over else ''}", flush=True)
                if not over:
                    errors.append(abs(error))
    print(f"median error {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %")


def compare(plan: Plan, model: timing.Model, ranks: int, kind: str, rounds: list[list[Round]]) -> list[tuple[str, float]]:
    """Each pass with its relative error: medians over rounds, the slowest rank's time, predicted from the round's own calibration."""
    predicted: dict[str, list[float]] = {"decode": [], "prefill": [], "train": []}
    measured: dict[str, list[float]] = {"decode": [], "prefill": [], "train": []}
    for at_once in zip(*rounds, strict=True):
        machine = Machine(*calibrate.presets([r.measured for r in at_once], kind, 0.0))
        predicted["decode"].append(timing.decode(plan, model, machine, 1, PROMPT + STEPS // 2, 4).total)
        predicted["prefill"].append(timing.prefill(plan, model, machine, 1, PROMPT, 4).total)
        predicted["train"].append(timing.train(plan, model, machine, 1, PROMPT, 4).total)
        for key, values in measured.items():
            values.append(max(getattr(r, key) for r in at_once))
    out = []
    for key, values in measured.items():
        one, other = median(predicted[key]), median(values)
        out.append((f"{key:<9}{1e3 * one:>8.2f} ms{1e3 * other:>8.2f} ms", one / other - 1))
    return out


if __name__ == "__main__":
    main()
