"""Sums that wait: what a Pending does by itself, parallel blocks in every way of writing them, and through training and decoding."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import CohereConfig, FalconConfig, GPTJConfig, GPTNeoXConfig, PhiConfig, PreTrainedConfig

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.parallel.pending import Due, Pending
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.proof.precision import Float64

from . import tiny
from .families import EVEN, PLAIN
from .small_blocks import Feed, Norm, derived, model_of, places
from .splitting import TOLERANCE, decode, logits_off, next_token_loss

# by itself


class Rank:
    """A due reduction that doubles, as if two ranks had the same part, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.due = Due("there", run_threads(lambda group: group, 1)[0], self.add_up)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * x


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A, B, X, BIAS = numbers(1, 2, 3, 4), numbers(2, 2, 3, 4), numbers(3, 2, 3, 4), numbers(4, 4)
SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a + b + x": lambda a, b, x: a + b + x,
    "x + a + b": lambda a, b, x: x + a + b,
    "x + (b + a)": lambda a, b, x: x + (b + a),
    "(a + x) + (b + x)": lambda a, b, x: (a + x) + (b + x),
    "torch.add": lambda a, b, x: torch.add(torch.add(x, a), b),
    "in place": lambda a, b, x: operator.iadd(operator.iadd(a, b), x),
    "through an idle dropout": lambda a, b, x: x + F.dropout(nn.Dropout(0.0)(a) + b, p=0.5, training=False),
    "to where it is": lambda a, b, x: a.to(x.device) + b.to(torch.float64) + x,
}


@pytest.mark.parametrize("how", SUMS)
def test_additions_in_any_order_are_one_reduction(how: str) -> None:
    rank = Rank()
    found = SUMS[how](Pending(A, BIAS, rank.due), Pending(B, None, rank.due), X)
    assert isinstance(found, Pending)
    assert found.shape == (2, 3, 4)
    assert (found.dtype, found.size(1), rank.calls) == (torch.float64, 3, 0)
    twice = 2 if "(a + x)" in how else 1
    torch.testing.assert_close(found.settle(), 2 * A + 2 * B + BIAS + twice * X, rtol=1e-14, atol=1e-14)
    assert found.settle() is found.settle()
    assert rank.calls == 1


OTHERS: dict[str, Callable[[Any], Any]] = {
    "product": lambda p: p * X,
    "product from the left": lambda p: X * p,
    "matrix": lambda p: F.linear(p, numbers(5, 2, 4)),
    "number": lambda p: p + 1.0,
    "difference": lambda p: p - X,
    "difference from the left": lambda p: X - p,
    "index": lambda p: p[..., :2],
    "method": lambda p: p.view(6, 4).t(),
    "cat": lambda p: torch.cat([p, X], -1),
    "scaled sum": lambda p: torch.add(X, p, alpha=2),
    "norm": lambda p: F.layer_norm(p, (4,)),
    "cast": lambda p: p.to(torch.float32),
    "negative": lambda p: -p,
    "comparison": lambda p: (p > 0).double(),
    "in place on a tensor": lambda p: X.clone().add_(p),
    "in place by name": lambda p: operator.iadd(X.clone(), p),
}


@pytest.mark.parametrize("how", OTHERS)
def test_anything_else_settles_first(how: str) -> None:
    rank = Rank()
    pending = Pending(A, BIAS, rank.due)
    found = OTHERS[how](pending)
    torch.testing.assert_close(found, OTHERS[how](2 * A + BIAS), rtol=1e-14, atol=1e-14)
    assert isinstance(found, torch.Tensor)
    assert rank.calls == 1
    assert (pending + X - 2 * A - BIAS - X).abs().max() < 1e-14, "what was settled is a value like any other from here on"
    assert rank.calls == 1


def test_dropout_that_drops_settles() -> None:
    rank = Rank()
    torch.manual_seed(1)
    found = F.dropout(Pending(A, BIAS, rank.due), 0.5)
    kept = found != 0
    torch.testing.assert_close(found[kept], (2 * (2 * A + BIAS))[kept])
    assert 0 < kept.sum() < A.numel()


def test_gradients_reach_both_parts_and_are_not_lost_without_a_word() -> None:
    a, x = (t.clone().requires_grad_() for t in (A, X))
    rank = Rank()
    (Pending(a, None, rank.due) + x).settle().sum().backward()
    for leaf, expected in ((a, 2), (x, 1)):
        assert leaf.grad is not None
        assert bool((leaf.grad == expected).all())
    with torch.no_grad(), pytest.raises(UserError, match="use_reentrant"):
        (Pending(a, None, rank.due) + x).settle()


# as the planner sees them


class Block(nn.Module):
    """Two branches and the residual; biases in both second layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = Norm(), Feed(bias=True), Feed(bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.added(self.left(y), self.right(y), x)

    def added(self, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return a + b + x


def written(**methods: Any) -> type[Block]:
    return type("Written", (Block,), methods)


WAYS: dict[str, type[nn.Module]] = {
    "a + b + x": Block,
    "x + a + b": written(added=lambda self, a, b, x: x + a + b),
    "b += a": written(added=lambda self, a, b, x: operator.iadd(b, a) + x),
    "(a + x) + b": written(added=lambda self, a, b, x: (a + x) + b),
}


def compare(block: type[nn.Module], plan: Plan) -> int:
    """Every gradient of a split model of two such blocks. All-reduces of activations in the first block, forward and backward."""
    whole = model_of(block, "cpu").double()
    tiny.add_noise(whole)
    ids = torch.arange(14).view(2, 7)
    copies = [copy.deepcopy(whole) for _ in range(plan.ranks)]
    whole(ids)["logits"].square().sum().backward()

    def on_a_rank(group: Group) -> tuple[int, dict[str, torch.Tensor]]:
        model: Any = parallelize(copies[group.rank], plan, group)
        group.counters.reset()
        model(ids)["logits"].square().sum().backward()
        names = [name for (_, op, name), tally in group.counters.sites.items() if op == "all_reduce" for _ in range(tally.calls)]
        return sum("blocks.0." in f"{name}." for name in names), whole_gradients(model)

    results = run_threads(on_a_rank, plan.ranks)
    for _, found in results:
        for name, p in whole.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-10)
    return results[0][0]


@pytest.mark.parametrize("way", WAYS)
def test_a_parallel_block_is_reduced_once_each_way(way: str) -> None:
    _, plan = derived(WAYS[way], ranks=3)
    assert places(plan, "reduce") == ["blocks.0.output"]
    assert places(plan, "copy") == ["blocks.0.norm.output"]
    assert sorted(places(plan, "hold")) == ["blocks.0.left.down.output", "blocks.0.right.down.output"]
    assert plan.tensor("blocks.0.left.down.bias").grad == "whole"
    assert compare(WAYS[way], plan) == 2


class Sequential(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.left(self.norm(x))
        return y + self.right(self.other(y))


REFUSED: dict[str, type[nn.Module]] = {
    "a product in between": written(added=lambda self, a, b, x: (a + x) * 2 + b),
    "another use of a summand": written(added=lambda self, a, b, x: a + b + x + torch.tanh(a)),
    "a weighted sum": written(added=lambda self, a, b, x: torch.add(x, a, alpha=2) + b),
    "a sequential block": Sequential,
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_wait_is_reduced_before(way: str) -> None:
    """`derived` replays the plan."""
    _, plan = derived(REFUSED[way])
    assert places(plan, "hold") == []
    assert sorted(places(plan, "reduce")) == ["blocks.0.left.down.output", "blocks.0.right.down.output"]


class Tables(nn.Module):
    """A sum that is due where it enters the next module: there is no border behind the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right, self.last = Norm(), Feed(), Feed(bias=True), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = x + self.left(y) + self.right(y)
        return z + self.last(z)


class Again(Tables):
    """... and another module, which is split, is given the same sum later: there f stands."""

    def __init__(self) -> None:
        super().__init__()
        self.third = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = x + self.left(y) + self.right(y)
        return self.last(z) + self.third(z)


@pytest.mark.parametrize("block", [Tables, Again])
def test_a_sum_may_be_due_at_an_input(block: type[nn.Module]) -> None:
    _, plan = derived(block)
    assert places(plan, "reduce")[0] == "blocks.0.last.input.x"
    assert any("third" in name for name in places(plan, "copy")) == (block is Again)
    compare(block, plan)


# as they run


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gptj": lambda: GPTJConfig(**tiny.TOKENS, n_embd=48, n_head=6, n_layer=2, rotary_dim=4, n_positions=64, n_inner=51),
    "cohere": lambda: CohereConfig(**EVEN, logit_scale=0.25),
    "gpt-neox": lambda: GPTNeoXConfig(**PLAIN, rotary_pct=0.25, hidden_dropout=0.0),
    "phi": lambda: PhiConfig(**PLAIN),
    "falcon": lambda: FalconConfig(**tiny.TOKENS, multi_query=True, hidden_size=56, num_attention_heads=7, num_hidden_layers=2),
}


def trained(model: Any, ids: torch.Tensor) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64())})
    model.train()
    with Float64():
        next_token_loss(model(ids).logits, ids).backward()


@pytest.mark.parametrize("family", CONFIGS)
def test_with_checkpointing_hidden_states_and_a_cache(family: str) -> None:
    """Every gradient where blocks are computed again, hidden states between blocks whole, 8 cached steps."""
    config = CONFIGS[family]()
    whole, ids = tiny.whole(config), tiny.ids(config)
    copies = [copy.deepcopy(whole) for _ in range(3)]
    with torch.no_grad(), Float64():
        states, steps = whole(ids, output_hidden_states=True).hidden_states, decode(whole, ids)[0]
    trained(whole, ids)
    plan = derive(config, 3)

    def on_a_rank(group: Group) -> None:
        model: Any = parallelize(copies[group.rank], plan, group)
        with torch.no_grad(), Float64():
            for mine, expected in zip(model(ids, output_hidden_states=True).hidden_states, states, strict=True):
                assert (mine - expected).abs().max() <= TOLERANCE
            assert (decode(model, ids)[0] - steps).abs().max() <= TOLERANCE
        trained(model, ids)
        found = whole_gradients(model)
        for name, p in whole.named_parameters():
            assert p.grad is not None
            assert (found[name] - p.grad).abs().max() <= TOLERANCE, name

    run_threads(on_a_rank, 3)


@pytest.mark.parametrize(
    ("op", "module", "message"),
    [("reduce", "gpt_neox.layers.0", "waits for a reduction"), ("hold", "gpt_neox.layers.0.mlp.dense_4h_to_h", "has a bias")],
)
def test_a_plan_without_a_half_is_refused(op: str, module: str, message: str) -> None:
    config = GPTNeoXConfig(**PLAIN)
    plan = derive(config, 2)
    regions = tuple(r for r in plan.regions if (r.op, r.module) != (op, module))
    assert len(regions) == len(plan.regions) - 1
    wrong = replace(plan, regions=regions)
    copies = [tiny.whole(config) for _ in range(2)]
    with pytest.raises(UserError, match=message):
        run_threads(lambda group: parallelize(copies[group.rank], wrong, group), 2)


def on_process(group: Group) -> float:
    return logits_off(tiny.whole(CONFIGS["cohere"]()), group)


@pytest.mark.process
def test_in_processes() -> None:
    assert max(spawn(on_process, 2)) <= TOLERANCE
