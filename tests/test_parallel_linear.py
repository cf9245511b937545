"""Column- and row-parallel layers beside nn.Linear: output, every gradient, any cut; the exact numbers of a known bias report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colrow.comm import regions
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from colrow.partition import Partition, even

IN, OUT = 7, 11


def linear(inputs: int = IN, outputs: int = OUT, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    return layer


def backward(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of a loss that weighs every output differently."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * scale).sum().backward()
    return {"output": y.detach(), "input": x.grad} | {k: p.grad for k, p in layer.named_parameters()}


CUTS = {
    "even": lambda dim, size, ranks: even(dim, size, ranks),
    "unequal": lambda dim, size, ranks: even(dim, size, ranks, [1.0, *[5.0] * (ranks - 1)]),
    "nothing on rank 0": lambda dim, size, ranks: even(dim, size, ranks, [0.0, *[1.0] * (ranks - 1)]),
    "interleaved": lambda dim, size, ranks: Partition(dim, tuple(tuple((i, i + 1) for i in range(r, size, ranks)) for r in range(ranks))),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_column(cut: str, ranks: int) -> None:
    whole, partition = linear(), CUTS[cut](0, OUT, ranks)
    x, scale = torch.randn(2, 5, IN, dtype=torch.float64), torch.randn(2, 5, OUT, dtype=torch.float64)
    expected = backward(whole, x, whole.weight, scale)
    mine = Partition(2, partition.pieces)  # of the output's last dim

    def rank(group: Group) -> dict[str, torch.Tensor]:
        layer = ColumnParallelLinear.from_linear(whole, partition, group, name="up")
        found = backward(layer, x, layer.weight, mine.split(scale, group.rank))
        assert (layer.in_features, layer.out_features) == (IN, partition.local_size(group.rank))
        assert {s: t.calls for s, t in group.counters.sites.items()} == {("", "all_reduce", "up.grad"): 1}
        return found

    results = run_threads(rank, ranks)
    for result in results:
        torch.testing.assert_close(result["input"], expected["input"])
    torch.testing.assert_close(mine.merge([r["output"] for r in results]), expected["output"])
    torch.testing.assert_close(partition.merge([r["weight"] for r in results]), expected["weight"])
    torch.testing.assert_close(partition.merge([r["bias"] for r in results]), expected["bias"])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_row(cut: str, ranks: int) -> None:
    whole, partition = linear(), CUTS[cut](1, IN, ranks)
    x, scale = torch.randn(2, 5, IN, dtype=torch.float64), torch.randn(2, 5, OUT, dtype=torch.float64)
    expected = backward(whole, x, whole.weight, scale)
    mine = Partition(2, partition.pieces)

    def rank(group: Group) -> dict[str, torch.Tensor]:
        layer = RowParallelLinear.from_linear(whole, partition, group, name="down")
        found = backward(layer, mine.split(x, group.rank), layer.weight, scale)
        assert (layer.in_features, layer.out_features) == (partition.local_size(group.rank), OUT)
        assert {s: t.calls for s, t in group.counters.sites.items()} == {("", "all_reduce", "down"): 1}
        return found

    results = run_threads(rank, ranks)
    for result in results:
        torch.testing.assert_close(result["output"], expected["output"])
        torch.testing.assert_close(result["bias"], expected["bias"])
    torch.testing.assert_close(mine.merge([r["input"] for r in results]), expected["input"])
    torch.testing.assert_close(partition.merge([r["weight"] for r in results]), expected["weight"])


def test_row_bias_counts_once() -> None:
    """The numbers of Wenyueh/MinivLLM #80: with the bias on both ranks the result was [[230, 470, 710], [270, 574, 878]]."""
    whole = nn.Linear(4, 3)
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        whole.weight.copy_(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]))
        whole.bias.copy_(torch.tensor([100.0, 200, 300]))

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        layer = RowParallelLinear.from_linear(whole, even(1, 4, 2), group)
        y = layer(x.chunk(2, 1)[group.rank])
        y.sum().backward()
        return y.detach(), layer.bias.grad

    for y, bias_grad in run_threads(rank, 2):
        assert y.tolist() == [[130, 270, 410], [170, 374, 578]]
        assert bias_grad.tolist() == [2, 2, 2]  # once for each of the two rows, as in the whole layer


def test_the_given_layer_is_not_changed_and_shares_no_memory() -> None:
    whole = linear()
    before = whole.weight.detach().clone()

    def rank(group: Group) -> None:
        layer = ColumnParallelLinear.from_linear(whole, even(0, OUT, 2), group)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()

    run_threads(rank, 2)
    assert torch.equal(whole.weight, before)
    assert whole.bias.abs().min() > 0


def test_made_from_sizes_it_starts_the_same_at_any_number_of_ranks() -> None:
    def made(group: Group) -> Any:
        return ColumnParallelLinear(IN, OUT, even(0, OUT, group.size), group, dtype=torch.float64)

    torch.manual_seed(3)
    [alone] = run_threads(made, 1)
    torch.manual_seed(3)
    split = run_threads(made, 3)
    assert torch.equal(even(0, OUT, 3).merge([layer.weight.detach() for layer in split]), alone.weight)
    assert torch.equal(even(0, OUT, 3).merge([layer.bias.detach() for layer in split]), alone.bias)
    assert alone.weight.abs().max() <= IN**-0.5


def test_a_pair_made_from_sizes_keeps_its_row_bias_equal() -> None:
    def made(group: Group) -> torch.Tensor:
        return RowParallelLinear(OUT, IN, even(1, OUT, group.size), group).bias.detach()

    first, *others = run_threads(made, 3)
    assert first.abs().max() > 0
    assert all(torch.equal(first, other) for other in others)


def test_copied_output_features_get_the_sum_of_their_gradients() -> None:
    """Features 2 to 5 lie on both ranks (a KV head that both use): the copies see what the whole layer's features would."""
    whole, partition = linear(), Partition(0, (((0, 5),), ((2, 11),)))
    x, scale = torch.randn(3, IN, dtype=torch.float64), torch.randn(2, 3, OUT, dtype=torch.float64)
    both = scale.clone()  # the loss reads features 0 to 5 on rank 0 and 2 to 11 on rank 1
    both[0, :, 5:], both[1, :, :2] = 0, 0
    expected = backward(whole, x, whole.weight, both.sum(0))

    def rank(group: Group) -> dict[str, torch.Tensor]:
        layer = ColumnParallelLinear.from_linear(whole, partition, group)
        for _ in range(2):  # twice: accumulation must not sum again what was summed
            (layer(x) * partition_of_output.split(scale[group.rank], group.rank)).sum().backward()
        return {key: p.grad for key, p in layer.named_parameters()}

    partition_of_output = Partition(1, partition.pieces)
    results = run_threads(rank, 2)
    for key in ("weight", "bias"):
        for r, result in enumerate(results):
            torch.testing.assert_close(result[key], 2 * partition.split(expected[key], r))
        assert torch.equal(results[0][key][2:5], results[1][key][0:3])


def test_one_f_placed_by_the_caller_serves_several_layers() -> None:
    whole = [linear(seed=seed) for seed in range(3)]
    x = torch.randn(4, IN, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    sum(layer(mine).pow(2).sum() for layer in whole).backward()

    def rank(group: Group) -> torch.Tensor:
        layers = [ColumnParallelLinear.from_linear(layer, even(0, OUT, 2), group, copy_input=False) for layer in whole]
        given = x.clone().requires_grad_()
        shared = regions.copy_to(given, group, "norm")
        sum(layer(shared).pow(2).sum() for layer in layers).backward()
        assert group.counters.total("all_reduce").calls == 1
        return given.grad

    for grad in run_threads(rank, 2):
        torch.testing.assert_close(grad, mine.grad)


def test_input_that_is_not_contiguous() -> None:
    whole = linear()
    x = torch.randn(IN, 5, 2, dtype=torch.float64).permute(2, 1, 0)

    def rank(group: Group) -> torch.Tensor:
        layer = RowParallelLinear.from_linear(whole, even(1, IN, 2), group)
        return layer(Partition(2, even(1, IN, 2).pieces).split(x, group.rank)).detach()

    for y in run_threads(rank, 2):
        torch.testing.assert_close(y, whole(x).detach())


@pytest.mark.parametrize("partition", [even(1, OUT, 1), even(0, OUT - 1, 1), even(0, OUT, 2)])
def test_a_partition_that_does_not_fit_is_refused(partition: Partition) -> None:
    with pytest.raises(UserError, match="does not fit"):
        ColumnParallelLinear.from_linear(linear(), partition, single())
