"""Scheduler: which sequences run in a step. Rank 0's alone, and plain Python: no tensors, no ranks.

Requests join and leave at every step. A step has every sequence that is decoding, and pieces of prompts of at most `chunk` tokens together,
so a long prompt does not stall the others. Where pieces of all prompts go through the model in one pass (packed.py), a step is filled to
its room, and the room is smaller, `beside`, while sequences decode, since they wait for it. Elsewhere pieces are cut at fixed places of a
sequence, whatever else runs: its arithmetic is the same alone and in company. What is kept of prompts begins and ends at those places in
either case, and what an earlier prompt had too, with the same tokens before it, is not computed again (prefixes.py).

The cache is given out in blocks as sequences grow. A request is admitted, in order of arrival, when there is room for its prompt. When the
cache is full, pieces kept for later are given up first; then the sequence that came last gives up its place and waits. It begins again with
the same pieces and the same single tokens, so that its numbers are the same to the bit, and nobody sees it but by the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from .prefixes import Prefixes, last_cut, next_cut
from .request import Load, Output, Request, Run, Step, TokenLogprob
from .stopping import Finish, Limits

NAMES = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CONTEXT: "length"}
BLOCK = 16  # positions
SLACK = 4  # of a step's room such a part is added where a prompt ends in it


class Text(Protocol):
    """What a scheduler needs of a sequence's text: engine.RowText is one."""

    def push(self, token: int) -> Finish | None:
        """A token has come: a reason to end (a stop string), or None."""

    def take(self, finished: Finish | None) -> str:
        """The text that has become certain since; all of the rest where the sequence has `finished`."""


@dataclass
class Sequence:
    """A request on its way. `cached`: tokens that have gone through the model; `new`: those that were chosen; `piece`: the kept piece that
    its prompt has come to, 0 at its beginning, None once a piece is not kept; `shared`: positions taken from kept pieces; `anew`: its first
    tokens, new ones among them, that were read again like a prompt, 0 before that."""

    request: Request
    text: Text
    arrived: float
    limits: Limits
    cached: int = 0
    new: list[int] = field(default_factory=list)
    piece: int | None = 0
    shared: int = 0
    anew: int = 0

    @property
    def begins(self) -> int:
        """How many of its tokens are read as a prompt."""
        return max(len(self.request.ids), self.anew)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.ids, *self.new]

    @property
    def length(self) -> int:
        return len(self.request.ids) + len(self.new)

    @property
    def room(self) -> int:
        """Positions of the cache, with its next token."""
        return _blocks(len(self.request.source) + self.length + 1)


@dataclass(frozen=True)
class Chosen:
    """What the model brought for a run: the token (None where none was to be chosen), or why there is none; log-probabilities as asked."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] = ()
    error: str = ""


class Scheduler:
    """`cache_tokens`: positions that all caches together may hold. `text(request)` makes the text of a new sequence. `eos`, `context`: as
    in stopping.Limits. `chunk`, `beside`: tokens of prompts in a step, and in one that others wait for. `share`: whether beginnings of
    prompts are kept; it may be set to False later. `whole`: a prompt is one piece (continuing.py says for which models).
    `packs`: whether pieces may be cut anywhere and go together. `anew`: the length at which a `whole` sequence is computed again."""

    def __init__(
        self,
        cache_tokens: int,
        eos: frozenset[int],
        context: int | None,
        text: Callable[[Request], Text],
        chunk: int = 256,
        max_running: int = 64,
        clock: Callable[[], float] = time.monotonic,
        share: bool = True,
        whole: bool = False,
        beside: int = 128,
        packs: bool = False,
        anew: int | None = None,
    ) -> None:
        self.cache_tokens, self.eos, self.context, self.chunk, self.max_running = cache_tokens, eos, context, chunk, max_running
        self.beside, self.packs, self.anew = min(beside, chunk), packs, anew if whole else None
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in order of arrival
        self.prefixes, self.share, self.whole = Prefixes(), share and not whole, whole
        self.shared, self.paused = 0, 0  # of all requests: positions not computed; pauses
        self._text, self._clock, self._number = text, clock, 0
        self._dropped: list[int] = []
        self._forgotten: list[int] = []
        self._begun, self._loaded = set[int](), set[int]()  # pieces that the step being planned computes, and those it takes
        self._outputs: list[Output] = []  # of requests that ended outside a step

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._dropped or self._outputs)

    @property
    def used(self) -> int:
        """Positions of the blocks that running sequences hold or come to, each with room for its next token."""
        return sum(sequence.room for sequence in self.running.values())

    def add(self, request: Request) -> None:
        """Queues the request. One that can never run ends at once, with an error."""
        eos = frozenset() if request.ignore_eos else self.eos
        limits = Limits(request.max_new_tokens, eos, self.context)
        if not request.ids:
            self._outputs.append(Output(request.id, finish="error", error="the prompt has no tokens"))
        elif _blocks(request.cache_tokens) > self.cache_tokens:
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
        self._make_room()
        added = self._admit()
        self._begun, self._loaded = set(), set()
        loads, runs = list[Load](), list[Run]()
        waits = self.packs and any(s.cached >= len(s.request.ids) for s in self.running.values())
        most = room = self.beside if waits else self.chunk
        for sequence in self.running.values():
            if keys := self._kept(sequence):
                loads.append(Load(sequence.request.id, tuple(keys)))
            at = sequence.cached
            if at >= sequence.begins:
                runs.append(self._run(sequence, at, at + 1))
            pieces = self._packed(sequence, room, most) if self.packs and not _every(sequence) else self._cut(sequence, room, most)
            runs += pieces
            room -= sum(len(run.tokens) for run in pieces) + (len(sequence.request.source) if pieces and at == 0 else 0)
        dropped, self._dropped = tuple(self._dropped), []
        forgotten, self._forgotten = tuple(self._forgotten), []
        self._number += 1
        return Step(self._number, tuple(replace(s.request, ids=()) for s in added), dropped, forgotten, tuple(loads), tuple(runs))

    def advance(self, step: Step, chosen: list[Chosen]) -> list[Output]:
        """What the step brought: `chosen` has one entry for each of its runs."""
        outputs, self._outputs = self._outputs, []
        for run, choice in zip(step.runs, chosen, strict=True):
            if run.id in self.running:  # an earlier piece of the same step may have ended it
                outputs += self._advanced(self.running[run.id], run, choice)
        return outputs

    def _advanced(self, sequence: Sequence, run: Run, choice: Chosen) -> list[Output]:
        id = sequence.request.id
        sequence.cached += len(run.tokens)
        if choice.error:
            self._leave(id)
            return [Output(id, finish="error", error=choice.error)]
        if not run.chooses:
            done = sequence.request.max_new_tokens == 0 and sequence.cached >= len(sequence.request.ids)  # only log-probabilities wanted
            if done:
                self._leave(id)
            return [Output(id, prompt_logprobs=choice.prompt, finish="length" if done else None)] if done or choice.prompt else []
        assert choice.token is not None
        sequence.new.append(choice.token)
        limit = sequence.limits.finish(len(sequence.request.ids), len(sequence.new), choice.token)
        ends = limit if limit is Finish.EOS else sequence.text.push(choice.token) or limit
        if ends is not None:
            self._leave(id)
        elif sequence.length == self.anew:
            sequence.cached, sequence.anew = 0, sequence.length
        logprobs = (choice.logprob,) if choice.logprob is not None else ()
        text, finish, shared = sequence.text.take(ends), NAMES[ends] if ends else None, sequence.shared if len(sequence.new) == 1 else 0
        return [Output(id, (choice.token,), text, finish, logprobs, choice.prompt, shared=shared)]

    def stop_sharing(self) -> None:
        """The model's caches cannot be taken apart."""
        self.share, self.prefixes = False, Prefixes()
        for sequence in (*self.running.values(), *self.waiting):
            sequence.piece = None

    # ---- pieces ----

    def _cut(self, sequence: Sequence, room: int, most: int) -> list[Run]:
        """Pieces of its prompt that fit into the room, each as it is cut whatever else runs; one at least where all the room is left."""
        at, prompt, runs = sequence.cached, sequence.begins, list[Run]()
        if room < prompt - at <= most:
            return runs  # a short prompt waits for a step that has room for all of it
        while at < prompt:
            end = prompt if self.whole else min(next_cut(at, self.chunk), prompt)
            size = end - at + (len(sequence.request.source) if at == 0 else 0)  # what an encoder reads, it reads at once
            if (size > room and room < most) or self._comes(sequence, at, end):
                break
            room -= size
            runs.append(self._run(sequence, at, end))
            at = end
        return runs

    def _packed(self, sequence: Sequence, room: int, most: int) -> list[Run]:
        """As much of its prompt as there is room for. A last small part is not left to a pass of its own."""
        at, prompt, runs = sequence.cached, len(sequence.request.ids), list[Run]()
        if 0 < room < prompt - at <= room + most // SLACK:
            room = prompt - at
        while at < prompt and room > 0:
            end = min(next_cut(at, self.chunk), prompt)
            if self._comes(sequence, at, end):
                break
            end = min(end, at + room)
            room -= end - at
            runs.append(self._run(sequence, at, end))
            at = end
        return runs

    def _run(self, sequence: Sequence, at: int, end: int) -> Run:
        request, prompt = sequence.request, len(sequence.request.ids)
        tokens = tuple(sequence.tokens[at:end]) if sequence.anew else request.ids[at:end] if at < prompt else (sequence.new[at - prompt],)
        every = _every(sequence) and at < prompt
        chooses = end == sequence.length and request.max_new_tokens > 0
        return Run(request.id, tokens, at, every, chooses, max(end - prompt, 0), self._keep(sequence, at, end), last_cut(at, self.chunk))

    def _keep(self, sequence: Sequence, at: int, end: int) -> int:
        """The number under which the piece that ends here is kept; 0 where none does, or there is no room for it."""
        ids, parent, start, stop = sequence.request.ids, sequence.piece, last_cut(at, self.chunk), next_cut(at, self.chunk)
        if end < min(stop, len(ids)) or at >= len(ids) or parent is None:
            return 0
        sequence.piece = None
        if not self.share or end != stop or (parent and not self.prefixes.keeps(parent)):
            return 0
        if found := self.prefixes.find(parent, ids[start:end]):  # kept already: it was computed for its scores, or its last token's
            sequence.piece = found
            return 0
        self._forget(end - start, parent)
        if self.used + self.prefixes.positions + end - start > self.cache_tokens:
            return 0
        key = self.prefixes.add(parent, ids[start:end])
        self._begun.add(key)
        sequence.piece = key
        return key

    def _kept(self, sequence: Sequence) -> list[int]:
        """Kept pieces that the sequence goes on with; at least one token of its prompt is left to be computed."""
        found: list[int] = []
        ids = sequence.request.ids
        if not self.share or _every(sequence) or sequence.cached != last_cut(sequence.cached, self.chunk):
            return found
        while sequence.piece is not None and (end := next_cut(sequence.cached, self.chunk)) < len(ids):
            key = self.prefixes.find(sequence.piece, ids[sequence.cached : end])
            if not key or key in self._begun:
                break
            found.append(key)
            self._loaded.add(key)
            sequence.shared += end - sequence.cached if not sequence.new else 0
            self.shared += end - sequence.cached
            sequence.cached, sequence.piece = end, key
        return found

    def _comes(self, sequence: Sequence, at: int, end: int) -> bool:
        """Whether another sequence computes this piece in this step, so that it is better to wait for it."""
        ids = sequence.request.ids
        if sequence.piece is None or end >= len(ids) or _every(sequence) or at != last_cut(at, self.chunk):
            return False
        return self.prefixes.find(sequence.piece, ids[at:end]) in self._begun

    # ---- room ----

    def _admit(self) -> list[Sequence]:
        """Requests that begin with this step: there is room for their prompt (of one that was paused: for all it had), and for a block more
        of each that runs."""
        added: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            need = self.waiting[0].room + (BLOCK * len(self.running) if self.running else 0)
            self._forget(need)
            if self.running and self.used + need > self.cache_tokens:
                break
            sequence = self.waiting.popleft()
            self.running[sequence.request.id] = sequence
            added.append(sequence)
        return added

    def _make_room(self) -> None:
        """For the next token of every running sequence."""
        while self.used > self.cache_tokens and len(self.running) > 1:
            id, sequence = self.running.popitem()
            self._dropped.append(id)
            sequence.cached, sequence.piece = 0, 0
            self.waiting.appendleft(sequence)
            self.paused += 1
        self._forget(0)

    def _forget(self, positions: int, parent: int = 0) -> None:
        """Kept pieces, until so many positions are free, but none that this step computes, loads, or hangs a new one on."""
        excess = self.used + self.prefixes.positions + positions - self.cache_tokens
        self._forgotten += self.prefixes.forget(excess, {parent, *self._begun, *self._loaded})

    def _end_late_ones(self) -> None:
        now = self._clock()
        for sequence in [*self.running.values(), *self.waiting]:
            if sequence.request.seconds is not None and now - sequence.arrived > sequence.request.seconds:
                self.abort(sequence.request.id, "timeout")

    def _leave(self, id: int) -> None:
        del self.running[id]
        self._dropped.append(id)


def _every(sequence: Sequence) -> bool:
    """Whether the scores of all positions of its prompt are wanted."""
    return sequence.request.prompt_logprobs is not None and not sequence.new


def _blocks(positions: int) -> int:
    """So many positions in whole blocks."""
    return -(-positions // BLOCK) * BLOCK
