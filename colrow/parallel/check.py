"""Does a plan fit a model, and can it be carried out? Asked before anything is changed and before any weight is read.

A plan may come from a file that was edited by hand, or from a deriver that knows more than the layers here. Whatever cannot be done
exactly is refused with a UserError that names the parameter or module: nothing in a plan is ever ignored. Whether the plan is RIGHT is not
asked here; that is proven by running it (proof/gate).
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

from torch import nn

from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning.models import is_table
from ..planning.plan import Attention, BufferPlan, Edit, Plan, Region, TensorPlan
from . import attention, entries, norm, rows
from .borders import awaited
from .embedding import check_vocab
from .linear import OUTPUT_DIM

AGAIN = "a plan made for this model by colrow plan"


def check(model: nn.Module, plan: Plan, group: Group) -> None:
    """UserError with the first thing that does not fit."""
    if plan.ranks != group.size:
        raise UserError("the plan is for another number of ranks", plan.ranks, f"a plan for {group.size}")
    if plan.architecture not in ("", type(model).__name__):
        raise UserError(f"the plan is for another model than {type(model).__name__}", plan.architecture, AGAIN)
    _check_names(model, plan)
    for entry in plan.tensors.values():
        _check_tensor(model, plan, entry)
    for path in entries.lists(plan):
        if not isinstance(_module(model, path, "an entry"), nn.ModuleList):
            raise UserError("entries that ranks have apart must lie in a list of modules", path, AGAIN)
    for buffer in plan.buffers:
        _check_buffer(model, plan, buffer)
    for region in plan.regions:
        _check_region(model, plan, region)
        if plan.regions.count(region) > 1:
            raise UserError("the plan names a region twice", region.name, "each once")
    for edit in plan.edits:
        _check_edit(model, plan, edit)
    for heads in plan.attention:
        _check_attention(model, plan, heads)


def _check_names(model: nn.Module, plan: Plan) -> None:
    in_model = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    in_plan = {name for name, _ in plan.names()}
    if missing := sorted(in_model - in_plan):
        raise UserError("the plan says nothing about a parameter of the model", missing[0], AGAIN)
    if unknown := sorted(in_plan - in_model):
        raise UserError("the plan names a parameter that the model does not have", unknown[0], AGAIN)
    for entry in plan.tensors.values():
        for alias in entry.aliases:
            if model.get_parameter(alias) is not model.get_parameter(entry.name):
                raise UserError(f"the plan ties {alias} to {entry.name}, the model does not", "two parameters", AGAIN)
    if len(list(model.parameters())) != len(plan.tensors):
        tied = next(e.name for e in plan.tensors.values() if any(_same(model, e, other) for other in plan.tensors.values()))
        raise UserError("the model ties parameters that the plan keeps apart", tied, AGAIN)


def _same(model: nn.Module, entry: TensorPlan, other: TensorPlan) -> bool:
    """Whether two entries of the plan are one parameter of the model."""
    return entry is not other and model.get_parameter(entry.name) is model.get_parameter(other.name)


def _check_tensor(model: nn.Module, plan: Plan, entry: TensorPlan) -> None:
    found = tuple(model.get_parameter(entry.name).shape)
    if found != entry.shape:
        raise UserError(f"the plan has another shape for {entry.name}", entry.shape, f"{found}, the model's")
    cut = entry.partition
    if cut.ranks != plan.ranks:
        raise UserError(f"the partition of {entry.name} is for another number of ranks", cut.ranks, str(plan.ranks))
    if cut.dim is not None and not (0 <= cut.dim < len(found) and cut.size == found[cut.dim]):
        raise UserError(f"the partition of {entry.name} does not cover it", f"{cut.size} indices of dim {cut.dim}", f"the shape is {found}")
    if entry.grad == "partial" and cut.dim is not None:
        raise UserError(f"{entry.name} is cut, its gradient cannot be a part for all ranks", entry.grad, 'grad "whole"')
    if entry.once and (entry.grad != "partial" or entry.aliases):
        raise UserError(f"{entry.name} counts on one rank, so its gradient is a part", entry.grad, 'grad "partial", and no other name')
    for name in (entry.name, *entry.aliases):
        module, _, key = name.rpartition(".")
        _check_cut(plan, model.get_submodule(module), module, key, entry)


def _check_buffer(model: nn.Module, plan: Plan, buffer: BufferPlan) -> None:
    found = dict(model.named_buffers()).get(buffer.name)
    if found is None or tuple(found.shape) != buffer.shape:
        raise UserError(
            f"the plan cuts a buffer {buffer.name} of shape {buffer.shape}", found if found is None else tuple(found.shape), AGAIN
        )
    cut = buffer.partition
    if cut.ranks != plan.ranks or cut.dim is None or cut.size != buffer.shape[cut.dim]:
        raise UserError(f"the partition of {buffer.name} does not cover it", cut.pieces, f"the shape is {buffer.shape}")


def _check_cut(plan: Plan, module: nn.Module, name: str, key: str, entry: TensorPlan) -> None:
    """A cut must be one that the layer's class can carry out; other modules use a "split" parameter as they would the whole one."""
    cut, kind = entry.partition, type(module)
    if cut.dim is None or entry.role == "entry" or (entry.role == "split" and kind not in OUTPUT_DIM and not is_table(kind)):
        return
    if kind in OUTPUT_DIM and key == "weight":
        column = cut.dim == OUTPUT_DIM[kind]
        bias = plan.tensor(f"{name}.bias").partition if module.bias is not None else None
        if bias is not None and bias.pieces != (cut.pieces if column else Partition(None, ((),) * plan.ranks).pieces):
            works = "cut like the weight's output features" if column else "whole: it is added once, after the sum"
            raise UserError(f"the bias of {name} does not fit the cut of its weight", bias.pieces, works)
        if not column and cut.shared():
            raise UserError(f"input features of {name} lie on two ranks and would be added twice", cut.pieces, "each index on one rank")
        if not column and bias is not None and reduces(plan, name) is None and waits(plan, name) is None:
            works = f"reduce at the output of {name}"
            raise UserError(f"{name} has a bias, which can only be added after a sum at its own output", "no such region", works)
    elif kind in OUTPUT_DIM and key == "bias":
        if plan.tensor(f"{name}.weight").partition.pieces != cut.pieces:
            raise UserError(f"the bias of {name} is cut, its weight is not or in another way", cut.pieces, "the same cut")
    elif is_table(kind):
        if cut.dim == 0:
            check_vocab(module, cut, name)  # type: ignore[arg-type]
    elif entry.role == "row" and not cut.shared() and any(r.op == "reduce" and _holds(r.module, name) for r in plan.regions):
        return  # its partial sums are added at its module's output, or at that of one around it
    elif entry.role == "column" and len(entry.shape) > 2 and not kind.__module__.startswith("torch."):
        return  # matrices of experts, with which the model's own code multiplies
    else:
        raise UserError(f"colrow cannot cut {name}.{key} of a {kind.__name__} as '{entry.role}'", cut.pieces, "leave it whole in the plan")


def _holds(outer: str, inner: str) -> bool:
    return f"{inner}.".startswith(f"{outer}." if outer else "")


def reduces(plan: Plan, module: str) -> Region | None:
    """The region that adds up the module's own output over all ranks."""
    found = (r for r in plan.regions if r.module == module and r.place == "output" and r.op == "reduce" and not r.ranks)
    return next(found, None)


def waits(plan: Plan, module: str) -> Region | None:
    """The region that holds the module's own output until it is added up with others."""
    return next((r for r in plan.regions if (r.module, r.place, r.op) == (module, "output", "hold")), None)


def _module(model: nn.Module, name: str, what: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UserError(f"{what} of the plan names a module that the model does not have", name, AGAIN) from None


def _check_region(model: nn.Module, plan: Plan, region: Region) -> None:
    module = _module(model, region.module, "a region")
    if region.op == "mean":
        norm.check(region, plan.ranks)
        return
    if region.op == "row":
        rows.check(region, plan)
        return
    if region.op == "hold":
        awaited(plan, region)
    if (region.op, region.place) == ("hold", "input"):
        raise UserError(f"the region {region.name} cannot be carried out", "a sum waits from an output on", "hold at an output")
    if region.op not in ("copy", "reduce", "gather", "slice", "hold", "once") or region.place not in ("input", "output"):
        raise UserError(
            f"the region {region.name} cannot be carried out", f"{region.op} at the {region.place}", "copy, reduce, gather or slice"
        )
    members = [rank for ranks in region.ranks for rank in ranks]
    if members and sorted(members) != list(range(plan.ranks)):
        raise UserError(f"the groups of region {region.name} must hold each rank once", region.ranks, f"ranks 0 to {plan.ranks - 1}")
    if region.place == "input":
        names = list(inspect.signature(module.forward).parameters)
        if region.arg not in ("", *names) and not (region.arg.isdigit() and int(region.arg) < len(names)):
            raise UserError(f"{region.module} has no input of this name", region.arg, ", ".join(names))
    if region.op == "slice" and (region.place != "input" or region.partition is None or region.partition.dim is None):
        raise UserError(f"the region {region.name} cannot be sliced", region.partition, "a partition, at an input")
    if region.op == "gather":
        cut = region.partition
        ends = [pieces for pieces in cut.pieces if pieces] if cut is not None else []
        in_order = all(len(p) == 1 for p in ends) and all(a[0][1] == b[0][0] for a, b in pairwise(ends))
        if cut is None or cut.dim is None or cut.ranks != plan.ranks or region.ranks or not in_order:
            works = "one range a rank, in rank order, of all ranks"
            raise UserError(f"the region {region.name} cannot be gathered", cut and cut.pieces, works)


def _check_edit(model: nn.Module, plan: Plan, edit: Edit) -> None:
    target: Any = _module(model, edit.module, "an edit")
    *path, last = edit.attribute.split(".")
    for step in path:
        target = getattr(target, step, None)
    if path not in ([], ["config"]) or not hasattr(target, last):
        raise UserError(f"{edit.module} has no such integer", edit.attribute, "an attribute, or one of its config")
    if getattr(target, last) != edit.whole:
        raise UserError(f"{edit.module}.{edit.attribute} is not what the plan expects, {edit.whole}", getattr(target, last), AGAIN)
    if len(edit.values) != plan.ranks:
        raise UserError(f"{edit.module}.{edit.attribute} needs one value a rank", edit.values, f"{plan.ranks} values")


def _check_attention(model: nn.Module, plan: Plan, heads: Attention) -> None:
    module = _module(model, heads.module, "an attention entry")
    if {heads.query.ranks, heads.kv.ranks} != {plan.ranks} or heads.query.size != len(heads.kv_of):
        found = f"{heads.query.size} heads on {heads.query.ranks} ranks, a map of {len(heads.kv_of)}"
        raise UserError(f"the heads of {heads.module} do not fit", found, "one KV head for each query head, all ranks")
    try:
        for rank in range(plan.ranks):
            heads.local_map(rank)
    except ValueError as error:
        raise UserError("the plan's heads cannot be carried out", str(error), "each query head with its KV head") from error
    attention.check(module, heads)
