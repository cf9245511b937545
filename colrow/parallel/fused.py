"""Head and loss in one: from hidden states to the loss by some tokens at a time, so that no rank ever holds the logits of all tokens.

Logits are by far the widest activation of a small model: tokens x vocabulary, their gradient once more. Here a chunk of tokens goes through
the head's product, the cross entropy (loss.py, two small all-reduces a chunk) and back to the gradients of hidden states and weight, and is
forgotten. For a mean or a sum all that is known in the forward pass already, so nothing is computed twice; the gradients wait, scaled in
the backward pass, where they are handed over. With reduction "none" the chunks are computed again there.

    loss = forward_loss(model, input_ids=..., labels=...)       the model's own .loss; .logits do not exist

The model's code runs as it is: its head only leaves a promise, a tensor without memory, and the loss function, given that very promise
back, computes from the hidden states. A model that does something between the two (soft-capping, scaling) is noticed by this and runs as it
always did. Not here: the loss itself (loss.py), gathering logits (head.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from . import loss as rowwise
from .linear import ColumnParallelLinear
from .loss import Reduction, Rows, Terms
from .state import State, sharded, state_of

CHUNK = 32 << 20  # bytes of logits that exist at a time
LEAST_ROWS = 64  # a product of fewer reads the weight for too little


class NotPlain(Exception):
    """The model does something else between its head and its loss than handing over logits."""


@dataclass(eq=False)
class Promises:
    """What a head leaves instead of logits: `logits` have their shape, no memory, and nan in them. `redeemed`: asked for by the loss."""

    head: nn.Linear
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    redeemed: bool = False

    def make(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.logits is not None:
            raise NotPlain  # the head is called twice
        self.hidden = hidden
        self.logits = hidden.new_full((), float("nan")).expand(*hidden.shape[:-1], self.head.weight.shape[0])
        return self.logits

    def redeem(self, logits: torch.Tensor) -> tuple[torch.Tensor, nn.Linear]:
        """The hidden states behind a promise, and the head. NotPlain where `logits` are something that was made of it."""
        if self.hidden is None or logits is not self.logits or self.redeemed:
            raise NotPlain
        self.redeemed = True
        return self.hidden, self.head


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    group: Group,
    partition: Partition,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    name: str = "loss",
) -> torch.Tensor:
    """`parallel_cross_entropy(hidden @ weight.T + bias, ...)`, without ever making those logits.

    `hidden` [..., h] is whole on every rank, and its gradient a part (an f stands before it); `weight` [v_r, h] and `bias` [v_r] are the
    rank's. `chunk`: tokens at a time. Errors as parallel_cross_entropy's.
    """
    rowwise.check_columns(weight.shape[0], partition, group)
    if hidden.shape[:-1] != labels.shape:
        raise UserError(
            "hidden states and labels differ in shape", f"{tuple(hidden.shape)} and {tuple(labels.shape)}", "one label for each"
        )
    dtype = rowwise.at_least_float32(hidden.dtype)
    rows = rowwise.rows_of(labels.reshape(-1), ignore_index, partition, group.rank, class_weight, dtype)
    terms = rowwise.terms_of(rows, partition, group.rank, label_smoothing, z_loss, class_weight, reduction, dtype)
    size = chunk or max(LEAST_ROWS, CHUNK // (max(1, weight.shape[0]) * weight.element_size()))
    share = None if reduction == "none" else 1.0 if reduction == "sum" else 1.0 / float(rowwise.counted(rows))
    flat = hidden.reshape(-1, hidden.shape[-1])
    found = _LinearCrossEntropy.apply(flat, weight, bias, rows, terms, group, name, size, share, torch.is_grad_enabled())
    return found.view(labels.shape) if share is None else found


class _LinearCrossEntropy(torch.autograd.Function):
    """`share`: what each row counts in the result; None: the result is one loss a row. `learning`: gradients will be asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Rows,
        terms: Terms,
        group: Group,
        name: str,
        size: int,
        share: float | None,
        learning: bool,
    ) -> torch.Tensor:
        tensors, wanted = (hidden, weight, bias), tuple(learning and need for need in ctx.needs_input_grad[:3])
        sums = _Sums(tensors, wanted) if share is not None and any(wanted) else None
        losses = hidden.new_empty(len(hidden), dtype=rowwise.at_least_float32(hidden.dtype))
        kept = []
        for at in _chunks(len(hidden), size):
            logits = F.linear(hidden[at], weight, bias)
            losses[at], top, log_total = rowwise.row_losses(logits, rows.at(at), terms, group, name)
            if sums is not None:
                assert share is not None
                rowwise.slopes(logits, logits, rows.at(at), top, log_total, torch.full_like(top, share), terms)
                sums.add(at, logits, hidden, weight)
            kept.append((top, log_total))
            del logits
        ctx.sums, ctx.again = sums, None
        if share is not None:
            return losses.sum() * share
        ctx.save_for_backward(*tensors)
        ctx.again = rows, terms, size, kept, wanted
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        if ctx.again is not None:
            hidden, weight, bias = tensors = ctx.saved_tensors
            rows, terms, size, kept, wanted = ctx.again
            sums = _Sums(tensors, wanted)
            for at, (top, log_total) in zip(_chunks(len(hidden), size), kept, strict=True):
                logits = F.linear(hidden[at], weight, bias)
                rowwise.slopes(logits, logits, rows.at(at), top, log_total, grad[at], terms)
                sums.add(at, logits, hidden, weight)
            return *sums.take(None), *[None] * 7
        if ctx.sums is None:
            raise RuntimeError("the gradients of this loss were handed over by an earlier backward pass")
        sums, ctx.sums = ctx.sums, None
        return *sums.take(grad), *[None] * 7


class _Sums:
    """The gradients of hidden states, weight and bias, added up over chunks; of a 16-bit weight in float32."""

    def __init__(self, tensors: tuple[torch.Tensor | None, ...], wanted: tuple[bool, ...]) -> None:
        self.dtypes = [None if t is None else t.dtype for t in tensors]
        hidden, *rest = (t if t is not None and want else None for t, want in zip(tensors, wanted, strict=True))
        self.of_hidden = None if hidden is None else torch.empty_like(hidden)
        self.of_weight, self.of_bias = (None if t is None else torch.zeros_like(t, dtype=rowwise.at_least_float32(t.dtype)) for t in rest)

    def add(self, at: slice, slope: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """`slope` [chunk, v_r]: the gradient of the chunk's logits."""
        if self.of_hidden is not None:
            torch.mm(slope, weight, out=self.of_hidden[at])
        if self.of_weight is not None and self.of_weight.dtype == slope.dtype:
            self.of_weight.addmm_(slope.T, hidden[at])
        elif self.of_weight is not None:
            self.of_weight += slope.T @ hidden[at]
        if self.of_bias is not None:
            self.of_bias += slope.sum(0)

    def take(self, factor: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """All three, times `factor`, in the tensors' own dtypes."""
        out = []
        for found, dtype in zip((self.of_hidden, self.of_weight, self.of_bias), self.dtypes, strict=True):
            if found is not None and factor is not None:
                found.mul_(factor)
            out.append(None if found is None else found.to(dtype))
        return tuple(out)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def forward_loss(model: Any, call: Any = None, **batch: Any) -> torch.Tensor:
    """`model(**batch).loss` of a split model, without logits where its code allows it. `call`: what is called instead (DDP around it)."""
    state, run = state_of(model), call or model
    head = plain_head(model, state)
    if head is not None:
        number = state.masks.number if state.masks is not None else 0
        try:
            with promising(state, head) as promises:
                loss = run(**batch).loss
                if not promises.redeemed:
                    raise NotPlain
                return loss
        except NotPlain:
            state.plain = False
            if state.masks is not None:
                state.masks.number = number  # dropout draws what it would have drawn
    with sharded(state):
        return run(**batch).loss


def plain_head(model: Any, state: State) -> nn.Linear | None:
    """The model's head, where nothing is known to stand between it and a loss that works on slices."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    known = type(head) is (nn.Linear if state.group.size == 1 else ColumnParallelLinear)
    takes = getattr(getattr(model, "loss_function", None), "takes_promises", False)
    if head is None or not (known and takes and state.plain) or torch.is_autocast_enabled(head.weight.device.type):
        return None
    return head


@contextmanager
def promising(state: State, head: nn.Linear) -> Iterator[Promises]:
    """Within, the head leaves a promise, and the loss must be given just that."""
    promises = state.promises = Promises(head)
    head.forward = promises.make  # type: ignore[method-assign,assignment]
    try:
        with sharded(state):
            yield promises
    finally:
        del head.forward
        state.promises = None
