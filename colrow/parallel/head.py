"""The head's contract: what `model(...)` returns on every rank.

* `.logits` is whole, as wide as the vocabulary, so that anything written for transformers works;
* inside `sharded_logits(model)` it is the rank's slice, and nothing is gathered (the engine, the trainer);
* `.loss` is computed from the slices and needs no whole logits: pass `labels` as always;
* `.attentions`, where asked for, are those of all heads. The cache is the rank's own.

The loss is transformers' own (`num_items_in_batch`, `ignore_index`, `shift_labels`), computed by loss.py. A training loop that does not
read the logits should run inside `sharded_logits`, which spares their gather. `loss_terms` adds label smoothing or a z-loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition, even
from ..planning.plan import Attention
from . import inline_loss
from .fused import linear_cross_entropy
from .loss import parallel_cross_entropy
from .state import State, sharded, state_of

Loss = Callable[..., torch.Tensor]
KNOWN = (ForCausalLMLoss, ForMaskedLMLoss)


@contextmanager
def sharded_logits(model: nn.Module) -> Iterator[None]:
    """Within, the model's logits are the rank's slice of the vocabulary (its columns as the plan's head region cuts them)."""
    with sharded(state_of(model)):
        yield


@contextmanager
def loss_terms(model: nn.Module, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Iterator[None]:
    """Within, the model's `.loss` has these terms (loss.py). UserError where its loss is computed elsewhere than here."""
    state = state_of(model)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss} if label_smoothing or z_loss else {}
    if terms and not getattr(getattr(model, "loss_function", None), "takes_promises", False):
        what = "label smoothing and z-loss are for models whose loss is the usual one of their logits"
        raise UserError(what, type(model).__name__, "training without them")
    before, state.terms = state.terms, terms
    try:
        yield
    finally:
        state.terms = before


def install(model: nn.Module, state: State) -> None:
    """Replaces the loss of a model whose head is cut. Losses that are not known to work on slices refuse with UserError when called."""
    if state.group.size > 1 and state.plan.attention:
        model.register_forward_hook(lambda _, __, output: _whole_attentions(output, state))
    if not hasattr(type(model), "loss_function"):
        return
    region, original, own = state.head, model.loss_function, inline_loss.computes_own(model)
    if state.group.size == 1:
        head = model.get_output_embeddings()  # type: ignore[operator]
        if original in KNOWN and not own and isinstance(head, nn.Linear):
            model.loss_function = _of_promises(original, even(0, head.out_features, 1), state)  # type: ignore[assignment,arg-type]
    elif region is not None and region.partition is not None:
        if own:
            inline_loss.install(model, state, region)
        model.loss_function = parallel_loss(original, state.group, region.partition, None if own else state)  # type: ignore[assignment,arg-type]


def _whole_attentions(output: Any, state: State) -> Any:
    """[B, rank's heads, S, T] of each layer become [B, heads, S, T], in a ModelOutput whose attentions are those of the plan's modules."""
    weights = output.get("attentions") if isinstance(output, dict) else None
    entries = state.plan.attention
    if weights and len(weights) == len(entries) and all(isinstance(w, torch.Tensor) for w in weights):
        output["attentions"] = tuple(_whole_heads(w, entry, state) for w, entry in zip(weights, entries, strict=True))
    return output


def _whole_heads(weights: torch.Tensor, entry: Attention, state: State) -> torch.Tensor:
    sizes = [entry.query.local_size(rank) for rank in range(state.group.size)]
    beside = regions.gather_from(weights, state.group, f"{entry.module}.attentions", 1, sizes)
    return Partition(1, entry.query.pieces).merge(beside.split(sizes, 1))


def parallel_loss(original: Loss, group: Group, partition: Partition, state: State | None = None) -> Loss:
    """The loss `original` for logits that are the rank's slice; with `state` also for a promise of them (fused.py)."""
    if original not in KNOWN:
        return _refusal(original)
    shift = original is ForCausalLMLoss

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if vocab_size not in (partition.size, partition.local_size(group.rank)):  # some models ask their head, which says its own
            raise UserError("the loss is asked for another vocabulary than the head's", vocab_size, f"{partition.size} columns")
        targets = shift_labels if shift and shift_labels is not None else labels
        if targets is None:
            raise UserError("the loss needs labels", None, "model(..., labels=...)")
        if shift and shift_labels is None:  # position n predicts token n + 1
            targets = F.pad(targets, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.to(logits.device)
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum"}
        options |= state.terms if state is not None else {}
        if state is not None and state.promises is not None:
            hidden, head = state.promises.redeem(logits)
            hidden = hidden.reshape(*targets.shape, hidden.shape[-1])
            total = linear_cross_entropy(hidden, head.weight, head.bias, targets, group, partition, **options)
        else:
            logits = logits.reshape(*targets.shape, logits.shape[-1]) if logits.shape[:-1] != targets.shape else logits
            total = parallel_cross_entropy(logits, targets, group, partition, **options)
        if num_items_in_batch is None:
            return total
        items = num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, torch.Tensor) else num_items_in_batch
        return total / items

    loss.takes_promises = state is not None  # type: ignore[attr-defined]
    return loss


def _of_promises(original: Loss, partition: Partition, state: State) -> Loss:
    """On one rank: transformers' own loss, but for promises and terms that it does not know."""
    ours = parallel_loss(original, state.group, partition, state)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (ours if state.promises is not None or state.terms else original)(*args, **kwargs)

    loss.takes_promises = True  # type: ignore[attr-defined]
    return loss


def _refusal(original: Loss) -> Loss:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        name = getattr(original, "__name__", str(original))
        raise UserError("this loss does not work on slices of the logits", name, "compute it from model(...).logits, which are whole")

    return refuse
