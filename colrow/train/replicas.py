"""Data parallelism around tensor parallelism: `dp` replicas of a model that is split over `tp` ranks each, under torchrun.

    torchrun --nproc-per-node 4 program.py                  # on one host, or with --nnodes on several

    replicas = Replicas.join(dp=2, tp=2)
    model = colrow.load(path, replicas.group)                # split over this replica's ranks
    ddp = replicas.wrap(model)                               # torch's own DistributedDataParallel over the mesh's dim "dp"
    loss = backward(ddp, batches, replicas=replicas.size, total=replicas.total(batches))

Rank r of the world is rank r % tp of replica r // tp, so that a replica's ranks, which talk most, are neighbours on one host. Gradients of
split work are summed inside the replica as they arrive; DDP averages what then is whole over the replicas. A `backward` that divides by the
tokens of all replicas makes that average the mean over tokens. The mesh is an ordinary DeviceMesh with dims "dp" and "tp".

Parameters must be of 32 bits or more: DDP averages after the hook that moves a 16-bit gradient to its master has run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..comm import launch
from ..comm.group import Group
from ..errors import UserError
from .step import Batch, count_tokens


@dataclass(frozen=True)
class Replicas:
    """Replica `index` of `size`; `group`: its ranks."""

    index: int
    size: int
    group: Group
    mesh: DeviceMesh

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
        world = launch.join(backend)
        kind = world.device.type
        if not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        mesh = init_device_mesh(kind, (dp, tp), mesh_dim_names=("dp", "tp"))
        groups = [world.sub(range(start, start + tp)) for start in range(0, dp * tp, tp)]
        mine = next(group for group in groups if group is not None)
        return Replicas(world.rank // tp, dp, mine, mesh)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model under DDP over the replicas; itself where there is one. All replicas must hold the same weights."""
        if self.size == 1:
            return model
        small = next((name for name, p in model.named_parameters() if p.requires_grad and p.element_size() < 4), None)
        if small is not None:
            dtype = model.get_parameter(small).dtype
            raise UserError(f"replicas are trained in 32 bits, {small} has another dtype", dtype, "dtype float32, with torch.autocast")
        device = [self.group.device] if self.group.device.type == "cuda" else None
        return DistributedDataParallel(model, device, process_group=self.mesh.get_group("dp"), broadcast_buffers=False, **options)

    def rows(self, window: Sequence[Any]) -> list[Any]:
        """This replica's share of a step's rows."""
        return list(window[self.index :: self.size])

    def total(self, batches: Sequence[Batch]) -> int:
        """Tokens that the loss counts, of all replicas."""
        return int(self._sum(sum(map(count_tokens, batches))))

    def mean(self, share: float) -> float:
        """The loss of the step from the shares that `backward` returned."""
        return self._sum(share)

    def _sum(self, number: float) -> float:
        out = torch.tensor(number, dtype=torch.float64, device=self.group.device)
        dist.all_reduce(out, group=self.mesh.get_group("dp"))
        return float(out)
