"""Real processes as ranks over shared memory, for tests/test_shm*.py and bench/soak.py.

`run_ranks(fn, size, *args)` calls `fn(transport, *args)` in `size` fresh processes and says how each one ended. They come from a fork
server that has imported torch once, so a run costs a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from colrow.comm.shm import ShmTransport

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "colrow.comm.shm", "colrow.comm.shm_check", "tests.shm_ranks"])


@dataclass(frozen=True)
class Ended:
    """How a rank ended: `value` returned, or `error` raised (its type's name) with `text`, or the exit code of a killed process."""

    value: Any = None
    error: str = ""
    text: str = ""
    exitcode: int = 0
    at: float = 0.0  # time.monotonic() when it ended


class Ranks:
    """Processes that run; `wait` ends them all."""

    def __init__(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(theirs, self.store.port, rank, size, fn, args, options), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def until(self, key: str) -> None:
        """Waits until a rank has set `key` with `mark`."""
        self.store.wait([key], timedelta(seconds=60))

    def wait(self, seconds: float = 120.0, kill: bool = True) -> list[Ended]:
        limit, results = time.monotonic() + seconds, []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            ended = None
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll(max(limit - time.monotonic(), 0)):
                    ended = pipe.recv()
            process.join(max(limit - time.monotonic(), 0.5) if ended is None else 10.0)
            if process.is_alive() and kill:
                process.kill()
                process.join()
                ended = ended or Ended(error="Hang", text=f"still running after {seconds} s", at=time.monotonic())
            results.append(ended or Ended(error="Killed", exitcode=process.exitcode or 0, at=time.monotonic()))
        return results


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, seconds: float = 120.0, **options: Any) -> list[Any]:
    """The values that `fn` returned, in rank order; AssertionError where a rank did not return one. `options` go to ShmTransport.create."""
    ended = Ranks(fn, size, *args, **options).wait(seconds)
    for rank, end in enumerate(ended):
        assert not end.error, f"rank {rank}: {end.error}: {end.text} {end.exitcode or ''}"
    return [end.value for end in ended]


def mark(transport: ShmTransport, key: str) -> None:
    """Tells the test that this point has been reached."""
    _stores[0].set(key, "1")


_stores: list[dist.Store] = []


def _main(pipe: Any, port: int, rank: int, size: int, fn: Callable[..., Any], args: tuple, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        _stores.append(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)))
        with contextlib.closing(ShmTransport.create(rank, size, _stores[0], **options)) as transport:
            ended = Ended(fn(transport, *args))
    except BaseException as error:
        text = str(error) if type(error).__module__.startswith("colrow") else traceback.format_exc()
        ended = Ended(error=type(error).__name__, text=text)
    pipe.send(Ended(ended.value, ended.error, ended.text, at=time.monotonic()))
