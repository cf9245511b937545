"""Integers of a model's code that are sizes of cut axes, on small hand-written models: which become edits, and what is refused."""

from __future__ import annotations

import torch
from torch import nn

from .small_blocks import H, I, Norm, derived


class Fused(nn.Module):
    """gate|up in one matrix, cut apart by an int of the module: an edit makes it local."""

    def __init__(self, literal: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(H, 2 * I, bias=False), nn.Linear(I, H, bias=False)
        self.width = I

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).split(self.width, -1)
        return x + self.down(torch.relu(gate) * up)


class Literal(Fused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).split(60, -1)
        return x + self.down(torch.relu(gate) * up)


class Chunked(Fused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.relu(gate) * up)


def test_ints_of_modules_become_edits_and_literals_refusals() -> None:
    _, plan = derived(Fused, ranks=7)
    assert plan.tensor("blocks.0.up.weight").partition.pieces[0] == ((0, 9), (60, 69))
    assert {(e.module, e.attribute, e.whole, e.values) for e in plan.edits} == {
        (f"blocks.{i}", "width", 60, (9, 9, 9, 9, 8, 8, 8)) for i in (0, 1)
    }
    _, plan = derived(Literal)
    assert plan.tensor("blocks.0.up.weight").role == "whole"
    assert any("uses 60 as a size" in n.text for n in plan.notes)
    _, plan = derived(Chunked)
    assert plan.tensor("blocks.0.up.weight").role == "column"
    assert plan.edits == ()


class Ambiguous(Fused):
    """The same int is the size of a cut axis and of a whole one: no value is right for both."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(I))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).split(self.width, -1)
        return x + self.down(torch.relu(gate) * up) + torch.cumsum(self.bias.view(1, 1, self.width), -1).sum()


def test_an_int_with_two_meanings_is_refused() -> None:
    _, plan = derived(Ambiguous)
    assert plan.tensor("blocks.0.up.weight").role == "whole"
    assert plan.edits == ()


class HalfOnly(Fused):
    """Of two halves of one matrix only the first meets the cut axis: chunk would halve the rank's share in the wrong place."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Norm60()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.relu(gate)) + self.other(up).sum(-1, keepdim=True)


class Norm60(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


def test_chunk_of_a_half_cut_axis_is_refused() -> None:
    _, plan = derived(HalfOnly)
    assert plan.tensor("blocks.0.up.weight").role == "whole"
    assert any("chunk" in n.text for n in plan.notes)
