"""Candidates: what ranks exchange instead of full logits.

Each rank holds the scores of its own vocabulary slice. Greedy and untruncated sampling need one (score, id) a rank. With top-k each rank
sends its k best. With top-p or min-p alone it sends its `WIDTH` best, the log-sum-exp of its slice and the smallest score it sent: every
token that was not sent scores at most that. Rank 0 then knows whether the tokens it may draw from are all on the table; where they are not
(a flat distribution), the full scores are gathered for that step. Both ways give the token that `sampling.choose` gives on gathered logits.

A row of an offer is float64: [not finite, floor, log-sum-exp, scores..., ids...]; ids below 2^53 are exact in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ColrowError
from .sampling import draw, gumbel, kept, scale, top
from .settings import Sampling

WIDTH = 256  # candidates a rank and row for top-p and min-p: 4 KB, enough for nearly every nucleus of a trained model
OFFER_HEAD = 3  # numbers before the candidates


class NonFiniteLogits(ColrowError):
    """The model produced NaN or infinite logits: weights, dtype or input are broken, and any token would be noise."""


def width(sampling: Sampling, vocab: int) -> int:
    """Candidates that each rank sends for a row."""
    return 1 if sampling.single else min(sampling.top_k or WIDTH, vocab)


def offer(logits: torch.Tensor, ids: torch.Tensor, sampling: Sampling, count: int, step: int) -> torch.Tensor:
    """This rank's offer [rows, 3 + 2 * count] for its `logits` [rows, len(ids)].

    In single mode the Gumbel noise is already in the score, since only the winner is sent.
    """
    if sampling.greedy and (best := _greedy(logits, ids)) is not None:
        return best
    out = torch.zeros(logits.shape[0], OFFER_HEAD + 2 * count, dtype=torch.float64)
    out[:, 1:OFFER_HEAD] = float("-inf")
    out[:, OFFER_HEAD : OFFER_HEAD + count] = float("-inf")
    out[:, OFFER_HEAD + count :] = -1
    if ids.numel() == 0:
        return out
    scores = scale(logits, sampling)
    out[:, 0] = (torch.isnan(scores) | (scores == float("inf"))).sum(1)
    if sampling.greedy:  # of all rows at once; of equal scores argmax takes the first
        best = scores.argmax(1, keepdim=True)
        out[:, OFFER_HEAD], out[:, OFFER_HEAD + 1] = scores.gather(1, best)[:, 0], ids[best[:, 0]].double()
        return out
    for row, line in enumerate(scores):
        if sampling.single:
            line = line + gumbel(sampling.seed, row, step, ids)
        best = top(line, count)
        out[row, OFFER_HEAD : OFFER_HEAD + len(best)] = line[best]
        out[row, OFFER_HEAD + count : OFFER_HEAD + count + len(best)] = ids[best].double()
        if not sampling.single and not sampling.top_k:
            out[row, 2] = torch.logsumexp(line, 0)
            if len(best) < len(ids):
                out[row, 1] = line[best[-1]]
    return out


def _greedy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """The same for greedy sampling, in one look at the scores; None where they are not so plain. While weights stream through the cache
    each of torch's ops is slow to begin."""
    if logits.numel() == 0 or logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return None
    lines = logits.numpy()
    places = lines.argmax(1).tolist()  # the first of equals; a NaN where there is one
    scores = [float(line[at]) for line, at in zip(lines, places, strict=True)]
    if not all(map(math.isfinite, scores)):
        return None
    rest = [float("-inf")] * (OFFER_HEAD - 1)
    return torch.tensor([[0.0, *rest, score, int(ids[at])] for score, at in zip(scores, places, strict=True)], dtype=torch.float64)


@dataclass(frozen=True)
class Table:
    """All ranks' candidates of one row, best first, ties by id. Above `floor` nothing is missing; `log_total` is over the vocabulary."""

    scores: torch.Tensor
    ids: torch.Tensor
    floor: float
    log_total: float


def check(offers: torch.Tensor, ranks: int) -> None:
    """NonFiniteLogits where a rank met NaN or infinity, or a row has no finite score. Every rank has the same offers, so all raise
    alike."""
    heads = offers[:, : OFFER_HEAD + 1].tolist()  # what is not finite, ..., and the best score
    rows = len(heads) // ranks
    for row in range(rows):
        bad = int(sum(count for count, *_ in heads[row::rows]))
        if bad or all(score == float("-inf") for *_, score in heads[row::rows]):
            what = f"{bad} logits of prompt {row} are NaN or infinite" if bad else f"all logits of prompt {row} are -infinity"
            raise NonFiniteLogits(f"{what}: try --dtype float32, and colrow verify on the model")


def winners(offers: torch.Tensor, ranks: int) -> list[int | None]:
    """Each row's token in single mode: the largest score, of equal ones the lowest id. None where `check` would raise."""
    lines = offers.tolist()
    rows = len(lines) // ranks

    def winner(line: list[list[float]]) -> int | None:
        score, token = min((-score, token) for *_, score, token in line)
        return None if any(bad for bad, *_ in line) or score == float("inf") else int(token)

    return [winner(lines[row::rows]) for row in range(rows)]


def tables(offers: torch.Tensor, ranks: int) -> list[Table]:
    """One table a row from the gathered `offers` [ranks * rows, 3 + 2 * count]."""
    count = (offers.shape[1] - OFFER_HEAD) // 2
    out = []
    for lines in _by_row(offers, ranks):
        scores, ids = lines[:, OFFER_HEAD : OFFER_HEAD + count].flatten(), lines[:, OFFER_HEAD + count :].flatten().long()
        real = ids >= 0
        scores, ids = scores[real], ids[real]
        ids, by_id = torch.sort(ids)
        best = torch.sort(scores[by_id], descending=True, stable=True).indices
        total = torch.logsumexp(lines[:, 2], 0).item()
        out.append(Table(scores[by_id][best], ids[best], lines[:, 1].max().item(), total))
    return out


def decide(table: Table, sampling: Sampling, row: int, step: int) -> int | None:
    """The row's token; None where the candidates do not reach far enough and the full scores are needed."""
    if sampling.single:  # the noise is in the scores
        return int(table.ids[0])
    if sampling.top_k:
        count = kept(table.scores, sampling)
    else:
        known = int((table.scores > table.floor).sum())
        # The best token that may be missing scores at most `floor`: put one there. What is kept is a prefix, so if the stand-in is turned
        # down, every missing token would be.
        stand_in = table.scores.new_tensor([table.floor])
        count = kept(torch.cat([table.scores[:known], stand_in]), sampling, table.log_total)
        if count > known:
            return None
    return draw(table.scores[:count], table.ids[:count], sampling, row, step)


def _by_row(offers: torch.Tensor, ranks: int) -> torch.Tensor:
    """[rows, ranks, 3 + 2 * count]"""
    return offers.view(ranks, -1, offers.shape[1]).transpose(0, 1)
