"""A model and a plan become a split model: the same transformers module with smaller parameters, other layer classes and a few hooks.

    model = split(empty(config, dtype), plan, group)     then parallel/load.py puts slices of files into it
    model = parallelize(model, plan, group)              for a whole model that is in memory

Parameters keep their names and stay the same objects (tied ones stay tied, an optimizer made before keeps its hold); their data becomes the
rank's piece. `model.colrow` is the State. generate, caches, save_pretrained and checkpoint names keep working because the modules are still
there. A split model cannot be deep-copied (copy the whole one).

Not here: deciding anything (the plan does), reading files, proving that the result is right (proof/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning import models
from ..planning.graph import CONVOLUTIONS
from ..planning.models import is_table
from ..planning.plan import Edit, Plan, Region
from . import (
    attention,
    borders,
    conv,
    embedding,
    entries,
    experts,
    generate,
    gradients,
    guards,
    head,
    linear,
    norm,
    once,
    random,
    recompute,
    rows,
    save,
    sequence_probe,
)
from .check import check, reduces, waits
from .sequence import Mode, Sequence
from .sequence import install as install_sequence
from .sequence import make as make_sequence
from .state import State


def empty(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The whole model without memory: every parameter and buffer is on the meta device. `attention`: instead of the config's."""
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return models.build(config, dtype=dtype, **options)


def parallelize(model: nn.Module, plan: Plan, group: Group, sequence: Mode = "off") -> nn.Module:
    """Splits a model whose weights are in memory, parameter by parameter: at no time is there more than one copy of a piece."""
    return split(model, plan, group, sequence)


def split(model: nn.Module, plan: Plan, group: Group, sequence: Mode = "off") -> nn.Module:
    """Applies the plan to the model, in place, and returns it. On meta, or with weights; a collective of all ranks.

    `sequence` "again" or "keep": the residual stream is cut along the sequence in training (sequence.py).

    UserError, with the model unchanged, where the model is split already or the plan cannot be carried out on it exactly.
    """
    if isinstance(getattr(model, "colrow", None), State):
        raise UserError("the model is split already", type(model).__name__, "a fresh one")
    check(model, plan, group)
    cut = make_sequence(model, plan, group, sequence)
    if cut is not None:
        plan = sequence_probe.suited(model, plan, lambda whole, plan, mode: on_meta(whole, plan, sequence_probe.lone(group), mode))
        cut = make_sequence(model, plan, group, sequence)
    return _apply(model, plan, group, cut)


def on_meta(whole: nn.Module, plan: Plan, group: Group, mode: Mode) -> nn.Module:
    """A split model for its shapes alone: `group` speaks to no one, dropout is torch's own, the sequence is cut without gradients too."""
    cut = make_sequence(whole, plan, group, mode)
    part: Any = _apply(whole, plan, group, cut)
    part.colrow.masks.probe = True
    if cut is not None:
        cut.always = True
    return part


def _apply(model: nn.Module, plan: Plan, group: Group, cut: Sequence | None) -> nn.Module:
    state = State(plan, group, sequence=cut)
    for entry in plan.tensors.values():
        _slice(model.get_parameter(entry.name), entry.partition, group.rank)
    for buffer in plan.buffers:
        path, _, key = buffer.name.rpartition(".")
        whole = model.get_buffer(buffer.name)
        model.get_submodule(path)._buffers[key] = buffer.partition.split(whole, group.rank).clone()
    done = _change_layers(model, state)
    for edit in plan.edits:
        _edit(model.get_submodule(edit.module), edit, group.rank)
    for heads in plan.attention:
        attention.apply(model.get_submodule(heads.module), heads, group.rank)
    for region in plan.regions:
        if region not in done and region.op not in ("mean", "row"):
            borders.install(model, state, region)
    norm.install(model, plan, group)
    rows.install(model, plan, group)
    entries.install(model, plan, group)
    once.install(model, plan, group)
    experts.choose(model, plan)
    state.sums = gradients.install(model, plan, group)
    borders.forget_copies(model, state)
    if cut is not None:
        install_sequence(model, cut)
    for part in (head, generate, save, guards, random, recompute):
        part.install(model, state)
    model.colrow = state  # type: ignore[assignment]
    return model


def _slice(parameter: nn.Parameter, partition: Partition, rank: int) -> None:
    """The parameter's data becomes the rank's piece, in memory of its own, so that the whole tensor is freed."""
    whole = parameter.data
    piece = partition.split(whole, rank)
    if piece.shape != whole.shape:
        parameter.data = piece.clone(memory_format=torch.contiguous_format)
        parameter.grad = None


def _change_layers(model: nn.Module, state: State) -> set[Region]:
    """Gives each layer with a cut weight its class. Returns the regions that these layers carry out themselves."""
    plan, group, cut_sequence = state.plan, state.group, state.sequence
    done = set()
    for name, entry in plan.names():
        path, _, key = name.rpartition(".")
        layer, cut = model.get_submodule(path), entry.partition
        if key != "weight" or cut.dim is None:
            continue
        region = reduces(plan, path)
        if is_table(type(layer)) and cut.dim == 0:
            embedding.make_vocab(layer, cut, group, region.name if region else None)  # type: ignore[arg-type]
        elif is_table(type(layer)):
            embedding.make_column(layer)  # type: ignore[arg-type]
        elif type(layer) in CONVOLUTIONS:
            conv.make_local(layer)  # type: ignore[arg-type]
            continue
        elif type(layer) in linear.OUTPUT_DIM and cut.dim == linear.OUTPUT_DIM[type(layer)]:
            linear.make_column(layer, group, path)
            continue
        elif type(layer) in linear.OUTPUT_DIM and (hold := waits(plan, path)) is not None:
            linear.make_row(layer, group, None, due=borders.due(state, hold))
            region = hold
        elif type(layer) in linear.OUTPUT_DIM:
            scattered = cut_sequence if cut_sequence is not None and region in cut_sequence.cut.regions else None
            linear.make_row(layer, group, region.name if region else None, scattered)
        else:
            continue
        if region is not None:
            done.add(region)
    return done


def _edit(module: nn.Module, edit: Edit, rank: int) -> None:
    *path, last = edit.attribute.split(".")
    setattr(attention.own_config(module) if path else module, last, edit.values[rank])
