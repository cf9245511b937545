"""The size of a gradient that lies on several ranks, and clipping to it.

A rank's own pieces are not enough, and the sum over all ranks' pieces is too much: what every rank holds (norms, row biases) would count
once per rank, and a copied KV head once per copy; clipping would then depend on the number of ranks. So each element is counted by its
lowest holder alone (`Partition.owned`), a tied parameter under its one name, and one small all-reduce gives every rank the same number.

These functions take parameters by name, because an optimizer may hold others than the model's (master.py). They expect gradients that are
complete on each rank, as parallel/gradients.py leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..parallel.state import state_of
from ..partition import Partition
from ..planning.plan import Plan

Parameters = Mapping[str, torch.Tensor]
SMALL = 1e-6  # added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get a gradient, tied ones once, under the plan's names. UserError where the plan does not know one."""
    plan, found = state_of(model).plan, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[plan.tensor(name).name] = parameter
    return found


def owned(tensor: torch.Tensor, partition: Partition, rank: int) -> Iterator[torch.Tensor]:
    """Views of those parts of the rank's piece that it alone has to count: over all ranks each element once."""
    if partition.dim is None:
        if rank == 0:
            yield tensor
        return
    for start, stop in partition.owned(rank):
        at = partition.local_offset(rank, start)
        assert at is not None
        yield tensor.narrow(partition.dim, at, stop - start)


def grad_norm(parameters: Parameters, plan: Plan, group: Group, kind: float = 2.0) -> torch.Tensor:
    """The norm of the whole model's gradient, all elements taken as one vector: a float64 scalar with the same bits on every rank.

    `kind` 2 is the Euclidean norm, `math.inf` the largest magnitude; any number above 0 works. Parameters without a gradient count as 0.
    """
    if not kind > 0:
        raise UserError("the kind of a norm must be above 0", kind, "2.0 or math.inf")
    parts = [
        torch.linalg.vector_norm(piece, kind, dtype=torch.promote_types(piece.dtype, torch.float32)).double()
        for name, parameter in parameters.items()
        if parameter.grad is not None
        for piece in owned(parameter.grad, plan.tensor(name).partition, group.rank)
        if piece.numel()
    ]
    mine = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=group.device)
    if math.isinf(kind):
        return collectives.all_reduce(mine.max(), group, "grad_norm", op="max")
    return collectives.all_reduce(mine.pow(kind).sum(), group, "grad_norm").pow(1 / kind)


def scale_to(parameters: Parameters, norm: torch.Tensor, max_norm: float) -> None:
    """Gradients times max_norm / norm where the norm is larger: the same factor on every rank, so that replicas stay equal."""
    factor = (max_norm / (norm + SMALL)).clamp(max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, torch.promote_types(parameter.grad.dtype, torch.float32)))


def clip_grad_norm(model: nn.Module, max_norm: float, kind: float = 2.0) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a split model: the norm before clipping, the same on every rank. A collective of all ranks."""
    state, parameters = state_of(model), trainable(model)
    norm = grad_norm(parameters, state.plan, state.group, kind)
    scale_to(parameters, norm, max_norm)
    return norm
