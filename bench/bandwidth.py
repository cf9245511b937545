"""How fast processes of this machine read memory, by bench/read.c: the bound of decoding."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from colrow.native import compiler_command

BYTES, ROUNDS = 512 << 20, 7


def cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def read_bandwidth(processes: int) -> float:
    """GB/s of all processes together, each on a core of its own."""
    command = [str(_program()), str(BYTES), str(ROUNDS), *map(str, cpus()[:processes])]
    return sum(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


@functools.cache
def _program() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="read-")
    _kept.append(directory)
    program, source = Path(directory.name) / "read", Path(__file__).parent / "read.c"
    subprocess.run([*compiler_command(), "-O3", "-march=native", "-std=gnu11", str(source), "-o", str(program)], check=True)
    return program


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
