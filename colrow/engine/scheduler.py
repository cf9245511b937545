"""Scheduler: which sequences run in a step. Rank 0's alone, and plain Python: no tensors, no ranks.

Requests join and leave at every step. A step has every sequence that is decoding, and prompts in chunks of at most `chunk` tokens together,
so a long prompt does not stall the others. Chunks are cut at fixed places of a sequence, whatever else runs: its arithmetic is the same
alone and in company.

A request is admitted, in order of arrival, when the cache has room for its prompt and all the tokens it may still make; then it never has
to give its place up. (Taking a cache away and computing it again later would round differently, and a request's greedy tokens would depend
on its company.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from .request import Output, Request, Run, Step, TokenLogprob
from .stopping import Finish, Limits

NAMES = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CONTEXT: "length"}


class Text(Protocol):
    """What a scheduler needs of a sequence's text: engine.RowText is one."""

    def push(self, token: int) -> Finish | None:
        """A token has come: a reason to end (a stop string), or None."""

    def take(self, finished: Finish | None) -> str:
        """The text that has become certain since; all of the rest where the sequence has `finished`."""


@dataclass
class Sequence:
    """A request on its way. `cached`: tokens that have gone through the model; `new`: those that were chosen."""

    request: Request
    text: Text
    arrived: float
    limits: Limits
    cached: int = 0
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.ids, *self.new]


@dataclass(frozen=True)
class Chosen:
    """What the model brought for a run: the token (None where none was to be chosen), or why there is none; log-probabilities as asked."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] = ()
    error: str = ""


class Scheduler:
    """`cache_tokens`: positions that all caches together may hold. `text(request)` makes the text of a new sequence. `eos`, `context`: as
    in stopping.Limits."""

    def __init__(
        self,
        cache_tokens: int,
        eos: frozenset[int],
        context: int | None,
        text: Callable[[Request], Text],
        chunk: int = 256,
        max_running: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache_tokens, self.eos, self.context, self.chunk, self.max_running = cache_tokens, eos, context, chunk, max_running
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._text, self._clock, self._number = text, clock, 0
        self._dropped: list[int] = []
        self._outputs: list[Output] = []  # of requests that ended outside a step

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._dropped or self._outputs)

    @property
    def reserved(self) -> int:
        """Positions of the cache that are promised to running requests."""
        return sum(sequence.request.cache_tokens for sequence in self.running.values())

    def add(self, request: Request) -> None:
        """Queues the request. One that can never run ends at once, with an error."""
        eos = frozenset() if request.ignore_eos else self.eos
        limits = Limits(request.max_new_tokens, eos, self.context)
        if not request.ids:
            self._outputs.append(Output(request.id, finish="error", error="the prompt has no tokens"))
        elif request.cache_tokens > self.cache_tokens:
            need = f"it needs {request.cache_tokens} positions of the cache, which has {self.cache_tokens}"
            self._outputs.append(Output(request.id, finish="error", error=need))
        elif request.max_new_tokens == 0 and request.prompt_logprobs is None:
            self._outputs.append(Output(request.id, finish="length"))
        else:
            self.waiting.append(Sequence(request, self._text(request), self._clock(), limits))

    def abort(self, id: int, finish: str = "abort") -> None:
        """Ends a request; its place is free in the next step. Nothing happens for one that has ended already."""
        found = id in self.running
        if self.running.pop(id, None) is not None:
            self._dropped.append(id)
        for sequence in [s for s in self.waiting if s.request.id == id]:
            self.waiting.remove(sequence)
            found = True
        if found:
            self._outputs.append(Output(id, finish=finish))

    def plan(self) -> Step:
        """The next step. Everything that the other ranks must know is in it."""
        self._end_late_ones()
        added = self._admit()
        runs, room = [], self.chunk
        for sequence in self.running.values():
            total = len(sequence.request.ids) + len(sequence.new)
            if total - sequence.cached == 1 and sequence.new:
                runs.append(self._run(sequence, total))
                continue
            # A prompt's next chunk, cut at a multiple of the chunk's size. It runs whole or waits.
            end = min(total, (sequence.cached // self.chunk + 1) * self.chunk)
            if end - sequence.cached <= room:
                room -= end - sequence.cached
                runs.append(self._run(sequence, end))
        dropped, self._dropped = tuple(self._dropped), []
        self._number += 1
        return Step(self._number, tuple(replace(s.request, ids=()) for s in added), dropped, tuple(runs))

    def advance(self, step: Step, chosen: list[Chosen]) -> list[Output]:
        """What the step brought: `chosen` has one entry for each of its runs."""
        outputs, self._outputs = self._outputs, []
        for run, choice in zip(step.runs, chosen, strict=True):
            outputs += self._advanced(self.running[run.id], run, choice)
        return outputs

    def _advanced(self, sequence: Sequence, run: Run, choice: Chosen) -> list[Output]:
        id = sequence.request.id
        sequence.cached += len(run.tokens)
        if choice.error:
            self._leave(id)
            return [Output(id, finish="error", error=choice.error)]
        if not run.chooses:
            done = sequence.cached >= len(sequence.request.ids)  # a prompt of which only the log-probabilities were wanted
            if done:
                self._leave(id)
            return [Output(id, prompt_logprobs=choice.prompt, finish="length" if done else None)] if done or choice.prompt else []
        assert choice.token is not None
        sequence.new.append(choice.token)
        limit = sequence.limits.finish(len(sequence.request.ids), len(sequence.new), choice.token)
        ends = limit if limit is Finish.EOS else sequence.text.push(choice.token) or limit
        if ends is not None:
            self._leave(id)
        logprobs = (choice.logprob,) if choice.logprob is not None else ()
        return [Output(id, (choice.token,), sequence.text.take(ends), NAMES[ends] if ends else None, logprobs, choice.prompt)]

    def _run(self, sequence: Sequence, end: int) -> Run:
        prompt, request = len(sequence.request.ids), sequence.request
        decodes = end == sequence.cached + 1 and sequence.new  # then its tokens need not be put together
        tokens = (sequence.new[-1],) if decodes else tuple(sequence.tokens[sequence.cached : end])
        return Run(
            request.id,
            tokens,
            request.prompt_logprobs is not None and sequence.cached < prompt,
            end >= prompt and request.max_new_tokens > 0,
        )

    def _admit(self) -> list[Sequence]:
        added: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            first = self.waiting[0].request
            if self.reserved + first.cache_tokens > self.cache_tokens:
                break
            sequence = self.waiting.popleft()
            self.running[first.id] = sequence
            added.append(sequence)
        return added

    def _end_late_ones(self) -> None:
        now = self._clock()
        for sequence in [*self.running.values(), *self.waiting]:
            if sequence.request.seconds is not None and now - sequence.arrived > sequence.request.seconds:
                self.abort(sequence.request.id, "timeout")

    def _leave(self, id: int) -> None:
        del self.running[id]
        self._dropped.append(id)
