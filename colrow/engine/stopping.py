"""Stopping: when a sequence ends, and text that must not be shown because a stop string may have begun in it.

Limits are checked on token ids, stop strings on text. Only rank 0 decides (generate.py sends its decision on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..errors import UserError


class Finish(IntEnum):
    """Why a sequence ended. A small integer, because it travels to the other ranks."""

    EOS = 1
    STOP = 2  # a stop string
    LENGTH = 3  # max_new_tokens
    CONTEXT = 4  # the model's longest sequence


@dataclass(frozen=True)
class Limits:
    """`max_new_tokens` None: until the model stops or its context is full. `eos`: the ids that end a sequence. `context`: longest sequence
    (prompt and new tokens), None where the model has no limit."""

    max_new_tokens: int | None = None
    eos: frozenset[int] = frozenset()
    context: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise UserError("max-new-tokens must be at least 0", self.max_new_tokens, "--max-new-tokens 100")

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """UserError for no prompt, an empty one, or one that leaves no room for a new token."""
        if not prompts:
            raise UserError("there is no prompt", works='-p "Once upon a time"')
        for number, prompt in enumerate(prompts):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            if not prompt:
                raise UserError(f"{which} has no tokens", works='a text that is not empty, -p "Once upon a time"')
            if self.context is not None and len(prompt) >= self.context:
                what = f"{which} does not fit into the model's context of {self.context} tokens"
                raise UserError(what, f"{len(prompt)} tokens", f"a prompt of at most {self.context - 1} tokens")

    def finish(self, prompt: int, new: int, token: int) -> Finish | None:
        """Whether a sequence of `prompt` + `new` tokens ends with its last one, `token`."""
        if token in self.eos:
            return Finish.EOS
        if self.max_new_tokens is not None and new >= self.max_new_tokens:
            return Finish.LENGTH
        if self.context is not None and prompt + new >= self.context:
            return Finish.CONTEXT
        return None


def eos_ids(*sources: Any) -> frozenset[int]:
    """The end-of-sequence ids that a generation config, config or tokenizer names: one id, a list of them, or None each. UserError for
    anything else."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        named = [value] if isinstance(value, int) else value or []
        if not isinstance(named, list | tuple) or not all(isinstance(token, int) for token in named):
            raise UserError(f"the eos_token_id of {type(source).__name__} is no token", repr(value), "a token's number, or a list of them")
        found.update(named)
    return frozenset(found)


def context_limit(config: Any) -> int | None:
    """The longest sequence the model was made for; None where its config names none (ALiBi, recurrent models)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    value = getattr(text, "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


class StopText:
    """Passes text through until a stop string appears in it.

    `feed(piece)` returns the text that may be shown; `flush()` what is still held back when the sequence ends another way. Text is held
    back only while it may be the beginning of a stop string. The stop string that is complete first counts (of two complete at once, the
    longer), and nothing of it is ever shown, however the text is cut into pieces.

    >>> stop = StopText(["DEF"])
    >>> stop.feed("ABCD"), stop.feed("EX"), stop.feed("DEFG"), stop.stopped
    ('ABC', 'DEX', '', True)
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not s for s in stops):
            raise UserError("a stop string must not be empty", works='--stop "\\n\\n"')
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def feed(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        hold = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
