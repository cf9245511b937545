"""A long run of mixed collectives over shared memory with random sizes, dtypes and pauses, each result checked bit by bit.

    python -m bench.soak --operations 1000000 --ranks 2 3 4 8

The operations are divided among the given numbers of ranks. All ranks draw the same operations from one seed; every rank computes every
result itself, adding in rank order in torch. Small slots make the larger payloads go through in many pieces. Exit code 1 at the first
difference. Fault runs are tests: COLROW_FAULT_RUNS=50 python -m pytest tests/test_shm_faults.py
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from colrow.comm.group import Call
from colrow.comm.shm import ShmTransport
from colrow.comm.shm_check import ordered_sum
from tests.shm_ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
LARGEST = 60_000  # elements
OPS = ("all_reduce", "all_reduce", "max", "all_gather", "reduce_scatter", "broadcast", "objects", "barrier", "sub", "into")


def soak(transport: ShmTransport, operations: int, seed: int) -> dict[str, int]:
    """The number of operations of each kind that were run and found right."""
    size = transport.size
    pool = {(rank, dtype): _values(rank, dtype) for rank in range(size) for dtype in DTYPES}
    draw, pauses = random.Random(seed), random.Random(seed * 100 + transport.rank)
    subs = {ranks: transport.sub(ranks) for ranks in ((0, size - 1), tuple(range(size // 2 + 1)))}
    done = dict.fromkeys(OPS, 0)
    for turn in range(operations):
        if turn % 100 == 0:
            transport.one_shot_limit = draw.choice([0, 2048, 1 << 30])
            _pause(pauses)
        op, dtype, numel = draw.choice(OPS), draw.choice(DTYPES), int(LARGEST ** draw.random()) - 1
        start = draw.randrange(LARGEST)
        members = draw.choice(list(subs)) if op == "sub" else tuple(range(size))
        group = subs[members] if op == "sub" else transport
        if group is not None:
            inputs = [pool[rank, dtype][start : start + numel] for rank in members]
            right = one(group, op, inputs, draw.randrange(1 << 30) if op != "sub" else 0, f"{op} {turn % 50}")
            assert right, f"seed {seed}, {size} ranks, operation {turn}: {op} of {numel} {dtype} is wrong on rank {transport.rank}"
        elif op != "sub":
            raise AssertionError("only a sub-group has outsiders")
        done[op] += 1
    for sub in subs.values():
        if sub is not None:
            sub.close()
    return done


def one(group: ShmTransport, op: str, inputs: list[torch.Tensor], number: int, name: str) -> bool:
    """Runs one operation; is its result right?"""
    rank, size, call = group.rank, group.size, Call(op, name)
    mine, numel = inputs[rank], inputs[rank].numel()
    if op in ("all_reduce", "sub", "max"):
        x = mine.clone()
        group.all_reduce(x, "max" if op == "max" else "sum", call)
        return _same(x, torch.stack(inputs).amax(0) if op == "max" else ordered_sum(inputs))
    if op == "into":
        numel = min(numel, group.mapping.slot_bytes // mine.itemsize)
        buffer, out = group.buffer(numel, mine.dtype), torch.empty(numel, dtype=mine.dtype)
        group.all_reduce_into(buffer.copy_(mine[:numel]), out, "sum", call)
        return _same(out, ordered_sum([x[:numel] for x in inputs]))
    cuts = sorted(random.Random(number).choices(range(numel + 1), k=size - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
    if op == "all_gather":
        pieces = [x.split(sizes)[r] for r, x in enumerate(inputs)]
        out_pieces = [torch.empty_like(piece) for piece in pieces]
        group.all_gather(pieces[rank].clone(), out_pieces, call)
        return all(map(_same, out_pieces, pieces))
    if op == "reduce_scatter":
        part = torch.empty(sizes[rank], dtype=mine.dtype)
        group.reduce_scatter([x.contiguous() for x in mine.split(sizes)], part, call)
        return _same(part, ordered_sum([x.split(sizes)[rank] for x in inputs]))
    if op == "broadcast":
        x = mine.clone()
        group.broadcast(x, number % size, call)
        return _same(x, inputs[number % size])
    if op == "objects":
        return group.gather_objects((rank, "x" * (numel % 5000)), call) == [(r, "x" * (numel % 5000)) for r in range(size)]
    return group.gather_objects(None, Call("barrier", name)) == [None] * size


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(2 * LARGEST, generator=generator, dtype=torch.float64) * 1000).to(dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def _pause(draw: random.Random) -> None:
    """On one rank now and then: nothing, within the spinning, within the yielding, or until the others sleep."""
    if draw.random() < 0.2:
        time.sleep(draw.choice([0.0, 1e-5, 3e-4, 0.03]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--operations", type=int, default=100_000)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    share, total = arguments.operations // len(arguments.ranks), 0
    for size in arguments.ranks:
        began = time.monotonic()
        results = run_ranks(soak, size, share, arguments.seed, seconds=24 * 3600.0, slot_bytes=16384)
        assert all(result == results[0] for result in results)
        total += share
        kinds = ", ".join(f"{op} {count}" for op, count in results[0].items())
        print(f"{size} ranks: {share} operations right in {time.monotonic() - began:.0f} s ({kinds})", flush=True)
    print(f"{total} operations, each checked bit by bit on every rank")


if __name__ == "__main__":
    main()
