"""Attention of a prompt in bfloat16 on a CPU, a block of queries at a time: at 512 tokens five times as fast as torch's fused kernel there
by kernels/prompt.c, and twice as fast by torch's own products where that does not run.

All heads that share a KV head go together, so K and V are read once for each of those, not for each query head. Scores are float32, their
softmax bfloat16, as in the fused kernel. A causal block is multiplied only with the keys up to its own end. The scores of one block stay in
the processor's cache.

transformers' sdpa attention stays what it is called: some families' code asks for that name and does something else under any other
(Falcon's prompts would see later tokens). Once `install` is called, what the name stands for is a function that looks whether `install` has
marked the module, and leaves all else to transformers': single tokens, other dtypes and devices, training, masks that hide a whole row. An
"sdpa" that a user has registered stays theirs, for every model. Not here: which heads a rank has, and maps of heads that are not regular
(attention.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..kernels import prompt

SCORES = 1 << 19  # of one block, about: 2 MB of float32
LEAST, MOST = 32, 128  # queries of a block


def install(model: nn.Module) -> None:
    """Wherever a module of the model calls transformers' sdpa attention, `prompt_attention` answers from now on."""
    for module in model.modules():
        module.colrow_prompts = True  # type: ignore[assignment]
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", sdpa)


class _Now(threading.local):
    listener: Callable[[], None] | None = None
    sequences: Sequence[tuple[int, int]] | None = None


_now = _Now()


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Within, each call of what "sdpa" stands for is told."""
    before, _now.listener = _now.listener, listener
    try:
        yield
    finally:
        _now.listener = before


def sdpa(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """What "sdpa" stands for in transformers' registry once something is installed."""
    if _now.listener is not None:
        _now.listener()
    function = prompt_attention if getattr(module, "colrow_prompts", False) else sdpa_attention_forward
    return function(module, *args, **kwargs)


def prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, S, d], key [B, KV, T, d], value [B, KV, T, e], mask [B or 1, 1, S, T] of what is seen, or None. Returns [B, S, H, e]."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = attention_mask is None and causal
    sequences = _now.sequences
    blocks = (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
        and dropout == 0
        and kwargs.get("softcap") is None
        and kwargs.get("position_bias") is None
        and query.shape[0] == key.shape[0]
        and key.shape[1] > 0
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
    )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if sequences is not None:
        return _each(query, key, value, sequences if blocks and causal else None, scale), None
    blocks = (
        blocks
        and query.shape[2] > 1
        and (not causal or query.shape[2] == key.shape[2])
        and (attention_mask is None or _is_whole(attention_mask, query.shape[2], key.shape[2]))
    )
    if not blocks:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    out = prompt.attend(query, key, value, attention_mask, causal, scale)
    return (_in_blocks(query, key, value, attention_mask, causal, scale) if out is None else out), None


@contextmanager
def several(lengths: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Within, what attention gets is of several sequences, one behind the other: of each so many queries, and so many keys, whose last ones
    are the queries' own. A query sees the keys of its sequence up to its own. Where the library cannot do it, or the model's code asks for
    anything else, NaN comes back: ranks stay in step, and whoever compares sees it."""
    before, _now.sequences = _now.sequences, lengths
    try:
        yield
    finally:
        _now.sequences = before


def _each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[tuple[int, int]] | None, scale: float
) -> torch.Tensor:
    """[B, S, H, e] of all sequences' queries; NaN without `lengths`."""
    sizes = [[length[side] for length in lengths or ()] for side in (0, 1)]
    found: list[torch.Tensor | None] = [None]
    if (sum(sizes[0]), sum(sizes[1])) == (query.shape[2], key.shape[2]):
        parts = zip(query.split(sizes[0], 2), key.split(sizes[1], 2), value.split(sizes[1], 2), strict=True)
        found = [prompt.attend(q, k, v, None, True, scale) for q, k, v in parts]
    outs = [out for out in found if out is not None]
    if len(outs) == len(found):
        return torch.cat(outs, 1)
    return value.new_full((query.shape[0], query.shape[2], query.shape[1], value.shape[3]), float("nan"))


def _is_whole(mask: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether it says for each query, and for all heads alike, which keys it sees, and each sees one at least."""
    return mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:] == (1, queries, keys) and bool(mask.any(-1).all())


def _in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    out = value.new_empty(batch, queries, heads, value.shape[3])
    keys_t = key.float().reshape(batch * kv_heads, keys, width).transpose(1, 2)
    values = value.reshape(batch * kv_heads, keys, value.shape[3])
    rows = min(max(SCORES // (batch * heads * keys) // LEAST * LEAST, LEAST), MOST)
    later = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        size, seen = last - first, last if causal else keys
        block = (query[:, :, first:last].float() * scale).reshape(batch * kv_heads, -1, width)
        scores = torch.bmm(block, keys_t[:, :, :seen])
        by_head = scores.view(batch, kv_heads, -1, size, seen)
        if causal:
            by_head[..., first:].masked_fill_(later[:size, :size], float("-inf"))
        elif mask is not None:
            by_head.masked_fill_(~mask[:, :, None, first:last], float("-inf"))
        weights = torch.softmax(scores, -1).to(value.dtype)
        out[:, first:last] = torch.bmm(weights, values[:, :seen]).view(batch, heads, size, -1).transpose(1, 2)
    return out
