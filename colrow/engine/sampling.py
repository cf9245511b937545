"""Sampling: which token comes next, given scores. Pure functions of numbers, no ranks.

The rules, in this order (transformers' order): repetition penalty, temperature, top-k, top-p, min-p, then one draw. The draw is a
Gumbel-max: the token with the largest score + Gumbel noise has exactly the softmax distribution (Maddison et al., arXiv:1411.0030, section
2). The noise is a hash of (seed, row, step, vocabulary id), so it needs no generator state, can be computed for any slice of the vocabulary
by itself, and the same seed gives the same text whatever the number of ranks. Ties go to the lowest id everywhere.

Not here: who holds which part of the vocabulary and what ranks exchange (candidates.py).
"""

from __future__ import annotations

import math

import torch

from .settings import Sampling

_MASK = (1 << 64) - 1
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64: Steele, Lea, Flood, OOPSLA 2014


def scale(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float64 scores: `logits` over the temperature (unchanged where greedy)."""
    scores = logits.double()
    return scores if sampling.greedy else scores / sampling.temperature


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Scores of the tokens marked in the boolean `seen` made less likely (Keskar et al., arXiv:1909.05858, section 4.1); same shape."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def gumbel(seed: int, row: int, step: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, one number for each vocabulary id in the int64 tensor `ids`."""
    key = 0
    for part in (seed, row, step):
        key = _mix((key + part + _GOLDEN) & _MASK)
    z = ids * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_M1)
    z = (z ^ _shift(z, 27)) * _signed(_M2)
    z = z ^ _shift(z, 31)
    uniform = (_shift(z, 12).double() + 0.5) * 2.0**-52  # 52 bits: 0 < uniform < 1 holds exactly
    return -torch.log(-torch.log(uniform))


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the `count` largest of the 1-D `scores`, best first, equal ones by position (torch.topk leaves their order open)."""
    count = min(count, scores.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    least = torch.topk(scores, count).values[-1]
    above = (scores > least).nonzero().flatten()
    equal = (scores == least).nonzero().flatten()[: count - above.numel()]
    chosen = torch.cat([above, equal])
    return chosen[torch.sort(scores[chosen], descending=True, stable=True).indices]


def kept(scores: torch.Tensor, sampling: Sampling, log_total: float | None = None) -> int:
    """How many of the descending `scores` stay after top-k, top-p and min-p: a prefix.

    `log_total` is the log-sum-exp of ALL scores of the vocabulary where `scores` is only its beginning.
    """
    if sampling.top_k:
        scores, log_total = scores[: sampling.top_k], None
    count = scores.numel()
    if sampling.top_p < 1:
        total = torch.logsumexp(scores, 0).item() if log_total is None else log_total
        mass_before = torch.cumsum(torch.exp(scores - total), 0).roll(1)
        mass_before[0] = 0
        count = min(count, int((mass_before < sampling.top_p).sum()))
    if sampling.min_p > 0:
        count = min(count, int((scores >= scores[0] + math.log(sampling.min_p)).sum()))
    return max(count, 1)


def draw(scores: torch.Tensor, ids: torch.Tensor, sampling: Sampling, row: int, step: int) -> int:
    """One of `ids` (any order) with the softmax probabilities of `scores`; the largest score where greedy."""
    noisy = scores if sampling.greedy else scores + gumbel(sampling.seed, row, step, ids)
    return int(ids[noisy == noisy.max()].min())


def choose(logits: torch.Tensor, sampling: Sampling, row: int = 0, step: int = 0) -> int:
    """The token for the whole vocabulary's 1-D `logits`: the reference that the exchange of candidates must equal."""
    scores = scale(logits, sampling)
    ids = torch.arange(scores.numel(), device=scores.device)
    if not sampling.single:
        order = torch.sort(scores, descending=True, stable=True).indices
        ids = order[: kept(scores[order], sampling)]
    return draw(scores[ids], ids, sampling, row, step)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
