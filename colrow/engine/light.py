"""Light: in each decoding step, what depends on the token or its position alone: embedded tokens, the sines of rotary positions.

Torch computes it, with the recorded ops. While weights stream through the cache each op is slow to begin, so what positions alone make is
computed for a few positions at once, before they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..planning.trace import leaves
from .arena import Arena
from .compiled import Compiled, needed

AHEAD = 16  # positions that are computed at once
KEPT = 8 << 20  # bytes of what is kept of positions: fewer are computed at once where so many rows would not find theirs again


class Light:
    """Of a program that runs up to `rows` sequences in a step, each at a position of its own."""

    def __init__(self, compiled: Compiled, arena: Arena, rows: int) -> None:
        by_token = {id(compiled.ids)}
        for op in compiled.light:
            if any(id(x) in by_token for x in leaves((op.args, op.kwargs), torch.Tensor)):
                by_token.update(map(id, op.outputs))
        self._arena, self._ids, self._positions = arena, compiled.ids, compiled.positions
        self._of_tokens = [pair for pair in compiled.inputs if id(pair[0]) in by_token]
        self._of_positions = [pair for pair in compiled.inputs if id(pair[0]) not in by_token]
        self._token_ops, self._position_ops = (needed(compiled.light, pairs) for pairs in (self._of_tokens, self._of_positions))
        self._known: dict[int, list[torch.Tensor]] = {}  # the position's inputs
        nbytes = sum(shadow.numel() * 4 for _, shadow in self._of_positions)
        self._most = KEPT // max(nbytes, 1)
        self._ahead = max(1, min(AHEAD, self._most // rows))

    def fill(self, arena: torch.Tensor, token: int, position: int) -> None:
        """Writes the inputs of a row's next step into its arena."""
        if self._of_positions:
            found = self._known.get(position) or self._look_ahead(position)
            for (_, shadow), value in zip(self._of_positions, found, strict=True):
                self._arena.view(arena, shadow).copy_(value)
        made = _run(self._token_ops, {id(self._ids): torch.tensor([[token]]), id(self._positions): torch.tensor([[position]])})
        for recorded, shadow in self._of_tokens:
            self._arena.view(arena, shadow).copy_(_real(made[id(recorded)]))

    def _look_ahead(self, position: int) -> list[torch.Tensor]:
        known = self._known
        for at in range(position, position + self._ahead):
            try:
                made = _run(self._position_ops, {id(self._positions): torch.tensor([[at]])})
            except (IndexError, RuntimeError):  # no step may ever come there: a table of positions has an end
                if at == position:
                    raise
                break
            known.pop(at, None)
            known[at] = [_real(made[id(recorded)]).to(torch.float32, copy=True) for recorded, _ in self._of_positions]
        while len(known) > max(self._most, self._ahead):
            del known[next(iter(known))]
        return known[position]


def _run(ops: Sequence[Any], known: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Runs the ops on what is known, by the recorded tensors' ids, and adds what they give."""

    def now(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return known.get(id(tree), tree)
        if isinstance(tree, list | tuple):
            return [now(x) for x in tree]
        return tree

    for op in ops:
        result = op.func(*now(op.args), **{key: now(value) for key, value in op.kwargs.items()})
        outs = (result,) if isinstance(result, torch.Tensor) else tuple(r for r in result if isinstance(r, torch.Tensor))
        known.update((id(recorded), out) for recorded, out in zip(op.outputs, outs, strict=True))
    return known


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
