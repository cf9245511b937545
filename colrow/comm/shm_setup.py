"""How the ranks of one host come to share memory, without a name that could be left behind.

One rank makes a memfd (a file without a name that lives as long as a process has it open or mapped) and reserves its pages, so that no
later access can fail. The others open it through /proc/PID/fd, or get it passed over an abstract socket, which has no file either. A random
token in the mapping proves that it is the one that was meant. All ranks then vote: they use the mapping together or not at all.

    rendezvous.set(key, text); rendezvous.get(key) -> bytes, waiting until the key is there

is all that is asked of a rendezvous; a torch.distributed Store has it. Keys are used once: give each world a prefix of its own.

Not here: what is done with the memory (shm.c), the transport (shm.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..native import SHM, NativeUnavailable

RESERVE = 64 << 20  # bytes of memory that stay free when the pages are reserved


class Rendezvous(Protocol):
    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...


class ShmUnavailable(Exception):
    """Shared memory cannot be used by this group; the text is one line that says why, the same on all ranks."""


@dataclass(frozen=True)
class Mapping:
    """The shared memory of one group as this rank sees it."""

    library: ctypes.CDLL
    base: int
    nbytes: int
    slot_bytes: int
    pids: tuple[int, ...]  # of all ranks
    crowded: bool  # there are more ranks than processors they may run on


def load_library() -> ctypes.CDLL:
    """The C library with the types of its functions declared. NativeUnavailable where it cannot be had."""
    library = SHM.load()
    pointer, u64, i64, i32, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "cr_bytes": (u64, (i32, u64)),
        "cr_format": (None, (pointer, i32, u64, text)),
        "cr_differs": (i32, (pointer, i32, u64, text)),
        "cr_map": (pointer, (i32, u64)),
        "cr_unmap": (None, (pointer, u64)),
        "cr_open": (pointer, (pointer, i32, i32, u64, pointer, pointer, i32)),
        "cr_site": (i32, (pointer, text)),
        "cr_forget_sites": (None, (pointer,)),
        "cr_buffer": (pointer, (pointer, u64)),
        "cr_give_up": (None, (pointer, text)),
        "cr_close": (None, (pointer,)),
        "cr_all_reduce": (i64, (pointer, pointer, pointer, u64, i32, i32, i32)),
        "cr_reduce_norm": (i64, (pointer, pointer, pointer, pointer, pointer, u64, u64, i32, ctypes.c_float, i32)),
        "cr_all_gather": (i64, (pointer, pointer, pointer, pointer, i32, u64, i32, i32)),
        "cr_reduce_scatter": (i64, (pointer, pointer, pointer, pointer, i32, u64, i32)),
        "cr_broadcast": (i64, (pointer, pointer, u64, i32, i32, i32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def share(rank: int, size: int, slot_bytes: int, exchange: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Mapping:
    """The mapping of `size` ranks, made by rank 0. `exchange(value)` returns the values of all ranks in rank order, as a collective.

    ShmUnavailable, with the same text on all ranks, where any of them cannot.
    """
    offer: dict[str, Any] = {"pid": os.getpid(), "host": _host(), "cpus": sorted(os.sched_getaffinity(0)), "quota": _quota()}
    made = None
    with contextlib.ExitStack() as stack:
        try:
            library = load_library()
            nbytes = library.cr_bytes(size, slot_bytes)
            if rank == 0:
                made = _make(library, nbytes, size, slot_bytes, stack)
                offer |= made.offer
        except (OSError, NativeUnavailable) as error:
            offer["error"] = f"rank {rank}: {_text(error)}"
        offers = exchange(offer)
        base, error_text = None, _disagreement(offers)
        if error_text is None:
            try:
                base = made.base if made else _attach(library, nbytes, size, slot_bytes, offers[0])
            except OSError as error:
                error_text = f"rank {rank}: {_text(error)}"
        # The vote, after which rank 0 may close its file: everybody has the mapping, or nobody uses it.
        votes = exchange({"error": error_text})
        error_text = next((vote["error"] for vote in votes if vote["error"]), None)
        if error_text is not None:
            base = base or (made.base if made else None)
            if base is not None:
                library.cr_unmap(base, nbytes)
            raise ShmUnavailable(error_text)
    assert base is not None
    cpus = {cpu for offer in offers for cpu in offer["cpus"]}
    processors = min(len(cpus), offers[0]["quota"])
    return Mapping(library, base, nbytes, slot_bytes, tuple(offer["pid"] for offer in offers), size > processors)


def exchange_over(rendezvous: Rendezvous, rank: int, size: int) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """All ranks' values through a rendezvous; each call uses keys of its own."""
    turn = iter(range(1 << 62))

    def exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
        prefix = f"colrow.shm/{next(turn)}/"
        rendezvous.set(f"{prefix}{rank}", json.dumps(value))
        return [json.loads(rendezvous.get(f"{prefix}{peer}")) for peer in range(size)]

    return exchange


# ---- Making and opening ----


@dataclass(frozen=True)
class _Made:
    base: int
    offer: dict[str, Any]


def _make(library: ctypes.CDLL, nbytes: int, size: int, slot_bytes: int, stack: contextlib.ExitStack) -> _Made:
    """Makes, reserves, maps and lays out the memory. The file stays open, and its socket listens, until `stack` is closed."""
    free = available_memory()
    if nbytes + RESERVE > free:
        raise OSError(f"{size} ranks need {nbytes / 2**20:.1f} MiB of shared memory, {free / 2**20:.1f} MiB are available")
    file = os.memfd_create("colrow", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    os.ftruncate(file, nbytes)
    os.posix_fallocate(file, 0, nbytes)  # every page now: a later access can neither fail nor be killed for want of memory
    base = _map(library, file, nbytes)
    token = secrets.token_hex(16)
    library.cr_format(base, size, slot_bytes, token.encode())
    address = stack.enter_context(_passing(file, size - 1))
    return _Made(base, {"file": file, "token": token, "socket": address})


def _attach(library: ctypes.CDLL, nbytes: int, size: int, slot_bytes: int, offer: dict[str, Any]) -> int:
    problem = ""
    for way in (_open_through_proc, _receive):
        try:
            file = way(offer)
        except OSError as error:
            problem = f"the memory of process {offer['pid']} could not be opened: {_text(error)}"
            continue
        try:
            if os.fstat(file).st_size != nbytes:
                problem = f"process {offer['pid']} offered memory of another size"
                continue
            base = _map(library, file, nbytes)
        finally:
            os.close(file)
        if not library.cr_differs(base, size, slot_bytes, offer["token"].encode()):
            return base
        library.cr_unmap(base, nbytes)
        problem = f"what process {offer['pid']} offered is not this group's memory"
    raise OSError(problem)


def _map(library: ctypes.CDLL, file: int, nbytes: int) -> int:
    base = library.cr_map(file, nbytes)
    if not base:
        raise OSError(f"{nbytes / 2**20:.1f} MiB of shared memory could not be mapped (limit of address space?)")
    return base


def _open_through_proc(offer: dict[str, Any]) -> int:
    return os.open(f"/proc/{offer['pid']}/fd/{offer['file']}", os.O_RDWR | os.O_CLOEXEC)


def _receive(offer: dict[str, Any]) -> int:
    """The file over the socket: works where /proc is not mounted or another process's entries may not be opened."""
    if not offer["socket"]:
        raise OSError("no socket to receive it from")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10.0)
        client.connect("\0" + offer["socket"])
        _, files, _, _ = socket.recv_fds(client, 1, 1)
    if not files:
        raise OSError("no file was passed over the socket")
    return files[0]


@contextlib.contextmanager
def _passing(file: int, peers: int) -> Iterator[str]:
    """A thread passes `file` to whoever connects to the abstract socket of the yielded name ("" where there are no such sockets)."""
    name = "colrow-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.bind("\0" + name)
            server.listen(max(peers, 1))
        except OSError:
            yield ""
            return

        def serve() -> None:
            with contextlib.suppress(OSError):  # the closing of the server ends this
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(OSError):
                        if _user(client) == os.getuid():  # names of sockets are no secret on a host
                            socket.send_fds(client, [b"f"], [file])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield name
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes accept()
            thread.join()


def _user(client: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user


# ---- Can it be used? ----


def available_memory() -> int:
    """Bytes that can still be had: the machine's, or what is left of this process's memory cgroups."""
    found = [1 << 62]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for directory in _cgroups("memory"):
            with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
                free = int((directory / limit).read_text()) - int((directory / used).read_text())
                stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                found.append(free + int(stat.get(cache, 0)))  # cached files give way
    return min(found)


def _quota() -> float:
    """Processors' worth of time that this process's cgroups allow; a container with less than it sees must not spin it away."""
    found = [float("inf")]
    for directory in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            quota, period = (directory / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((directory / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            found.append(int(quota) / int(period) if int(quota) > 0 else float("inf"))
    return min(found)


def _cgroups(controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and all above it; a limit on any of them counts."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup") / (controller if controllers else "")
            place = root / path.lstrip("/")
            yield from (place, *(parent for parent in place.parents if parent.is_relative_to(root)))


def _host() -> str:
    """Equal on ranks that can share memory: the same boot of the same kernel, the same view of process numbers."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
    return " ".join(parts) or socket.gethostname()


def _disagreement(offers: list[dict[str, Any]]) -> str | None:
    for rank, offer in enumerate(offers):
        if "error" in offer:
            return offer["error"]
        if offer["host"] != offers[0]["host"]:
            return f"ranks 0 and {rank} are not on the same host (or see different process numbers)"
    return None


def _text(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
