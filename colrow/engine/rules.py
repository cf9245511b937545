"""Rules: what a model's own generation config asks of its text, beside temperature and the like: no n-gram twice, words never said, a
first token that is forced, and a last one upon a text that is cut off.

transformers' `generate` obeys these in greedy search too, so the same tokens need them here. Each is transformers' own processor, run on
rank 0 on one row's scores of the whole vocabulary, which the ranks gather for such models. A repetition penalty alone needs no gathering:
it becomes the request's (`sampling`). Not here: temperature, top-k and top-p of a generation config, which a request must ask for, and
searches along several sequences (`ignored` names them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import generation

from ..errors import UserError
from .settings import Sampling


@dataclass(frozen=True)
class Place:
    """Where a row stands: its sequence begins with `begin` given tokens, and `last` says whether its limit allows one more token only."""

    begin: int
    last: bool


_Make = Callable[[Any, "Rules", Place], Any]  # (the setting, all rules, place) -> a processor
_FIRST, _BIAS = "forced_bos_token_id", "sequence_bias"
_RULES: dict[str, tuple[Any, _Make]] = {
    _BIAS: (None, lambda given, rules, place: generation.SequenceBiasLogitsProcessor(given)),
    "no_repeat_ngram_size": (0, lambda given, rules, place: generation.NoRepeatNGramLogitsProcessor(given)),
    "bad_words_ids": (None, lambda given, rules, place: generation.NoBadWordsLogitsProcessor(given, rules.ends)),
    "min_length": (0, lambda given, rules, place: generation.MinLengthLogitsProcessor(given, rules.ends)),
    "min_new_tokens": (0, lambda given, rules, place: generation.MinNewTokensLengthLogitsProcessor(place.begin, given, rules.ends)),
    _FIRST: (None, lambda given, rules, place: generation.ForcedBOSTokenLogitsProcessor(given)),
    "suppress_tokens": (None, lambda given, rules, place: generation.SuppressTokensLogitsProcessor(given)),
    "begin_suppress_tokens": (None, lambda given, rules, place: generation.SuppressTokensAtBeginLogitsProcessor(given, rules.free(place))),
}
"""By the setting's name: the value that asks for nothing, and the processor; in the order in which transformers applies them."""

_IGNORED = {
    "num_beams": 1,
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class Rules:
    """The rules of one model: `wanted` by name, the end tokens, and the one that is forced upon a text at its limit."""

    wanted: tuple[tuple[str, Any], ...] = ()
    eos: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    ignored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is one that needs the scores of the whole vocabulary."""
        return bool(self.wanted or self.forced)

    def sampling(self, asked: Sampling) -> Sampling:
        """The request's own settings, with the model's repetition penalty where it names none."""
        return asked if asked.repetition_penalty is not None else replace(asked, repetition_penalty=self.repetition_penalty)

    def __call__(self, scores: torch.Tensor, tokens: Sequence[int], place: Place) -> torch.Tensor:
        """`scores` [vocabulary] of what comes after `tokens` (given ones included), as the rules leave them. They are `biased` before, and
        a repetition penalty comes in between."""
        ids, line = torch.tensor([list(tokens)]), scores[None].clone()
        for name, given in self.wanted:
            line = line if name == _BIAS else _RULES[name][1](given, self, place)(ids, line)
        if self.forced and place.last:
            line = generation.ForcedEOSTokenLogitsProcessor(ids.shape[1] + 1, list(self.forced))(ids, line)
        return line[0]

    def biased(self, scores: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """`scores` [vocabulary] of what comes after `tokens` with the sequence bias, the one rule in front of a repetition penalty."""
        given = dict(self.wanted).get(_BIAS)
        return scores if given is None else generation.SequenceBiasLogitsProcessor(given)(torch.tensor([list(tokens)]), scores[None])[0]

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor(self.eos)

    def free(self, place: Place) -> int:
        """Where the first token comes that is not forced. transformers forces one behind a single given one, a decoder's start."""
        return place.begin + (place.begin == 1 and any(name == _FIRST for name, _ in self.wanted))

    @property
    def warning(self) -> str:
        """A sentence about what is not obeyed; "" where that is nothing."""
        listed = ", ".join(self.ignored)
        return f"generation_config.json asks for {listed}, which colrow does not do" if listed else ""


def rules_of(config: Any, eos: frozenset[int]) -> Rules:
    """Those of a model's generation `config`, which ends at the tokens `eos`; none for None. UserError for what is no rule."""

    def asked(name: str, nothing: Any) -> Any:
        value = getattr(config, name, None)
        return None if value in (None, nothing, []) else value

    ends = {"min_length", "min_new_tokens"}  # these need to know the end tokens; without one they say nothing
    wanted = [(name, asked(name, nothing)) for name, (nothing, _) in _RULES.items() if eos or name not in ends]
    ignored = [(name, asked(name, nothing)) for name, nothing in _IGNORED.items()]
    forced = asked("forced_eos_token_id", None)
    rules = Rules(
        tuple((name, value) for name, value in wanted if value is not None),
        tuple(sorted(eos)),
        () if forced is None else tuple([forced] if isinstance(forced, int) else forced),
        Sampling(repetition_penalty=asked("repetition_penalty", None) or None).penalty,
        tuple(f"{name}={value}" for name, value in ignored if value is not None),
    )
    for name, value in rules.wanted:
        try:
            _RULES[name][1](value, rules, Place(1, False))
        except (ValueError, TypeError) as error:
            raise UserError(f"{name} in generation_config.json is no rule ({error})", value, "a file without it") from None
    return rules
