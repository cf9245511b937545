"""Arena: where each shadow of a compiled step lies in a row's memory.

Memory is given again as soon as its last reader is done, so an arena is as large as what is live at one time, and stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from .compiled import Compiled
from .steps import memory

LINE = 16  # floats; every place begins at a multiple of it


class Arena:
    """`size` in floats."""

    def __init__(self, compiled: Compiled) -> None:
        self._places: dict[int, int] = {}  # memory of a shadow -> where it lies
        self.size = self._lay_out(compiled)

    def _lay_out(self, compiled: Compiled) -> int:
        last: dict[int, int] = {}
        sizes: dict[int, int] = {}
        first: dict[int, list[int]] = {}

        def used(x: Any, at: int) -> None:
            if isinstance(x, torch.Tensor):
                key = memory(x)
                if key not in sizes:
                    sizes[key] = -(-x.untyped_storage().nbytes() // 4 // LINE) * LINE
                    first.setdefault(at, []).append(key)
                last[key] = at

        for _, shadow in compiled.inputs:
            used(shadow, -1)
        for at, step in enumerate(compiled.steps):
            for x in (*step.outs, *step.sources):
                used(x, at)
        used(compiled.logits, len(compiled.steps))
        free: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for key, at in last.items():
            ends.setdefault(at, []).append(key)
        total = 0
        for at in range(-1, len(compiled.steps) + 1):
            for key in first.get(at, ()):
                room = free.get(sizes[key])
                self._places[key] = room.pop() if room else total
                total = max(total, self._places[key] + sizes[key])
            for key in ends.get(at, ()):
                free.setdefault(sizes[key], []).append(self._places[key])
        return max(total, LINE)

    def at(self, shadow: torch.Tensor) -> int:
        return self._places[memory(shadow)] + int(shadow.storage_offset())

    def view(self, arena: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
        return arena.as_strided(shadow.shape, shadow.stride(), self.at(shadow))
