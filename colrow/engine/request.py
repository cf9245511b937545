"""What a server asks of the engine, and what comes back. Data only, without torch, so that both sides of a pipe can import it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..errors import UserError
from .settings import Sampling


@dataclass(frozen=True)
class Request:
    """One sequence to be made. `ids`: its prompt. `logprobs` and `prompt_logprobs`: how many alternatives beside the token itself, None for
    no log-probabilities. `seconds`: how long it may take from its arrival, waiting included. `source`: what an encoder-decoder's encoder
    reads; `ids` is then what the decoder begins with. UserError for values out of range."""

    id: int
    ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seconds: float | None = None
    source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UserError("max_tokens must be at least 0", self.max_new_tokens, "16")
        if any(not stop for stop in self.stop):
            raise UserError("a stop string must not be empty", works='"\\n\\n"')
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} must be a finite number", getattr(self, name), "0.5")
        if any(not math.isfinite(value) for _, value in self.logit_bias):
            raise UserError("logit_bias must have finite numbers", dict(self.logit_bias), "{5: -100}")

    @property
    def needs_logits(self) -> bool:
        """Whether rank 0 must see the scores of the whole vocabulary to choose a token or to tell its probability."""
        changed = self.sampling.penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        return bool(changed) or self.logprobs is not None

    @property
    def cache_tokens(self) -> int:
        """Positions of the cache that it may come to hold."""
        return len(self.source) + len(self.ids) + self.max_new_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """`logprob` of the token under the model's own distribution (no temperature, no penalties), None for a prompt's first token; `top` the
    likeliest tokens, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What a step brought for one request. `finish`: "stop", "length", "abort", "timeout" or "error" with its last output, else None.
    `shared`: with its first token, the positions of its prompt that were not computed but taken from an earlier request."""

    id: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    shared: int = 0


@dataclass(frozen=True)
class Run:
    """A piece of one sequence, from position `at` on, that goes through the model in a step. `every`: the scores of all its positions are
    wanted (prompt logprobs); `chooses`: the next token is chosen from the last one's. `new`: how many tokens were chosen up to here (0: it
    is a piece of the prompt, else its last token is the last one chosen; it is the only one unless all are computed again, from 0 on).
    `keep`: a number under which the keys and values from position `since` to its end are kept, 0 for none."""

    id: int
    tokens: tuple[int, ...]
    at: int = 0
    every: bool = False
    chooses: bool = True
    new: int = 0
    keep: int = 0
    since: int = 0


@dataclass(frozen=True)
class Load:
    """Sequence `id` goes on with kept pieces instead of computing them."""

    id: int
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What rank 0 tells the others to do. `dropped` sequences and `forgotten` pieces are gone before `loads` and `runs`. `added` come
    without their prompts, which arrive in runs."""

    number: int
    added: tuple[Request, ...] = ()
    dropped: tuple[int, ...] = ()
    forgotten: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    runs: tuple[Run, ...] = ()
    last: bool = False
