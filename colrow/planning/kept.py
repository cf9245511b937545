"""What attention keeps: the KV cache of each rank, as the model's own code keeps it.

    kept = heads(trace)                                    # of the whole model: it is run once more on meta tensors, with a cache
    cache_bytes(plan, kept, context=4096)                  # per rank, of one sequence

So a layer with a sliding window stops growing, cross attention keeps the encoder's tokens, and DeepSeek's attention keeps its latent, whole
on every rank, if this release of transformers does. Not here: recurrent states (Mamba), which do not grow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .inputs import CACHES, DECODED, TOKENS
from .plan import Plan
from .trace import Trace, empty_model


@dataclass(frozen=True)
class Heads:
    """What one attention module keeps for a token: `kv` heads of `key` + `value` elements, of the last `window` - 1 tokens (0: of all).
    `cut`: they are the heads that attention works on, so ranks share them; else, as a latent, whole on every rank. `source`: of the
    encoder's tokens."""

    module: str
    kv: int
    key: int
    value: int
    window: int = 0
    source: bool = False
    cut: bool = True

    def tokens(self, context: int) -> int:
        """That are kept of `context` tokens."""
        return min(context, self.window - 1) if self.window else context

    def local(self, plan: Plan, rank: int) -> int:
        """Heads that a rank keeps: those the plan gives it, or as many as its part of the output projection takes."""
        if not self.cut:
            return self.kv
        if (given := next((a for a in plan.attention if a.module == self.module), None)) is not None:
            return given.kv.local_size(rank)
        for t in plan.tensors.values():
            if t.role == "row" and t.name.startswith(f"{self.module}.") and t.partition.size == self.kv * self.value:
                return t.partition.local_size(rank) // self.value
        return self.kv


def heads(trace: Trace) -> tuple[Heads, ...]:
    """Of every attention module that keeps something for the next token; none for a model without a cache or whose code does not run."""
    try:
        grown = list(_cached(trace))
    except Exception:  # a model's own code on meta tensors: whatever it raises, there is nothing to be said
        return ()
    own, crossing = _modules(trace)
    out = []
    for number, ((layer, source), at) in enumerate(grown):
        names = crossing if source else own
        before = sum(s == source for (_, s), _ in grown[:number])
        module, made = names[before] if len(names) == sum(s == source for (_, s), _ in grown) else ("", 0)
        _, kv, _, key = layer.keys.shape
        window = int(getattr(layer, "sliding_window", 0) or 0)
        module = module or _numbered(trace, at)
        out.append(Heads(module, kv, key, layer.values.shape[3], window, source, not made or made == kv))
    return tuple(out)


def _cached(trace: Trace) -> Iterator[tuple[tuple[Any, bool], int]]:
    """The layers of the cache after a prompt, with whether they hold the encoder's tokens and their number."""
    model = _plain_model(trace)
    wanted = {TOKENS, DECODED} & trace.inputs.keys() if TOKENS in trace.inputs else trace.inputs.keys()  # a picture may be left out
    values = {name: trace.values[trace.inputs[name]] for name in wanted}
    arguments = {name: torch.zeros(v.shape, dtype=v.dtype, device="meta") for name, v in values.items()}
    with torch.no_grad(), _PlainCase():
        out = model(**arguments, use_cache=True)
    cache = next(found for name in CACHES if (found := getattr(out, name, None)) is not None)
    pair = [(cache, False)] if hasattr(cache, "layers") else [(cache.self_attention_cache, False), (cache.cross_attention_cache, True)]
    for part, source in pair:
        for number, layer in enumerate(part.layers):
            if getattr(layer, "keys", None) is not None:
                yield (layer, source), number


def _plain_model(trace: Trace) -> Any:
    try:
        return empty_model(trace.config, "sdpa")
    except (ValueError, ImportError):
        return empty_model(trace.config, "eager")


class _PlainCase(TorchDispatchMode):
    """Answers what a model asks about contents ("is the mask all ones?"): yes, the plain case."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True if args[0].dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


def _modules(trace: Trace) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Attention modules in the order of their calls, each with its number of KV heads: of a decoder by itself, and with the encoder."""
    own, crossing = dict[str, int](), dict[str, int]()
    row = next((trace.values[trace.inputs[name]].shape[1] for name in (DECODED, TOKENS) if name in trace.inputs), 0)
    for call in trace.attention:
        _, kv, length, _ = trace.values[call.k].shape
        if trace.values[call.q].shape[2] == row:
            (own if length == row else crossing)[call.module] = kv
    return list(own.items()), list(crossing.items())


def _numbered(trace: Trace, number: int) -> str:
    """The layer of this number: "transformer.h.3"; for models whose attention does not go through the AttentionInterface."""
    found = (re.match(rf".*?\.{number}(?=\.|$)", path) for path in trace.modules)
    return next((match.group() for match in found if match), "")


def cache_bytes(plan: Plan, kept: Sequence[Heads], context: int, dtype_bytes: int = 2, source: int = 0) -> list[int]:
    """Bytes of keys and values of one sequence of `context` tokens (and of `source` tokens of an encoder, as many if 0), for each rank."""
    sizes = [((h.key + h.value) * h.tokens(source or context if h.source else context), h) for h in kept]
    return plan.each(lambda rank: sum(size * h.local(plan, rank) for size, h in sizes) * dtype_bytes)


def cache_bytes_per_token(plan: Plan, kept: Sequence[Heads], dtype_bytes: int = 2) -> list[int]:
    """Of one token of one sequence while no window is full."""
    return cache_bytes(plan, kept, 1, dtype_bytes)
