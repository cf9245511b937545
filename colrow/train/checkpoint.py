"""Saving a training run so that it goes on exactly, at any number of ranks, and so that no moment of a crash can lose the last good state.

Each rank writes its own pieces (weights, master weights, the optimizer's states) into a directory of another name; when all are on the
disk, rank 0 adds state.json and renames the directory. A run that is killed leaves the last whole checkpoint, and something with a name
that nobody reads and the next save removes. Resuming reads each rank's ranges with the same slice reader that loads models
(checkpoint/rank_files.py): another number of ranks, or one, is no special case, and no tensor is ever put together on the way.

Optimizers must keep states that are numbers or have the parameter's shape (SGD, Adam, AdamW, ...): those that mix elements (Adafactor,
Shampoo) would have to know the cut, and are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..checkpoint.rank_files import FORMAT, PREFIX, STATE, Saved, complete, directory_name, file_name
from ..comm import collectives
from ..comm.decide import on_rank_0
from ..comm.group import Group
from ..errors import UserError
from ..parallel import adapter_files
from ..parallel.adapter_files import NAME
from ..parallel.load import persistent_buffers
from ..parallel.state import State, state_of
from ..partition import whole
from ..planning.plan import BufferPlan, TensorPlan
from .writing import reason, writing

Parameters = Mapping[str, nn.Parameter]
Kept = Mapping[str, TensorPlan | BufferPlan]
UNFINISHED = ".unfinished-"
AGAIN = "more room on the disk, then the same command: it goes on from there"


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None = None,
    *,
    beside: Callable[[Path], None] | None = None,
    keep: int = 2,
) -> Path:
    """Writes checkpoint `step` into `directory` and returns its path; the newest `keep` are kept. A collective of all ranks.

    `parameters` are the optimizer's, by the plan's names (the model's own, or masters). `extra` is anything JSON can hold, alike on all
    ranks. `beside(path)` is called on rank 0 to write further files into the directory before it is named. All ranks see one file system.
    """
    state = state_of(model)
    group, kept = state.group, _kept(model, parameters)
    final, unfinished = directory / directory_name(step), directory / f"{UNFINISHED}{directory_name(step)}"
    what = f"the checkpoint could not be written into {directory}; the last one is as it was"

    def begin() -> None:
        with writing(what, AGAIN):
            directory.mkdir(parents=True, exist_ok=True)
            for old in directory.glob(f"{UNFINISHED}*"):
                shutil.rmtree(old)
            unfinished.mkdir()

    def finish() -> None:
        with writing(what, AGAIN, remove=unfinished):
            model.config.save_pretrained(unfinished)  # type: ignore[union-attr,operator]
            if getattr(model, "can_generate", lambda: False)():
                model.generation_config.save_pretrained(unfinished)  # type: ignore[union-attr,operator]
            if state.adapters is not None:
                adapter_files.write_config(unfinished, state.adapters.config)
            if beside is not None:
                beside(unfinished)
            content = {
                "format": FORMAT,
                "step": step,
                "ranks": group.size,
                "tensors": {n: {"shape": t.shape, "partition": t.partition.to_json()} for n, t in kept.items()},
                "adapter": _adapter(state),
                "optimizer": numbers,
                "extra": dict(extra or {}),
            }
            (unfinished / STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
            for file in unfinished.rglob("*"):
                _to_disk(file)
            _to_disk(unfinished)
            if final.exists():  # an earlier run's, which this one has overtaken
                shutil.rmtree(final)
            os.rename(unfinished, final)
            _to_disk(directory)
        for old in complete(directory)[:-keep]:
            shutil.rmtree(old)

    on_rank_0(begin, group, "checkpoint.begin")
    tensors, numbers = _pieces(model, kept, parameters, optimizer)
    path, wrong = unfinished / file_name(group.rank, group.size), ""
    try:
        save_file(tensors, path)
        _to_disk(path)
    except (OSError, SafetensorError) as error:
        wrong = reason(error)
    _all_written(collectives.gather_objects(wrong, group, "checkpoint.written"), unfinished, group.rank)
    on_rank_0(finish, group, "checkpoint.named")
    return final


def _kept(model: nn.Module, parameters: Parameters) -> Kept:
    """What a checkpoint holds: the model with the buffers that its files have, or beside an adapter what is trained alone; the model is
    then where it was read from."""
    state = state_of(model)
    if state.adapters is not None:
        return {name: entry for name, entry in state.plan.tensors.items() if name in parameters}
    cut = {b.name: b for b in state.plan.buffers}
    everywhere = whole(state.group.size)
    buffers = {n: cut.get(n) or BufferPlan(n, tuple(b.shape), everywhere, "") for n, b in persistent_buffers(model)}
    return state.plan.tensors | buffers


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    """The rank's piece of a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _adapter(state: State) -> dict[str, list[float]] | None:
    """Rank and scale of every adapted layer."""
    return None if state.adapters is None else {path: [m.r[NAME], m.scaling[NAME]] for path, m in state.adapters.layers.items()}


def _all_written(wrong: Sequence[str], unfinished: Path, rank: int) -> None:
    """UserError on every rank where one could not write its file; what was written is removed, so that the disk has its room again."""
    if any(wrong):
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        first = next(n for n, text in enumerate(wrong) if text)
        what = f"the checkpoint could not be written by rank {first} into {unfinished.parent}; the last one is as it was"
        raise UserError(what, wrong[first], AGAIN)


def _pieces(
    model: nn.Module, kept: Kept, parameters: Parameters, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The rank's tensors by section and name, and the optimizer's numbers: {"class", "groups", "state": {name: {key: number}}}."""
    tensors: dict[str, torch.Tensor] = {}
    for name in kept:
        mine = _tensor(model, name).detach()
        tensors[f"weights/{name}"] = mine
        if name in parameters and parameters[name].data_ptr() != mine.data_ptr():
            tensors[f"master/{name}"] = parameters[name].detach()
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items() if optimizer is not None else ():
        assert optimizer is not None
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                tensors[f"optimizer.{key}/{name}"] = value.detach()
            elif isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                state.setdefault(name, {})[key] = value.item() if isinstance(value, torch.Tensor) else value
            elif value is not None:
                what = f"the optimizer keeps {key} in another shape than its parameter {name}, which cannot be cut like it"
                raise UserError(what, type(optimizer).__name__, "torch.optim.AdamW or SGD")
    numbers: dict[str, Any] = {"state": state}
    if optimizer is not None:
        numbers |= {"class": type(optimizer).__name__, "groups": [_settings(group) for group in optimizer.param_groups]}
    return {key: tensor.contiguous() for key, tensor in tensors.items()}, numbers


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def resume(saved: Saved, model: nn.Module, parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Weights, masters and the optimizer's states as they were saved, at whatever number of ranks; returns `extra`.

    The model has memory already, its contents are overwritten. UserError where the checkpoint is another model's or another optimizer's.
    """
    state = state_of(model)
    group, kept = state.group, _kept(model, parameters)
    weights = saved.source("weights")
    if (found := saved.state.get("adapter")) != _adapter(state):
        what = f"the checkpoint {saved.path} is of a run with {'another adapter' if found and state.adapters else 'an adapter'}"
        raise UserError(what if found else f"the checkpoint {saved.path} is of a run without an adapter", works="the same --lora options")
    _check(saved, kept, weights.tensors, optimizer)
    sources = {section: saved.source(section) for section in saved.sections()}
    numbers = saved.state["optimizer"]["state"]
    with torch.no_grad():
        for name, entry in kept.items():
            _read_into(_tensor(model, name), weights, entry, group)
            if name in parameters and parameters[name] is not _tensor(model, name):
                known = sources.get("master")
                _read_into(parameters[name], known if known is not None and name in known.tensors else weights, entry, group)
    for name, parameter in parameters.items() if optimizer is not None else ():
        assert optimizer is not None
        entry, states = kept[name], {}
        for section, source in sources.items():
            if section.startswith("optimizer.") and name in source.tensors:
                states[section.split(".", 1)[1]] = _read_into(torch.empty_like(parameter, requires_grad=False), source, entry, group)
        for key, value in numbers.get(name, {}).items():  # torch keeps the count of steps as a float32 tensor
            states[key] = torch.tensor(float(value), dtype=torch.float32) if key == "step" else value
        if states:
            optimizer.state[parameter] = states
    if optimizer is not None:
        for settings, old in zip(optimizer.param_groups, saved.state["optimizer"]["groups"], strict=True):
            settings.update({k: tuple(v) if isinstance(settings.get(k), tuple) else v for k, v in old.items()})
    return saved.state["extra"]


def _read_into(to: torch.Tensor, source: Any, entry: TensorPlan | BufferPlan, group: Group) -> torch.Tensor:
    cut = entry.partition
    return to.copy_(source.read(entry.name, cut.dim, () if cut.is_whole else cut.pieces[group.rank], to.dtype))


def _check(saved: Saved, wanted: Kept, found: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    for name, entry in wanted.items():
        if name not in found:
            raise UserError(f"the checkpoint {saved.path} is of another model: it has no", name, "the model it was trained from")
        if found[name].shape != entry.shape:
            raise UserError(f"the checkpoint {saved.path} has another shape for {name}", found[name].shape, f"{entry.shape}, the model's")
    kept = saved.state["optimizer"].get("class")
    if optimizer is not None and kept != type(optimizer).__name__:
        raise UserError("the checkpoint was written with another optimizer", kept, f"{kept}, or a fresh start")


def _to_disk(path: Path) -> None:
    """Returns when the file's or directory's content would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(directory: Path) -> list[Path]:
    """What a killed save has left."""
    return sorted(directory.glob(f"{UNFINISHED}{PREFIX}*"))
