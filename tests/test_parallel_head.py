"""What a split model returns: whole logits by default, slices where asked for, the loss, attentions and hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colrow.comm.group import Group
from colrow.errors import UserError
from colrow.parallel.collect import whole_gradients
from colrow.parallel.head import sharded_logits
from colrow.parallel.state import state_of
from colrow.partition import Partition

from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask_split, case, next_token_loss, whole


def test_logits_are_whole_by_default_and_slices_inside() -> None:
    at = whole(case("llama"))
    plan = hand_plan(at.config, 3)
    expected = at.answers.tensors["logits"]

    def task(group: Group, model: Any) -> None:
        with torch.no_grad():
            assert model(at.ids).logits.shape == expected.shape
            as_tuple = model(at.ids, return_dict=False, use_cache=False)
            assert as_tuple[0].shape == expected.shape
            loss, logits, *_ = model(at.ids, labels=at.ids, return_dict=False)
            assert (loss.dim(), logits.shape) == (0, expected.shape)
            assert model(at.ids, logits_to_keep=1).logits.shape == (2, 1, 101)
            with sharded_logits(model):
                mine = model(at.ids).logits
                with sharded_logits(model):
                    pass
                assert model(at.ids).logits.shape == mine.shape, "an inner block must not end the outer one"
            assert model(at.ids).logits.shape == expected.shape
        cut = Partition(2, plan.tensors["lm_head.weight"].partition.pieces)
        assert (mine - cut.split(expected, group.rank)).abs().max() <= TOLERANCE

    ask_split(at, plan, task)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attentions_and_hidden_states_are_the_whole_models(name: str) -> None:
    at = whole(case(name))
    asked = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        expected = at.model(at.ids, **asked)

    def task(group: Group, model: Any) -> Any:
        with torch.no_grad():
            found = model(at.ids, **asked)
            group.counters.reset()
            model(at.ids)
        assert not [n for _, _, n in group.counters.sites if n.endswith("attentions")], "gathered only where asked for"
        return found

    for found in ask_split(at, hand_plan(at.config, 4), task):
        for key in ("attentions", "hidden_states"):
            assert len(found[key]) == len(expected[key])
            assert all((a - b).abs().max() <= 1e-6 for a, b in zip(found[key], expected[key], strict=True)), key


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_models_own_loss(name: str) -> None:
    """`.loss` beside transformers', which computes it in float32 whatever the logits are."""
    at = whole(case(name))
    labels = at.ids.clone()
    labels[0, :4] = -100
    for extra in ({}, {"num_items_in_batch": 17}):
        expected = at.model(at.ids, labels=labels, **extra).loss.detach()
        found = ask_split(
            at, hand_plan(at.config, 2), lambda group, model, extra=extra: model(at.ids, labels=labels, **extra).loss.detach()
        )
        for loss in found:
            assert (loss - expected).abs() <= 1e-6


def test_loss_and_logits_may_both_be_used() -> None:
    at = whole(case("llama"))

    def grads(model: nn.Module, collect: Callable[[nn.Module], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        out = model(at.ids, labels=at.ids)
        (next_token_loss(out.logits, at.ids) + out.logits.logsumexp(-1).pow(2).mean()).backward()
        return collect(model)

    mine = copy.deepcopy(at.model)
    expected = grads(mine, lambda m: {n: p.grad for n, p in m.named_parameters()})
    for found in ask_split(at, hand_plan(at.config, 2), lambda group, model: grads(model, whole_gradients)):
        for name, grad in found.items():
            assert (grad - expected[name]).abs().max() <= TOLERANCE, name


def test_an_unsplit_model_has_no_state() -> None:
    with pytest.raises(UserError, match="not split"):
        state_of(nn.Linear(2, 2))
