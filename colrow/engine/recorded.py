"""Recorded: what a split model does for one new token, as a list: its aten ops, its attention calls, its sums over ranks.

The model runs once, with real weights, on one token after a few others. Its ops are caught as they are executed (a dispatch mode), its
attention through transformers' AttentionInterface, its sums through the counters that book every collective. The attention function gives
zeros here and the cache is left alone: only who computes what from what is of interest. Models with attention code of their own run it,
with the keys and values of their cache, and experts run as a product of matrices picked by the router (standins.py). A model whose
attention, cache or positions cannot be followed raises NotRecorded. The decoder of an encoder-decoder asks its cache for the position, so
that says it as a tensor; what it adds to scores depends on the distance, so it is given keys of all positions, numbers without meaning.
Not here: what is made of the list (compiled.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..comm.group import Call, Group
from . import standins
from .forward import Forward
from .slots import halves
from .tape import Added, Attended, Cached, Entry, NotRecorded, Ran, Tape


class Recorder(TorchDispatchMode):
    """`own`: the model has attention code of its own, so it is given what its cache holds. `source`: the cache of what an encoder made;
    there are then `length` positions before the new one."""

    def __init__(self, past: Any, own: bool, source: Any, length: int) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.past, self.own, self.length, self.cached = past, own, length, dict[int, Cached]()
        self.sources = None if source is None else {id(layer.keys): at for at, layer in enumerate(source.layers)}
        if source is not None:  # for code that works on them itself
            held = ((at, layer.keys, layer.values) for at, layer in enumerate(source.layers))
            self.entries += [Cached(at, k, v, k, v, source=True) for at, k, v in held]
        self.quiet = 0
        self.problem = ""  # the first one; told at the end, as a rank that left in the middle would leave the others waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = standins.picked(func, args)
        if result is None:
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
        """Stands for the cache's."""
        held, got, self.quiet = self.past.layers[layer], (keys, values), self.quiet + 1
        if self.own:
            got = torch.cat([held.keys, keys], 2), torch.cat([held.values, values], 2)
        elif self.sources is not None:
            got = keys.expand(-1, -1, self.length + 1, -1), values.expand(-1, -1, self.length + 1, -1)
        self.quiet -= 1
        self.cached[id(got[0])] = Cached(layer, keys, values, *got)
        self.entries.append(self.cached[id(got[0])])
        return got

    def attended(self, call: Attended) -> None:
        """A call of the attention function, whose `k`, `v` and `bias` are as it got them."""
        k, v, bias = call.k, call.v, call.bias
        cached, source = self.cached.get(id(k)), (self.sources or {}).get(id(k))
        layer = cached.layer if cached is not None else source
        if cached is not None:
            k, v = cached.k, cached.v
        self.quiet += 1
        if bias is not None and (cached is None or self.sources is None) and bool(bias.any()):
            self.problem = self.problem or "its attention takes position_bias"
        added = bias.expand(1, call.q.shape[1], 1, -1)[0, :, 0] if bias is not None and cached is not None else None
        self.quiet -= 1
        self.entries.append(replace(call, layer=layer, k=k, v=v, bias=added, source=source is not None))


class Ranges(TorchFunctionMode):
    """torch makes numbers of the ends of a range that it is given as tensors; while a step is recorded it counts from the first one on,
    which is then followed as what it is."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.arange or len(args) != 2 or not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        self.recorder.quiet += 1
        count = int(args[1] - args[0])
        self.recorder.quiet -= 1
        return torch.arange(count, **(kwargs or {})) + args[0]


def has_own_attention(model: Any) -> bool:
    return not getattr(model, "_supports_attention_backend", True)


def record(model: Any, group: Group, forward: Forward, past: Any, token: int, plain: bool = True, length: int | None = None) -> Tape:
    """One step of the model on `token`, with the cache `past` of one row, which stays as it is. A collective of all ranks. `plain`: of a
    model's own attention code, the plainest that it has. `length`: of an encoder-decoder, as many positions before it as one likes."""
    whole, (past, source) = past, halves(past)
    for half in (past, source) if source is not None else (past,):
        layers = getattr(half, "layers", None)
        if type(half) is not DynamicCache or not layers or any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in layers):
            raise NotRecorded("its cache is not one of keys and values")
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise NotRecorded("its attention sees chunks")
    own = source is None and has_own_attention(model)
    if not forward.takes_positions and not own and source is None:
        raise NotRecorded("it takes no positions")
    length = past.get_seq_length() if length is None else length
    recorder = Recorder(past, own, source, length)
    ids, positions = torch.tensor([[token]]), torch.tensor([[length]])
    with ExitStack() as stack:
        stack.enter_context(standins.installed(model, ("eager" if plain else "") if own else standins.RECORDS))
        stack.enter_context(_replaced(past, "update", recorder.update))
        if source is not None:
            stack.enter_context(_replaced(whole, "get_seq_length", lambda *_, **__: positions.view(())))
        stack.enter_context(_replaced(group.counters, "watch", recorder.add))
        stack.enter_context(_replaced(standins.active, "recorder", recorder))
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        stack.enter_context(Ranges(recorder))
        logits = forward.at(ids, positions, whole)
    if recorder.problem:
        raise NotRecorded(recorder.problem)
    windows = tuple(getattr(layer, "sliding_window", 0) or 0 for layer in past.layers)
    return Tape(recorder.entries, ids, positions, logits, windows, source is not None)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is owner else setattr(owner, name, before)
