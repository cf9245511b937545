"""Starting ranks: in this process, as processes of this host, or as what torchrun has started.

    results = launch.spawn(fn, 2, (arg,))           # fn(group, arg) in two new processes
    results = launch.run(fn, 2, (arg,))             # the same; in this process for one rank; in place under torchrun
    for item in launch.stream(fn, 2, (arg,)): ...   # what rank 0's fn yields, as it comes

`fn` is at the top level of a module. This process is never forked; the ranks are, from a new one. Each is pinned to cores // ranks cores,
and has a thread for each or as few as OMP_NUM_THREADS says. Standard input and output of rank 0 are this process's. The first failing
rank's error is raised, a UserError as it was; no process is left behind, also when this one is killed. See ranks.py for how, and for ranks
that are kept for several jobs.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import heap
from .ranks import Ranks, check_size

if TYPE_CHECKING:
    from .group import Group


def spawn(fn: Callable[..., Any], size: int, args: Sequence[Any] = (), backend: str = "auto") -> list[Any]:
    """`fn(group, *args)` in `size` new processes; the results in rank order. `backend`: "auto", "shm", "gloo" or "nccl"."""
    with Ranks(size, backend, _module_of(fn)) as ranks:
        return ranks.run(fn, args)


def run(fn: Callable[..., Any], size: int, args: Sequence[Any] = (), backend: str = "auto") -> list[Any]:
    """`fn(group, *args)` on `size` ranks; the results in rank order. Under torchrun every process returns all results."""
    if under_torchrun():
        from .collectives import gather_objects

        group = _joined(size, backend)
        return gather_objects(fn(group, *args), group, "results")
    if size == 1:
        return [fn(_alone(backend), *args)]
    return spawn(fn, size, args, backend)


def stream(fn: Callable[..., Iterator[Any]], size: int, args: Sequence[Any] = (), backend: str = "auto") -> Iterator[Any]:
    """What `fn(group, *args)` yields on rank 0 of `size`, as it comes; the others run along. Under torchrun the others yield nothing."""
    if under_torchrun():
        group = _joined(size, backend)
        for item in fn(group, *args):
            if group.rank == 0:
                yield item
    elif size == 1:
        yield from fn(_alone(backend), *args)
    else:
        with Ranks(size, backend, _module_of(fn)) as ranks:
            yield from ranks.stream(fn, args)


def _module_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    """What the ranks need for `fn`, so that it is imported once for all of them."""
    name = getattr(fn, "__module__", None)
    return (name,) if name and name != "__main__" else ()


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(backend: str = "auto") -> Group:
    """The group of the processes that torchrun (or anything that sets its variables) has started. Made once, then remembered.

    NCCL with GPU number LOCAL_RANK where there are GPUs; else shared memory where all ranks are on this host; else gloo.
    """
    if not _made:
        _made.append(_join(backend))
    return _made[0]


_made: list[Group] = []  # the process's world: torch allows only one, and it lives as long as the process


def _join(backend: str) -> Group:
    from torch.distributed import rendezvous

    from .dist import join_ranks

    rank, size, local_rank = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", "0")
    if not 0 <= rank < size:
        raise UserError("RANK must be below WORLD_SIZE", f"RANK={rank} WORLD_SIZE={size}", "torchrun --nproc-per-node 2 ...")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"{name} is not set", works="torchrun --nproc-per-node 2 ...")
    store, _, _ = next(rendezvous("env://"))
    atexit.register(_leave)
    return join_ranks(rank, size, store, backend, local_rank, one_host=_number("LOCAL_WORLD_SIZE", "0") == size)


def _leave() -> None:
    """Ends torch's process group before the interpreter ends: the threads of gloo would abort it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal():
        raise UserError(f"{name} must be a number", text or "nothing", "torchrun --nproc-per-node 2 ...")
    return int(text)


def _joined(size: int, backend: str) -> Group:
    check_size(size)
    heap.keep()
    group = join(backend)
    if group.size != size:
        raise UserError(f"{size} ranks were asked for and torchrun started", group.size, f"--tp {group.size}")
    return group


def _alone(backend: str) -> Group:
    from .group import single

    heap.keep()
    if backend != "nccl":
        import torch

        if backend != "auto" or not torch.cuda.is_available():
            return single()
    return single("cuda")
