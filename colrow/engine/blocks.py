"""Blocks: keys and values of pieces of prompts, kept by every rank for later requests; and caches that begin with them.

Each rank has its own KV heads' part of a piece, under the number that rank 0 gave it (prefixes.py). A sequence that begins with kept pieces
gets copies of them: they were computed once, but each sequence has a cache of its own, which the model's code extends as it likes.

Only caches that are plain keys and values, one position after the other, can be taken apart (`plain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer


def plain(past: Any) -> bool:
    """Whether it is a cache of plain keys and values."""
    return type(past) is DynamicCache and all(type(layer) is DynamicLayer and layer.is_initialized for layer in past.layers)


class Blocks:
    """One for each rank; all ranks make the same calls."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by number: keys and values of each layer

    def keep(self, key: int, past: Any, start: int, stop: int) -> None:
        """Positions [start, stop) of a sequence's cache, under the number `key`."""
        self._kept[key] = [(layer.keys[:, :, start:stop].clone(), layer.values[:, :, start:stop].clone()) for layer in past.layers]

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._kept.pop(key, None)

    def extended(self, past: Any, keys: Sequence[int]) -> DynamicCache:
        """`past` (None: nothing) with these pieces after it."""
        pieces = [self._kept[key] for key in keys]
        out = DynamicCache()
        for index in range(len(pieces[0])):
            before = [] if past is None else [(past.layers[index].keys, past.layers[index].values)]
            keys_of, values_of = zip(*before, *(piece[index] for piece in pieces), strict=True)
            out.update(torch.cat(keys_of, 2), torch.cat(values_of, 2), index)
        return out
