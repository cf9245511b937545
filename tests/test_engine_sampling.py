"""Choosing tokens: candidates of vocabulary slices against the whole vocabulary, exactly; the draw against softmax, statistically."""

from __future__ import annotations

import pytest
import torch

from colrow.engine.candidates import NonFiniteLogits, check, decide, offer, tables, width
from colrow.engine.sampling import choose, draw, gumbel, kept, penalize, top
from colrow.engine.settings import Sampling
from colrow.errors import UserError
from colrow.partition import balance

RULES = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5, seed=3),
    Sampling(temperature=1.3, top_k=200, top_p=0.6, seed=4),
    Sampling(temperature=1.0, top_p=0.9, seed=5),
    Sampling(temperature=0.8, top_p=0.5, min_p=0.1, seed=5),
    Sampling(temperature=1.0, min_p=0.2, seed=6),
    Sampling(temperature=1.0, top_p=0.999999, seed=6),
]


def split_choice(logits: torch.Tensor, sampling: Sampling, ranks: int, step: int, count: int = 0) -> list[int | None]:
    """What rank 0 picks for `logits` [rows, vocabulary] cut over `ranks`, by the offers alone."""
    cuts = balance(logits.shape[1], ranks)
    count = count or width(sampling, logits.shape[1])
    offers = torch.cat([offer(logits[:, a:b], torch.arange(a, b), sampling, count, step) for a, b in cuts])
    check(offers, ranks)
    return [decide(table, sampling, row, step) for row, table in enumerate(tables(offers, ranks))]


@pytest.mark.parametrize("sampling", RULES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_candidates_choose_what_the_whole_vocabulary_chooses(sampling: Sampling, ranks: int) -> None:
    for seed in range(20):
        logits = 4 * torch.randn(2, 101, generator=torch.Generator().manual_seed(seed))
        logits[0] = logits[0].bfloat16().float()  # many ties
        expected = [choose(line, sampling, row, seed) for row, line in enumerate(logits)]
        assert split_choice(logits, sampling, ranks, seed) == expected


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_vocabulary_smaller_than_the_ranks(ranks: int) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0, 2.0]])
    assert split_choice(logits, Sampling(), ranks, 0) == [1]
    assert split_choice(logits, Sampling(temperature=1.0, top_p=0.8, seed=1), ranks, 0) == [
        choose(logits[0], Sampling(1.0, top_p=0.8, seed=1))
    ]


def test_lowest_id_wins_ties() -> None:
    logits = torch.zeros(1, 101)
    logits[0, [98, 40, 60]] = 7.0
    assert [split_choice(logits, Sampling(), ranks, 0) for ranks in (1, 2, 3, 8)] == [[40]] * 4


def test_a_nucleus_wider_than_the_candidates_asks_for_the_full_logits() -> None:
    flat, peaked = torch.zeros(1, 101), torch.zeros(1, 101)
    peaked[0, 17] = 30.0
    nucleus = Sampling(temperature=1.0, top_p=0.9)
    assert split_choice(flat, nucleus, 2, 0, count=8) == [None]
    assert split_choice(peaked, nucleus, 2, 0, count=8) == [17]
    assert split_choice(flat, Sampling(temperature=1.0, min_p=0.5), 2, 0, count=8) == [None]
    assert split_choice(peaked, Sampling(temperature=1.0, min_p=0.5), 2, 0, count=8) == [17]


def test_few_candidates_never_choose_another_token() -> None:
    """With offers of any width the answer is the right token or None, and both happen."""
    answers = []
    for seed in range(60):
        logits = 3 * torch.randn(1, 101, generator=torch.Generator().manual_seed(seed))
        sampling = Sampling(temperature=1.0, top_p=0.8, seed=seed)
        (found,) = split_choice(logits, sampling, 3, 0, count=3)
        assert found in (None, choose(logits[0], sampling))
        answers.append(found is None)
    assert 0 < sum(answers) < 60


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_named(bad: float) -> None:
    logits = torch.zeros(2, 101)
    logits[1, 77] = bad
    with pytest.raises(NonFiniteLogits, match="1 logits of prompt 1"):
        split_choice(logits, Sampling(), 3, 0)
    with pytest.raises(NonFiniteLogits, match="all logits of prompt 0"):
        split_choice(torch.full((1, 101), float("-inf")), Sampling(temperature=1.0, top_k=3), 3, 0)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.7), Sampling(1.0, min_p=0.3)], ids=str
)
def test_the_draw_has_the_softmax_distribution(sampling: Sampling) -> None:
    logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.5, 0.0, 0.2])
    scores = logits.double() / sampling.temperature
    order = scores.argsort(descending=True)
    probabilities = torch.zeros(7, dtype=torch.float64)
    allowed = order[: kept(scores[order], sampling)]
    probabilities[allowed] = torch.softmax(scores[allowed], 0)
    draws = 20_000
    counts = torch.bincount(torch.tensor([draw(scores[allowed], allowed, sampling, 0, step) for step in range(draws)]), minlength=7)
    assert (counts[probabilities == 0] == 0).all()
    expected = draws * probabilities[probabilities > 0]
    chi_square = ((counts[probabilities > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 27.9  # 0.9999 quantile for 6 degrees of freedom; the draws are fixed by the seed


def test_top_p_and_min_p_keep_what_transformers_keeps() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(20):
        logits = 3 * torch.randn(1, 101, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for sampling in (
            Sampling(1.0, top_p=0.8),
            Sampling(1.0, top_k=10, top_p=0.5),
            Sampling(1.0, min_p=0.1),
            Sampling(1.0, 20, 0.9, 0.05),
        ):
            theirs = logits
            if sampling.top_k:
                theirs = TopKLogitsWarper(sampling.top_k)(None, theirs)
            if sampling.top_p < 1:
                theirs = TopPLogitsWarper(sampling.top_p)(None, theirs)
            if sampling.min_p > 0:
                theirs = MinPLogitsWarper(sampling.min_p)(None, theirs)
            ordered = logits[0].sort(descending=True).values
            assert kept(ordered, sampling) == int(torch.isfinite(theirs).sum())


def test_the_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = torch.randn(1, 20), torch.tensor([[3, 5, 5, 19]])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    assert torch.equal(penalize(logits, torch.isin(torch.arange(20), ids[0])[None], 1.3), theirs)


def test_noise_depends_on_seed_row_step_and_id_and_not_on_the_slice() -> None:
    ids = torch.arange(1000)
    whole = gumbel(7, 0, 0, ids)
    assert torch.equal(torch.cat([gumbel(7, 0, 0, ids[:333]), gumbel(7, 0, 0, ids[333:])]), whole)
    for other in (gumbel(8, 0, 0, ids), gumbel(7, 1, 0, ids), gumbel(7, 0, 1, ids), gumbel(0, 7, 0, ids)):
        assert not torch.equal(other, whole)
    many = gumbel(1, 2, 3, torch.arange(200_000))
    assert abs(many.mean().item() - 0.57722) < 0.01  # Euler's constant
    assert abs(many.var().item() - 1.64493) < 0.02  # pi^2 / 6
    assert torch.isfinite(many).all()


def test_top_is_stable() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    assert top(scores, 4).tolist() == [1, 3, 2, 4]
    assert top(scores, 99).tolist() == [1, 3, 2, 4, 5, 0]
    assert top(scores[:0], 3).tolist() == []


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -1},
        {"repetition_penalty": 0},
    ],
    ids=str,
)
def test_values_out_of_range_are_the_users_error(bad: dict) -> None:
    with pytest.raises(UserError):
        Sampling(**bad)
