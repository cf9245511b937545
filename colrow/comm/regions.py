"""Where a tensor changes its state between ranks, as autograd functions.

A tensor is whole (the same on all ranks), a slice, or partial (to be summed). Its gradient has a state too, and each function here is right
for one pair of states:

    function                   forward          backward         value            gradient of the input
    copy_to          (f)       identity         all-reduce       whole -> whole   was partial, becomes whole
    reduce_from      (g)       all-reduce       identity         partial -> whole whole, for every rank's part
    gather_from                all-gather       own slice        slice -> whole   whole at the output, slice at the input
    scatter_to                 own slice        all-gather       whole -> slice   slice at the output, whole at the input
    gather_sequence            all-gather       reduce-scatter   slice -> whole   partial at the output, slice at the input
    reduce_scatter_sequence    reduce-scatter   all-gather       partial -> slice slice at the output, whole at the input

    sum_over                   all-reduce       all-reduce       partial -> whole partial at the output, whole at the input

f and g are those of Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3, figure 3); the sequence pair are g-bar's and its conjugate of
Korthikanti et al. (arXiv:2205.05198, section 4.2.2, figure 5). `sum_over` is g and then f: for a value that is reduced and then used by
split work, such as the statistic of a norm over a cut axis.

The call in the backward pass is counted under name + ".grad". Where no gradient is wanted no graph node is made. Second derivatives are
refused by autograd (`once_differentiable`), not computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import background, collectives
from .group import Group


def copy_to(x: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """f. Forward: identity. Backward: all-reduce. Before split work that consumes a whole tensor."""
    return _run(_Copy, lambda x, *_: x, x, group, name)


def copy_beside(
    x: torch.Tensor, group: Group, name: str, beside: Callable[[], Sequence[torch.Tensor | None]], others: Sequence[torch.Tensor]
) -> torch.Tensor:
    """f, whose all-reduce runs while `beside()` computes the gradients of `others`, once all that used f's result has been gone through
    backward. For weights whose products leave their gradient to f (parallel/overlap.py). `x` requires a gradient."""
    return _CopyBeside.apply(x, group, name, beside, *others)


def reduce_from(x: torch.Tensor, group: Group, name: str, inplace: bool = False) -> torch.Tensor:
    """g. Forward: all-reduce. Backward: identity. After split work that leaves partial sums.

    With `inplace` the sum is written into `x`: for a product that nobody else reads and that its own backward pass does not need.
    """
    return _run(_Reduce, collectives.all_reduce, x, group, name, "sum", inplace)


def sum_over(x: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """g, then f. Forward and backward: all-reduce. For what split work has summed and split work goes on with."""
    return copy_to(reduce_from(x, group, name), group, name)


def gather_from(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Forward: all-gather along `dim`. Backward: the own slice. For a result whose consumers are whole: the same work on every rank."""
    return _run(_Gather, collectives.all_gather, x, group, name, dim, tuple(sizes))


def scatter_to(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Forward: the own slice along `dim`. Backward: all-gather. For a value that is computed whole on every rank."""
    return _run(_Scatter, _own_slice, x, group, name, dim, tuple(sizes))


def gather_sequence(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Forward: all-gather along `dim`. Backward: reduce-scatter. Sequence slices before split work."""
    return _run(_GatherSequence, collectives.all_gather, x, group, name, dim, tuple(sizes))


def gather_sequence_beside(
    x: torch.Tensor,
    group: Group,
    name: str,
    dim: int,
    sizes: Sequence[int],
    beside: Callable[[], Sequence[torch.Tensor | None]],
    others: Sequence[torch.Tensor],
) -> torch.Tensor:
    """gather_sequence, whose reduce-scatter runs while `beside()` computes the gradients of `others`: as copy_beside is to copy_to."""
    return _GatherSequenceBeside.apply(x, group, name, dim, tuple(sizes), beside, *others)


def reduce_scatter_sequence(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Forward: reduce-scatter along `dim`. Backward: all-gather. Partial sums after split work, into sequence slices."""
    return _run(_ReduceScatterSequence, collectives.reduce_scatter, x, group, name, dim, tuple(sizes))


def _run(function: Any, plain: Callable[..., torch.Tensor], x: torch.Tensor, group: Group, *args: Any) -> torch.Tensor:
    """The autograd function where a gradient is wanted, else the plain one; the identity in a group of one rank."""
    if not isinstance(x, torch.Tensor):  # it would go through autograd without a gradient
        raise TypeError(f"'{args[0]}' is about a tensor, not a {type(x).__name__}")
    if group.size == 1:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return function.apply(x, group, *args)
    return plain(x, group, *args)


def _own_slice(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    if sum(sizes) != x.shape[dim] or len(sizes) != group.size:
        raise ValueError(f"'{name}': sizes must add up to {x.shape[dim]} along dim {dim} over {group.size} ranks, got {list(sizes)}")
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        ctx.group, ctx.name = group, name
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return collectives.all_reduce(grad, ctx.group, f"{ctx.name}.grad"), None, None


class _CopyBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, name: str, beside: Callable[[], Sequence[torch.Tensor | None]], *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.args = group, name, beside
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        group, name, beside = ctx.args
        wait = background.begin(lambda: collectives.all_reduce(grad, group, f"{name}.grad"), group)
        found = beside()
        return wait(), None, None, None, *found


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, op: str, inplace: bool) -> torch.Tensor:
        if inplace:
            ctx.mark_dirty(x)
        return collectives.all_reduce(x, group, name, op, inplace)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.args = group, f"{name}.grad", dim, sizes
        return collectives.all_gather(x, group, name, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _own_slice(grad, *ctx.args), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.args = group, f"{name}.grad", dim, sizes
        return _own_slice(x, group, name, dim, sizes).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return collectives.all_gather(grad, *ctx.args), None, None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.args = group, f"{name}.grad", dim, sizes
        return collectives.all_gather(x, group, name, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return collectives.reduce_scatter(grad, *ctx.args), None, None, None, None


class _GatherSequenceBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        name: str,
        dim: int,
        sizes: tuple[int, ...],
        beside: Callable[[], Sequence[torch.Tensor | None]],
        *others: torch.Tensor,
    ) -> torch.Tensor:
        ctx.args, ctx.beside = (group, f"{name}.grad", dim, sizes), beside
        return collectives.all_gather(x, group, name, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        wait = background.begin(lambda: collectives.reduce_scatter(grad, *ctx.args), ctx.args[0])
        found = ctx.beside()
        return wait(), None, None, None, None, None, *found


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, name: str, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.args = group, f"{name}.grad", dim, sizes
        return collectives.reduce_scatter(x, group, name, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return collectives.all_gather(grad, *ctx.args), None, None, None, None
