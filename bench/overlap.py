"""Does it pay to run a collective beside a product: the all-reduce of input gradients beside weight gradients, a gather beside its product.

    python bench/overlap.py                          # 2 ranks, shared memory and gloo, float32 and bfloat16: half a minute

The shapes are those of bench/train.py: 2,048 tokens, hidden 768, a rank's share of 12 heads and of 2,048 MLP features. `q k v` and
`gate up` are the backward pass of the column-parallel products that share one f (input gradients, their all-reduce, weight gradients);
`sp q k v` is their forward pass under sequence parallelism (gather, products): with overlap the rank's own rows are multiplied while the
others' arrive. The collectives are colrow's, beside the products in a thread (comm/background.py). Ways take turns; medians of the time
until both ranks are done, and of the products alone. What came of it: docs/architecture.md, parallel/overlap.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from colrow.comm import collectives
from colrow.comm.background import Worker
from colrow.comm.group import Group
from colrow.comm.launch import spawn

TOKENS, HIDDEN = 2048, 768
CASES = {"q k v": (384, 384, 384), "gate up": (1024, 1024), "sp q k v": (384, 384, 384)}


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    rounds: int


def fill(parts: list[torch.Tensor], group: Group) -> None:
    """`parts[rank]` is the rank's own; the others are filled."""
    sizes = [len(part) for part in parts]
    whole = collectives.all_gather(parts[group.rank], group, "gather", 0, sizes)
    for part, found in zip(parts, whole.split(sizes), strict=True):
        part.copy_(found)


def measure(group: Group, case: Case) -> dict[str, float]:
    """Seconds of the case by way: "products" alone, the collective "after" or before them, "beside" them."""
    draw, worker, dtype = torch.Generator().manual_seed(group.rank), Worker(), getattr(torch, case.dtype)
    x, *gradients = (torch.randn(TOKENS, n, generator=draw).to(dtype) for n in (HIDDEN, *CASES[case.name]))
    weights = [torch.randn(n, HIDDEN, generator=draw).to(dtype) for n in CASES[case.name]]
    rows = [slice(start, start + TOKENS // group.size) for start in range(0, TOKENS, TOKENS // group.size)]

    def backward(way: str) -> None:
        of_input = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            of_input.addmm_(gradient, weight)
        if way == "after":
            collectives.all_reduce(of_input, group, "reduce", inplace=True)
        elif way == "beside":
            done = worker.begin(lambda: collectives.all_reduce(of_input, group, "reduce", inplace=True))
        of_weights = [gradient.T @ x for gradient in gradients]
        if way == "beside":
            done.result()
        assert len(of_weights) == len(weights)

    def forward(way: str) -> None:
        parts = [x[at] for at in rows]
        if way != "beside":
            if way == "after":
                fill(parts, group)
            out = [x @ weight.T for weight in weights]
        else:
            done = worker.begin(lambda: fill(parts, group))
            out = [x.new_empty(TOKENS, len(weight)) for weight in weights]
            for number in sorted(range(group.size), key=lambda r: r != group.rank):
                for to, weight in zip(out, weights, strict=True):
                    torch.mm(parts[number], weight.T, out=to[rows[number]])
                if number == group.rank:
                    done.result()
        assert len(out) == len(weights)

    run = forward if case.name.startswith("sp") else backward
    seconds: dict[str, list[float]] = {way: [] for way in ("products", "after", "beside")}
    for _ in range(case.rounds):
        for way, found in seconds.items():
            collectives.barrier(group, "begin")
            start = time.perf_counter()
            run(way)
            collectives.barrier(group, "end")
            found.append(time.perf_counter() - start)
    return {way: statistics.median(found) for way, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'over':5} {'dtype':9} {'case':9} {'products':>10} {'after':>10} {'beside':>10} {'saved':>10}")
    for backend in ("shm", "gloo"):
        for dtype in ("float32", "bfloat16"):
            for name in CASES:
                found = spawn(measure, options.ranks, (Case(name, dtype, options.rounds),), backend)[0]
                numbers = (*found.values(), found["after"] - found["beside"])
                print(f"{backend:5} {dtype:9} {name:9} " + " ".join(f"{1e3 * n:7.2f} ms" for n in numbers), flush=True)


if __name__ == "__main__":
    main()
