"""Cross entropy over a vocabulary that is cut over ranks: computed from the slices, without ever making a whole row of logits.

    loss = log Σ_v exp(x_v - m) - (x_label - m),   m = max_v x_v

Each rank takes its part of the maximum, of the sum and of the label's logit. Two small all-reduces forward (the maximum; then sum, label's
logit and, for label smoothing, the sum of logits in one), none backward: with the whole sum known, each rank's gradient is its own slice of
softmax(x) - target (Shoeybi et al., arXiv:1909.08053, section 3).

float16 and bfloat16 logits are computed in float32; float32 and float64 stay. Some rows at a time, so that the float32 numbers never exist
all at once and stay in the cache. The logits are not changed. Where every label is ignored the mean is 0 with zero gradients, not nan as in
torch, so that a batch that is all padding on one data-parallel rank cannot poison a step.
Not here: shifting of labels (head.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from .embedding import local_ids

BLOCK = 1 << 17  # elements that are worked on at a time: in float32 half a megabyte, which stays in a processor's cache


def parallel_cross_entropy(
    local_logits: torch.Tensor,
    labels: torch.Tensor,
    group: Group,
    partition: Partition,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["none", "mean", "sum"] = "mean",
    name: str = "loss",
) -> torch.Tensor:
    """As torch.nn.functional.cross_entropy on the whole logits; the same value on every rank.

    `local_logits` [..., v_r] are the rank's slice of the vocabulary, cut by `partition` (each index on one rank); `labels` [...] whole ids.
    UserError where the logits are not the rank's slice (whole ones would give loss + log R without a word); IndexError where a label is
    neither `ignore_index` nor in the vocabulary.
    """
    width = partition.local_size(group.rank)
    if local_logits.shape[-1] != width:
        found = f"{local_logits.shape[-1]} columns on rank {group.rank}"
        works = f"{width} columns, as inside colrow.sharded_logits(model)"
        raise UserError("the parallel loss takes the rank's slice of the logits", found, works)
    if partition.shared():
        raise UserError("columns of the logits lie on two ranks and would be counted twice", partition.pieces, "each on one rank")
    if local_logits.shape[:-1] != labels.shape:
        found = f"{tuple(local_logits.shape)} and {tuple(labels.shape)}"
        raise UserError("logits and labels differ in shape", found, "one label for each row")
    ignored = labels == ignore_index
    _check_labels(labels[~ignored], partition.size)
    losses = _CrossEntropy.apply(local_logits, labels, ignored, group, partition, label_smoothing, name)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum().clamp(min=1)


def _check_labels(labels: torch.Tensor, size: int) -> None:
    if labels.numel() and labels.is_cpu:
        low, high = (int(x) for x in labels.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"label {low if low < 0 else high} is outside the vocabulary of {size}")


class _CrossEntropy(torch.autograd.Function):
    """Losses [...] of the rows. Saves the logits as they came and two numbers a row; the softmax is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        ignored: torch.Tensor,
        group: Group,
        partition: Partition,
        smoothing: float,
        name: str,
    ) -> torch.Tensor:
        local, held = local_ids(labels.masked_fill(ignored, 0), partition, group.rank)
        held &= ~ignored
        ours, parts = _own_parts(logits, local, smoothing)
        top = collectives.all_reduce(ours, group, f"{name}.max", op="max")
        # From the rank's own maximum to that of all. A rank without columns has nothing to pick a label from: `held` is false there.
        lower = _finite(ours) - top
        parts[0].mul_(lower.exp())
        parts[1].add_(lower).masked_fill_(~held, 0)
        if smoothing:
            parts[2].add_(lower, alpha=logits.shape[-1])
        total, target, *rest = collectives.all_reduce(parts, group, f"{name}.sum", inplace=True)
        log_total = total.log()
        losses = log_total - target
        if smoothing:
            uniform = log_total - rest[0] / partition.size
            losses = (1 - smoothing) * losses + smoothing * uniform
        ctx.save_for_backward(logits, top, log_total, local, held, ignored)
        ctx.smoothing, ctx.size = smoothing, partition.size
        return losses.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        logits, top, log_total, local, held, ignored = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dtype = _at_least_float32(logits.dtype)
        label = (held.to(dtype) * (ctx.smoothing - 1)).view(-1, 1)
        rows = [t.reshape(-1, 1) for t in (top, log_total, grad, local, ignored)]
        for (at, x), (_, to) in zip(_blocks(logits), _blocks(out), strict=True):
            row_top, row_log, row_grad, row_local, row_ignored = (t[at] for t in rows)
            # Two subtractions: top + log_total in one number would round away the logarithm where logits are large.
            softmax = torch.sub(x, row_top, out=to) if x.dtype == dtype else x.to(dtype).sub_(row_top)
            softmax.sub_(row_log).exp_()
            if ctx.smoothing:
                softmax.sub_(ctx.smoothing / ctx.size)
            softmax.scatter_add_(-1, row_local, label[at])
            softmax.mul_(row_grad).masked_fill_(row_ignored, 0)  # not times 0: such a row may hold nan
            if softmax is not to:
                to.copy_(softmax)
        return out, None, None, None, None, None, None


def _own_parts(logits: torch.Tensor, local: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rank's columns of each row: their maximum m, and Σ exp(x - m), x_label - m and, for smoothing, Σ (x - m)."""
    dtype = _at_least_float32(logits.dtype)
    top = logits.new_full(local.shape, float("-inf"), dtype=dtype)
    parts = logits.new_zeros(3 if smoothing else 2, *local.shape, dtype=dtype)
    label, flat_top, flat = local.reshape(-1, 1), top.view(-1), parts.view(len(parts), -1)
    for at, x in _blocks(logits):
        x = x.to(dtype)
        torch.amax(x, -1, out=flat_top[at])
        x = x - _finite(flat_top[at]).unsqueeze(-1)
        flat[1, at] = x.gather(-1, label[at]).squeeze(-1)
        if smoothing:
            torch.sum(x, -1, out=flat[2, at])
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


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
