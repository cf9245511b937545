"""Means over a cut axis: norms whose features lie on several ranks (OLMo2's and OLMoE's query norm, Mamba2's gated norm).

Each rank normalises its own features, but by the statistic of all of them: the ranks' sums are added, divided by the whole width, and that
mean goes back to every rank (Megatron's rule for what must not be computed over a slice). One small all-reduce forward, one backward, since
each rank knows only what its own features send back to the mean. An index that several ranks hold (a copied KV head) counts once.

The module's own forward runs, whatever it does besides; only the means that it takes, by number as the plan gives them, are replaced as
they come by. So it need not be known what kind of norm it is, and a norm written out in the middle of an attention is as good as a module.
Fused ones (F.layer_norm, F.rms_norm) are taken apart. A forward that takes other means than the plan says is an error, not a wrong number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning.plan import Plan, Region

TAKEN: dict[Any, int] = {
    **dict.fromkeys((torch.mean, torch.Tensor.mean, F.rms_norm, torch.rms_norm), 1),
    **dict.fromkeys((F.layer_norm, torch.layer_norm, torch.std, torch.Tensor.std, torch.var, torch.Tensor.var), 2),
}
"""How many means a function takes; planning/means.py counts the same."""


@dataclass(frozen=True)
class OverRanks:
    """One mean of a module. `partition` cuts a dim that is counted from the end."""

    name: str
    partition: Partition
    group: Group

    def __call__(self, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The mean over `dims` of the whole tensor, of which `x` is the rank's part; added up in float32 at least."""
        cut, here = self.partition.dim, self.partition.local_size(self.group.rank)
        if cut not in dims or x.shape[cut] != here:
            found = f"{x.shape[cut] if cut is not None else 0} entries, averaged over dims {dims}"
            raise UserError(f"{self.name} is of other features than the plan says", found, f"{here} along dim {cut}")
        size = self.entries(x, dims)
        dtype = dtype or x.dtype
        weight = self._shares()
        if weight is not None:
            x = x * weight.to(x).view(-1, *(1,) * (-cut - 1))
        part = x.sum(dims, keepdim=keepdim, dtype=torch.promote_types(dtype, torch.float32)) / size
        return regions.sum_over(part, self.group, self.name).to(dtype)

    def entries(self, x: torch.Tensor, dims: tuple[int, ...]) -> int:
        """Of how many entries of the whole tensor the mean is."""
        return self.partition.size * prod(x.shape[d] for d in dims if d != self.partition.dim)

    def _shares(self) -> torch.Tensor | None:
        """For each index that the rank holds 1 / (number of ranks that do); None where no index lies on two."""
        if not self.partition.shared():
            return None
        rank = self.group.rank
        mine = sorted((self.partition.local_offset(rank, s.start) or 0, s) for s in self.partition.segments() if rank in s.ranks)
        return torch.cat([torch.full((s.stop - s.start,), 1 / len(s.ranks), dtype=torch.float64) for _, s in mine] or [torch.zeros(0)])


def install(model: nn.Module, plan: Plan, group: Group) -> None:
    """Gives the modules that take means over cut axes a class that takes them over all ranks."""
    found: dict[str, dict[int, OverRanks]] = {}
    for region in plan.regions:
        if region.op == "mean" and group.size > 1:
            assert region.partition is not None  # check.py has seen to it
            found.setdefault(region.module, {})[int(region.arg)] = OverRanks(region.name, region.partition, group)
    for name, means in found.items():
        module = model.get_submodule(name)
        module.__class__ = _with_means(type(module))  # type: ignore[arg-type]
        vars(module)["means_over_ranks"] = means
        for inside in module.modules():
            vars(inside).pop("colrow_norm", None)  # of an engine of the whole model: it takes no means (prompt_norms.py)


@functools.cache
def _with_means(cls: type[nn.Module]) -> type[nn.Module]:
    own: Callable[..., Any] = cls.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Taking(self.means_over_ranks) as taking:
            out = own(self, *args, **kwargs)
        taking.check(type(self).__name__)
        return out

    return type(f"{cls.__name__}OverRanks", (cls,), {"forward": forward})


class _Taking(TorchFunctionMode):
    """Within one forward of a module: counts the means that it takes, and takes those of `means` over all ranks."""

    def __init__(self, means: dict[int, OverRanks]) -> None:
        super().__init__()
        self.means, self.number, self.done = means, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        taken = TAKEN.get(func, 0)
        mine = [self.means.get(self.number + i) for i in range(taken)]
        self.number += taken
        over = [m for m in mine if m is not None]
        if not over:
            return func(*args, **kwargs)
        self.done += len(over)
        if func in (torch.mean, torch.Tensor.mean):
            return _mean(over[0], *args, **kwargs)
        if func in (torch.std, torch.Tensor.std, torch.var, torch.Tensor.var):
            spread = _variance(over, *args, **kwargs)
            return spread.sqrt() if func in (torch.std, torch.Tensor.std) else spread
        return _rms_norm(over[0], *args, **kwargs) if taken == 1 else _layer_norm(over, *args, **kwargs)

    def check(self, name: str) -> None:
        if self.done != len(self.means):
            found = f"means {sorted(self.means)} are taken over all ranks, its forward took {self.number} in all"
            raise UserError(f"{name} does not work as the plan was derived", found, "the model's own forward, not a kernel in its place")


def _mean(
    over: OverRanks,
    input: torch.Tensor,
    dim: int | tuple[int, ...] | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return over(input, _from_the_end(input, dim), keepdim, dtype)


def _from_the_end(input: torch.Tensor, dim: int | tuple[int, ...] | list[int] | None) -> tuple[int, ...]:
    n = input.dim()
    every = range(n) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return tuple(d % n - n for d in every)


def _variance(
    over: list[OverRanks],
    input: torch.Tensor,
    dim: int | tuple[int, ...] | list[int] | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor:
    if isinstance(dim, bool):  # torch.std(x, unbiased)
        return _variance(over, input, None, dim)
    dims = _from_the_end(input, dim)
    mean, square = over
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    n = mean.entries(x, dims)
    less = correction if correction is not None else int(unbiased)
    return (square((x - mean(x, dims, True)).square(), dims, keepdim) * (n / (n - less))).to(input.dtype)


def _rms_norm(
    over: OverRanks, input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    y = x * torch.rsqrt(over(x.square(), (-1,), True) + (torch.finfo(input.dtype).eps if eps is None else eps))
    return (y if weight is None else y * weight).to(input.dtype)


def _layer_norm(
    over: list[OverRanks],
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    mean, square = over
    x = x - mean(x, (-1,), True)
    y = x * torch.rsqrt(square(x.square(), (-1,), True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


def check(region: Region, ranks: int) -> None:
    """UserError where a mean of a plan cannot be taken."""
    cut = region.partition
    if region.place != "inside" or not region.arg.isdigit() or region.ranks:
        raise UserError(
            f"the region {region.name} cannot be carried out", f"mean {region.arg!r} at {region.place}", "the number of one inside"
        )
    if cut is None or cut.dim is None or cut.dim >= 0 or cut.ranks != ranks:
        raise UserError(f"the region {region.name} has no axis to take a mean over", cut and cut.pieces, "a dim counted from the end")
