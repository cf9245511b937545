"""Weights into a split model: each rank reads its own ranges, every element is written exactly once.

`from_source` fills a split model on the meta device from the files of a checkpoint; `from_whole` from the tensors of a whole model. Both
need only the model's parameters, `model.colrow.plan` and `model.colrow.group.rank`. Peak memory is the shard and one tensor: each parameter
is allocated, read and done with. Buffers that are not in the files (rotary frequencies) are computed as transformers does after its own
loading, and so are parameters that files leave out since the model computes them (initial.py). Not here: which tensor belongs to which
parameter (checkpoint/names.py), where its bytes lie (checkpoint/source.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint import names
from ..checkpoint.source import Source
from ..errors import UserError
from ..planning.models import BUILDING
from ..planning.plan import BufferPlan, Plan, TensorPlan
from . import initial

Progress = Callable[[str, int, int], None]  # (parameter, elements done, elements in all)
_Buffers = dict[tuple[nn.Module, str], torch.Tensor]  # by module and name in it


def from_source(
    model: PreTrainedModel,
    source: Source,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Fill the split `model` (on meta) with this rank's slices of the files, on `device`.

    `dtype` None keeps each parameter's own; otherwise floating parameters get `dtype`, but for those that transformers keeps in float32.
    Returns sentences of warning. UserError where files and model disagree (names.match), or a tied parameter is stored twice with
    different values.
    """
    plan, rank = _plan_of(model)
    shapes = {name: entry.shape for name, entry in plan.tensors.items()}
    buffers = dict(persistent_buffers(model))
    cuts = {b.name: b for b in plan.buffers}
    shapes |= {name: cuts[name].shape if name in cuts else tuple(buffer.shape) for name, buffer in buffers.items()}
    aliases = {name: entry.aliases for name, entry in plan.tensors.items()}
    spare = initial.left_out(model, plan.tensors)
    matched = names.match(model, source, shapes, aliases, optional=[*buffers, *spare])
    missing = [name for name in spare if name not in matched.keys]
    made = initial.computed(model.config, missing)
    if lost := [name for name in missing if name not in made]:
        names.refuse_missing(lost, source)

    def piece(entry: TensorPlan, wanted: torch.dtype) -> torch.Tensor:
        if entry.name in made:
            return entry.partition.split(made[entry.name], rank).to(wanted, copy=True)
        dim, ranges = entry.partition.dim, () if entry.partition.is_whole else entry.partition.pieces[rank]
        value = matched.source.read(matched.keys[entry.name], dim, ranges, wanted)
        for key in matched.copies.get(entry.name, ()):
            if not torch.equal(value, matched.source.read(key, dim, ranges, wanted)):
                raise UserError(
                    f"the plan ties {entry.name} and {entry.aliases[0]}, the files hold different values",
                    key,
                    "tie_word_embeddings=False in the config",
                )
        return value

    _fill(model, plan, rank, piece, dtype, device, progress)
    for name, buffer in buffers.items():
        if name in matched.keys:
            dim, ranges = (cuts[name].partition.dim, cuts[name].partition.pieces[rank]) if name in cuts else (None, ())
            _set(model, name, matched.source.read(matched.keys[name], dim, ranges, buffer.dtype).to(device))
    remake_buffers(model, device)
    _check_nothing_on_meta(model)
    return matched.warnings


def from_whole(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> None:
    """Fill the split `model` with this rank's pieces of a whole model's `state_dict()`. The pieces are copies."""
    plan, rank = _plan_of(model)

    def piece(entry: TensorPlan, wanted: torch.dtype) -> torch.Tensor:
        name = next((n for n in (entry.name, *entry.aliases) if n in state), None)
        if name is None:
            raise KeyError(f"the whole model has no {entry.name}")
        return entry.partition.split(state[name].detach(), rank).to(wanted, copy=True).contiguous()

    _fill(model, plan, rank, piece, dtype, device, None)
    cuts = {b.name: b.partition for b in plan.buffers}
    for name, _ in persistent_buffers(model):
        if name in state:
            value = state[name].detach()
            _set(model, name, (cuts[name].split(value, rank) if name in cuts else value).to(device, copy=True))
    remake_buffers(model, device)
    _check_nothing_on_meta(model)


def fill(
    model: PreTrainedModel,
    piece: Callable[[TensorPlan, torch.dtype], torch.Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fill the split `model` with what `piece(entry, dtype)` gives for each parameter; buffers other than `buffers` are computed."""
    _fill(model, *_plan_of(model), piece, dtype, device, progress)
    for name, value in (buffers or {}).items():
        _set(model, name, value.to(device))
    remake_buffers(model, device)
    _check_nothing_on_meta(model)


def _plan_of(model: Any) -> tuple[Plan, int]:
    return model.colrow.plan, model.colrow.group.rank


def _fill(
    model: nn.Module,
    plan: Plan,
    rank: int,
    piece: Callable[[TensorPlan, torch.dtype], torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: Progress | None,
) -> None:
    """Give every parameter of the plan its piece, tied ones one tensor; count the elements."""
    old = dict(model.named_parameters(remove_duplicate=False))
    unknown = sorted(old.keys() - {name for name, _ in plan.names()})
    if unknown:
        raise ValueError(f"the plan does not cover the parameters {unknown[:3]}")
    needed = sum(p.numel() for p in model.parameters())
    float32 = _kept_in_float32(model, dtype)
    done = 0
    for entry in plan.tensors.values():
        before = old[entry.name]
        wanted = before.dtype if dtype is None or not before.is_floating_point() else dtype
        value = piece(entry, torch.float32 if float32(entry.name) else wanted)
        if value.shape != before.shape or value.shape != entry.partition.local_shape(entry.shape, rank):
            raise ValueError(f"{entry.name}: the model expects {tuple(before.shape)}, the plan gives {tuple(value.shape)}")
        parameter = nn.Parameter(value.to(device), requires_grad=before.requires_grad)
        for name in (entry.name, *entry.aliases):
            _set(model, name, parameter)
        done += parameter.numel()
        if progress:
            progress(entry.name, done, needed)
    if done != needed or done != sum(p.numel() for p in model.parameters()):
        raise ValueError(f"{done} elements were written, the model has {needed}")


def _kept_in_float32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Which parameters transformers keeps in float32 in a model of this dtype."""
    rule = getattr(model, "_get_dtype_plan", None)
    patterns = [p.replace("*", ".*") for p in rule(dtype)] if rule and dtype is not None else []
    found = re.compile("|".join(patterns)) if patterns else None
    return lambda name: found is not None and found.search(name) is not None


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
    else:
        module._buffers[leaf] = value


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a model's files hold: corrections of routers (DeepSeek-V3), biases of scores (Marian)."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}" if prefix else leaf, buffer


def remake_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers that are still on meta with the model's own `_init_weights`, as transformers does after loading: that of the
    module that has the buffer, else of the next module around it that writes it. Of a buffer that the plan cuts the rank keeps its piece.

    Whether it really writes a buffer cannot be seen from outside, so it runs over two different fillings and must give the same twice.
    """
    plan, rank = _plan_of(model) if hasattr(model, "colrow") else (None, 0)
    cut = {_place(model, b.name): b for b in plan.buffers} if plan is not None else {}
    lost = {(module, leaf): b for module in model.modules() for leaf, b in module._buffers.items() if b is not None and b.is_meta}
    for owner, module in reversed(list(with_owner(model))) if lost else ():
        mine = {key: lost[key] for inner in module.modules() for leaf in inner._buffers if (key := (inner, leaf)) in lost}
        for key, value in (_computed(owner, module, mine, cut, device) if mine else {}).items():
            inner, leaf = key
            inner._buffers[leaf] = cut[key].partition.split(value, rank).clone() if key in cut else value
            del lost[key]
    for module, leaf in lost:
        raise ValueError(f"{type(module).__name__}.{leaf} is neither in the files nor computed by {type(model).__name__}._init_weights")


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _computed(
    owner: nn.Module, module: nn.Module, lost: _Buffers, cut: Mapping[tuple[nn.Module, str], BufferPlan], device: torch.device | str
) -> _Buffers:
    """Those of `lost` that the initializer of `module` writes, whole. The others are as they were."""
    shapes = {key: cut[key].shape if key in cut else tuple(old.shape) for key, old in lost.items()}
    results: list[_Buffers] = []
    for filling in (0, 1):
        with BUILDING, torch.no_grad(), _out_of_reach(module):
            for (inner, leaf), old in lost.items():
                inner._buffers[leaf] = torch.full(shapes[inner, leaf], filling, dtype=old.dtype, device=device)
            owner._init_weights(module)  # type: ignore[operator]
            made = {(inner, leaf): inner._buffers[leaf] for inner, leaf in lost}
        results.append({key: value for key, value in made.items() if value is not None and value.shape == shapes[key]})
    first, second = results
    return {key: value for key, value in first.items() if key in second and torch.equal(value, second[key])}


@contextmanager
def _out_of_reach(module: nn.Module) -> Iterator[None]:
    """Initializers write buffers, but also weights, and not always only the module's own: meanwhile they find empty weights on meta, and
    copies of the buffers that there are."""
    kept = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
    try:
        for owner, parameters, buffers in kept:
            for leaf, p in parameters.items():
                if p is not None:
                    owner._parameters[leaf] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            owner._buffers.update((leaf, b.clone()) for leaf, b in buffers.items() if b is not None)
        yield
    finally:
        for owner, parameters, buffers in kept:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def with_owner(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module with the nearest enclosing module that has `_init_weights`."""

    def walk(owner: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        owner = module if hasattr(module, "_init_weights") else owner
        yield owner, module
        for child in module.children():
            yield from walk(owner, child)

    return walk(model, model)


def _check_nothing_on_meta(model: nn.Module) -> None:
    """Also plain tensor attributes: transformers' models have none, remote code may."""
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}}
        for leaf, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                raise ValueError(f"{prefix}.{leaf} was not loaded: it is still on the meta device")
