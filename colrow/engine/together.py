"""Together: sequences that decode go through the model as rows of one batch, so that weights are read once a step. The mode `--fast`.

Rows are padded on the left to the longest, and a matrix product of several rows rounds differently from one of a single row: in this mode a
request's tokens may depend on its company where two tokens score alike. Sequences of similar length (the same power of two) form a batch,
so less than half of it is padding. Rows are put together again only when a sequence joins, leaves, or outgrows its batch.

Only caches that are plain keys and values can be put together; sequences with others (sliding windows, recurrent states) go one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from .blocks import plain
from .forward import Forward
from .request import Request


@dataclass
class Held:
    """What every rank keeps of a running sequence: how the model is called for it (an encoder-decoder also with what its encoder made of
    the prompt), its cache (None while it is a row of a batch), the positions in it."""

    request: Request
    forward: Forward
    past: Any = None
    length: int = 0


@dataclass
class _Rows:
    """One batch: the cache of its rows, and the mask [rows, positions] that is 0 where a row is padded."""

    past: DynamicCache
    mask: torch.Tensor


class Together:
    """The batches of one engine. Every rank makes the same calls."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._batches: dict[tuple[int, ...], _Rows] = {}  # by the ids of their rows

    def decode(self, tokens: Mapping[int, int], held: Mapping[int, Held]) -> dict[int, torch.Tensor]:
        """The scores [columns] after one more token of each sequence that can be put together with others; those that cannot are left out.
        `held` has all running sequences: rows of a batch that are not in it are forgotten."""
        joined = {id for ids in self._batches for id in ids}
        able = [id for id in tokens if id in joined or plain(held[id].past)]
        sizes: dict[int, list[int]] = {}
        for id in able:
            sizes.setdefault(held[id].length.bit_length(), []).append(id)
        wanted = [tuple(sorted(ids)) for ids in sizes.values()]
        for ids in [ids for ids in self._batches if ids not in wanted]:
            self._apart(ids, held)
        found: dict[int, torch.Tensor] = {}
        for ids in wanted:
            if ids not in self._batches:
                self._batches[ids] = _join([held[id] for id in ids])
            rows = self._batches[ids]
            rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(ids), 1)], 1)
            new = torch.tensor([[tokens[id]] for id in ids], device=rows.mask.device)
            logits, rows.past = self._forward(new, None if bool(rows.mask.all()) else rows.mask, rows.past)
            found.update(zip(ids, logits, strict=True))
        return found

    def _apart(self, ids: Sequence[int], held: Mapping[int, Held]) -> None:
        """Gives the rows' caches back to their sequences."""
        rows = self._batches.pop(tuple(ids))
        for row, id in enumerate(ids):
            if id not in held:
                continue
            past, length = DynamicCache(), held[id].length
            for index, layer in enumerate(rows.past.layers):
                keys, values = (getattr(layer, name)[row : row + 1] for name in ("keys", "values"))
                past.update(keys[:, :, keys.shape[2] - length :], values[:, :, values.shape[2] - length :], index)
            held[id].past = past


def _join(rows: Sequence[Held]) -> _Rows:
    """The rows' caches side by side, padded on the left. They are taken from the sequences."""
    longest = max(row.length for row in rows)
    past = DynamicCache()
    for index, first in enumerate(rows[0].past.layers):
        sides = []
        for name in ("keys", "values"):
            own = getattr(first, name)
            whole = own.new_zeros(len(rows), own.shape[1], longest, own.shape[3])
            for at, row in enumerate(rows):
                whole[at, :, longest - row.length :] = getattr(row.past.layers[index], name)[0]
            sides.append(whole)
        past.update(sides[0], sides[1], index)
    lengths = torch.tensor([row.length for row in rows], device=own.device)
    mask = (torch.arange(longest, device=own.device) >= longest - lengths[:, None]).long()
    for row in rows:
        row.past = None
    return _Rows(past, mask)
