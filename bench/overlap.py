"""Does it pay to run a collective beside a product: measured over shared memory and gloo, where colrow does it and where it might.

    python bench/overlap.py                          # 2 ranks, shared memory and gloo, float32 and bfloat16: a minute
    python bench/overlap.py --backend gloo --dtype float32 --rounds 31

The shapes are those of bench/train.py: 2,048 tokens, hidden 768, a rank's share of 12 heads and of 2,048 MLP features. `f` is the backward
pass of the column-parallel products that share one f (input gradients, their all-reduce beside the weight gradients). The others are of
sequence parallelism, whose ranks hold their own rows: `column` is the forward pass of the products behind a gather (the own rows are
multiplied while the others arrive); `column back` their backward pass (the input is gathered again beside the input gradients, which are
reduced and scattered beside the weight gradients); `row back` is the backward pass of a row-parallel product (gradients gathered, own rows
multiplied meanwhile). The collectives are colrow's, beside the products in a thread (comm/background.py). Ways take turns; medians of the
time until both ranks are done, and of the products alone; `saved` is the median of the pairs' differences, with its quartiles. What came
of it: docs/architecture.md, parallel/overlap.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from colrow.comm import collectives
from colrow.comm.background import Worker
from colrow.comm.group import Group
from colrow.comm.launch import spawn

SEQUENCES, LENGTH, HIDDEN = 4, 512, 768
LAYERS = {"q k v": (384, 384, 384), "gate up": (1024, 1024), "o": (384,), "down": (1024,)}
CASES = [
    *((kind, layers) for kind in ("f", "column", "column back") for layers in ("q k v", "gate up")),
    *(("row back", layers) for layers in ("o", "down")),
]
WAYS = ("products", "after", "beside")


@dataclass(frozen=True)
class Case:
    kind: str
    layers: str
    dtype: str
    rounds: int


@dataclass(frozen=True)
class Ranks:
    """The collectives of one way: none, done at once, or begun and waited for later."""

    group: Group
    way: str
    worker: Worker
    sizes: list[int]

    def begin(self, work: Callable[[], torch.Tensor], instead: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self.way == "products":
            return lambda: instead
        if self.way == "beside":
            return self.worker.begin(work).result
        found = work()
        return lambda: found

    def gather(self, x: torch.Tensor, instead: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.begin(lambda: collectives.all_gather(x, self.group, "gather", 1, self.sizes), instead)

    def scatter(self, x: torch.Tensor, instead: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.begin(lambda: collectives.reduce_scatter(x, self.group, "scatter", 1, self.sizes), instead)

    def reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.begin(lambda: collectives.all_reduce(x, self.group, "reduce", inplace=True), x)


def measure(group: Group, case: Case) -> dict[str, list[float]]:
    """Seconds of the case, round by round, by way: "products" alone, the collective "after" or before them, "beside" them."""
    draw, dtype = torch.Generator().manual_seed(group.rank), getattr(torch, case.dtype)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    sizes, widths = [LENGTH // group.size] * group.size, LAYERS[case.layers]
    x, mine = random(SEQUENCES, LENGTH, HIDDEN), random(SEQUENCES, sizes[group.rank], HIDDEN)
    gradients = [random(SEQUENCES, LENGTH, n) for n in widths]
    weights = [random(n, HIDDEN) for n in widths]
    own = slice(group.rank * sizes[0], (group.rank + 1) * sizes[0])
    others = [slice(0, own.start), slice(own.stop, LENGTH)]

    def of_input() -> torch.Tensor:
        out = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            out += gradient @ weight
        return out

    def of_weights(x: torch.Tensor) -> list[torch.Tensor]:
        return [gradient.flatten(0, 1).T @ x.flatten(0, 1) for gradient in gradients]

    def in_two(ranks: Ranks, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole x by each matrix; where the collective runs beside them the own rows first."""
        wait = ranks.gather(mine, x)
        if ranks.way != "beside":
            whole = wait()
            return [whole @ matrix for matrix in matrices]
        out = [x.new_empty(SEQUENCES, LENGTH, matrix.shape[1]) for matrix in matrices]
        for to, matrix in zip(out, matrices, strict=True):
            to[:, own] = mine @ matrix
        whole = wait()
        for to, matrix in zip(out, matrices, strict=True):
            for rest in others:
                if rest.start < rest.stop:
                    to[:, rest] = whole[:, rest] @ matrix
        return out

    def run(ranks: Ranks) -> Any:
        match case.kind:
            case "f":
                wait = ranks.reduce(of_input())
                return of_weights(x), wait()
            case "column" | "row back":  # of a row-parallel product the gradient of the input; the weight's comes after in any case
                return in_two(ranks, [weight.T for weight in weights])
            case "column back":
                again = ranks.gather(mine, x)
                scattered = ranks.scatter(of_input(), mine)
                return of_weights(again()), scattered()

    ways = [Ranks(group, way, Worker(), sizes) for way in WAYS]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(case.rounds):
        for ranks in ways:
            collectives.barrier(group, "begin")
            start = time.perf_counter()
            run(ranks)
            collectives.barrier(group, "end")
            seconds[ranks.way].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", choices=("shm", "gloo"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--kind", choices=sorted({kind for kind, _ in CASES}))
    options = parser.parse_args()
    print(f"{'over':5} {'dtype':9} {'case':20} {'products':>10} {'after':>10} {'beside':>10}   saved (quartiles)")
    for backend in (options.backend,) if options.backend else ("shm", "gloo"):
        for dtype in (options.dtype,) if options.dtype else ("float32", "bfloat16"):
            for kind, layers in (case for case in CASES if options.kind in (None, case[0])):
                found = spawn(measure, options.ranks, (Case(kind, layers, dtype, options.rounds),), backend)[0]
                saved = [1e3 * (a - b) for a, b in zip(found["after"], found["beside"], strict=True)]
                low, middle, high = statistics.quantiles(saved, n=4)
                times = " ".join(f"{1e3 * statistics.median(found[way]):7.2f} ms" for way in WAYS)
                print(f"{backend:5} {dtype:9} {kind + ' ' + layers:20} {times}  {middle:6.2f} ms ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
