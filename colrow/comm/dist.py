"""How processes find each other and become a `Group`: over shared memory, gloo or NCCL.

    group = join_ranks(rank, size, store, backend)        # a torch Store that all ranks reach

gloo and NCCL use torch's default process group, so that DDP and DeviceMesh can be used beside colrow. Not here: who starts the ranks
(launch.py), the messages (gloo.py, cuda.py), the memory (shm.py).
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import UserError
from .cuda import CudaTransport
from .gloo import GlooTransport
from .group import CPU, Group, deadline, single


def join_ranks(
    rank: int, size: int, store: dist.Store, backend: str = "auto", local_rank: int | None = None, one_host: bool = True
) -> Group:
    """The group of `size` processes that all call this with the same store. A collective.

    `backend` "auto": NCCL where every rank of this host has a GPU of its own (number `local_rank`), else shared memory on one host, else
    gloo, with a line on rank 0 that says why not shared memory. UserError where another one was asked for and cannot be had.
    """
    gpu = rank if local_rank is None else local_rank
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" or (backend == "auto" and gpu < gpus and (size <= gpus or not one_host)):
        if gpu >= gpus:
            raise UserError(f"NCCL needs one GPU per rank and rank {rank} has none", f"{gpus} GPUs", "--backend gloo")
        device = torch.device("cuda", gpu)
        return single(device) if size == 1 else connect(rank, size, store, device)
    if size == 1:
        return single()
    if backend in ("auto", "shm") and one_host:
        group = _shared_memory(rank, size, store)
        if isinstance(group, Group):
            return group
        if backend == "shm":
            raise UserError("the ranks cannot share memory", group, "--backend gloo")
        if rank == 0:
            print(f"colrow: ranks talk over gloo, since they cannot share memory: {group}", file=sys.stderr)
    elif backend == "shm":
        raise UserError("the ranks cannot share memory", "several hosts", "--backend gloo")
    return connect(rank, size, store)


def _shared_memory(rank: int, size: int, store: dist.Store) -> Group | str:
    """The group, or why there is none: the same on all ranks."""
    from .shm import ShmTransport
    from .shm_setup import ShmUnavailable

    try:
        return Group(rank, size, ShmTransport.create(rank, size, store, deadline=deadline()), CPU, tuple(range(size)))
    except ShmUnavailable as error:
        return str(error)


def connect(rank: int, size: int, store: dist.Store, device: torch.device = CPU) -> Group:
    """Joins torch's default process group: gloo, and NCCL too where `device` is a GPU, which becomes the current one. A collective."""
    patience = timedelta(seconds=deadline())
    ranks = tuple(range(size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=patience, device_id=device)
        return Group(rank, size, CudaTransport(ranks, rank), device, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    return Group(rank, size, GlooTransport(ranks, rank), device, ranks)
