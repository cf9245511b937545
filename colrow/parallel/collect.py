"""The whole model's parameters and gradients from the ranks' pieces: for tests, verify, and small models' checkpoints.

Collectives: every rank must call. Each rank gets everything, or only rank 0 with `everywhere=False` (the others get an empty dict, though
the bytes pass them; exporting large models is checkpoint/export's business). What a rank holds whole is returned as it is, not copied.
"""

from __future__ import annotations

import torch
from torch import nn

from ..comm import collectives
from ..comm.group import Group
from ..partition import Partition
from .state import state_of


def whole_parameters(model: nn.Module, everywhere: bool = True) -> dict[str, torch.Tensor]:
    """Each parameter of the plan under its name, whole, detached. Of copies the lowest rank's is taken."""
    return _collect(model, {n: _piece(model, n) for n in state_of(model).plan.tensors}, "parameters", everywhere)


def whole_gradients(model: nn.Module, everywhere: bool = True) -> dict[str, torch.Tensor]:
    """Each gradient under its parameter's name, whole. Parameters without a gradient on any rank are left out."""
    state = state_of(model)
    mine = {name: model.get_parameter(name).grad for name in state.plan.tensors}
    present = set().union(*collectives.gather_objects({n for n, g in mine.items() if g is not None}, state.group, "gradients.present"))
    found = {n: torch.zeros_like(model.get_parameter(n)) if g is None else g for n, g in mine.items() if n in present}
    return _collect(model, {n: g.detach() for n, g in found.items()}, "gradients", everywhere)


def whole_tensor(piece: torch.Tensor, partition: Partition, group: Group, name: str) -> torch.Tensor:
    """One tensor from the ranks' pieces of it. A tensor that every rank holds is returned as it is, not copied."""
    if partition.dim is None or group.size == 1:
        return piece
    sizes = [partition.local_size(rank) for rank in range(group.size)]
    beside = collectives.all_gather(piece, group, name, partition.dim, sizes)
    return partition.merge(beside.split(sizes, partition.dim))


def _piece(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter, or what stands for one that is kept in another form (kept.py)."""
    layer, _, leaf = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(layer), leaf)
    return found.detach()


def _collect(model: nn.Module, pieces: dict[str, torch.Tensor], what: str, everywhere: bool) -> dict[str, torch.Tensor]:
    state, out = state_of(model), {}
    for name, piece in pieces.items():
        whole = whole_tensor(piece, state.plan.tensors[name].partition, state.group, f"{what}.{name}")
        if everywhere or state.group.rank == 0:
            out[name] = whole
    return out
