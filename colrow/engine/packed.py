"""Packed: pieces of prompts, of one request or of several, go through the model in one pass, where that was seen to change no bit.

Every piece reads all weights, so few tokens cost nearly as much as many: prompts that wait together should go together, and a long prompt
should be cut where the others can wait no longer. But a product of more rows need not give a row the same bits as one of fewer; whether it
does depends on processor, dtype and libraries. kernels/prompt.c adds up a row of attention in one order; where it runs, `packable` looks at
the rest: the keys, values and scores of prompts by themselves, and of the same prompts cut elsewhere and in company. A pass has at least
`LEAST` rows, since libraries have code of their own for a few: it is filled up with tokens of nobody. The head is asked row by row.

Each sequence keeps a cache of its own. Not here: which pieces go together (scheduler.py), single tokens that are decoded (program.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..errors import RankError
from ..kernels import many, prompt
from ..parallel.prompt_attention import several
from .blocks import plain
from .forward import Forward

LEAST = many.LEAST  # rows of a pass, at least
ALONE, ASIDE, FAR = (48, 20), (21,), 112  # pieces of two prompts that `packable` tries by themselves; tokens at the context's end
BESIDE = ((30, 18), (38, 3))  # ... and those in which it tries both together


@dataclass(frozen=True)
class Piece:
    """Tokens of a sequence behind those in its cache `past`, which they are added to. `first`: the first one's position, where it is not
    their number. `scored`: whether its last scores are wanted."""

    tokens: Sequence[int]
    past: DynamicCache
    first: int | None = None
    scored: bool = True


class _Beside(DynamicCache):
    """What the model takes for its cache: it hands on each piece's keys and values, and gives back those of all, one behind the other. Of
    what came before it says nothing: pieces have positions of their own, and attention sees to what they see."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        sizes = [len(piece.tokens) for piece in self._pieces]
        sides = zip(self._pieces, key_states.split(sizes, 2), value_states.split(sizes, 2), strict=True)
        found = [piece.past.update(keys, values, layer_idx, *args, **kwargs) for piece, keys, values in sides]
        return torch.cat([keys for keys, _ in found], 2), torch.cat([values for _, values in found], 2)


class Packed:
    """`Packed(forward)(pieces)` -> the last scores [columns of this rank] of each piece that is scored, in order; None of the others."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._head = forward.model.get_output_embeddings()

    def __call__(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        count = sum(len(piece.tokens) for piece in pieces)
        filled = [*pieces, Piece((0,) * (LEAST - count), DynamicCache(), scored=False)] if count < LEAST else pieces
        spans = [(piece.past.get_seq_length(), len(piece.tokens)) for piece in filled]
        starts = [before if piece.first is None else piece.first for piece, (before, _) in zip(filled, spans, strict=True)]
        device = self._forward.model.device
        ids = torch.tensor([[token for piece in filled for token in piece.tokens]], device=device)
        positions = torch.cat([torch.arange(at, at + new, device=device) for at, (_, new) in zip(starts, spans, strict=True)])[None]
        ends = torch.tensor([new for _, new in spans], device=device).cumsum(0) - 1
        scored = [at for at, piece in enumerate(filled) if piece.scored]
        with several([(new, before + new) for before, new in spans]), _row_by_row(self._head, bool(scored)):
            rows = iter(self._forward.rows(ids, positions, _Beside(filled), ends[scored or [-1]])[0])
        return [next(rows) if piece.scored else None for piece in pieces]


@contextmanager
def _row_by_row(head: Any, wanted: bool) -> Iterator[None]:
    """Within, a row's scores are those of the row alone; nothing where none are wanted."""
    own, before = head.forward, vars(head).get("forward")
    columns = None if wanted else getattr(head, "out_features", None)
    head.forward = lambda x: torch.cat([own(row) for row in x.split(1, 1)], 1) if columns is None else x.new_zeros(*x.shape[:-1], columns)
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


def packable(forward: Forward, group: Group, context: int | None) -> bool:
    """Whether pieces may be packed, on every rank. A collective: the model runs."""
    model = forward.model
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    able = group.device.type == "cpu" and dtypes == {torch.bfloat16} and prompt.library() is not None
    able = able and not model.config.is_encoder_decoder and forward.chooses_rows and model.get_output_embeddings() is not None
    able = able and (context is None or context >= FAR)
    if not all(gather_objects(able, group, "engine.packed")):  # ranks of several hosts may have different processors
        return False
    phase, group.counters.phase = group.counters.phase, "prepare"
    try:
        same = _same(forward, group.device, FAR if context is None else context)
    except (RankError, MemoryError):  # this rank's own trouble: who waits for it in the model should hear of that
        raise
    except Exception:  # a model's code may fail where it meets what it has never met before
        same = False
    group.counters.phase = phase
    return all(gather_objects(same, group, "engine.packed"))


def _same(forward: Forward, device: torch.device, context: int) -> bool:
    vocab = forward.model.config.get_text_config().vocab_size
    prompts = [[(7 * at + 3 + 11 * which) % vocab for at in range(sum(sizes))] for which, sizes in enumerate((ALONE, ASIDE))]
    expected = []
    for ids, sizes in zip(prompts, (ALONE, ASIDE), strict=True):
        past: Any = None
        for piece in torch.tensor([ids], device=device).split(sizes, 1):
            scores, past = forward(piece, None, past)
        if not plain(past):
            return False
        expected.append((scores[0], past))
    packed, pasts, at = Packed(forward), (DynamicCache(), DynamicCache()), [0, 0]
    far = Piece(prompts[0][:1] * FAR, DynamicCache(), context - FAR, scored=False)  # what is far away must not change how the others turn
    for sizes, company in zip(BESIDE, ([far], []), strict=True):
        pieces = [Piece(ids[a : a + n], past) for ids, past, a, n in zip(prompts, pasts, at, sizes, strict=True)]
        found = packed([*company, *pieces])[len(company) :]
        at = [a + n for a, n in zip(at, sizes, strict=True)]
    sides = [(scores, theirs) for scores, (theirs, _) in zip(found, expected, strict=True)]
    for past, (_, theirs) in zip(pasts, expected, strict=True):
        layers = zip(past.layers, theirs.layers, strict=True)
        sides += [(getattr(a, name), getattr(b, name)) for a, b in layers for name in ("keys", "values")]
    return all(a is not None and torch.equal(a, b) for a, b in sides)
