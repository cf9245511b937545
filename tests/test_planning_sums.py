"""Partial sums and partial gradients on small hand-written models, each with one situation: where they are added, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.partition import Partition
from colrow.planning.record import record
from colrow.planning.replay import check
from colrow.planning.spread import ReplayError

from . import tiny
from .small_blocks import Feed, H, I, Norm, derived, model_of, places


class Serial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Feed(bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def test_bias_of_the_second_layer_is_whole_and_counts_once() -> None:
    _, plan = derived(Serial)
    assert places(plan, "reduce") == ["blocks.0.mlp.down.output"]
    assert places(plan, "copy") == ["blocks.0.norm.output"]
    bias = plan.tensor("blocks.0.mlp.down.bias")
    assert (bias.role, bias.grad) == ("whole", "whole")
    assert "added once" in bias.reason


class Parallel(nn.Module):
    """Two branches with a norm each: one f before both norms is cheaper than two after them, at the price of the norms' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.left, self.right = Norm(), Norm(), Feed(), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.left(self.one(x)) + self.right(self.two(x))


def test_two_norms_of_one_tensor_share_an_f() -> None:
    choice, plan = derived(Parallel)
    assert len([v for v in choice.gradients.copies if choice.graph.leaving[v] or choice.graph.entering[v]]) == 3, (
        "one a block, one at the head"
    )
    assert plan.tensor("blocks.0.one.weight").grad == "partial"
    assert plan.tensor("norm.weight").grad == "whole"


class PostNorm(nn.Module):
    """The residual stream itself feeds the split layer: f only for that consumer, at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mlp(x))


def test_f_at_the_input_of_the_split_module_where_others_read_the_value() -> None:
    _, plan = derived(PostNorm)
    assert places(plan, "copy") == ["blocks.0.mlp.up.input.input"], "the smallest module that holds the split consumers"


class Gated(nn.Module):
    """A whole gate times a partial sum: the gate's gradient is a part, and so is that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.mlp = Norm(), nn.Linear(H, 1, bias=False), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + torch.sigmoid(self.gate(y)) * self.mlp(y)


def test_gate_is_applied_after_the_reduction() -> None:
    _, plan = derived(Gated)
    assert places(plan, "reduce") == ["blocks.0.mlp.down.output"]
    assert plan.tensor("blocks.0.gate.weight").role == "whole"
    assert plan.tensor("blocks.0.gate.weight").grad == "whole"


class NormInside(nn.Module):
    """A norm over the hidden features of the MLP, and its mean: each rank has a part of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(self.scaled(h))

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1)


def test_the_mean_of_a_norm_over_a_cut_axis_is_a_region() -> None:
    _, plan = derived(NormInside)
    assert plan.tensor("blocks.0.up.weight").role == "column"
    (mean,) = (r for r in plan.regions if r.op == "mean" and r.module == "blocks.0")
    assert (mean.name, mean.place, mean.arg, mean.shape) == ("blocks.0.mean.1", "inside", "1", ("B", "S", 1)), "0 is that of self.norm"
    assert mean.partition == Partition(-1, (((0, 30),), ((30, 60),)))


class Sorted(NormInside):
    """What mixes the axis in another way keeps it whole, and the note says so."""

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sort(h, -1)[0]


class MeanUsedWhole(NormInside):
    """The mean goes into the residual stream too: there its gradient is no part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        mean = h.mean(-1, keepdim=True)
        return x + self.down(h - mean) + mean


@pytest.mark.parametrize(("block", "text"), [(Sorted, "mixes it"), (MeanUsedWhole, "uses a mean over a cut axis whole")])
def test_what_mixes_an_axis_otherwise_keeps_it_whole_with_a_note(block: type[nn.Module], text: str) -> None:
    _, plan = derived(block)
    assert plan.tensor("blocks.0.up.weight").role == "whole"
    assert any(text in n.text and "blocks.*.up" in n.subject for n in plan.notes)
    assert plan.tensor("head.weight").role == "column", "the rest is still cut"
    assert plan.tensor("blocks.0.up.weight").grad == "whole", "f before the head keeps gradients below it whole"


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.renorm(self.up(self.norm(x)), 2, 0, 5.0))


def test_an_op_without_a_rule_costs_coverage_only() -> None:
    _, plan = derived(Unknown)
    assert plan.tensor("blocks.0.up.weight").role == "whole"
    assert any("renorm" in n.text and "no rule" in n.text for n in plan.notes)


def test_more_ranks_than_features_leave_some_with_nothing() -> None:
    _, plan = derived(Serial, ranks=70, replay=False)
    cut = plan.tensor("blocks.0.mlp.up.weight").partition
    assert [cut.local_size(r) for r in range(70)] == [1] * 60 + [0] * 10


class Mixed(nn.Module):
    """A sum over cut and whole features together: the whole ones would count once per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(H, I), nn.Linear(I + H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.cat([torch.relu(self.up(y)), y], -1))


def test_a_sum_over_cut_and_whole_features_is_refused() -> None:
    _, plan = derived(Mixed)
    assert plan.tensor("blocks.0.down.weight").role == "whole"
    assert any("together with what cannot be cut" in n.text for n in plan.notes)


class Join(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


class Scaled(nn.Module):
    """Seen from the scale alone, an f on it is cheapest; the other factor then needs one behind the product, which makes the first needless
    (and wrong: the gradient would be added twice)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two, self.three = Norm(), Feed(), Feed(), Feed()
        self.gate, self.join = nn.Linear(H, 1), Join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        left = self.one(y)
        return x + self.three(self.join(left, self.gate(self.two(y))))


def test_an_f_that_a_later_one_makes_needless_is_dropped() -> None:
    _, plan = derived(Scaled)
    assert places(plan, "copy") == ["blocks.0.norm.output", "blocks.0.join.output"]


class Written(nn.Module):
    """A tensor that is filled piece by piece in place: the gradient comes back through the memory, not through a result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        turned = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        turned[..., :6] = y[..., 6:]
        turned[..., 6:] = y[..., :6]
        return x + self.mlp(turned)


def test_gradients_come_back_through_memory_written_in_place() -> None:
    _, plan = derived(Written, replay=False)  # which cannot follow it
    assert len(places(plan, "copy")) == 1
    assert plan.tensor("blocks.0.norm.weight").grad == "whole"
    whole = model_of(Written, "cpu").double()
    tiny.add_noise(whole)
    ids = torch.arange(14).view(2, 7)
    sliced = copy.deepcopy(whole)
    whole(ids)["logits"].square().sum().backward()

    def on_a_rank(group: Group) -> dict[str, torch.Tensor]:
        model = parallelize(copy.deepcopy(sliced), plan, group)
        model(ids)["logits"].square().sum().backward()
        return whole_gradients(model)

    for gradients in run_threads(on_a_rank, 2):
        for name, p in whole.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-10)


class Collected(nn.Module):
    """Rows are added to zeros, as those of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        rows = y.transpose(0, 1)
        into = self.memory(rows)
        self.fill(into, rows)
        places = torch.arange(rows.shape[0], device=y.device)
        into.index_add_(0, places, self.feed(rows))
        into.index_add_(0, places, self.feed(2 * rows))
        return into.transpose(0, 1)

    def memory(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)

    def fill(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        pass


class OfNothing(Collected):
    """The zeros are made of no tensor."""

    def memory(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(rows.shape, device=rows.device)


class HandsOn(Collected):
    """One of the experts is the identity (LongCat): what it gives is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        rows = y.transpose(0, 1)
        into, places = torch.zeros_like(rows), torch.arange(rows.shape[0], device=y.device)
        into.index_add_(0, places, self.feed(rows))
        into.index_add_(0, places, self.same(rows[places]) * rows.mean(-1, keepdim=True))
        return into.transpose(0, 1)


class Filled(Collected):
    """They are zeros no more when the first rows are added."""

    def fill(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        into[:, 0] = rows[:, 0]


@pytest.mark.parametrize(
    ("collect", "role", "sums"),
    [
        (Collected, "row", ["blocks.0.mlp.output"]),
        (OfNothing, "row", ["blocks.0.mlp.output"]),
        (HandsOn, "row", ["blocks.0.mlp.output"]),
        (Filled, "whole", []),
    ],
)
def test_partial_rows_are_added_to_zeros_only(collect: type[nn.Module], role: str, sums: list[str]) -> None:
    """What is whole and added to on every rank would count once a rank."""

    class Block(Serial):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = collect()

    _, plan = derived(Block, replay=collect is not Filled)  # which cannot follow what is written through a view
    assert plan.tensor("blocks.0.mlp.feed.down.weight").role == role
    assert places(plan, "reduce") == sums


def test_what_is_handed_on_among_partial_rows_counts_once() -> None:
    class Block(Serial):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = HandsOn()

    trace, plan = record(model_of(Block, "meta"), bypasses=True), derived(Block)[1]
    assert places(plan, "once") == ["blocks.0.mlp.same.input.input"]
    wrong = replace(plan, regions=tuple(r for r in plan.regions if r.op != "once"))
    with pytest.raises(ReplayError, match="index_add_ adds .* rows to a tensor that is"):
        check(trace, wrong)


def test_reasons_name_module_and_op() -> None:
    _, plan = derived(Serial)
    entry: Any = plan.tensor("blocks.0.mlp.up.weight")
    assert entry.reason == (
        "column: 60 features are made here and summed away in blocks.0.mlp.down, whose result is all-reduced before add in blocks.0"
    )
    assert entry.path == ("blocks.0.mlp.up: addmm", "blocks.0.mlp: relu", "blocks.0.mlp.down: addmm")
