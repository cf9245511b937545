"""Batch: many requests at once, which join and leave at every step. All ranks step together; rank 0 alone is asked and answers.

    batch = Batch(engine, cache_tokens=20_000)          # on every rank
    batch.add(Request(1, ids)); batch.add(...)          # rank 0
    while batch.step(outputs.extend): ...               # every rank, until rank 0 calls close()

Each sequence has its own cache, and its arithmetic, and with it its greedy tokens, are bit-equal alone and in any company. Prompts go
through the model's modules, those of a step in one pass where that changes no bit (packed.py), elsewhere each by itself, in pieces that do
not depend on the others; beginnings that were computed before are not computed again (prefixes.py, blocks.py). New tokens of all sequences
go through the engine's program together, which reads weights once a step and computes each row as it would alone; beside packed prompts
that step takes the weights as they come by (riding.py). For models without a program (decoder.py says why) they go through the modules,
each sequence by itself, so that weights are read once for each; `fast` makes it once a step (together.py).

Not here: which sequences run (scheduler.py), which token comes (mixed.py), HTTP (serve/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..comm.collectives import broadcast_object
from ..comm.group import Group
from ..errors import RankError
from . import packed
from .blocks import Blocks, plain
from .continuing import begins_anew
from .engine import Engine, RowText
from .forward import Forward, vocabulary
from .mixed import NOT_FINITE, Mixed, Row, logprobs
from .program import ROWS
from .request import Output, Request, Run, Step, TokenLogprob
from .riding import BESIDE, Riding, rides
from .scheduler import Chosen, Scheduler
from .slots import Slot, as_cache, as_slot
from .together import Held, Together
from .translate import Translate, taken_apart

STEP = "engine.step"


class Batch:
    """`engine`: a split model with its tokenizer. `options` are the scheduler's (chunk, max_running, clock)."""

    def __init__(self, engine: Engine, cache_tokens: int, fast: bool = False, **options: Any) -> None:
        self.group: Group = engine.group
        self._model = engine.model
        self._forward, self._mixed = Forward(engine.model), Mixed(engine.group, vocabulary(engine.model), engine.rules)
        self._held: dict[int, Held] = {}
        self._blocks = Blocks()
        engine.decoder.prepare()
        self._program = engine.decoder.program
        whole = not engine.decoder.continues
        anew = begins_anew(self._forward, engine.context) if whole else None
        packs = not whole and packed.packable(self._forward, engine.group, engine.context)
        self._packed = packed.Packed(self._forward) if packs else None
        self._rides = packs and rides(self._program, self._forward, engine.group)
        self._together = Together(self._forward) if fast and self._program is None and not whole else None
        self.number, self.decoded, self._closed = 0, 0, False  # steps; new tokens after a request's first; whether this is the end

        def text(request: Request) -> RowText:
            return RowText(engine.tokenizer, request.stop, frozenset() if request.ignore_eos else engine.eos)

        options = {"beside": BESIDE, **options} if self._rides else options
        on_rank_0 = self.group.rank == 0
        self.scheduler = (
            Scheduler(cache_tokens, engine.eos, engine.context, text, whole=whole, packs=packs, anew=anew, **options) if on_rank_0 else None
        )

    def add(self, request: Request) -> None:
        """Rank 0: the request takes part from the next step on, or waits for room."""
        request = replace(request, sampling=self._mixed.rules.sampling(request.sampling))
        self._on_rank_0.add(taken_apart(self._model, request) if request.ids else request)

    def abort(self, id: int) -> None:
        """Rank 0: the request ends with the next step; an output says so."""
        self._on_rank_0.abort(id)

    def close(self) -> None:
        """Rank 0: the next step is the last one on every rank, and computes nothing."""
        self._closed = True

    @property
    def idle(self) -> bool:
        """Rank 0: whether a step would have nothing to do."""
        return self._on_rank_0.idle and not self._closed

    def step(self, tell: Callable[[list[Output]], None] = lambda outputs: None) -> bool:
        """One step of all ranks; False after `close`. `tell` gets rank 0's outputs."""
        planned = None
        if self.group.rank == 0:
            planned = Step(self.number + 1, last=True) if self._closed else self._on_rank_0.plan()
        step: Step = broadcast_object(planned, self.group, STEP)
        if not step.last and step.number != self.number + 1:
            raise RankError(f"rank {self.group.rank} is at step {self.number + 1} of the batch, rank 0 at step {step.number}")
        self.number = step.number
        if step.last:
            return False
        for id in step.dropped:
            self._held.pop(id, None)
        self._blocks.forget(step.forgotten)
        for request in step.added:
            encodes = Translate(self._model, [request.source], self.group.device) if request.source else None
            self._held[request.id] = Held(request, encodes or self._forward)
        for load in step.loads:
            held = self._held[load.id]
            held.past = self._blocks.extended(as_cache(held.past), load.keys)
            held.length = held.past.get_seq_length()
        chosen = self._run(step.runs)
        if self.group.rank == 0:
            tell(self._on_rank_0.advance(step, chosen))
        return True

    def _run(self, runs: Sequence[Run]) -> list[Chosen]:
        """Rank 0's choices, one for each run."""
        rows: list[Row] = []
        prompts: list[tuple[TokenLogprob, ...] | None] = []  # of each run
        ready = self._at_once(runs)
        for run in runs:
            held = self._held[run.id]
            self.decoded += run.new > 0
            if run.id in ready:
                logits = ready[run.id][None]
            else:
                self.group.counters.phase = "decode" if run.new else "prefill"
                ids = torch.tensor([run.tokens], device=self.group.device)
                held.past = held.past if run.at else None  # of what is computed anew
                logits, held.past = held.forward(ids, None, as_cache(held.past), every=run.every)
            held.length += len(run.tokens)
            if run.keep:
                self._keep(run, as_cache(held.past))
            prompts.append(self._prompt_logprobs(run, held.request, logits[0]) if run.every else ())
            logits = logits[:, -1] if run.every else logits
            if run.chooses:
                rows.append(Row(held.request, logits[0], run.new, self._tokens(run.id, held.request)))
        self.group.counters.phase = "choose"
        choices = iter(self._mixed.choose(rows))
        if self.group.rank != 0:
            return []
        out = []
        for run, prompt in zip(runs, prompts, strict=True):
            choice = next(choices) if run.chooses else Chosen()
            error = NOT_FINITE if prompt is None else choice.error
            out.append(Chosen(choice.token, choice.logprob, prompt or (), error))
        return out

    def _at_once(self, runs: Sequence[Run]) -> dict[int, torch.Tensor]:
        """The last scores of the sequences that do not go through the modules by themselves."""
        tokens = {run.id: run.tokens[0] for run in runs if run.new and run.at}
        prompts = any(not run.new and not run.every for run in runs)
        if self._program is None or not (self._rides and prompts and 0 < len(tokens) <= ROWS):
            return self._decode_together(tokens) | self._read_together(runs)
        with Riding(self._program, list(tokens.values()), self._slots(tokens), self.group) as step:
            read = self._read_together(runs)
        self.group.counters.phase = "decode"
        return read | dict(zip(tokens, step.scores(), strict=True))

    def _decode_together(self, tokens: dict[int, int]) -> dict[int, torch.Tensor]:
        """The scores of the sequences that are decoded as rows of a batch; none where neither a program nor `fast` makes one."""
        self.group.counters.phase = "decode"
        if self._program is not None and tokens:
            return dict(zip(tokens, self._program.run(list(tokens.values()), self._slots(tokens)), strict=True))
        return self._together.decode(tokens, self._held) if self._together is not None else {}

    def _slots(self, ids: Iterable[int]) -> list[Slot]:
        """Where the program is to find these sequences."""
        found = [self._held[id] for id in ids]
        for held in found:
            held.past = as_slot(held.past)
        return [held.past for held in found]

    def _read_together(self, runs: Sequence[Run]) -> dict[int, torch.Tensor]:
        """The last scores of the prompts that go through the model in one pass; of those that are not at their end nothing that counts."""
        pieces: dict[int, list[Run]] = {}
        for run in runs:
            if not run.new and not run.every:
                pieces.setdefault(run.id, []).append(run)
        if self._packed is None or not pieces:
            return {}
        self.group.counters.phase = "prefill"
        for held in map(self._held.__getitem__, pieces):
            held.past = DynamicCache() if held.past is None else as_cache(held.past)
        asked = [
            packed.Piece([token for run in own for token in run.tokens], self._held[id].past, scored=own[-1].chooses)
            for id, own in pieces.items()
        ]
        found = self._packed(asked)
        return {id: torch.empty(0) if scores is None else scores for id, scores in zip(pieces, found, strict=True)}

    def _prompt_logprobs(self, run: Run, request: Request, logits: torch.Tensor) -> tuple[TokenLogprob, ...] | None:
        """Of the prompt's tokens that this chunk's scores are about; None where those are not finite. A collective."""
        whole = self._mixed.whole(logits)
        if self.group.rank != 0:
            return ()
        if not bool(torch.isfinite(whole).any(1).all()) or bool((torch.isnan(whole) | (whole == float("inf"))).any()):
            return None
        sequence = self._on_rank_0.running[run.id]
        ids, at = sequence.request.ids, run.at
        about = ids[at + 1 : at + 1 + len(run.tokens)]
        first = (TokenLogprob(ids[0], None),) if at == 0 else ()
        return first + tuple(logprobs(whole[: len(about)], about, request.prompt_logprobs or 0))

    def _keep(self, run: Run, past: Any) -> None:
        """This piece's keys and values, for later prompts that begin with it."""
        if plain(past):
            self._blocks.keep(run.keep, past, run.since, run.at + len(run.tokens))
        elif self.scheduler is not None:
            self.scheduler.stop_sharing()

    def _tokens(self, id: int, request: Request) -> Sequence[int]:
        """All tokens of a sequence so far, where rank 0 needs them."""
        return self._on_rank_0.running[id].tokens if self.group.rank == 0 and self._mixed.gathers(request) else ()

    @property
    def _on_rank_0(self) -> Scheduler:
        if self.scheduler is None:
            raise ValueError(f"requests are rank 0's; this is rank {self.group.rank}")
        return self.scheduler
