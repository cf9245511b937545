"""The plan's regions as hooks at module borders: f, g, gathers, and sums that wait.

A region says where a tensor changes its state: at a named input or output of a module. Row-parallel layers and vocabulary-parallel
embeddings reduce by themselves (the bias comes after the sum), so their regions are not hooked here. Hooks see the module's call as it is
(positional or by keyword; a tensor, a tuple or a dict), and replace just the one tensor.

A hook on an input uses the model's memory of copies: modules that are given the same tensor share one f.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning.plan import Plan, Region
from . import once
from .pending import Due, Pending, settled
from .state import State, is_head

Change = Callable[[Any], Any]
"""Of a tensor, or of a sum that waits, into one of the two."""


def install(model: nn.Module, state: State, region: Region) -> None:
    """Hooks one region. A collective where it has sub-groups: every rank must install the regions in the plan's order."""
    module = model.get_submodule(region.module)
    change = _change(state, region)
    if region.place == "input":
        module.register_forward_pre_hook(on_input(module, region.arg, change), with_kwargs=True)
    else:
        module.register_forward_hook(on_output(region.arg, change))


def forget_copies(model: nn.Module, state: State) -> None:
    """At the model's own border: nothing is remembered from one call to the next."""

    def before(*_: Any) -> None:
        state.copies.forget()
        if state.sums is not None:
            state.sums.ensure()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(lambda *_: state.copies.forget(), always_call=True)


def due(state: State, hold: Region) -> Due:
    """The reduction that a sum waits for."""
    region = awaited(state.plan, hold)
    scattered = state.sequence is not None and region in state.sequence.cut.regions
    return Due(region.name, state.group, _sum(state, region), scattered)


def awaited(plan: Plan, hold: Region) -> Region:
    """UserError where the plan does not have the reduction that a region waits for."""
    for region in plan.regions:
        if region.op == "reduce" and region.name == hold.shares and not region.ranks:
            return region
    raise UserError(f"{hold.name} waits for a reduction that the plan does not have", hold.shares, "the name of one of all ranks")


def _sum(state: State, region: Region) -> Change:
    """g; under sequence parallelism the rank's slice of the sum."""
    group, name, sequence = _group(state.group, region), region.name, state.sequence
    if sequence is not None and region in sequence.cut.regions:
        return lambda x: sequence.scatter(x, name)
    return lambda x: regions.reduce_from(x, group, name)


def _change(state: State, region: Region) -> Change:
    if region.op == "reduce":
        waits = any(r.op == "hold" and r.shares == region.name for r in state.plan.regions)
        return settled if waits else _sum(state, region)
    if region.op == "hold":
        sum_of_all = due(state, region)
        return lambda x: Pending(x, None, sum_of_all)
    change = _of_value(state, region)
    return lambda x: change(settled(x))  # a sum that was due at another module's input, and is settled there


def _of_value(state: State, region: Region) -> Change:
    """f, a gather or a slice: of a tensor that is no sum."""
    group, name = _group(state.group, region), region.name
    sequence = state.sequence
    if sequence is not None and region in sequence.cut.regions:
        return lambda x: sequence.gather(x, name)
    if region.op == "copy" and region.place == "input":
        return lambda x: state.copies.copy(x, group, name)
    if region.op == "copy":
        return lambda x: state.copies.new(x, group, name)
    if region.op == "once":
        return lambda x: x if group.rank == once.FIRST else x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    assert region.partition is not None  # a gather or a slice: check.py has seen to it
    if region.op == "slice":
        return functools.partial(own_part, region.partition, group.rank, name)
    assert region.partition.dim is not None
    dim, sizes = region.partition.dim, [region.partition.local_size(rank) for rank in range(group.size)]
    if is_head(region):
        return lambda x: x if state.sharded_logits else regions.gather_from(x, group, name, _last(x, dim), sizes)
    return lambda x: regions.gather_from(x, group, name, _last(x, dim), sizes)


def own_part(partition: Partition, rank: int, name: str, x: torch.Tensor) -> torch.Tensor:
    """The rank's part of each stretch of `partition.size` along the dim. UserError where the dim does not consist of such stretches."""
    assert partition.dim is not None
    dim = _last(x, partition.dim)
    if x.shape[dim] == 1 < partition.size:
        return x  # the same for all
    if x.shape[dim] % partition.size:
        raise UserError(f"{name} does not consist of stretches of {partition.size}", tuple(x.shape), "a dim that is a multiple of it")
    stretches = x.unflatten(dim, (-1, partition.size))
    return Partition(dim + 1, partition.pieces).split(stretches, rank).flatten(dim, dim + 1)


def _last(x: torch.Tensor, dim: int) -> int:
    return dim if dim >= 0 else x.dim() + dim


def _group(group: Group, region: Region) -> Group:
    """The ranks among which this rank's part of the region works. All sub-groups are made, in order, on every rank."""
    subs = [group.sub(ranks) for ranks in region.ranks]
    return next((sub for sub in subs if sub is not None), group)


def on_input(module: nn.Module, arg: str, change: Change) -> Callable[..., Any]:
    names = list(inspect.signature(module.forward).parameters)
    position = int(arg) if arg.isdigit() else names.index(arg) if arg else 0
    name = names[position]

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if kwargs.get(name) is not None:
            return args, {**kwargs, name: change(kwargs[name])}
        if position < len(args) and args[position] is not None:
            return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
        return None  # an optional input that this call does not have

    return hook


def on_output(arg: str, change: Change) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, torch.Tensor | Pending):
            return change(output)
        if isinstance(output, dict):  # ModelOutput too
            key = arg if arg in output else list(output)[int(arg or 0)]
            output[key] = change(output[key])
            return output
        at = int(arg or 0) if arg.isdigit() or not arg else _place_in_tuple(output)
        return (*output[:at], change(output[at]), *output[at + 1 :])

    return hook


def _place_in_tuple(output: tuple) -> int:
    """Where the logits are with return_dict=False: transformers puts the loss, a scalar, before them."""
    return 1 if isinstance(output[0], torch.Tensor) and output[0].dim() == 0 else 0
