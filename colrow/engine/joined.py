"""Joined: pieces of one prompt that follow each other in a step go through the model at once, where that was seen to change no bit.

Prompts are cut at fixed places, so that beginnings can be shared (prefixes.py), and each piece reads all weights. A product of more rows
need not give a row the same bits as one of fewer; whether it does depends on processor, dtype and libraries. kernels/prompt.c adds up a
row of attention in one order; where it runs, `joinable` looks at the rest: the model's keys, values and scores for a few pieces, one by
one and joined. Pieces of less than `LEAST` tokens always go by themselves, since libraries have code of their own for a few rows; whether
a piece does depends on its prompt alone, not on its company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..kernels import many, prompt
from .blocks import plain
from .forward import Forward
from .request import Run

LEAST = many.LEAST  # tokens of a piece that may be joined to others
SEEN = (64, 64, LEAST)  # pieces that `joinable` tries


def joinable(forward: Forward, group: Group, context: int | None) -> bool:
    """Whether pieces of a prompt may be joined, on every rank. A collective: the model runs."""
    model, same = forward.model, False
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    able = group.device.type == "cpu" and dtypes == {torch.bfloat16} and prompt.library() is not None
    able = able and not model.config.is_encoder_decoder  # an encoder reads its prompt whole
    if able and (context is None or context >= sum(SEEN)):
        phase, group.counters.phase = group.counters.phase, "prepare"
        same = _same(forward, group.device)
        group.counters.phase = phase
    return all(gather_objects(same, group, "engine.joined"))


def _same(forward: Forward, device: torch.device) -> bool:
    vocab = forward.model.config.get_text_config().vocab_size
    ids = torch.tensor([[(7 * at + 3) % vocab for at in range(sum(SEEN))]], device=device)
    pieces = [torch.Tensor() for _ in SEEN]
    past: Any = None
    for at, piece in enumerate(ids.split(SEEN, 1)):
        pieces[at], past = forward(piece, None, past)
    scores, joined = forward(ids, None, None)
    if not plain(past):
        return False
    sides = [(getattr(a, name), getattr(b, name)) for a, b in zip(past.layers, joined.layers, strict=True) for name in ("keys", "values")]
    return all(torch.equal(a, b) for a, b in [*sides, (pieces[-1], scores)])


def groups(runs: Sequence[Run], joins: bool) -> Iterator[list[Run]]:
    """The step's runs, those together that go through the model at once."""
    together: list[Run] = []
    for run in runs:
        if together and not (joins and run.id == together[-1].id and _may(run) and _may(together[-1])):
            yield together
            together = []
        together.append(run)
    if together:
        yield together


def _may(run: Run) -> bool:
    return not run.every and run.new == 0 and len(run.tokens) >= LEAST
