"""Thousands of ranks: what a plan costs to make and to price grows with their number, not with its square; ranks alike are asked once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from colrow.cli.plan import sampling
from colrow.planning import cost, kept, links, memory
from colrow.planning.derive import choice, derive
from colrow.planning.graph import Graph
from colrow.planning.study import Question, Study
from colrow.planning.trace import trace
from colrow.planning.verdict import verdict
from tests import tiny

CASES = [("llama", 2, None), ("llama", 4, None), ("llama", 7, None), ("gpt2", 5, None), ("llama", 13, None), ("qwen2", 3, (1.0, 3.0, 2.0))]


@pytest.mark.parametrize(("family", "ranks", "weights"), CASES)
def test_ranks_alike_hold_as_much_of_everything(family: str, ranks: int, weights: tuple[float, ...] | None) -> None:
    config = tiny.config(family)
    plan = derive(config, ranks, weights)
    assert plan.like[0] == 0
    assert max(plan.like) < ranks
    each = [sum(prod(t.partition.local_shape(t.shape, rank)) for t in plan.tensors.values()) * 4 for rank in range(ranks)]
    assert cost.parameter_bytes(plan, 4) == each
    heads = kept.heads(Graph(trace(config)).trace)
    grown = [sum((h.key + h.value) * h.tokens(9) * h.local(plan, rank) for h in heads) for rank in range(ranks)]
    assert kept.cache_bytes(plan, heads, 9, 1) == grown
    assert [m.parameters for m in memory.serving(plan, heads, 1, 9, 4)] == each
    found = choice(config, ranks, weights)
    assert all(found.cuts.local(dim, r) == found.cuts.local(dim, found.cuts.like[r]) for dim in _dims(found) for r in range(ranks))


def _dims(found: Any) -> list[Any]:
    return [dim for at in found.graph.trace.parameters.values() for dim in found.graph.axes.dims[at] if found.cuts.touches(dim)]


def calls(work: Callable[[], Any]) -> int:
    """Of functions of Python, and steps of generators, while `work` runs."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_eight_times_the_ranks_are_about_eight_times_the_work() -> None:
    config = tiny.config("llama", hidden_size=144, num_attention_heads=18, num_key_value_heads=6, intermediate_size=2048, vocab_size=4096)

    def all_of_it(ranks: int) -> Callable[[], Any]:
        def work() -> None:
            plan = derive(config, ranks)
            study = Study.of(config, plan, links.machine("h100", ""), Question(context=32), sampling(config), others=(1,))
            verdict(study)

        return work

    all_of_it(2)()
    few, many = (calls(all_of_it(ranks)) for ranks in (150, 1200))
    assert many < 8 * few
