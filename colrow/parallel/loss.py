"""Cross entropy over a vocabulary that is cut over ranks: computed from the slices, without ever making a whole row of logits.

    loss = log Σ_v exp(x_v - m) - (x_label - m),   m = max_v x_v

Each rank takes its part of the maximum, of the sum and of the label's logit. Two small all-reduces forward (the maximum; then sum, label's
logit and, for label smoothing, the sum of logits in one), none backward: with the whole sum known, each rank's gradient is its own slice of
softmax(x) - target (Shoeybi et al., arXiv:1909.08053, section 3).

float16 and bfloat16 logits are computed in float32; float32 and float64 stay. Some rows at a time, so that the float32 numbers never exist
all at once and stay in the cache. The logits are not changed. Where every label is ignored the mean is 0 with zero gradients, not nan as in
torch, so that a batch that is all padding on one data-parallel rank cannot poison a step.
Not here: shifting of labels (head.py), the head's product (fused.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from .embedding import local_ids

BLOCK = 1 << 17  # elements that are worked on at a time: in float32 half a megabyte, which stays in a processor's cache
Reduction = Literal["none", "mean", "sum"]


@dataclass(frozen=True, eq=False)
class Terms:
    """What each row is asked. `own`: class weights of the rank's columns; `total`: of all columns, their number without weights."""

    columns: int
    smoothing: float = 0.0
    z: float = 0.0
    own: torch.Tensor | None = None
    total: float = 0.0

    @property
    def uniform(self) -> float:
        """What label smoothing gives to each column."""
        return self.smoothing / self.columns


@dataclass(frozen=True, eq=False)
class Rows:
    """Of each row: its label's place among the rank's columns, whether the rank holds it, whether it is ignored, its class weight."""

    local: torch.Tensor
    held: torch.Tensor
    ignored: torch.Tensor
    weight: torch.Tensor | None

    def at(self, some: slice) -> Rows:
        return Rows(self.local[some], self.held[some], self.ignored[some], None if self.weight is None else self.weight[some])


def parallel_cross_entropy(
    local_logits: torch.Tensor,
    labels: torch.Tensor,
    group: Group,
    partition: Partition,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    name: str = "loss",
) -> torch.Tensor:
    """As torch.nn.functional.cross_entropy on the whole logits; the same value on every rank.

    `local_logits` [..., v_r] are the rank's slice of the vocabulary, cut by `partition` (each index on one rank); `labels` [...] whole ids;
    `weight` [vocabulary] of the classes, whole on every rank; the mean is then weighted, as torch's. `z_loss` adds z_loss·(log Σ exp x)² to
    each row, which keeps the logits' level near 0 (PaLM, arXiv:2204.02311, section 5); in the mean every row counts alike in it.
    UserError where the logits are not the rank's slice (whole ones would give loss + log R without a word); IndexError where a label is
    neither `ignore_index` nor in the vocabulary.
    """
    check_columns(local_logits.shape[-1], partition, group)
    if local_logits.shape[:-1] != labels.shape:
        found = f"{tuple(local_logits.shape)} and {tuple(labels.shape)}"
        raise UserError("logits and labels differ in shape", found, "one label for each row")
    dtype = at_least_float32(local_logits.dtype)
    rows = rows_of(labels, ignore_index, partition, group.rank, weight, dtype)
    terms = terms_of(rows, partition, group.rank, label_smoothing, z_loss, weight, reduction, dtype)
    losses = _CrossEntropy.apply(local_logits, rows, terms, group, name)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted(rows)


def parallel_logprobs(
    local_logits: torch.Tensor, labels: torch.Tensor, group: Group, partition: Partition, *, ignore_index: int = -100, name: str = "loss"
) -> torch.Tensor:
    """The log-probability [...] of each label, differentiable; 0 where it is ignored. Arguments as parallel_cross_entropy's."""
    return -parallel_cross_entropy(local_logits, labels, group, partition, ignore_index=ignore_index, reduction="none", name=name)


def check_columns(width: int, partition: Partition, group: Group) -> None:
    """UserError where `width` is not the rank's number of columns, or where columns lie on two ranks."""
    if width != partition.local_size(group.rank):
        works = f"{partition.local_size(group.rank)} columns, as inside colrow.sharded_logits(model)"
        raise UserError("the parallel loss takes the rank's slice of the logits", f"{width} columns on rank {group.rank}", works)
    if partition.shared():
        raise UserError("columns of the logits lie on two ranks and would be counted twice", partition.pieces, "each on one rank")


def rows_of(
    labels: torch.Tensor, ignore_index: int, partition: Partition, rank: int, weight: torch.Tensor | None, dtype: torch.dtype
) -> Rows:
    """IndexError where a label is neither ignored nor in the vocabulary."""
    ignored = labels == ignore_index
    known = labels[~ignored]
    if known.numel() and known.is_cpu:
        low, high = (int(x) for x in known.aminmax())
        if low < 0 or high >= partition.size:
            raise IndexError(f"label {low if low < 0 else high} is outside the vocabulary of {partition.size}")
    if weight is not None and weight.shape != (partition.size,):
        raise UserError("class weights must be one for each column of the whole logits", tuple(weight.shape), f"({partition.size},)")
    kept = labels.masked_fill(ignored, 0)
    local, held = local_ids(kept, partition, rank)
    of_label = None if weight is None else weight.to(dtype)[kept].masked_fill(ignored, 0)
    return Rows(local, held & ~ignored, ignored, of_label)


def terms_of(
    rows: Rows,
    partition: Partition,
    rank: int,
    smoothing: float,
    z: float,
    weight: torch.Tensor | None,
    reduction: Reduction,
    dtype: torch.dtype,
) -> Terms:
    if weight is None:
        return Terms(partition.size, smoothing, z, None, float(partition.size))
    if reduction == "mean" and z:  # divided by the weights' sum afterwards, and should be by the number of rows
        z = z * float(counted(rows)) / max(1, int((~rows.ignored).sum()))
    own = Partition(0, partition.pieces).split(weight.to(dtype), rank)
    return Terms(partition.size, smoothing, z, own, float(weight.double().sum()))


def counted(rows: Rows) -> torch.Tensor:
    """What the mean divides by: the rows that count, or their weights' sum; 1 where that is 0."""
    if rows.weight is None:
        return (~rows.ignored).sum().clamp(min=1)
    total = rows.weight.sum()
    return total.masked_fill(total == 0, 1)


class _CrossEntropy(torch.autograd.Function):
    """Losses [...] of the rows. Saves the logits as they came and two numbers a row; the softmax is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: Rows, terms: Terms, group: Group, name: str) -> torch.Tensor:
        losses, top, log_total = row_losses(logits, rows, terms, group, name)
        ctx.save_for_backward(logits, top, log_total)
        ctx.rows, ctx.terms = rows, terms
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        logits, top, log_total = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        slopes(logits, out, ctx.rows, top, log_total, grad, ctx.terms)
        return out, None, None, None, None


def row_losses(logits: torch.Tensor, rows: Rows, terms: Terms, group: Group, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, maximum m, log Σ exp(x - m)) of the rows. Two all-reduces."""
    ours, parts = _own_parts(logits, rows.local, terms)
    top = collectives.all_reduce(ours, group, f"{name}.max", op="max")
    # From the rank's own maximum to that of all. A rank without columns has nothing to pick a label from: `held` is false there.
    lower = _finite(ours) - top
    parts[0].mul_(lower.exp())
    parts[1].add_(lower).masked_fill_(~rows.held, 0)
    if terms.smoothing:
        parts[2].add_(lower, alpha=logits.shape[-1] if terms.own is None else float(terms.own.sum()))
    total, target, *rest = collectives.all_reduce(parts, group, f"{name}.sum", inplace=True)
    log_total = total.log()
    losses = log_total - target
    if rows.weight is not None:
        losses = losses * rows.weight
    if terms.smoothing:
        losses = (1 - terms.smoothing) * losses + terms.uniform * (terms.total * log_total - rest[0])
    if terms.z:
        losses = losses + terms.z * (top + log_total).square()
    return losses.masked_fill(rows.ignored, 0), top, log_total


def slopes(
    logits: torch.Tensor, out: torch.Tensor, rows: Rows, top: torch.Tensor, log_total: torch.Tensor, grad: torch.Tensor, terms: Terms
) -> None:
    """Writes the gradient of Σ grad·loss with respect to `logits` into `out`, which may be the same memory.

    d loss / d x_j = softmax_j·a - b·[j is the label] - uniform·w_j,   b = (1 - smoothing)·w_label,   a = b + uniform·Σw + 2z·log Σ exp x
    """
    dtype = at_least_float32(logits.dtype)
    of_label = (1 - terms.smoothing) * (torch.ones_like(top) if rows.weight is None else rows.weight)
    of_softmax = of_label + terms.uniform * terms.total
    if terms.z:
        of_softmax = of_softmax + 2 * terms.z * (top + log_total)
    label = -of_label * rows.held
    table = [t.reshape(-1, 1) for t in (top, log_total, of_softmax * grad, label * grad, rows.local, rows.ignored, grad * terms.uniform)]
    for (at, x), (_, to) in zip(_blocks(logits), _blocks(out), strict=True):
        row_top, row_log, row_softmax, row_label, row_local, row_ignored, row_uniform = (t[at] for t in table)
        # Two subtractions: top + log_total in one number would round away the logarithm where logits are large.
        slope = torch.sub(x, row_top, out=to) if x.dtype == dtype == to.dtype else x.to(dtype).sub_(row_top)
        slope.sub_(row_log).exp_().mul_(row_softmax).scatter_add_(-1, row_local, row_label)
        if terms.smoothing:
            slope.sub_(row_uniform if terms.own is None else row_uniform * terms.own)
        slope.masked_fill_(row_ignored, 0)  # not times 0: such a row may hold nan
        if slope is not to:
            to.copy_(slope)


def _own_parts(logits: torch.Tensor, local: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rank's columns of each row: their maximum m, and Σ exp(x - m), x_label - m and, for smoothing, Σ w (x - m)."""
    dtype = at_least_float32(logits.dtype)
    top = logits.new_full(local.shape, float("-inf"), dtype=dtype)
    parts = logits.new_zeros(3 if terms.smoothing else 2, *local.shape, dtype=dtype)
    label, flat_top, flat = local.reshape(-1, 1), top.view(-1), parts.view(len(parts), -1)
    for at, x in _blocks(logits):
        x = x.to(dtype)
        torch.amax(x, -1, out=flat_top[at])
        x = x - _finite(flat_top[at]).unsqueeze(-1)
        flat[1, at] = x.gather(-1, label[at]).squeeze(-1)
        if terms.smoothing:
            flat[2, at] = x.sum(-1) if terms.own is None else x @ terms.own
        torch.sum(x.exp_(), -1, out=flat[0, at])
    return top, parts


def _finite(top: torch.Tensor) -> torch.Tensor:
    """-inf, of a row without columns or whose columns all are, must not be subtracted from -inf."""
    return top.masked_fill(top == float("-inf"), 0)


def _blocks(x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows of `x` [..., width] at a time. No rows at all where there are no columns."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 1)
    step = max(1, (BLOCK if x.is_cpu else 64 * BLOCK) // rows.shape[-1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step), rows[start : start + step]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
