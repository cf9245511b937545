"""Riding: a decoding step that goes along with a pass of prompts, so that both read the weights once.

    with Riding(program, tokens, slots, group) as step:
        packed(pieces)                  # layer by layer, the step's products are made where the prompts' are
    scores = step.scores()              # what program.run(tokens, slots) gives, bit for bit

A pass of few tokens takes little longer than reading the weights, and a step of the sequences that decode would read them again. So the
step's program is run up to a product and left there until the pass multiplies by the same weights: kernels/many.h then multiplies a block
of them by the step's columns too, while it is in the processor's cache. Each side computes what it computes by itself, in the same order.
What no prompt is multiplied by (the head, mostly) the step does when the pass is over.

Ranks must stop at the same places, since sums over ranks come between: `rides` looks, on all of them. Not here: models whose passes take
the products in another order than the program, or by another kernel; their steps go by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..kernels import many
from .forward import Forward
from .packed import Packed, Piece
from .program import Program
from .slots import Slot

SHARE = 0.5  # of the products, at least, are made on the way; else it is not worth it
BESIDE = 64  # tokens of prompts in a step that others wait for: fewer than elsewhere, since these read no weights of their own


class Places:
    """Where a step stands: which of the products `of` a program (by instruction the weights of each) are made next."""

    def __init__(self, of: dict[int, list[int]]) -> None:
        self._of, self.made = of, list[tuple[int, int]]()
        self.due: dict[int, int] = {}  # by weights their places in the instruction `at`
        self.at: int | None = None

    def stand(self, at: int | None) -> None:
        """At an instruction; None: at the end."""
        self.at, self.due = at, {} if at is None else {weight: place for place, weight in enumerate(self._of[at])}

    def take(self, weight: int) -> int | None:
        """The place of the product with this weight, if it is due; from now on it is not."""
        place = self.due.pop(weight, None)
        if place is not None and self.at is not None:
            self.made.append((self.at, place))
        return place


class Riding:
    """One step of `program` for these sequences, no more than one call of C takes."""

    def __init__(self, program: Program, tokens: Sequence[int], slots: Sequence[Slot], group: Group) -> None:
        self._program, self._tokens, self._slots, self._group = program, tokens, slots, group
        self.places = Places(program.products)
        self._within = ExitStack()

    @torch.inference_mode()
    def __enter__(self) -> Riding:
        self._program.begin(self._tokens, self._slots)
        self._task = self._program.ride(True)
        self._within.callback(self._program.ride, False)
        self._go_on()
        self._within.enter_context(many.riding(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()

    def job(self, weight: int) -> tuple[int, int] | None:
        """As many.Rider's."""
        place = self.places.take(weight)
        return None if place is None else (self._task, place)

    def made(self) -> None:
        """As many.Rider's. When all products of an instruction are made, the run goes on to the next."""
        if not self.places.due:
            self._go_on()

    @torch.inference_mode()
    def scores(self) -> torch.Tensor:
        """What Program.run gives; after the pass."""
        if self.places.at is not None:
            for place in self.places.due.values():
                self._program.make(place)
            self._go_on()
        return self._program.end(self._slots)

    def _go_on(self) -> None:
        phase, self._group.counters.phase = self._group.counters.phase, "decode"
        self.places.stand(self._program.go_on(len(self._tokens)))
        self._group.counters.phase = phase


class _Listener:
    """Hears what a pass multiplies by, and takes part in nothing."""

    def __init__(self) -> None:
        self.weights: list[int] = []

    def job(self, weight: int) -> None:
        self.weights.append(weight)

    def made(self) -> None:
        """Never said, as nothing was due."""


def rides(program: Program | None, forward: Forward, group: Group) -> bool:
    """Whether steps of `program` may ride along with packed prompts, on every rank. A collective: the model runs."""
    if program is None:
        return False
    vocab, packed = forward.model.config.get_text_config().vocab_size, Packed(forward)
    ids = [(7 * at + 3) % vocab for at in range(2 * many.LEAST)]

    def read() -> list[torch.Tensor | None]:
        return packed([Piece(ids, DynamicCache())])

    phase, group.counters.phase = group.counters.phase, "prepare"
    try:
        with many.riding(listener := _Listener()):
            alone = read()
        made = _made(program.products, listener.weights)
        enough = len(made) >= SHARE * sum(map(len, program.products.values()))
        found = gather_objects((enough, made), group, "engine.riding")
        if not enough or any(other != found[0] for other in found):
            return False
        pasts = [forward(torch.tensor([ids[:count]], device=group.device), None, None)[1] for count in (5, 9)]
        expected = program.run(ids[:2], [Slot(past) for past in pasts])
        with Riding(program, ids[:2], [Slot(past) for past in pasts], group) as step:
            beside = read()
        scores = step.scores()
        pairs = [(scores, expected), *zip(alone, beside, strict=True)]
        same = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        return all(gather_objects(same and step.places.made == made, group, "engine.riding"))
    finally:
        group.counters.phase = phase


def _made(products: dict[int, list[int]], weights: Sequence[int]) -> list[tuple[int, int]]:
    """Which products would be made on the way of a pass that multiplies by these weights."""
    places, instructions = Places(products), iter(products)
    places.stand(next(instructions, None))
    for weight in weights:
        if places.take(weight) is not None and not places.due:
            places.stand(next(instructions, None))
    return places.made
