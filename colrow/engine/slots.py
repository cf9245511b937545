"""Slots: the keys and values of one sequence in memory that a program writes to, with room for more positions.

A slot takes them over from the cache that transformers' modules made, and gives them back as such a cache (`to_cache`) without copying,
where modules go on: the next turn of a conversation.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import torch

ROOM = 64  # positions that are added at least when a slot is full; few, since the scheduler counts positions, not room for more


class Slot:
    """Row `row` of `past`, a DynamicCache: its last `length` positions, all by default. Position p is at index p of the slot's memory;
    where a window has let go of old positions, nothing is there."""

    def __init__(self, past: Any, row: int = 0, length: int | None = None) -> None:
        self._empty = _emptied(past)
        self.length: int = past.get_seq_length() if length is None else length
        self.capacity = self.length + ROOM
        self._keys = [self._taken(layer.keys[row : row + 1]) for layer in past.layers]
        self._values = [self._taken(layer.values[row : row + 1]) for layer in past.layers]
        self._point()

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        held = min(x.shape[2], self.length)
        out = x.new_zeros(1, x.shape[1], self.capacity, x.shape[3])
        out[:, :, self.length - held : self.length] = x[:, :, x.shape[2] - held :]
        return out

    def reserve(self) -> None:
        """Makes room for one more position, by moving to larger memory where there is none."""
        if self.length < self.capacity:
            return
        self.capacity += max(ROOM, self.capacity // 8)
        self._keys, self._values = ([self._taken(x[:, :, : self.length]) for x in side] for side in (self._keys, self._values))
        self._point()

    def _point(self) -> None:
        """The addresses, layer by layer, as C wants them."""
        self.keys, self.values = ((ctypes.c_void_p * len(side))(*(x.data_ptr() for x in side)) for side in (self._keys, self._values))

    def to_cache(self) -> Any:
        """A cache with all positions. It shares the slot's memory, so the slot must not be used on."""
        past = _emptied(self._empty)
        for layer, keys, values in zip(past.layers, self._keys, self._values, strict=True):
            window = getattr(layer, "sliding_window", None)
            first = max(0, self.length - window + 1) if window else 0
            layer.keys, layer.values = keys[:, :, first : self.length], values[:, :, first : self.length]
            if window:
                layer.cumulative_length = self.length
        return past


def _emptied(past: Any) -> Any:
    """A cache of the same kinds of layers that holds nothing on to."""
    out = copy.copy(past)
    out.layers = [copy.copy(layer) for layer in past.layers]
    for layer in out.layers:
        layer.keys = layer.values = None
    return out


def as_slot(past: Any) -> Slot:
    """The one row of a cache as a slot, or the slot that it is already."""
    return past if isinstance(past, Slot) else Slot(past)


def as_cache(past: Any) -> Any:
    """A slot as a cache, or the cache that it is already."""
    return past.to_cache() if isinstance(past, Slot) else past
