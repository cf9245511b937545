"""Data parallelism around tensor parallelism: `dp` replicas of a model that is split over `tp` ranks each.

    torchrun --nproc-per-node 4 program.py                  # on one host, or with --nnodes on several

    replicas = Replicas.join(dp=2, tp=2)
    model = colrow.load(path, replicas.group)                # split over this replica's ranks
    ddp = replicas.wrap(model)                               # torch's own DistributedDataParallel over the mesh's dim "dp"
    loss = backward(ddp, batches, replicas=replicas.size, total=replicas.total(batches))

Rank r of the world is rank r % tp of replica r // tp, so that a replica's ranks, which talk most, are neighbours on one host. Gradients of
split work are summed inside the replica as they arrive; DDP averages what then is whole over the replicas. A `backward` that divides by the
tokens of all replicas makes that average the mean over tokens. The mesh is an ordinary DeviceMesh with dims "dp" and "tp".

Parameters in 16 bits need their masters (master.py): what is averaged is the masters' float32 gradients, by a hook in DDP's own buckets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..comm import collectives, launch
from ..comm.group import Group, deadline
from ..errors import ColrowError, UserError
from .master import MasterWeights
from .step import Batch, count_tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Replicas:
    """Replica `index` of `size`; `group`: its ranks; `world`: all ranks of all replicas. `mesh` None: one replica, without DDP."""

    index: int
    size: int
    group: Group
    world: Group
    mesh: DeviceMesh | None

    @staticmethod
    def join(dp: int, tp: int, backend: str = "auto") -> Replicas:
        """A collective of all that torchrun has started. UserError where they are not dp x tp."""
        if min(dp, tp) < 1:
            raise UserError("dp and tp must be at least 1", f"dp={dp} tp={tp}", "dp=2, tp=2")
        if not launch.under_torchrun():
            raise UserError("data parallelism needs torchrun", works=f"torchrun --nproc-per-node {dp * tp} program.py")
        started = int(os.environ["WORLD_SIZE"])
        if started != dp * tp:
            raise UserError(f"dp={dp} times tp={tp} are {dp * tp} ranks, and torchrun started", started, f"--nproc-per-node {dp * tp}")
        return Replicas.of(launch.join(backend), dp)

    @staticmethod
    def of(world: Group, dp: int) -> Replicas:
        """`dp` replicas of the ranks of `world`, whose number dp must divide. A collective of all of them."""
        tp, left = divmod(world.size, dp)
        if left:
            raise UserError(f"{world.size} ranks are no whole number of replicas", f"dp={dp}", "a number of ranks that dp divides")
        _process_group(world)
        mesh = init_device_mesh(world.device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        groups = [world.sub(range(start, start + tp)) for start in range(0, dp * tp, tp)]
        mine = next(group for group in groups if group is not None)
        return Replicas(world.rank // tp, dp, mine, world, mesh)

    @staticmethod
    def single(group: Group) -> Replicas:
        """One replica, which is the whole group: nothing more is started or communicated."""
        return Replicas(0, 1, group, group, None)

    def wrap(self, model: nn.Module, master: MasterWeights | None = None, **options: Any) -> nn.Module:
        """The model under DDP over the replicas; itself where there is one. All replicas must hold the same weights.

        `master`: the masters that the optimizer holds, needed where parameters have 16 bits. UserError without them. `options` are DDP's:
        a model that leaves parameters unused needs `find_unused_parameters`.
        """
        if self.size == 1:
            return model
        small = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad and p.element_size() < 4]
        if small and master is None:
            raise UserError(f"replicas in 16 bits need masters, and {small[0][0]} is", small[0][1], "wrap(model, MasterWeights(model))")
        device = [self.group.device] if self.group.device.type == "cuda" else None
        assert self.mesh is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its name is about to change, and not what we ask for
            ddp = DistributedDataParallel(model, device, process_group=self.mesh.get_group("dp"), broadcast_buffers=False, **options)
        if small:
            assert master is not None
            between, masters = self.mesh.get_group("dp"), master.of_parameters()
            ddp.register_comm_hook(None, lambda _, bucket: _average(between, masters, bucket))
        return ddp

    def rows(self, window: Sequence[Any]) -> list[Any]:
        """This replica's share of a step's rows."""
        return list(window[self.index :: self.size])

    def total(self, batches: Sequence[Batch]) -> int:
        """Tokens that the loss counts, of all replicas."""
        return int(self.sum(sum(map(count_tokens, batches))))

    def sum(self, number: float) -> float:
        """Over the replicas, the same on all ranks: of shares of a loss, as `backward` returns them, the loss."""
        if self.mesh is None:
            return number
        out = torch.tensor(number, dtype=torch.float64, device=self.group.device)
        dist.all_reduce(out, group=self.mesh.get_group("dp"))
        return float(out)

    def together(self, make: Callable[[], T], name: str) -> T:
        """`make()` on every replica. A ColrowError of one replica is raised on all ranks, which else would wait for it. A collective."""
        if self.size == 1:
            return make()
        made, problem = None, None
        try:
            made = make()
        except ColrowError as error:
            problem = error
        problems = [p for p in collectives.gather_objects(problem, self.world, name) if p is not None]
        if problems:
            raise problems[0]
        return made  # type: ignore[return-value]

    def once(self, make: Callable[[], T], name: str) -> T | None:
        """`make()` on the first replica alone, None on the others: what is alike on all and need be done once, such as a checkpoint."""
        return self.together(lambda: make() if self.index == 0 else None, name)


def _process_group(world: Group) -> None:
    """torch's default process group, which DDP and meshes are made of. gloo and NCCL have it already; shared memory does without."""
    if dist.is_initialized():
        return
    if launch.under_torchrun():
        dist.init_process_group("gloo")
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    port = collectives.broadcast_object(store.port if store is not None else None, world, "replicas.port")
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=deadline()))


def _average(group: Any, masters: dict[torch.Tensor, nn.Parameter], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook for a bucket that is complete. Gradients in 16 bits have moved to their masters by then, in whose `.grad` they are
    averaged; the bucket holds zeros in their place. Those of 32 bits are in the bucket, as ever."""
    held = [masters[p] for p in bucket.parameters() if p in masters]
    for master in held:
        if master.grad is None:  # not used on this replica in this step
            master.grad = torch.zeros_like(master)
    flat = torch.cat([m.grad.flatten() for m in held if m.grad is not None]) if held else bucket.buffer()
    work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)

    def done(_: Any) -> torch.Tensor:
        for master, mean in zip(held, flat.split([m.numel() for m in held]) if held else (), strict=True):
            assert master.grad is not None
            master.grad.copy_(mean.view_as(master.grad))
        return bucket.buffer()

    return work.get_future().then(done)
