"""Where a model drops: each call of dropout, with the state of its tensor, whole or a slice.

Nothing in a module says whether its dropout meets a whole activation or the rank's slice of one. It is found by running: the whole model
and the rank's split one, both on meta tensors, in training mode and at the model's own rates, are followed op by op (planning/record.py).
Where a mask has the same shape in both, the activation is whole; where one dim is shorter, it is cut there: by the heads of the attention
around it, or like the features of a weight beside it. Not here: drawing the masks (random.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..comm import collectives
from ..comm.group import Alone, Call, Group, Transport
from ..errors import UserError
from ..partition import Partition
from ..planning.models import compute_experts
from ..planning.plan import Plan
from ..planning.record import EAGER, record
from ..planning.trace import Trace
from .sequence import Mode

INSTEAD = "dropout rates of 0"
RATES = ("attention_dropout", "dropout", "activation_dropout")  # plain numbers that transformers' modules pass to functional dropout
SKIPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # whole layers left out, by a draw of each rank's own


@dataclass(frozen=True)
class Site:
    """One call of dropout in a module's forward. `cut`: how its tensor is cut, along `cut.dim` of that tensor (-1: its last); None: it is
    whole. `sequence`: its dim 1 is the rank's slice of the sequence."""

    cut: Partition | None
    dims: int
    sequence: bool = False


Sites = dict[str, tuple[Site, ...]]  # of each module, in the order of one call of its forward


def rates(model: nn.Module) -> tuple[tuple[str, float], ...]:
    """Every module in training mode that drops something, with its rate."""
    return tuple(_rates(model))


def _rates(model: nn.Module) -> Iterator[tuple[str, float]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if any(getattr(module, key, 0) for key in SKIPS):
            raise UserError("layerdrop in a split model would leave out other layers on each rank", name, "a layerdrop of 0")
        found = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else [getattr(module, key, 0) for key in RATES]
        yield from ((name, rate) for rate in found if isinstance(rate, float) and rate > 0)


def find(model: nn.Module, plan: Plan, group: Group, mode: Mode) -> Sites:
    """The sites of a split `model` at its present rates. A collective. UserError where one cannot be told."""
    from .build import on_meta

    whole = _masks(at_present(model))
    lone = Group(group.rank, group.size, Silent(group.rank))
    local = whole
    if group.size > 1:
        local = _masks(on_meta(at_present(model), plan, lone, mode))
    if [name for name, _, _ in whole] != [name for name, _, _ in local]:
        raise UserError("the split model drops elsewhere than the whole one", type(model).__name__, INSTEAD)
    mine = [_cut_dim(name, a, b) for (name, _, a), (_, _, b) in zip(whole, local, strict=True)]
    everyone = collectives.gather_objects(mine, group, "dropout.sites")
    calls: dict[tuple[str, int], list[Site]] = {}
    for at, (name, call, shape) in enumerate(whole):
        dims = {found[at] for found in everyone} - {None}
        if len(dims) > 1:
            raise UserError(f"dropout in {name} meets a tensor that is cut along several dims", sorted(dims), INSTEAD)
        sliced = mode != "off" and dims == {1} and len(shape) == 3
        cut = _partition(plan, name, dims.pop(), shape) if dims and not sliced else None
        if cut is not None and cut.local_size(group.rank) != local[at][2][cut.dim or 0]:
            raise UserError(f"dropout in {name} meets a slice of another size than the plan's", local[at][2], INSTEAD)
        calls.setdefault((name, call), []).append(Site(cut, len(shape), sliced))
    out: Sites = {}
    for (name, _), sites in calls.items():
        if out.setdefault(name, tuple(sites)) != tuple(sites):
            raise UserError(f"dropout in {name} differs from call to call", len(sites), INSTEAD)
    return out


def at_present(model: Any) -> nn.Module:
    """The whole model on meta, in training mode, with the rates that `model` has now."""
    from .build import empty

    out = empty(model.config, torch.float32)
    out.set_attn_implementation(EAGER)
    compute_experts(out, "batched_mm")  # the one with static shapes
    known = dict(out.named_modules())
    for name, module in model.named_modules():
        if name in known:
            known[name].__dict__.update({k: v for k, v in vars(module).items() if type(v) is float})
            known[name].training = module.training
    return out


def _masks(model: Any) -> list[tuple[str, int, tuple[int, ...]]]:
    """(module, number of its call, shape) of each mask that is drawn, in order."""
    with _NoSkipping():
        found: Trace = record(model, bypasses=True)
    out = []
    for op in found.ops:
        if torch.Tag.nondeterministic_seeded not in op.func.tags:
            continue
        if op.name not in ("bernoulli_", "bernoulli", "native_dropout"):
            raise UserError(f"{found.module_of(op)} draws random numbers in training", op.name, "model.eval(), or settings without them")
        out.append((found.module_of(op), op.call, found.values[op.outputs[0]].shape))
    return out


class Silent(Alone):
    """The transport of a rank that computes shapes only: nothing is said to anyone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, x: torch.Tensor, out: list[torch.Tensor], call: Call) -> int:
        return 0

    def reduce_scatter(self, parts: list[torch.Tensor], out: torch.Tensor, call: Call) -> int:
        return 0

    def sub(self, ranks: Sequence[int]) -> Transport | None:
        return Silent(list(ranks).index(self.rank)) if self.rank in ranks else None


class _NoSkipping(TorchFunctionMode):
    """Some models draw a number for each layer even where no layer is ever skipped: it is 1 here, which skips none."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return torch.ones(*args, **(kwargs or {}), device="cpu") if func is torch.rand else func(*args, **(kwargs or {}))


def _cut_dim(name: str, whole: tuple[int, ...], local: tuple[int, ...]) -> int | None:
    differing = [dim for dim, (a, b) in enumerate(zip(whole, local, strict=True)) if a != b]
    if len(differing) > 1:
        raise UserError(f"dropout in {name} meets a tensor that is cut along several dims", f"{local} of {whole}", INSTEAD)
    return differing[0] if differing else None


def _partition(plan: Plan, name: str, dim: int, shape: tuple[int, ...]) -> Partition:
    """The cut of `shape[dim]` things: the heads of the attention around it, else the features of the nearest weight of that size."""
    if len(shape) == 4 and dim != 1:
        raise UserError(f"dropout in {name} meets attention that is not cut by heads", f"dim {dim} of {shape}", INSTEAD)
    for heads in plan.attention:
        if f"{name}.".startswith(f"{heads.module}.") and heads.query.size == shape[dim]:
            return Partition(dim, heads.query.pieces)
    fitting = [t for t in plan.tensors.values() if t.role in ("row", "column") and t.partition.size == shape[dim]]
    if not fitting:
        raise UserError(f"dropout in {name} meets a slice that no weight has", f"{shape[dim]} along dim {dim}", INSTEAD)
    near = max(fitting, key=lambda t: _shared_path(t.name, name))
    return Partition(dim, near.partition.pieces)


def _shared_path(a: str, b: str) -> int:
    """How many steps two dotted names have in common from the root on."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
