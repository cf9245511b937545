"""How fast processes of this machine read memory, by bench/read.c: the bound of decoding."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from colrow.checkpoint import pages
from colrow.native import compiler_command

BYTES, ROUNDS = 512 << 20, 7
WORD = 8  # bytes


def cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def read_bandwidth(processes: int) -> float:
    """GB/s of all processes together, each on a core of its own."""
    command = [str(_made("read")), str(BYTES), str(ROUNDS), *map(str, cpus()[:processes])]
    return sum(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


class Reader:
    """Memory of so many bytes, in large pages as weights have them, which `threads` threads of this process read."""

    def __init__(self, nbytes: int, threads: int = 1) -> None:
        self._look = ctypes.CDLL(str(_made("read.so", "-shared", "-fPIC"))).look
        self._look.argtypes, self._look.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
        self._parts = [pages.empty([nbytes // threads], torch.uint8).fill_(1) for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def seconds(self) -> float:
        """That reading all of it takes, once."""
        start = time.perf_counter()
        list(self._threads.map(lambda part: self._look(part.data_ptr(), part.nbytes // WORD), self._parts))
        return time.perf_counter() - start


@functools.cache
def _made(name: str, *flags: str) -> Path:
    directory = tempfile.TemporaryDirectory(prefix="read-")
    _kept.append(directory)
    program, source = Path(directory.name) / name, Path(__file__).parent / "read.c"
    subprocess.run([*compiler_command(), "-O3", "-march=native", "-std=gnu11", *flags, str(source), "-o", str(program)], check=True)
    return program


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
