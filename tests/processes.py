"""Processes that tests start: which there are, and that none of them is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 5.0  # in which no process may be left


def gone(pid: int) -> bool:
    """Ended, or ended and not yet collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """The running processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def session(leader: int) -> list[int]:
    """The running processes of the session that `leader` began: itself, ranks, helpers of multiprocessing."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def all_gone(pids: list[int]) -> bool:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not all(map(gone, pids)):
        time.sleep(0.05)
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # a failing test leaves nothing behind either
    return not left


def ranks_left() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}
