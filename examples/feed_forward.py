"""One feed-forward pair on two ranks, forward and backward, first by hand and then with colrow's layers on two real processes.

    python examples/feed_forward.py

The whole computation, in PyTorch's layout (a weight is (out, in), so a product is with its transpose):

    O = X @ W1.T          X  (3, 3)   W1 (2, 3)   O (3, 2)
    Y = O @ W2.T          W2 (3, 2)   Y  (3, 3)
    loss = mean(Y)

W1 is column-parallel: its OUTPUT features are shared out, which are the rows of `weight`. W2 is row-parallel: its INPUT features are
shared out, which are the columns of `weight`. Rank r owns hidden feature r: row r of W1 makes it and column r of W2 uses it up, so the
hidden slice never leaves the rank. What leaves it is a partial sum of Y and, backward, a partial sum of dX: one all-reduce each.
(Megatron-LM, arXiv:1909.08053, section 3; f is the all-reduce of dX, g the all-reduce of Y.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from colrow.partition import even

RANKS = 2
X = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]])
W1 = torch.tensor([[1.0, 0, -1], [2, 1, 3]])
W2 = torch.tensor([[1.0, -2], [3, 4], [0, 5]])


@dataclass(frozen=True)
class Shard:
    """What one rank holds and computes. Shapes for two ranks in the comments; every product here is local to the rank."""

    w1: torch.Tensor  # (1, 3)  a row of W1: one output feature
    w2: torch.Tensor  # (3, 1)  a column of W2: the matching input feature
    o: torch.Tensor  # (3, 1)  the hidden slice
    y_partial: torch.Tensor  # (3, 3)  to be summed over ranks (g)
    do: torch.Tensor  # (3, 1)
    dx_partial: torch.Tensor  # (3, 3)  to be summed over ranks (f)
    dw1: torch.Tensor  # (1, 3)  complete as it is: this rank's rows of dW1
    dw2: torch.Tensor  # (3, 1)  complete as it is: this rank's columns of dW2


def shard(rank: int) -> Shard:
    """Forward and backward of one rank, by hand."""
    w1 = W1[rank : rank + 1, :]
    w2 = W2[:, rank : rank + 1]
    o = X @ w1.T
    y_partial = o @ w2.T
    dy = torch.full((3, 3), 1 / 9)  # d mean(Y) / dY. Whole on every rank: Y is whole after g, and g passes gradients through
    do = dy @ w2
    return Shard(w1, w2, o, y_partial, do, dx_partial=do @ w1, dw1=do.T @ X, dw2=dy.T @ o)


@dataclass(frozen=True)
class Dense:
    """The unsplit computation, its gradients from autograd."""

    o: torch.Tensor
    y: torch.Tensor
    dx: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor


def dense() -> Dense:
    x, w1, w2 = (t.clone().requires_grad_() for t in (X, W1, W2))
    o = x @ w1.T
    y = o @ w2.T
    dx, dw1, dw2 = torch.autograd.grad(y.mean(), (x, w1, w2))
    return Dense(o.detach(), y.detach(), dx, dw1, dw2)


def by_hand() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, from the shards, from the whole) for each tensor."""
    shards, whole = [shard(r) for r in range(RANKS)], dense()
    return [
        ("O: hidden slices side by side", torch.cat([s.o for s in shards], dim=1), whole.o),
        ("Y: sum of the partial outputs", sum_of(s.y_partial for s in shards), whole.y),
        ("dX: sum of dO_shard @ W1_shard", sum_of(s.dx_partial for s in shards), whole.dx),
        ("dW1: shards' rows on top of each other", torch.cat([s.dw1 for s in shards], dim=0), whole.dw1),
        ("dW2: shards' columns side by side", torch.cat([s.dw2 for s in shards], dim=1), whole.dw2),
    ]


def sum_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def on_a_rank(group: Group) -> tuple[torch.Tensor, ...]:
    """The same with colrow's layers, as one of the processes: O_shard, Y, dX, dW1_shard, dW2_shard."""
    column = ColumnParallelLinear.from_linear(linear(W1), even(0, 2, group.size), group, name="w1")
    row = RowParallelLinear.from_linear(linear(W2), even(1, 2, group.size), group, name="w2")
    x = X.clone().requires_grad_()
    o = column(x)  # f stands at its input: backward, the all-reduce of dX
    y = row(o)  # g stands at its output: the all-reduce of Y
    y.mean().backward()
    return o.detach(), y.detach(), x.grad, column.weight.grad, row.weight.grad


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def on_processes() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, from two real processes, from the whole) for each tensor. Y and dX are whole on every rank, so both are looked at."""
    ranks, whole = spawn(on_a_rank, RANKS), dense()
    o, y, dx, dw1, dw2 = zip(*ranks, strict=True)
    return [
        ("O: hidden slices side by side", torch.cat(o, dim=1), whole.o),
        *((f"Y on rank {r}", y[r], whole.y) for r in range(RANKS)),
        *((f"dX on rank {r}", dx[r], whole.dx) for r in range(RANKS)),
        ("dW1: shards' rows on top of each other", torch.cat(dw1, dim=0), whole.dw1),
        ("dW2: shards' columns side by side", torch.cat(dw2, dim=1), whole.dw2),
    ]


def rounded(tensor: torch.Tensor) -> list[list[float]]:
    return [[round(x, 3) for x in row] for row in tensor.tolist()]


def show(title: str, rows: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    print(title)
    for what, found, expected in rows:
        print(f"  {what:42}{'equal' if torch.allclose(found, expected) else 'DIFFERENT':10}{rounded(found)}")


def main() -> None:
    for r in range(RANKS):
        s = shard(r)
        print(f"rank {r}: W1_shard {s.w1.tolist()}  W2_shard {s.w2.tolist()}  O_shard {s.o.tolist()}")
        print(f"        partial Y {s.y_partial.tolist()}  partial dX {rounded(s.dx_partial)}")
    show("\nBy hand, forward and backward:", by_hand())
    show("\nWith colrow's layers on two processes:", on_processes())


if __name__ == "__main__":  # the processes import this file, so nothing may run outside of main
    main()
