"""Recorded: what a split model does for one new token, as a list: its aten ops, its attention calls, its sums over ranks.

The model runs once, with real weights, on one token after a few others. Its ops are caught as they are executed (a dispatch mode), its
attention through transformers' AttentionInterface, its sums through the counters that book every collective. The attention function gives
zeros here and the cache is left alone: only who computes what from what is of interest. A model whose attention, cache or positions cannot
be followed raises NotRecorded. Not here: what is made of the list (compiled.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..comm.group import Call, Group
from .forward import Forward

RECORDS = "colrow_records"  # of the attention function in transformers' registry
HARMLESS = {"is_causal", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict", "position_embeddings"}
_active = threading.local()


class NotRecorded(Exception):
    """The model does something that a program cannot do; one line that says what."""


@dataclass(frozen=True)
class Ran:
    """An aten op that ran: `outputs` are its tensor results in order."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]

    @property
    def name(self) -> str:
        return self.func._schema.name.split("::")[-1]


@dataclass(frozen=True)
class Added:
    """`x` became the sum of all ranks' `x`; `name` is the call site, `call` its header."""

    name: str
    call: Call
    x: torch.Tensor


@dataclass(frozen=True)
class Attended:
    """Attention of the new position in layer `layer` of the cache: q [1, H, 1, d], k and v [1, KV, 1, d] to out [1, 1, H, d]. Query head h
    uses KV head `kv_of[h]`. `window`: positions seen, 0 for all; `softcap` 0 for none."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    kv_of: tuple[int, ...]
    scale: float
    softcap: float
    window: int


@dataclass(frozen=True)
class Tape:
    """All of it, in order. `ids` [1, 1] and `positions` [1, 1] went in, `logits` [1, columns] came out."""

    entries: list[Ran | Added | Attended]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, past: DynamicCache) -> None:
        super().__init__()
        self.entries: list[Ran | Added | Attended] = []
        self.past, self.layer_of = past, dict[int, int]()
        self.quiet = 0
        self.problem = ""  # the first one; told at the end, as a rank that left in the middle would leave the others waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.quiet:
            results = result if isinstance(result, tuple | list) else (result,)
            self.entries.append(Ran(func, args, kwargs or {}, tuple(r for r in results if isinstance(r, torch.Tensor))))
        return result

    @contextmanager
    def add(self, call: Call, x: Any) -> Iterator[None]:
        if call.op != "all_reduce" or not call.detail.startswith("sum"):
            self.problem = self.problem or f"{call.op} '{call.name}' is in the middle of it"
        self.quiet += 1
        yield
        self.quiet -= 1
        self.entries.append(Added(call.name, call, x))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Stands for the cache's: the new keys and values go on to the attention alone."""
        self.layer_of[id(keys)] = layer
        return keys, values


def record(model: Any, group: Group, forward: Forward, past: Any, token: int) -> Tape:
    """One step of the model on `token`, with the cache `past` of one row, which stays as it is. A collective of all ranks."""
    layers = getattr(past, "layers", None)
    if type(past) is not DynamicCache or not layers or any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in layers):
        raise NotRecorded("its cache is not one of keys and values")
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise NotRecorded("its attention sees chunks")
    if not forward.takes_positions:
        raise NotRecorded("it takes no positions")
    recorder = _Recorder(past)
    ids, positions = torch.tensor([[token]]), torch.tensor([[past.get_seq_length()]])
    with ExitStack() as stack:
        stack.enter_context(_attention_recorded(model))
        stack.enter_context(_replaced(past, "update", recorder.update))
        stack.enter_context(_replaced(group.counters, "watch", recorder.add))
        stack.enter_context(_replaced(_active, "recorder", recorder))
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        logits = forward.at(ids, positions, past)
    if recorder.problem:
        raise NotRecorded(recorder.problem)
    return Tape(recorder.entries, ids, positions, logits)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is owner else setattr(owner, name, before)


@contextmanager
def _attention_recorded(model: Any) -> Iterator[None]:
    """All attention modules look up the recording function, whatever their config (a private one too) names."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None and hasattr(c, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = RECORDS
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _attention(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
    """What the recorded model calls for attention."""
    recorder: _Recorder = _active.recorder
    recorder.quiet += 1
    out = q.new_zeros(1, 1, q.shape[1], v.shape[3])
    recorder.quiet -= 1
    layer, kv_of = recorder.layer_of.get(id(k)), _kv_of(module, q.shape[1], k.shape[1])
    scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    kwargs.pop("sliding_window", None)  # the cache's layer says it
    others = [name for name, value in kwargs.items() if name not in HARMLESS and value is not None and value is not False and value != 0]
    if layer is None or kv_of is None or others:
        what = (
            f"takes {others[0]}"
            if others
            else "gets other keys than those that are cached"
            if layer is None
            else "shares KV heads unevenly"
        )
        recorder.problem = recorder.problem or f"its attention {what}"
        return out, None
    window = getattr(recorder.past.layers[layer], "sliding_window", 0) or 0
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    recorder.entries.append(Attended(layer, q, k, v, out, kv_of, scale, float(softcap or 0), window))
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
