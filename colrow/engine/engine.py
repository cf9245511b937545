"""Engine: text in, text out, on all ranks together.

    engine = Engine(model, group, tokenizer)            # the tokenizer is needed on rank 0 only
    for chunk in engine.stream(["Once upon a time"], max_new_tokens=50):
        print(chunk.texts[0], end="")                   # "" on the other ranks

Every rank makes the same calls; what the others pass as prompts and settings is not looked at. Rank 0 turns text into tokens, tokens into
text, and watches for stop strings. One engine serves one call at a time (serving many requests at once is another layer's work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.decide import on_rank_0
from ..comm.group import Group
from ..errors import UserError
from ..parallel import prompt_attention, prompt_norms, prompt_products
from .account import Clock
from .decoder import Decoder
from .generate import Memory, Step, generate
from .prompts import Prompt, check_list, encode
from .rules import rules_of
from .settings import Sampling
from .stopping import Finish, Limits, StopText, context_limit, eos_ids
from .text import TextStream


@dataclass(frozen=True)
class Chunk:
    """One step: each row's new text (possibly "") and, once it has ended, why."""

    number: int
    texts: tuple[str, ...]
    finished: tuple[Finish | None, ...]


class Engine:
    """`model`: a split model, or a whole one with a group of one. `clock` has the times and token counts of the last call.
    `program`: whether decoding may leave the model's modules (decoder.py)."""

    def __init__(self, model: Any, group: Group, tokenizer: Any = None, generation_config: Any = None, program: bool = True) -> None:
        self.model, self.group, self.tokenizer = model, group, tokenizer
        prompt_attention.install(model)
        prompt_products.install(model)
        prompt_norms.install(model)
        config = generation_config or getattr(model, "generation_config", None)
        self.eos = eos_ids(config, model.config, tokenizer)
        self.rules = rules_of(config, self.eos)
        self.context = context_limit(model.config)
        self.decoder = Decoder(model, group, program)
        self.clock = Clock()

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        memory: Memory | None = None,
        raw: bool = False,
        until: Callable[[], bool] = lambda: False,
    ) -> Iterator[Chunk]:
        """Chunks until every row has ended. A prompt is a text, a conversation (list of {"role", "content"}) or token ids; texts of models
        with a chat template are put into it unless `raw`. `until`, asked on rank 0 after each token, ends all rows. UserError, on every
        rank, for prompts that cannot be used."""
        self.clock = Clock()

        def request() -> tuple[list[list[int]], Sampling, Limits]:
            check_list(prompts)
            ids = [encode(self.tokenizer, prompt, raw) for prompt in prompts]
            limits = Limits(max_new_tokens, self.eos, self.context)
            limits.check_prompts(ids)
            StopText(stop)  # refuses what cannot be a stop string
            return ids, self.rules.sampling(sampling or Sampling()), limits

        ids, chosen, limits = on_rank_0(request, self.group, "engine.request")
        rows = [RowText(self.tokenizer, stop, limits.eos) for _ in ids] if self.group.rank == 0 else None

        def watch(row: int, token: int) -> Finish | None:
            assert rows is not None
            return rows[row].push(token) or (Finish.STOP if until() else None)

        self.clock.begin(sum(map(len, ids)))
        watching = watch if rows is not None else None
        for step in generate(self.model, self.group, ids, chosen, limits, watching, memory, self.decoder, self.rules):
            self.clock.step(sum(token is not None for token in step.tokens), step.gathered, step.anew)
            yield _chunk(step, rows)

    def complete(self, prompts: Sequence[Prompt], **settings: Any) -> list[str]:
        """The whole texts of `stream` (same settings), on rank 0; "" elsewhere."""
        texts = [""] * len(prompts)
        for chunk in self.stream(prompts, **settings):
            texts = [text + new for text, new in zip(texts, chunk.texts, strict=True)]
        return texts


class RowText:
    """Rank 0's text of one row."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], eos: frozenset[int]) -> None:
        if tokenizer is None and stop:
            raise UserError("stop strings need a tokenizer", works="Engine(model, group, tokenizer)")
        self.stop, self.eos = StopText(stop), eos
        self.text = None if tokenizer is None else TextStream(tokenizer)
        self.piece, self.ended = "", False

    def push(self, token: int) -> Finish | None:
        if self.text is None or token in self.eos:
            return None
        self.piece = self.stop.feed(self.text.push(token))
        return Finish.STOP if self.stop.stopped else None

    def take(self, finished: Finish | None) -> str:
        """The text of the step that was just made."""
        text, self.piece = self.piece, ""
        if finished is not None and not self.ended and self.text is not None:
            self.ended = True
            text += self.stop.feed(self.text.finish()) + self.stop.flush()
        return text


def _chunk(step: Step, rows: Sequence[RowText] | None) -> Chunk:
    if rows is None:
        return Chunk(step.number, ("",) * len(step.tokens), step.finished)
    return Chunk(step.number, tuple(row.take(end) for row, end in zip(rows, step.finished, strict=True)), step.finished)
