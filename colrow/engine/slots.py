"""Slots: the keys and values of one sequence in memory that a program writes to, with room for more positions.

A slot takes them over from the cache that transformers' modules made, and gives them back as such a cache (`to_cache`) without copying,
where modules go on: the next turn of a conversation. Of an encoder-decoder it also has what the encoder made of the prompt, where it lies.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

ROOM = 64  # positions that are added at least when a slot is full; few, since the scheduler counts positions, not room for more


class Slot:
    """Row `row` of `past`, a DynamicCache or two of them: its last `length` positions, all by default, and of the encoder's the first
    `sources`. Position p is at index p of the slot's memory; where a window has let go of old positions, nothing is there."""

    def __init__(self, past: Any, row: int = 0, length: int | None = None, sources: int | None = None) -> None:
        own, source = halves(past)
        self._empty = _emptied(past)
        self.length: int = own.get_seq_length() if length is None else length
        self.capacity = self.length + ROOM
        self._keys = [self._taken(layer.keys[row : row + 1]) for layer in own.layers]
        self._values = [self._taken(layer.values[row : row + 1]) for layer in own.layers]
        self._point()
        layers: Any = () if source is None else source.layers
        self._source = [[x[row : row + 1, :, :sources].contiguous() for x in (layer.keys, layer.values)] for layer in layers]
        self.sources = self._source[0][0].shape[2] if layers else 0
        self.source_keys, self.source_values = (_pointers([pair[side] for pair in self._source]) for side in (0, 1))

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
        self.keys, self.values = _pointers(self._keys), _pointers(self._values)

    def to_cache(self) -> Any:
        """A cache with all positions. It shares the slot's memory, so the slot must not be used on."""
        past = _emptied(self._empty)
        own, source = halves(past)
        for layer, keys, values in zip(own.layers, self._keys, self._values, strict=True):
            window = getattr(layer, "sliding_window", None)
            first = max(0, self.length - window + 1) if window else 0
            layer.keys, layer.values = keys[:, :, first : self.length], values[:, :, first : self.length]
            if window:
                layer.cumulative_length = self.length
        for layer, (keys, values) in zip(() if source is None else source.layers, self._source, strict=True):
            layer.keys, layer.values = keys, values
        return past


def halves(past: Any) -> tuple[Any, Any]:
    """A cache of new tokens and, of an encoder-decoder, the one of what its encoder made; else None."""
    return (past.self_attention_cache, past.cross_attention_cache) if type(past) is EncoderDecoderCache else (past, None)


def _pointers(tensors: list[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _emptied(past: Any) -> Any:
    """A cache of the same kinds of layers that holds nothing on to."""
    out = copy.copy(past)
    if type(past) is EncoderDecoderCache:
        out.self_attention_cache, out.cross_attention_cache = map(_emptied, halves(past))
        return out
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
