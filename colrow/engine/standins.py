"""Stand-ins: what takes the place of a model's attention and experts while one of its steps is recorded (recorded.py).

Attention modules that go through transformers' AttentionInterface find a function that notes what it is given. Those that do not run code
of their own, which attended.py makes out: first as they are, then the plainest that they have ("eager"). Experts run as products of the
matrices that the router picked: one op that picks them, which here picks a view of the first one, so that nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .tape import Attended

RECORDS = "colrow_records"  # of the attention function in transformers' registry
HARMLESS = {"is_causal", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict", "position_embeddings"}
_CHOICES = ("_attn_implementation", "_experts_implementation")
active = threading.local()
"""`recorder`: of the recording that runs on this thread."""


@contextmanager
def installed(model: Any, attention: str) -> Iterator[None]:
    """All modules look up the recorder's functions, whatever their config (a private one too) names; `attention`: which one for that, ""
    for the one that they have."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    wanted = {name: value for name, value in zip(_CHOICES, (attention, "batched_mm"), strict=True) if value}
    before = [(c, name, value) for c in configs.values() for name in wanted if (value := getattr(c, name, None)) is not None]
    for config, name, _ in before:
        setattr(config, name, wanted[name])
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def picked(func: Any, args: Any) -> torch.Tensor | None:
    """For an op that picks matrices [places, a, b] out of many [experts, a, b]: as many times the first. Else None."""
    if func is not torch.ops.aten.index.Tensor or args[0].dim() != 3 or len(args[1]) != 1 or args[1][0].dtype is not torch.int64:
        return None
    return args[0][:1].expand(args[1][0].numel(), -1, -1)


def _attention(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
    """What the recorded model calls for attention."""
    recorder = active.recorder
    recorder.quiet += 1
    out = q.new_zeros(1, 1, q.shape[1], v.shape[3])
    recorder.quiet -= 1
    kv_of, sinks, bias = _kv_of(module, q.shape[1], k.shape[1]), kwargs.pop("s_aux", None), kwargs.pop("position_bias", None)
    scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    kwargs.pop("sliding_window", None)  # the cache's layer says it
    others = [name for name, value in kwargs.items() if name not in HARMLESS and value is not None and value is not False and value != 0]
    if kv_of is None or others:
        what = f"takes {others[0]}" if others else "shares KV heads unevenly"
        recorder.problem = recorder.problem or f"its attention {what}"
        return out, None
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    recorder.attended(Attended(None, q, k, v, out, kv_of, scale, float(softcap or 0), sinks, bias=bias))
    return out, None


def _kv_of(module: Any, heads: int, kv_heads: int) -> tuple[int, ...] | None:
    mapped = getattr(module, "colrow_heads", None)
    if mapped is not None:
        return mapped.kv_of
    if kv_heads and heads % kv_heads:
        return None
    return tuple(head // (heads // kv_heads) for head in range(heads))


def _mask(*_: Any, **__: Any) -> None:
    """One new position sees all that came before it; what a window hides is no longer in the cache."""


AttentionInterface.register(RECORDS, _attention)
AttentionMaskInterface.register(RECORDS, _mask)
