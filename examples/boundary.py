"""Where the communication boundary of a pair lies, and why: after the second matrix, not between the two.

    python examples/boundary.py

x = [1, 2] goes through W1, a ReLU and W2 (here written as in y = relu(x @ W1) @ W2, so columns are output features). Rank 0 owns hidden
features 0 and 1, rank 1 features 2 and 3. ReLU works feature by feature, so each rank applies it to its own slice without asking anyone.
The partial outputs are added at the end. Cut the first matrix along its input instead, and the ranks hold partial SUMS of every hidden
feature; the ReLU of a sum is not the sum of the ReLUs, so the sum has to be made before it, where the tensor is four times as wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

X = torch.tensor([[1.0, 2]])
W1 = torch.tensor([[1.0, -1, 2, 0], [0, 1, -1, 3]])  # (2 in, 4 hidden)
W2 = torch.tensor([[1.0, 0], [0, 1], [2, 1], [1, -1]])  # (4 hidden, 2 out)
BIAS = torch.tensor([10.0, 20])  # of the output; made up, to show what happens when every rank adds it
SLICES = (slice(0, 2), slice(2, 4))  # the hidden features of each rank


@dataclass(frozen=True)
class Boundary:
    hidden: torch.Tensor
    partial: tuple[torch.Tensor, ...]
    summed: torch.Tensor
    dense: torch.Tensor


def right() -> Boundary:
    """W1 by output features, W2 by input features: one sum, of the narrow output."""
    hidden = torch.relu(X @ W1)
    partial = tuple(torch.relu(X @ W1[:, s]) @ W2[s, :] for s in SLICES)
    return Boundary(hidden, partial, partial[0] + partial[1], hidden @ W2)


def wrong_cut() -> tuple[torch.Tensor, torch.Tensor]:
    """W1 by INPUT features without a sum before the ReLU: (what comes out, what should). Each rank sees one feature of x."""
    halves = [X[:, i : i + 1] @ W1[i : i + 1, :] for i in range(2)]  # partial sums of all four hidden features
    return (torch.relu(halves[0]) + torch.relu(halves[1])) @ W2, torch.relu(halves[0] + halves[1]) @ W2


def bias_on_every_rank() -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank adds the output bias to its partial sum: (what comes out, what should)."""
    partial = right().partial
    return sum((p + BIAS for p in partial), torch.zeros(1, 2)), partial[0] + partial[1] + BIAS


def bytes_before(tokens: int, expanded: int, itemsize: int) -> int:
    """Logical size of an all-reduce BEFORE the nonlinearity: the expanded hidden tensor."""
    return tokens * expanded * itemsize


def bytes_after(tokens: int, width: int, itemsize: int) -> int:
    """Logical size of the all-reduce after the second matrix: the output, as wide as the model."""
    return tokens * width * itemsize


def main() -> None:
    b = right()
    print("hidden, after ReLU     ", b.hidden.tolist()[0])
    print("partial output, rank 0 ", b.partial[0].tolist()[0])
    print("partial output, rank 1 ", b.partial[1].tolist()[0])
    print("their sum              ", b.summed.tolist()[0])
    print("unsplit                ", b.dense.tolist()[0], "equal" if torch.equal(b.summed, b.dense) else "DIFFERENT")

    print("\nThe wrong cut: W1 along its input, no sum before the ReLU.")
    a, c = torch.tensor(1.0), torch.tensor(-1.0)
    print(f"  relu(1) + relu(-1) = {(torch.relu(a) + torch.relu(c)).item():g}, relu(1 + -1) = {torch.relu(a + c).item():g}")
    got, expected = wrong_cut()
    print(f"  here: {got.tolist()[0]} instead of {expected.tolist()[0]}")
    before, after = bytes_before(128, 4096, 2), bytes_after(128, 1024, 2)
    print("  To put it right the sum must come before the ReLU. For 128 tokens, width 1024, expanded 4096, 2 bytes a value,")
    print(f"  that all-reduce is of {before:,} bytes; after the second matrix it is of {after:,}. (Sizes of the tensor; what goes")
    print("  over the wire depends on the algorithm: a ring sends 2(n-1)/n of it from each of n ranks.)")

    print("\nThe bias of the output, added by each rank before the sum:")
    got, expected = bias_on_every_rank()
    print(f"  {got.tolist()[0]} instead of {expected.tolist()[0]}: it counts once per rank, so it is added after the sum.")


if __name__ == "__main__":
    main()
