"""Split models equal the whole one: forward, cached decoding, loss, every gradient, optimizer steps; copies stay bit-equal."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.partition import Partition
from colrow.planning.derive import derive
from colrow.planning.plan import Plan

from .hand_plans import hand_plan
from .splitting import CASES, TOLERANCE, VARIANTS, ask, ask_split, case, next_token_loss, whole, worst

PLANS = {"by hand": (hand_plan, (1, 2, 3, 4, 5, 8)), "derived": (derive, (2, 5))}


@pytest.mark.parametrize(("plan", "ranks"), [(plan, ranks) for plan, (_, degrees) in PLANS.items() for ranks in degrees])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_whole_model(plan: str, name: str, ranks: int) -> None:
    at = whole(CASES[name])
    make, _ = PLANS[plan]
    results = ask_split(at, make(at.config, ranks))
    value, where = worst(at.answers, results)
    assert value <= TOLERANCE, where
    assert all(torch.equal(r.tokens, at.answers.tokens) for r in results)
    assert all(torch.equal(r.tensors["logits"], results[0].tensors["logits"]) for r in results), "ranks must have the same bits"


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("llama", 5), ("qwen2", 4), ("gpt2", 2), ("six-plain-heads", 8)])
def test_sdpa_is_kept(name: str, ranks: int) -> None:
    at = whole(CASES[name], "sdpa")
    value, where = worst(at.answers, ask_split(at, hand_plan(at.config, ranks)))
    assert value <= TOLERANCE, where


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 0.0, 5.0)])
def test_unequal_devices(weights: tuple[float, ...]) -> None:
    at = whole(case("llama"))
    value, where = worst(at.answers, ask_split(at, hand_plan(at.config, len(weights), weights)))
    assert value <= TOLERANCE, where


def _processes(group: Group) -> tuple[float, str]:
    at = whole(case("qwen2"))
    model = parallelize(copy.deepcopy(at.model), hand_plan(at.config, group.size), group)
    answers = ask(model, at.ids, lambda: whole_gradients(model), lambda: whole_parameters(model))
    assert torch.equal(answers.tokens, at.answers.tokens)
    return worst(at.answers, [answers])


@pytest.mark.process
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_in_real_processes(backend: str) -> None:
    for value, where in spawn(_processes, 2, backend=backend):
        assert value <= TOLERANCE, where


def pieces(partition: Partition, rank: int, local: torch.Tensor) -> dict[int, torch.Tensor]:
    """Each index along the cut dim that the rank holds, with its values."""
    indices = [i for start, stop in partition.pieces[rank] for i in range(start, stop)]
    return dict(zip(indices, local.unbind(partition.dim or 0), strict=True))


def copies_differ(plan: Plan, parameters: list[dict[str, torch.Tensor]]) -> list[str]:
    """The parameters of which two ranks hold the same part with different bits."""
    out = []
    for name, entry in plan.tensors.items():
        for a, b in combinations(range(plan.ranks), 2):
            mine, other = parameters[a][name], parameters[b][name]
            if entry.partition.is_whole:
                same = torch.equal(mine, other)
            else:
                left, right = pieces(entry.partition, a, mine), pieces(entry.partition, b, other)
                same = all(torch.equal(left[i], right[i]) for i in left.keys() & right.keys())
            if not same:
                out.append(f"{name} on ranks {a} and {b}")
    return out


def trained(group: Group, model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        for half in ids.roll(step, 1).chunk(2):  # two micro-batches accumulate: a sum taken of .grad would count the first one twice
            (next_token_loss(model(half).logits, half) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen2", "gpt2", "one-kv-head"])
def test_copies_stay_bit_equal(name: str, ranks: int) -> None:
    at = whole(CASES[name])
    plan = hand_plan(at.config, ranks)
    after = ask_split(at, plan, lambda group, model: trained(group, model, at.ids))
    assert copies_differ(plan, after) == []


def test_training_follows_the_whole_model() -> None:
    at = whole(case("qwen2"))
    plan = hand_plan(at.config, 2)
    expected = trained(None, copy.deepcopy(at.model), at.ids)  # type: ignore[arg-type]
    after = ask_split(at, plan, lambda group, model: trained(group, model, at.ids))
    for name, entry in plan.tensors.items():
        found = entry.partition.merge([rank[name] for rank in after])
        assert (found - expected[name]).abs().max() <= TOLERANCE, name


def test_variants_are_what_they_say() -> None:
    """A guard against a tiny config that drifts: the odd sizes are what makes these tests worth anything."""
    plan = hand_plan(whole(case("llama")).config, 2)
    heads = plan.attention[0]
    assert heads.query.pieces == (((0, 5),), ((5, 9),))
    assert heads.kv.pieces == (((0, 2),), ((1, 3),))
    assert (heads.local_map(0), heads.local_map(1)) == ((0, 0, 0, 1, 1), (0, 1, 1, 1))
    assert set(VARIANTS) <= set(CASES)
