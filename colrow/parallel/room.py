"""Does every rank have room for its part? Asked before a weight is read: a prediction, so that nobody is killed half-way.

A rank's part is its parameters, to the byte of the plan. The room is what is left of the process' own limits (RLIMIT_DATA, RLIMIT_AS), of
its control group's, and of the host's memory; on a GPU what is free there. Only what cannot work is refused: whether cache and activations
fit beside the parameters depends on what will be asked (planning/memory.py).
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..errors import UserError
from ..planning import cost
from ..planning.plan import Plan

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """`free` bytes that all ranks with the same `shared` take from together; `what` in words. `own`: no other rank has the same."""

    what: str
    shared: tuple[str, ...]
    free: int
    own: bool = False


def check(plan: Plan, dtype: torch.dtype, group: Group) -> None:
    """UserError, the same on every rank, where the parameters of some rank do not fit. A collective."""
    found: list[list[Room]] = gather_objects(list(rooms(group.device)), group, "load.room")
    needs = cost.parameter_bytes(plan, dtype.itemsize)
    for rank, mine in enumerate(found):
        for room in mine:
            beside = [other for other in range(group.size) if any(r.shared == room.shared for r in found[other])]
            need = sum(needs[other] for other in beside)
            if need > room.free:
                raise _refusal(rank, beside, room, need, plan.ranks)


def share(group: Group) -> int:
    """Bytes that this rank may still take if all ranks take as much. No collective: ranks are counted as if all were on this host."""
    found = list(rooms(group.device))
    return min(room.free // (1 if room.own else group.size) for room in found)


def _refusal(rank: int, beside: list[int], room: Room, need: int, ranks: int) -> UserError:
    who = f"rank {rank}'s" if len(beside) == 1 else f"the {len(beside)} ranks'"
    what = f"{who} parameters take {need / 1e9:.2f} GB, and {room.what} leaves {room.free / 1e9:.2f} GB"
    enough = -(-need * ranks // max(room.free, 1))
    more = f"--tp {enough}, each rank with as much" if len(beside) == 1 and enough < 1000 else "more memory, or more hosts"
    return UserError(what, works=more)


def rooms(device: torch.device) -> Iterator[Room]:
    """What limits this process, with what is left of each."""
    host, process = socket.gethostname(), psutil.Process()
    if device.type == "cuda":
        yield Room(f"{device} of {host}", (host, str(device)), torch.cuda.mem_get_info(device)[0], own=True)
        return
    memory = psutil.virtual_memory()
    yield Room(f"the memory of {host} ({memory.total / 1e9:.1f} GB)", (host,), memory.available + psutil.swap_memory().free)
    held = _status()
    for name, limit, used in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, held.get("VmData", 0)),
        ("RLIMIT_AS", resource.RLIMIT_AS, held.get("VmSize", 0)),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            yield Room(f"{name} ({most / 1e9:.2f} GB a process)", (host, name, str(process.pid)), max(most - used, 0), own=True)
    for folder, most, used in cgroups(Path("/proc/self/cgroup"), CGROUPS):
        yield Room(f"the control group ({most / 1e9:.2f} GB)", (host, str(folder)), max(most - used, 0))


def cgroups(listed: Path, root: Path) -> Iterator[tuple[Path, int, int]]:
    """(folder, limit, bytes in use) of this process' memory control groups that have a limit, of both versions. Pages of files count as
    free: the kernel gives them up."""
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = root, ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
            base = root / "memory"
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(base) and (found := _of(folder, *names)) is not None:
                yield folder, *found


def _of(folder: Path, most: str, used: str, *files: str) -> tuple[int, int] | None:
    """None where there is no limit to be read."""
    try:
        limit = int((folder / most).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return (limit, int((folder / used).read_text()) - sum(int(stat.get(name, 0)) for name in files)) if limit < 1 << 60 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _status() -> dict[str, int]:
    """Bytes of the lines of /proc/self/status that are in kB."""
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


def peak_bytes() -> int:
    """The most that was resident of this process. (Not getrusage: there a child starts with its parent's peak.)"""
    return _status().get("VmHWM") or psutil.Process().memory_info().rss
