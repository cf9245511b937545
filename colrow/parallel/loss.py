"""Cross entropy over a vocabulary that is cut over ranks: computed from the slices, without ever making a whole row of logits.

    loss = log Σ_v exp(x_v - m) - (x_label - m),   m = max_v x_v

Each rank takes its part of the maximum, of the sum and of the label's logit. Two small all-reduces forward (the maximum; then sum, label's
logit and, for label smoothing, the sum of logits in one), none backward: with the whole sum known, each rank's gradient is its own slice of
softmax(x) - target (Shoeybi et al., arXiv:1909.08053, section 3).

float16 and bfloat16 logits are computed in float32; float32 and float64 stay. The logits are not changed. Where every label is ignored the
mean is 0 with zero gradients, not nan as in torch, so that a batch that is all padding on one data-parallel rank cannot poison a step.
Not here: shifting of labels (head.py).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from .embedding import local_ids


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
        x = _at_least_float32(logits)
        top = x.amax(-1) if x.shape[-1] else x.new_full(labels.shape, float("-inf"))
        top = collectives.all_reduce(top, group, f"{name}.max", op="max")
        shifted = x - top.unsqueeze(-1)
        # A rank without a single column has nothing to pick a label from; `held` is false everywhere there.
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~held, 0) if x.shape[-1] else torch.zeros_like(top)
        parts = [shifted.exp().sum(-1), target] + ([shifted.sum(-1)] if smoothing else [])
        total, target, *rest = collectives.all_reduce(torch.stack(parts), group, f"{name}.sum", inplace=True)
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
        x = _at_least_float32(logits)
        # Two subtractions: top + log_total in one number would round away the logarithm where logits are large.
        softmax = ((x - top.unsqueeze(-1)) - log_total.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            softmax -= ctx.smoothing / ctx.size
        if x.shape[-1]:
            softmax.scatter_add_(-1, local.unsqueeze(-1), (held.to(x.dtype) * (ctx.smoothing - 1)).unsqueeze(-1))
        softmax = (softmax * grad.unsqueeze(-1)).masked_fill_(ignored.unsqueeze(-1), 0)  # not times 0: such a row may hold nan
        return softmax.to(logits.dtype), None, None, None, None, None, None


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
