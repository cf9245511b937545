"""One step's gradient from several micro-batches: the mean over tokens, however the batch is cut.

The mean of means is not the mean: micro-batches with few tokens would count as much as those with many. So the tokens of the whole step
are counted first, and each micro-batch's summed loss is divided by that number. A step with a single micro-batch, a last window that is
not full and a micro-batch without any token then need no rule of their own. Ranks of one tensor-parallel group see the same tokens and
never multiply the count; data-parallel ranks add theirs (`others`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..parallel.fused import forward_loss

Batch = Mapping[str, torch.Tensor]  # of a model's forward: input_ids, attention_mask, position_ids, labels (unshifted), each [B, S]
IGNORED = -100


def count_tokens(batch: Batch) -> int:
    """Labels that the loss of a causal model counts: position n predicts label n + 1, so the first of each row is never asked for."""
    if "labels" not in batch:
        raise UserError("a training batch needs labels", sorted(batch), 'batch["labels"], as wide as input_ids')
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def backward(model: nn.Module, batches: Sequence[Batch], *, replicas: int = 1, total: int | None = None, scale: float = 1.0) -> float:
    """Adds the gradient of the mean loss over the tokens of all `batches` to `.grad`; returns this rank's share of that loss.

    `total` is the number of tokens of the step where data-parallel `replicas` have others, whose gradients are averaged afterwards (DDP)
    and losses added. `scale` multiplies the gradient, not the result (loss scaling for float16).
    """
    tokens = max(1, sum(map(count_tokens, batches)) if total is None else total)
    loss = 0.0
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else _no_sync(model):
            share = mean_loss(model, batch, tokens)
            (share * (replicas * scale)).backward()
        loss += float(share.detach())
    return loss


def mean_loss(model: nn.Module, batch: Batch, tokens: int) -> torch.Tensor:
    """The batch's summed loss over `tokens`. Logits are not gathered, nor made for all tokens at once where the model allows that."""
    inner = getattr(model, "module", model)  # of DDP
    if _takes_tokens(inner):
        return forward_loss(inner, model, **batch, num_items_in_batch=tokens, use_cache=False)
    return forward_loss(inner, model, **batch, use_cache=False) * (count_tokens(batch) / tokens)


def _takes_tokens(model: nn.Module) -> bool:
    """Whether the model's loss can be given the number to divide by (transformers passes its keyword arguments on to it)."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def _no_sync(model: Any) -> contextlib.AbstractContextManager[Any]:
    make: Callable[[], Any] = getattr(model, "no_sync", contextlib.nullcontext)
    return make()


def check_same_data(batches: Sequence[Batch], group: Group, name: str = "data") -> None:
    """UserError on every rank, naming ranks and tensor, where the ranks of `group` were not given the same batches.

    Costs one exchange of a few bytes. Without it, ranks that shuffle for themselves train on a mixture that no unsplit model ever saw.
    """
    if group.size == 1:
        return
    mine = [{key: _digest(value) for key, value in batch.items()} for batch in batches]
    everyone = collectives.gather_objects(mine, group, name)
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        if len(other) != len(everyone[0]):
            what = f"{len(everyone[0])} micro-batches on rank 0, {len(other)} on rank {rank}"
        else:
            at, first, theirs = next((i, a, b) for i, (a, b) in enumerate(zip(everyone[0], other, strict=True)) if a != b)
            key = next(k for k in sorted(first.keys() | theirs.keys()) if first.get(k) != theirs.get(k))
            what = f"{key} of micro-batch {at} differs between rank 0 and rank {rank}"
        raise UserError("the ranks of one tensor-parallel group must train on the same data", what, "the same seed on all of them")


def _digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(data, digest_size=16).hexdigest()
