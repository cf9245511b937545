"""All-reduces between two pinned processes of this host, timed in one run: colrow's shared memory, gloo, and the least C that can do it.

    python bench/collectives.py [--quick] [--ranks 4]

Called from Python, headers checked: "colrow" is one call of the transport, "collectives" the same through colrow.comm.collectives (names,
counters). The three floors are bench/floor.c's. Every cell is the median and the 99th percentile in microseconds; colrow, gloo and, where
it is installed, DeepSpeed's shared-memory op take turns within a cell. Compare within one run only, and best on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colrow.comm import collectives
from colrow.comm.group import Call, Group
from colrow.comm.shm import ShmTransport
from colrow.native import compiler_command

SIZES = (4 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)
DTYPES = (torch.float32, torch.bfloat16)
FLOORS = ("one-shot", "two-shot", "in-pieces")


def percentiles(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile of seconds, in microseconds."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2] * 1e6, ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)] * 1e6


def rounds(nbytes: int, quick: bool) -> int:
    return max((4_000_000 if nbytes <= 64 << 10 else 60_000_000) // max(nbytes, 4096), 100) // (5 if quick else 1)


# ---- In a rank ----


def rank_main(pipe: Any, port: int, rank: int, size: int, cpu: int) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cpu})
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    transport = ShmTransport.create(rank, size, dist.PrefixStore("shm", store))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    group = Group(rank, size, transport, ranks=tuple(range(size)))
    other = deepspeed_op(rank, size, port)
    pipe.send((str(transport), other is not None))
    while (case := pipe.recv()) is not None:
        pipe.send(time_case(group, other, *case))
    dist.destroy_process_group()
    transport.close()


def deepspeed_op(rank: int, size: int, port: int) -> Callable[[torch.Tensor], object] | None:
    """DeepSpeed's op, which it compiles on first use; None where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    with contextlib.redirect_stdout(sys.stderr):
        ShareMemCommBuilder().load().initialize(size, rank)
    return torch.ops.deepspeed.inference_all_reduce_


def remove_what_deepspeed_left(port: int) -> None:
    for path in Path("/dev/shm").glob(f"deepspeed*{port}*"):
        path.unlink()


def time_case(
    group: Group, other: Callable[[torch.Tensor], object] | None, nbytes: int, dtype: torch.dtype, count: int
) -> dict[str, tuple[float, float]]:
    x = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    call = Call("all_reduce", "model.layers.3.mlp.down_proj.output", str(dtype), x.numel())
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "colrow": (lambda: group.transport.all_reduce(x, "sum", call), count),
        "collectives": (lambda: collectives.all_reduce(x, group, call.name, inplace=True), count),
        "gloo": (lambda: dist.all_reduce(x), max(count // 8, 40)),
    }
    if other is not None:
        ways["deepspeed"] = (lambda: other(x), count)
    for name, (way, _) in ways.items():
        x.fill_(group.rank + 1)
        way()
        assert bool((x == group.size * (group.size + 1) / 2).all()), f"{name}: a wrong sum"
    x.zero_()
    times: dict[str, list[float]] = {name: [] for name in ways}
    turns = 4
    for _ in range(turns):
        for name, (way, number) in ways.items():
            for warm in (True, False):
                for _ in range(max(number // turns // (10 if warm else 1), 3)):
                    start = time.perf_counter()
                    way()
                    if not warm:
                        times[name].append(time.perf_counter() - start)
    return {name: percentiles(seconds) for name, seconds in times.items()}


# ---- The parent ----


def floor_program(directory: str) -> Path:
    out = Path(directory) / "floor"
    command = [*compiler_command(), "-O3", "-march=native", "-std=gnu11", str(Path(__file__).parent / "floor.c"), "-o", str(out)]
    subprocess.run(command, check=True)
    return out


def floor(program: Path, nbytes: int, dtype: torch.dtype, count: int, cpus: list[int]) -> dict[str, tuple[float, float]]:
    command = [str(program), str(nbytes), str(dtype.itemsize), str(count), str(cpus[0]), str(cpus[1])]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (float(median), float(high)) for name, median, high in map(str.split, lines)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    arguments = options.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(arguments.ranks):
        ours, theirs = context.Pipe()
        place = (theirs, store.port, rank, arguments.ranks, cpus[rank % len(cpus)])
        processes.append(context.Process(target=rank_main, args=place, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    (about, with_deepspeed), *_ = [pipe.recv() for pipe in pipes]
    print(f"{arguments.ranks} ranks on {len(cpus)} processors; {about}")
    with_floor = arguments.ranks == 2 and len(cpus) > 1
    columns = ["colrow", "collectives", "gloo", *(("deepspeed",) if with_deepspeed else ()), *(FLOORS if with_floor else ())]
    print("median / 99th percentile, microseconds\n" + f"{'bytes':>9} {'dtype':<9}" + "".join(f"{name:>20}" for name in columns))
    with tempfile.TemporaryDirectory() as directory:
        program = floor_program(directory) if with_floor else None
        for dtype in DTYPES:
            for nbytes in SIZES:
                count = rounds(nbytes, arguments.quick)
                cells = floor(program, nbytes, dtype, count, cpus) if program else {}
                for pipe in pipes:
                    pipe.send((nbytes, dtype, count))
                measured, *_ = [pipe.recv() for pipe in pipes]
                cells |= measured
                text = "".join(f"{f'{cells[name][0]:.1f} / {cells[name][1]:.1f}':>20}" for name in columns)
                print(f"{nbytes:>9} {str(dtype).removeprefix('torch.'):<9}{text}", flush=True)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    remove_what_deepspeed_left(store.port)


if __name__ == "__main__":
    main()
