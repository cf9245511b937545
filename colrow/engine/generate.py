"""Generate: prefill, then one token a step with the cache, on all ranks together.

    for step in generate(model, group, [[1, 5, 9]], Sampling(), Limits(max_new_tokens=20)):
        ...                                        # step.tokens, the same on every rank

Every rank calls it with the same prompts and settings and iterates to the end. Rank 0 alone decides what comes next and when a row ends
(exchange.py). What only rank 0 can know (stop strings, a user who has gone) enters through `watch`.

Not here: text (text.py, engine.py), continuous batching. Rows that have ended are computed along until the last one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.group import Group
from .continuing import begins_anew
from .decoder import Decoder
from .exchange import Exchange
from .forward import Forward, left_pad, vocabulary
from .rules import Rules
from .settings import Sampling
from .slots import Slot, as_cache
from .stopping import Finish, Limits, context_limit
from .translate import Translate

Watch = Callable[[int, int], Finish | None]
"""watch(row, token) on rank 0, once for every new token: a reason to end the row, or None."""


@dataclass(frozen=True)
class Step:
    """One step's outcome, the same on every rank. A row's last token comes together with its reason in `finished`; afterwards the row's
    token is None and the reason stays."""

    number: int
    tokens: tuple[int | None, ...]
    finished: tuple[Finish | None, ...]
    gathered: bool = False  # the candidates did not reach: the full logits were exchanged
    anew: bool = False  # all tokens were computed again (continuing.py)


@dataclass
class Memory:
    """A cache that outlives one `generate` call: `past` (a cache, or a program's slot) holds the tokens `ids` of one row. A prompt that
    begins with them continues there."""

    ids: list[int] = field(default_factory=list)
    past: Any = None

    def take(self, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        """(past, the part of the prompt that is new). Everything is new unless what is remembered is a proper beginning of the prompt."""
        known, past = len(self.ids), self.past
        self.past = None  # it changes in place from here on, so it counts again only after `keep`
        if past is not None and known < len(prompt) and list(prompt[:known]) == self.ids:
            return as_cache(past), list(prompt[known:])
        return None, list(prompt)

    def keep(self, ids: Sequence[int], past: Any) -> None:
        self.ids, self.past = list(ids), past


def generate(
    model: Any,
    group: Group,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    watch: Watch | None = None,
    memory: Memory | None = None,
    decoder: Decoder | None = None,
    rules: Rules | None = None,
) -> Iterator[Step]:
    """Yields a `Step` for every new token. `prompts`: token ids, of any lengths. The counters' phase is "prefill", then "decode".
    With a `decoder` that has a program, new tokens go through that instead of the model's modules. `rules`: of the model's own config.

    UserError for prompts that are empty or too long, before anything is computed; NonFiniteLogits on every rank where the model yields NaN.
    """
    limits = limits or Limits()
    limits.check_prompts(prompts)
    if memory is not None and len(prompts) > 1:
        raise ValueError("a memory holds one row")
    return _steps(model, group, prompts, sampling or Sampling(), limits, watch, memory, decoder, rules)


def _steps(
    model: Any,
    group: Group,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limits: Limits,
    watch: Watch | None,
    memory: Memory | None,
    decoder: Decoder | None,
    rules: Rules | None,
) -> Iterator[Step]:
    if limits.max_new_tokens == 0:
        return
    if decoder is not None:
        decoder.prepare()
    program = decoder.program if decoder is not None else None
    slots: list[Slot] = []
    forward, exchange = Forward(model), Exchange(group, vocabulary(model), sampling, rules, limits.max_new_tokens)
    given = prompts
    if model.config.is_encoder_decoder:  # the prompts are read once; what becomes longer is the decoder's own sequence
        forward = Translate(model, prompts, group.device)
        prompts, memory = forward.starts, None
    history = [list(prompt) for prompt in prompts]
    finished: list[Finish | None] = [None] * len(prompts)
    goes_on = memory is not None and (decoder or Decoder(model, group, wanted=False)).continues
    past, new = memory.take(prompts[0]) if memory is not None and goes_on else (None, None)
    ids, mask = left_pad(prompts if new is None else [new], pad=0)
    ids, mask = ids.to(group.device), None if mask is None else mask.to(group.device)
    if mask is not None and program is not None and program.compiled.rewritten:
        program = None  # rows of other lengths that modules read together have the longest one's frequencies
    turns = program is None or bool(program.compiled.rewritten)
    border = begins_anew(forward, context_limit(model.config)) if turns else None
    seen = ids if new is None else torch.tensor([prompts[0]], device=group.device)  # all tokens, padded as they are computed
    number = 0

    def ends(tokens: Sequence[int]) -> list[Finish | None]:
        found: list[Finish | None] = list(finished)
        for row, token in enumerate(tokens):
            if found[row] is None:
                asked = watch(row, token) if watch is not None else None
                limit = limits.finish(len(prompts[row]), number + 1, token)
                found[row] = limit if limit is Finish.EOS else asked or limit
        return found

    phase = group.counters.phase
    try:
        while not all(finished):
            anew = number > 0 and seen.shape[1] == border
            group.counters.phase = "prefill" if number == 0 or anew else "decode"
            if program is not None and number > 0 and not anew:
                slots = slots or [
                    Slot(past, row, len(own) - 1, len(read)) for row, (own, read) in enumerate(zip(history, given, strict=True))
                ]
                logits = program.run([row[-1] for row in history], slots)
            else:
                logits, past = forward(seen, mask, None) if anew else forward(ids, mask, past)
                slots = []
            group.counters.phase = "decode" if anew else group.counters.phase
            if memory is not None:
                memory.keep(history[0], slots[0] if slots else past)
            live = [reason is None for reason in finished]
            agreed = exchange.agree(logits, history, number, ends)
            tokens, finished = agreed.tokens, agreed.finished
            for row, token in enumerate(tokens):
                if live[row]:
                    history[row].append(token)
            shown = tuple(token if alive else None for token, alive in zip(tokens, live, strict=True))
            yield Step(number, shown, tuple(finished), agreed.gathered, anew)
            ids = torch.tensor(tokens, device=group.device)[:, None]
            seen = torch.cat([seen, ids], 1)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(tokens), 1)], 1)
            number += 1
    finally:
        group.counters.phase = phase
