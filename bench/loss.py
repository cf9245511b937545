"""Head and loss of a training step, forward and backward: with the logits of all tokens, and some tokens at a time (parallel/fused.py).

    python bench/loss.py [--tokens 4096 --hidden 768 --vocabulary 32000 --ranks 2 --dtype float32]

Each way runs in fresh processes over shared memory, so that the peak of resident memory above what was there before is its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from colrow.comm import launch
from colrow.comm.collectives import barrier
from colrow.comm.group import Group
from colrow.parallel.fused import linear_cross_entropy
from colrow.parallel.loss import parallel_cross_entropy
from colrow.partition import even

REPEATS = 5


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def measure(group: Group, way: str, tokens: int, hidden: int, words: int, dtype: str) -> tuple[float, int, float]:
    """(seconds, bytes above what is held before, the loss)"""
    torch.manual_seed(0)
    partition, kind = even(0, words, group.size), getattr(torch, dtype)
    x = torch.randn(tokens, hidden).to(kind).requires_grad_()
    weight = (0.02 * torch.randn(partition.local_size(group.rank), hidden)).to(kind).requires_grad_()
    labels = torch.randint(0, words, (tokens,))
    before, seconds = resident("VmRSS"), []
    for _ in range(REPEATS):
        x.grad = weight.grad = None
        barrier(group, "bench")
        start = time.perf_counter()
        if way == "some tokens":
            loss = linear_cross_entropy(x, weight, None, labels, group, partition)
        else:
            loss = parallel_cross_entropy(F.linear(x, weight), labels, group, partition)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), resident("VmHWM") - before, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 4096), ("hidden", 768), ("vocabulary", 32000), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    for way in ("all tokens", "some tokens"):
        results = launch.spawn(measure, given.ranks, (way, given.tokens, given.hidden, given.vocabulary, given.dtype))
        seconds, peak = max(r[0] for r in results), max(r[1] for r in results)
        print(f"{way:12} {1000 * seconds:7.0f} ms  peak {peak / 1e6:6.0f} MB above weights and hidden states  loss {results[0][2]:.5f}")


if __name__ == "__main__":
    main()
