"""Generation by split models: the tokens of the whole model at every degree, and the number of collectives of a step."""

from __future__ import annotations

import copy

import pytest

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.generate import Memory, generate
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Limits
from colrow.parallel.build import parallelize
from tests import tiny
from tests.hand_plans import hand_plan

PROMPTS = [[5], [0, 100, 7, 33, 8], [9, 8, 7, 6, 5, 4, 3, 50, 60, 70, 80, 90]]
RULES = {
    "greedy": Sampling(),
    "temperature": Sampling(1.3, seed=7),
    "top-k": Sampling(1.3, top_k=7, seed=7),
    "top-p": Sampling(1.3, top_p=0.8, seed=7, repetition_penalty=1.2),
}


def rows(steps: list) -> list[list[int]]:
    return [[step.tokens[row] for step in steps if step.tokens[row] is not None] for row in range(len(steps[0].tokens))]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_any_degree_gives_the_whole_models_tokens(family: str, ranks: int) -> None:
    config = tiny.config(family)
    whole = tiny.whole(config, attention="sdpa")
    plan = hand_plan(config, ranks)

    def rank(group: Group) -> dict[str, list[list[int]]]:
        model = parallelize(copy.deepcopy(whole), plan, group)
        found = {name: rows(list(generate(model, group, PROMPTS, rule, Limits(8)))) for name, rule in RULES.items()}
        memory, prompt = Memory(), list(PROMPTS[1])
        (first,) = rows(list(generate(model, group, [prompt], limits=Limits(4), memory=memory)))
        second = [*prompt, *first, 17]
        return {**found, "second turn": rows(list(generate(model, group, [second], limits=Limits(4), memory=memory)))}

    expected = {name: rows(list(generate(whole, single(), PROMPTS, rule, Limits(8)))) for name, rule in RULES.items()}
    (first,) = rows(list(generate(whole, single(), [PROMPTS[1]], limits=Limits(4))))
    expected["second turn"] = rows(list(generate(whole, single(), [[*PROMPTS[1], *first, 17]], limits=Limits(4))))
    assert run_threads(rank, ranks) == [expected] * ranks


@pytest.mark.parametrize("weights", [(3, 1), (1, 0, 2)], ids=str)
def test_unequal_ranks(weights: tuple[float, ...]) -> None:
    config = tiny.config("qwen2")
    whole = tiny.whole(config, attention="sdpa")
    plan = hand_plan(config, len(weights), weights)

    def rank(group: Group) -> list[list[int]]:
        return rows(list(generate(parallelize(copy.deepcopy(whole), plan, group), group, PROMPTS, RULES["top-p"], Limits(8))))

    assert run_threads(rank, len(weights)) == [rows(list(generate(whole, single(), PROMPTS, RULES["top-p"], Limits(8))))] * len(weights)


def test_a_step_has_two_all_reduces_a_block_one_for_the_embedding_and_two_small_exchanges() -> None:
    config = tiny.config("llama")
    whole = tiny.whole(config, attention="sdpa")

    def rank(group: Group) -> dict[str, int]:
        model = parallelize(copy.deepcopy(whole), hand_plan(config, 2), group)
        list(generate(model, group, [[5, 6]], limits=Limits(11)))
        return {op: group.counters.total(op, "decode").calls for op in ("all_reduce", "all_gather", "broadcast")}

    layers = config.num_hidden_layers
    assert run_threads(rank, 2) == [{"all_reduce": 10 * (2 * layers + 1), "all_gather": 10, "broadcast": 10}] * 2
