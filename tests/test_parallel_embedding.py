"""The vocabulary-parallel embedding beside nn.Embedding: any vocabulary, padding, ids that do not exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.embedding import VocabParallelEmbedding
from colrow.partition import Partition, even

WIDTH = 6


def table(words: int, **options: object) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(words, WIDTH, dtype=torch.float64, **options)  # type: ignore[arg-type]


def scattered(words: int, ranks: int) -> Partition:
    """Several ranges a rank, as after an edit by hand."""
    return Partition(0, tuple(tuple((i, i + 1) for i in range(rank, words, ranks)) for rank in range(ranks)))


@pytest.mark.parametrize("cut", [even, lambda dim, words, ranks: scattered(words, ranks)], ids=["even", "scattered"])
@pytest.mark.parametrize(("words", "ranks"), [(101, 2), (101, 3), (5, 4), (3, 5), (2, 8)])
@pytest.mark.parametrize("padding", [None, 1])
def test_equal_to_the_whole_table(words: int, ranks: int, padding: int | None, cut: object) -> None:
    whole, partition = table(words, padding_idx=padding), cut(0, words, ranks)  # type: ignore[operator]
    nn.init.normal_(whole.weight)  # the padding row too: a trained one need not be zero
    ids = torch.cat([torch.arange(words), torch.tensor([0, words - 1, 1])]).reshape(1, -1)
    scale = torch.randn(*ids.shape, WIDTH, dtype=torch.float64)
    (whole(ids) * scale).sum().backward()

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        layer = VocabParallelEmbedding.from_embedding(whole, partition, group)
        out = layer(ids)
        (out * scale).sum().backward()
        assert group.counters.total("all_reduce").calls == 1
        return out.detach(), layer.weight.grad

    results = run_threads(rank, ranks)
    for out, _ in results:
        assert torch.equal(out, whole(ids)), "a sum with zeros is exact"
    grad = partition.merge([g for _, g in results])
    torch.testing.assert_close(grad, whole.weight.grad)
    assert padding is None or not grad[padding].any()


@pytest.mark.parametrize("wrong", [-1, 7, 1000])
def test_an_id_that_does_not_exist_is_an_error_on_every_rank(wrong: int) -> None:
    whole = table(7)
    with pytest.raises(IndexError):
        whole(torch.tensor([0, wrong]))

    def rank(group: Group) -> str:
        layer = VocabParallelEmbedding.from_embedding(whole, even(0, 7, 3), group)
        with pytest.raises(IndexError, match=rf"{wrong} .* vocabulary of 7") as error:
            layer(torch.tensor([0, wrong]))
        return str(error.value)

    assert len(set(run_threads(rank, 3))) == 1


def test_rows_of_other_ranks_stay_out_even_where_they_are_not_numbers() -> None:
    whole = table(4)
    with torch.no_grad():
        whole.weight[0] = float("nan")  # the row that stands in for ids of other ranks

    def rank(group: Group) -> torch.Tensor:
        return VocabParallelEmbedding.from_embedding(whole, even(0, 4, 2), group)(torch.tensor([1, 2, 3])).detach()

    for out in run_threads(rank, 2):
        assert torch.equal(out, whole.weight[1:].detach())


def test_no_ids_at_all() -> None:
    layer = VocabParallelEmbedding.from_embedding(table(4), even(0, 4, 1), single())
    assert layer(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, WIDTH)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_that_depend_on_all_ids_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        VocabParallelEmbedding.from_embedding(table(4, **options), even(0, 4, 1), single())


def test_rows_on_two_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="each held by one rank"):
        VocabParallelEmbedding.from_embedding(table(4), Partition(0, (((0, 3),), ((2, 4),))), single())
