"""Every collective against a plain computation: uneven, empty and non-contiguous tensors, all dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from colrow.comm import collectives, group, local
from colrow.comm.group import Group
from colrow.errors import RankError

DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
SIZES: tuple[tuple[int, ...], ...] = ((3, 1, 2, 4), (0, 2, 5, 1), (1, 1, 0, 3), (0, 0, 0, 0))


def value(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 1000, shape, generator=draw).to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values contiguous, transposed in memory, and strided; each a copy."""
    apart = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    return [x.clone(), x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1), apart.copy_(x)]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    assert torch.equal(found, wanted), (found, wanted)


def reference_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, 16-bit types in float32: what every rank must get to the bit."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def all_reduce_everything(g: Group) -> None:
    for dtype in DTYPES:
        for shape in ((5, 7), (3, 1, 4), (0, 3), (40, 500)):
            parts = [value(shape, dtype, seed) for seed in range(g.size)]
            for mine in layouts(parts[g.rank]):
                kept = mine.clone()
                highest = torch.stack(parts).amax(0) if parts[0].numel() else parts[0]
                same(collectives.all_reduce(mine, g, "max", op="max"), highest)
                if dtype is not torch.bool:
                    same(collectives.all_reduce(mine, g, "sum"), reference_sum(parts))
                    assert torch.equal(mine, kept), "the input was changed"
                    out = collectives.all_reduce(mine, g, "inplace", inplace=True)
                    assert out is mine
                    assert torch.equal(mine, reference_sum(parts)), "the result was lost"


def expanded_and_scalar(g: Group) -> None:
    same(collectives.all_reduce(torch.ones(1).expand(3, 4) * 1.0, g, "e"), torch.full((3, 4), float(g.size)))
    same(collectives.all_reduce(torch.ones(1).expand(3, 4), g, "e"), torch.full((3, 4), float(g.size)))
    same(collectives.all_reduce(torch.tensor(2.5), g, "s"), torch.tensor(2.5 * g.size))


def gather_and_scatter(g: Group) -> None:
    for dtype in DTYPES:
        for sizes in (s[: g.size] for s in SIZES):
            for dim in (0, 1, -1):
                shape = [4, 3, 5]
                shape[dim] = sum(sizes)
                whole = value(tuple(shape), dtype, 7)
                parts = whole.split(list(sizes), dim)
                for mine in layouts(parts[g.rank]):
                    same(collectives.all_gather(mine, g, "gather", dim, sizes), whole)
                if dtype is torch.bool:
                    continue
                wholes = [value(tuple(shape), dtype, seed) for seed in range(g.size)]
                wanted = reference_sum(wholes).split(list(sizes), dim)[g.rank].contiguous()
                for mine in layouts(wholes[g.rank]):
                    kept = mine.clone()
                    same(collectives.reduce_scatter(mine, g, "scatter", dim, sizes), wanted)
                    assert torch.equal(mine, kept)


def broadcasts(g: Group) -> None:
    for dtype in DTYPES:
        for source in range(g.size):
            for mine in layouts(value((3, 4), dtype, g.rank)):
                kept = mine.clone()
                same(collectives.broadcast(mine, g, "b", source), value((3, 4), dtype, source))
                assert torch.equal(mine, kept)
                assert collectives.broadcast(mine, g, "b", source, inplace=True) is mine
                assert torch.equal(mine, value((3, 4), dtype, source))


def objects(g: Group) -> None:
    assert collectives.gather_objects({"rank": g.rank, "text": "é" * g.rank * 5000}, g, "o") == [
        {"rank": rank, "text": "é" * rank * 5000} for rank in range(g.size)
    ]
    assert collectives.broadcast_object(["from", g.rank], g, "o", source=g.size - 1) == ["from", g.size - 1]
    collectives.barrier(g, "b")


def sub_groups(g: Group) -> list[Any]:
    """Ranks of a sub-group work together while the others do something else; sub-groups of sub-groups too."""
    last = g.sub(range(1, g.size))
    first = g.sub((0,))
    assert g.sub(range(g.size)) is g
    assert (first is None) == (g.rank != 0)
    if last is None:
        return [None]
    assert (last.rank, last.size, last.ranks) == (g.rank - 1, g.size - 1, tuple(range(1, g.size)))
    total = collectives.all_reduce(torch.tensor([float(g.rank)]), last, "sub")
    pair = last.sub((0, last.size - 1)) if last.size > 1 else None
    inner = None if pair is None else collectives.all_gather(torch.tensor([g.rank]), pair, "pair", 0, (1,) * pair.size).tolist()
    return [total.item(), inner]


CHECKS: tuple[Callable[[Group], Any], ...] = (
    all_reduce_everything,
    expanded_and_scalar,
    gather_and_scatter,
    broadcasts,
    objects,
)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads(check: Callable[[Group], Any], size: int) -> None:
    local.run_threads(check, size)


def test_sub_groups_of_threads() -> None:
    assert local.run_threads(sub_groups, 4) == [[None], [6.0, [1, 3]], [6.0, None], [6.0, [1, 3]]]
    assert local.run_threads(sub_groups, 2) == [[None], [1.0, None]]


def test_one_rank_is_the_identity_and_counts_nothing() -> None:
    one = group.single()
    x = torch.randn(3, 4, requires_grad=False)
    assert collectives.all_reduce(x, one, "n") is x
    assert collectives.all_gather(x, one, "n", 1, (4,)) is x
    assert collectives.reduce_scatter(x, one, "n", 0, (3,)) is x
    assert collectives.broadcast(x, one, "n") is x
    assert collectives.gather_objects("a", one, "n") == ["a"]
    assert collectives.broadcast_object("a", one, "n") == "a"
    collectives.barrier(one, "n")
    assert not one.counters.sites
    assert one.sub((0,)) is one


def test_16_bit_sums_are_rounded_once() -> None:
    """1 + 2^-8 three times: added in bfloat16 each small part is lost; added in float32 and rounded once they are not."""
    parts = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]
    found = local.run_threads(lambda g: collectives.all_reduce(torch.tensor([parts[g.rank]], dtype=torch.bfloat16), g, "n").item(), 4)
    assert found == [1.015625] * 4


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, g: collectives.all_gather(x, g, "site", 0, (3, 3)), "rank 0 has 2 along dim 0"),
        (lambda x, g: collectives.all_gather(x, g, "site", 0, (2,)), "2 numbers"),
        (lambda x, g: collectives.reduce_scatter(x, g, "site", 1, (1, 1)), "rank 0 has 3 along dim 1"),
        (lambda x, g: collectives.broadcast(x, g, "site", 2), "0 to 1, got 2"),
        (lambda x, g: collectives.all_reduce(x, g, "site", op="mean"), "'mean'"),
        (lambda x, g: collectives.all_reduce(x > 0, g, "site"), "only 'max'"),
        (lambda x, g: collectives.all_reduce(x.requires_grad_(), g, "site"), "would cut the gradient"),
    ],
)
def test_wrong_arguments_name_the_site(call: Callable[[torch.Tensor, Group], Any], text: str) -> None:
    with pytest.raises(ValueError, match="'site'") as caught:
        local.run_threads(lambda g: call(torch.ones(2, 3), g) if g.rank == 0 else None, 2)
    assert text in str(caught.value)


def test_ranks_that_disagree_are_both_named() -> None:
    def shapes(g: Group) -> None:
        collectives.all_reduce(torch.ones(3 + g.rank), g, f"layer.{g.rank}")

    with pytest.raises(RankError, match=r"rank [01] is in all_reduce 'layer\.[01]'.*rank [01] in all_reduce 'layer\.[01]'"):
        local.run_threads(shapes, 2)
