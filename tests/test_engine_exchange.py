"""The ranks' agreement on the next tokens: real exchanges between ranks as threads, vocabulary cut in every way."""

from __future__ import annotations

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.candidates import NonFiniteLogits
from colrow.engine.columns import LOGITS
from colrow.engine.exchange import CANDIDATES, DECISION, Exchange
from colrow.engine.sampling import choose, penalize
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Finish
from colrow.errors import RankError
from colrow.partition import Partition, even

VOCAB = 2001  # slices larger than the candidates of one rank, so that flat distributions need the full logits
INTERLEAVED = Partition(1, (((0, 10), (800, 1200)), ((10, 800),), ((1200, VOCAB),)))


def logits_at(step: int, flat: bool = False) -> torch.Tensor:
    return (0.1 if flat else 4) * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(step))


def no_end(tokens: list[int]) -> list[Finish | None]:
    return [None] * len(tokens)


def run(group: Group, cut: Partition | None, sampling: Sampling, flat: bool) -> tuple[list[list[int]], dict]:
    exchange, out = Exchange(group, cut, sampling), []
    for step in range(6):
        whole = logits_at(step, flat)
        local = whole if cut is None else cut.split(whole, group.rank)
        agreed = exchange.agree(local, [[3, 7], [300]], step, no_end)
        out.append(agreed.tokens)
        assert not agreed.gathered or flat
    return out, {name: tally.calls for (_, _, name), tally in group.counters.sites.items()}


@pytest.mark.parametrize("flat", [False, True], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, seed=1),
        Sampling(0.9, top_k=7),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, min_p=0.1),
        Sampling(repetition_penalty=1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "cut", [None, even(1, VOCAB, 3), even(1, VOCAB, 3, [3, 1, 0]), INTERLEAVED], ids=["whole", "even", "uneven", "interleaved"]
)
def test_every_rank_gets_the_token_of_the_gathered_logits(cut: Partition | None, sampling: Sampling, flat: bool) -> None:
    expected = []
    for step in range(6):
        whole = logits_at(step, flat)
        marks = torch.stack([torch.isin(torch.arange(VOCAB), torch.tensor(ids)) for ids in ([3, 7], [300])])
        whole = penalize(whole, marks, sampling.penalty)
        expected.append([choose(line, sampling, row, step) for row, line in enumerate(whole)])
    alone, counted_alone = run(single(), None, sampling, flat)
    assert alone == expected
    assert counted_alone == {}
    results = run_threads(run, 3, cut, sampling, flat)
    assert [tokens for tokens, _ in results] == [expected] * 3
    widened = flat and (sampling.top_p < 1 or sampling.min_p > 0) and sampling.temperature > 0
    wanted = {CANDIDATES: 6, DECISION: 12, LOGITS: 6} if widened else {CANDIDATES: 6, DECISION: 6}
    assert [calls for _, calls in results] == [wanted] * 3


def test_only_rank_0_says_when_a_row_ends() -> None:
    def rank(group: Group) -> list[Finish | None]:
        def ends(tokens: list[int]) -> list[Finish | None]:
            assert group.rank == 0
            return [Finish.STOP, None]

        cut = even(1, VOCAB, 2)
        return Exchange(group, cut, Sampling()).agree(cut.split(logits_at(0), group.rank), [[1], [1]], 0, ends).finished

    assert run_threads(rank, 2) == [[Finish.STOP, None]] * 2


def test_ranks_at_different_steps_fail() -> None:
    def rank(group: Group) -> None:
        Exchange(group, None, Sampling()).agree(logits_at(0), [[1], [1]], 4 + group.rank, no_end)

    with pytest.raises(RankError, match="step 5 of the generation, rank 0 at step 4"):
        run_threads(rank, 2)


def test_all_ranks_raise_where_one_has_nan() -> None:
    raised = []

    def rank(group: Group) -> None:
        logits = even(1, VOCAB, 3).split(logits_at(0), group.rank).clone()
        if group.rank == 2:
            logits[1, 5] = float("nan")
        try:
            Exchange(group, even(1, VOCAB, 3), Sampling()).agree(logits, [[1], [1]], 0, no_end)
        except NonFiniteLogits as error:
            raised.append((group.rank, str(error)))

    run_threads(rank, 3)
    assert sorted(rank for rank, _ in raised) == [0, 1, 2]
    assert all("of prompt 1 are NaN" in text for _, text in raised)
