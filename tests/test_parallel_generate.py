"""transformers' own generate on a split model: greedy, sampled, beams; dynamic and static cache; draws made once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.collect import whole_gradients
from colrow.parallel.generate import DrawOnce
from colrow.parallel.head import sharded_logits

from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask_split, case, next_token_loss, whole

NEW = {"max_new_tokens": 8, "min_new_tokens": 8}


def generated(at: Any, ranks: int, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole model's ids and those of every rank, from the same seed."""
    mask = torch.ones_like(at.ids)
    torch.manual_seed(5)
    expected = copy.deepcopy(at.model).generate(at.ids, attention_mask=mask, **NEW, **options)
    torch.manual_seed(5)
    return expected, ask_split(at, hand_plan(at.config, ranks), lambda g, m: m.generate(at.ids, attention_mask=mask, **NEW, **options))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_greedy(family: str, cache: str, ranks: int) -> None:
    expected, found = generated(whole(case(family), "sdpa"), ranks, do_sample=False, cache_implementation=cache)
    assert expected.shape == (2, 20)
    for ids in found:
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "temperature": 2.0}, {"num_beams": 3}], ids=str)
def test_sampled_text_is_the_whole_models(options: dict[str, Any]) -> None:
    at = whole(case("llama"), "sdpa")
    expected, found = generated(at, 3, do_sample=True, **options)
    assert not torch.equal(expected, generated(at, 1, do_sample=False)[0]), "sampling must differ from greedy, or this tests nothing"
    for ids in found:
        assert torch.equal(ids, expected)


def test_ranks_without_a_cache_of_heads() -> None:
    """Six heads on eight ranks: two ranks attend to nothing and still take every step."""
    at = whole(case("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6), "sdpa")
    for cache in ("dynamic", "static"):
        expected, found = generated(at, 8, do_sample=False, cache_implementation=cache)
        assert all(torch.equal(ids, expected) for ids in found)


def test_generate_has_whole_logits_even_inside_sharded_logits() -> None:
    at = whole(case("llama"), "sdpa")

    def task(group: Group, model: Any) -> torch.Tensor:
        with sharded_logits(model):
            ids = model.generate(at.ids, do_sample=False, **NEW)
            assert model(at.ids).logits.shape[-1] < 101
        return ids

    expected = copy.deepcopy(at.model).generate(at.ids, do_sample=False, **NEW)
    for ids in ask_split(at, hand_plan(at.config, 2), task):
        assert torch.equal(ids, expected)


def test_training_after_generation_in_inference_mode() -> None:
    """Nothing that generation made may be an inference tensor that autograd cannot save."""
    at = whole(case("llama"), "sdpa")

    def task(group: Group, model: Any) -> torch.Tensor:
        with torch.inference_mode():
            model.generate(at.ids, do_sample=False, **NEW)
            model(at.ids)
        next_token_loss(model(at.ids).logits, at.ids).backward()
        return whole_gradients(model)["model.embed_tokens.weight"]

    for grad in ask_split(at, hand_plan(at.config, 2), task):
        assert (grad - at.answers.tensors["gradient of model.embed_tokens.weight"]).abs().max() <= TOLERANCE


DRAWS = {
    "multinomial": lambda: torch.multinomial(torch.ones(3, 50), 4),
    "rand": lambda: torch.rand(3, 4),
    "randint": lambda: torch.randint(0, 1000, (5,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "rand_like": lambda: torch.rand_like(torch.empty(6, dtype=torch.float64)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_every_rank_gets_rank_0s_draw(draw: str) -> None:
    torch.manual_seed(9)
    expected = DRAWS[draw]()

    def rank(group: Group) -> torch.Tensor:
        with DrawOnce(group):
            return DRAWS[draw]()

    torch.manual_seed(9)
    for found in run_threads(rank, 3):
        assert torch.equal(found, expected)


def test_a_clock_on_each_rank_is_refused() -> None:
    at = whole(case("llama"))

    def task(group: Group, model: Any) -> None:
        with pytest.raises(UserError, match="max_time"):
            model.generate(at.ids, max_time=1.0, **NEW)

    ask_split(at, hand_plan(at.config, 2), task)
