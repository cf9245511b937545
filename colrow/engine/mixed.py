"""Mixed: the next tokens of sequences that each have settings of their own. Exchange.py does the same for rows that share them.

Every rank offers candidates of the rows where that is enough (candidates.py); the scores of the others (penalties, biases,
log-probabilities, and rows whose candidates turn out not to reach) are gathered. Rank 0 alone chooses; the others learn the tokens with the
next step. A row's token does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.collectives import all_gather, broadcast_object
from ..comm.group import Group
from ..partition import Partition
from .candidates import NonFiniteLogits, check, decide, offer, tables, width, winners
from .columns import columns, gathered
from .exchange import CANDIDATES
from .request import Request, TokenLogprob
from .rules import Place, Rules
from .sampling import choose, penalize
from .scheduler import Chosen
from .settings import Sampling

WIDEN = "engine.widen"


@dataclass(frozen=True)
class Row:
    """One sequence's scores [columns of this rank] for its new token `number` (0: the first). `tokens`: all before it, on rank 0."""

    request: Request
    logits: torch.Tensor
    number: int
    tokens: Sequence[int] = ()


class Mixed:
    """One for each engine. `cut`: the vocabulary's partition over the ranks, None where each has all of it. `rules`: the model's own."""

    def __init__(self, group: Group, cut: Partition | None, rules: Rules | None = None) -> None:
        self.group, self._cut, self.rules = group, cut, Rules() if rules is None else rules
        self._ids: list[torch.Tensor] = []

    def choose(self, rows: Sequence[Row]) -> list[Chosen]:
        """Rank 0's choice for each row; nothing on the others. A collective."""
        if not rows:
            return []
        self._know(rows[0].logits.shape[-1])
        found: dict[int, Chosen] = {}
        short = [at for at, row in enumerate(rows) if not self.gathers(row.request)]
        wide = [at for at, row in enumerate(rows) if self.gathers(row.request)]
        if short:
            wide += self._from_candidates(rows, short, found)
        if wide:
            whole = self.whole(torch.stack([rows[at].logits for at in wide]))
            if self.group.rank == 0:
                found |= {at: from_logits(rows[at], line, self.rules) for at, line in zip(wide, whole, strict=True)}
        return [found[at] for at in range(len(rows))] if self.group.rank == 0 else []

    def gathers(self, request: Request) -> bool:
        """Whether rank 0 needs the scores of the whole vocabulary, and the tokens so far, to choose the request's next token."""
        return request.needs_logits or bool(self.rules)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of this rank's [rows, columns]. A collective."""
        self._know(logits.shape[-1])
        return gathered(logits[:, : len(self._ids[self.group.rank])].cpu().contiguous(), self._ids, self.group)

    def _know(self, count: int) -> None:
        if not self._ids:
            self._ids = columns(self._cut, count, self.group.size)

    def _from_candidates(self, rows: Sequence[Row], short: Sequence[int], found: dict[int, Chosen]) -> list[int]:
        """Puts rank 0's choices into `found`; returns, on every rank, the rows whose candidates do not reach."""
        mine, vocab = self._ids[self.group.rank], sum(map(len, self._ids))
        sets = _alike([rows[at].request.sampling for at in short], short)
        offers = []
        for places in sets:
            sampling, count = rows[places[0]].request.sampling, width(rows[places[0]].request.sampling, vocab)
            logits = torch.stack([rows[at].logits[: len(mine)] for at in places]).cpu()
            offers.append(offer(logits, mine, sampling, count, rows[places[0]].number).flatten())
        flat = torch.cat(offers)
        every = all_gather(flat, self.group, CANDIDATES, 0, [len(flat)] * self.group.size).view(self.group.size, -1)
        missing: list[int] = []
        if self.group.rank == 0:
            start = 0
            for places, one in zip(sets, offers, strict=True):
                lines = every[:, start : start + len(one)].reshape(self.group.size * len(places), -1)
                start += len(one)
                found |= self._decided([rows[at] for at in places], places, lines)
            missing = [at for at in short if at not in found]
        if all(reaches(rows[at].request) for at in short):
            return []
        return broadcast_object(missing, self.group, WIDEN)

    def _decided(self, rows: Sequence[Row], places: Sequence[int], lines: torch.Tensor) -> dict[int, Chosen]:
        """The choices of one offer's `rows`, at `places`, from all ranks' `lines`; a row whose candidates do not reach has none."""
        sampling = rows[0].request.sampling
        if sampling.greedy:
            tokens = winners(lines, self.group.size)
            return {at: Chosen(error=NOT_FINITE) if token is None else Chosen(token) for at, token in zip(places, tokens, strict=True)}
        try:
            check(lines, self.group.size)
        except NonFiniteLogits:
            return {places[0]: Chosen(error=NOT_FINITE)}
        token = decide(tables(lines, self.group.size)[0], sampling, 0, rows[0].number)
        return {} if token is None else {places[0]: Chosen(token)}


def _alike(settings: Sequence[Sampling], places: Sequence[int]) -> list[list[int]]:
    """`places` whose offers are made at once: the greedy ones, which all follow one rule; each of the others by itself."""
    greedy = [at for sampling, at in zip(settings, places, strict=True) if sampling.greedy]
    others = [[at] for sampling, at in zip(settings, places, strict=True) if not sampling.greedy]
    return [greedy, *others] if greedy else others


NOT_FINITE = "the model's logits are NaN or infinite, so any token would be noise: try --dtype float32, and colrow verify on the model"


def reaches(request: Request) -> bool:
    """Whether a row's candidates are certain to be enough: all but a nucleus without top-k."""
    return request.sampling.single or request.sampling.top_k > 0


def from_logits(row: Row, logits: torch.Tensor, rules: Rules) -> Chosen:
    """The choice from the whole vocabulary's 1-D `logits`. Order: the model's sequence bias, repetition, presence and frequency penalty,
    the request's bias, the model's other rules, then the sampling."""
    if bool((torch.isnan(logits) | (logits == float("inf"))).any()) or bool((logits == float("-inf")).all()):
        return Chosen(error=NOT_FINITE)
    token = choose(changed(row, logits, rules), row.request.sampling, 0, row.number)
    if row.request.logprobs is None:
        return Chosen(token)
    return Chosen(token, logprobs(logits[None], [token], row.request.logprobs)[0])


def changed(row: Row, logits: torch.Tensor, rules: Rules) -> torch.Tensor:
    """`logits` with the request's penalties and biases, then by the model's `rules`. Presence and frequency count the new tokens only,
    repetition the prompt too."""
    request, logits = row.request, rules.biased(logits.double(), row.tokens)
    if request.sampling.penalty != 1:
        seen = torch.zeros(len(logits), dtype=torch.bool)
        seen[torch.tensor(sorted(set(row.tokens)))] = True
        logits = penalize(logits, seen, request.sampling.penalty)
    new = row.tokens[len(row.tokens) - row.number :]
    if new and (request.presence_penalty or request.frequency_penalty):
        counts = torch.bincount(torch.tensor(list(new)), minlength=len(logits)).double()
        logits = logits - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)
    for token, bias in request.logit_bias:
        logits[token] = logits[token] + bias
    last = row.number + 1 >= request.max_new_tokens and not request.ignore_eos
    return rules(logits, row.tokens, Place(len(row.tokens) - row.number, last)) if rules else logits


def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each row of `logits` [rows, vocabulary] the log-probability of its token, and the `top` likeliest ones (ties by id)."""
    out = []
    for line, token in zip(logits, tokens, strict=True):
        values = torch.log_softmax(line.double(), 0)
        best = torch.sort(values, descending=True, stable=True).indices[:top].tolist() if top else []
        out.append(TokenLogprob(token, values[token].item(), tuple((id, values[id].item()) for id in best)))
    return out
