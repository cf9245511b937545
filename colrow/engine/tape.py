"""Tape: what was recorded of one step of a model, as data. recorded.py makes it, compiled.py reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.group import Call


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

    @property
    def is_view(self) -> bool:
        """Whether all its results lie in its first argument's memory, unchanged."""
        returns = self.func._schema.returns
        return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@dataclass(frozen=True)
class Added:
    """`x` became the sum of all ranks' `x`; `name` is the call site, `call` its header."""

    name: str
    call: Call
    x: torch.Tensor


@dataclass(frozen=True)
class Cached:
    """New keys k [1, KV, 1, d] and values v went into layer `layer` of the cache; the model got `keys` and `values` in their place: with
    all positions before them where it has attention code of its own, else k and v themselves. `source`: they are those of an encoder's
    positions, which nothing is added to."""

    layer: int
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    source: bool = False


@dataclass(frozen=True)
class Attended:
    """Attention of the new position in layer `layer` of the cache: q [1, H, 1, d], k and v [1, KV, 1, d] to out [1, 1, H, d]. Query head h
    uses KV head `kv_of[h]`. `softcap` 0 for none. `sinks` [H]: of each head a score without a value. `slopes`: of each head, what is added
    to a score for each position that lies nearer. `bias` [H, positions]: what is added, too. `layer` None: k and v are made from what is
    cached. `source`: k and v are all that an encoder's positions have in that layer."""

    layer: int | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    kv_of: tuple[int, ...]
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: tuple[float, ...] = ()
    bias: torch.Tensor | None = None
    source: bool = False


Entry = Ran | Added | Cached | Attended


@dataclass(frozen=True)
class Tape:
    """All of it, in order. `ids` [1, 1] and `positions` [1, 1] went in, `logits` [1, columns] came out. `windows`: of each layer of the
    cache the number of positions that are seen, 0 for all. `anywhere`: it can be recorded behind any number of positions."""

    entries: list[Entry]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    windows: tuple[int, ...]
    anywhere: bool = False
