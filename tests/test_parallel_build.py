"""Building split models: what is kept, held, shared, frozen and saved."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import load
from colrow.parallel.build import empty, parallelize, split
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.planning.plan import Plan, Region

from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask, ask_split, case, next_token_loss, whole, worst


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_empty_then_filled(name: str) -> None:
    """On meta, then filled with the whole model's tensors: parameters are other objects then, and gradients are still summed."""
    at = whole(case(name))
    plan = hand_plan(at.config, 2)

    def rank(group: Group) -> Any:
        model = split(empty(at.config, torch.float64), plan, group)
        assert all(p.is_meta for p in model.parameters())
        load.from_whole(model, at.model.state_dict())
        return ask(model.eval(), at.ids, lambda: whole_gradients(model), lambda: whole_parameters(model))

    value, where = worst(at.answers, run_threads(rank, 2))
    assert value <= TOLERANCE, where


def test_nothing_is_held_twice() -> None:
    """Names, order and ties are the whole model's; the rank's parameters are as large as its pieces, in memory of their own."""
    at = whole(case("llama-tied"))
    plan = hand_plan(at.config, 3)

    def task(group: Group, model: Any) -> None:
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in at.model.named_parameters()]
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.out_features == plan.tensors["model.embed_tokens.weight"].partition.local_size(group.rank)
        for name, p in model.named_parameters():
            assert p.shape == plan.tensors[name].partition.local_shape(plan.tensors[name].shape, group.rank)
            assert p.untyped_storage().nbytes() == p.numel() * p.element_size()

    ask_split(at, plan, task)


def test_an_optimizer_made_before_keeps_its_hold() -> None:
    model = copy.deepcopy(whole(case("llama")).model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, hand_plan(model.config, 1), single())
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_frozen_parameters_stay_frozen_and_cost_nothing() -> None:
    """Only the MLP of the last layer trains: below it no gradient is computed and none is reduced."""
    at = whole(case("llama"))
    plan = hand_plan(at.config, 2)
    copies = [copy.deepcopy(at.model) for _ in range(2)]
    for model in copies:
        for name, p in model.named_parameters():
            p.requires_grad_("layers.1.mlp" in name)

    def rank(group: Group) -> dict[str, torch.Tensor]:
        model = parallelize(copies[group.rank], plan, group)
        group.counters.reset()
        next_token_loss(model(at.ids).logits, at.ids).backward()
        assert sorted(n for (_, _, n) in group.counters.sites if n.endswith(".grad")) == ["model.norm.output.grad"]
        return whole_gradients(model)

    for found in run_threads(rank, 2):
        assert set(found) == {f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        for name, grad in found.items():
            assert (grad - at.answers.tensors[f"gradient of {name}"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    at = whole(case(name))
    plan = hand_plan(at.config, 2)

    def task(group: Group, model: Any) -> dict[str, torch.Tensor]:
        model.train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its name before
        enable({"use_reentrant": reentrant})
        next_token_loss(model(at.ids).logits, at.ids).backward()
        return whole_gradients(model)

    for found in ask_split(at, plan, task):
        for key, grad in found.items():
            assert (grad - at.answers.tensors[f"gradient of {key}"]).abs().max() <= TOLERANCE, key


def test_only_rank_0_may_collect() -> None:
    at = whole(case("llama"))
    results = ask_split(at, hand_plan(at.config, 2), lambda group, model: whole_parameters(model, everywhere=False))
    assert results[1] == {}
    for name, p in at.model.named_parameters():
        assert torch.equal(results[0][name], p.detach()), name


def test_a_whole_parameter_that_met_split_work() -> None:
    """A norm's f moved before the norm: the gradients of its weight and bias are parts on each rank, and the plan says so."""
    at = whole(case("gpt2"))
    plan = hand_plan(at.config, 2)
    norm = "transformer.h.1.ln_2"
    before = tuple(replace(r, place="input", arg="input") if r.module == norm else r for r in plan.regions)
    partial = {f"{norm}.{key}": replace(plan.tensors[f"{norm}.{key}"], grad="partial") for key in ("weight", "bias")}

    value, where = worst(at.answers, ask_split(at, replace(plan, regions=before, tensors=plan.tensors | partial)))
    assert value <= TOLERANCE, where
    value, where = worst(at.answers, ask_split(at, replace(plan, regions=before)))
    assert value > 1e-3, "without the sum it must be wrong"


def test_groups_that_reduce_separately() -> None:
    """A region with sub-groups sums within each of them."""
    pairs = Region("0", "output", "0", "reduce", (), "", ranks=((0, 3), (1, 2)))
    plan = Plan("", "", 4, {}, (pairs,))

    def rank(group: Group) -> float:
        model = split(nn.Sequential(nn.Identity()), plan, group)
        return float(model(torch.tensor(10.0**group.rank)))

    assert run_threads(rank, 4) == [1001, 110, 110, 1001]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_save_pretrained_writes_the_whole_model(name: str, tmp_path: Path) -> None:
    at = whole(case(name))
    ask_split(at, hand_plan(at.config, 3), lambda group, model: model.save_pretrained(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(again) is type(at.model)
    for key, p in at.model.named_parameters():
        assert torch.equal(again.get_parameter(key), p), key
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == at.config.tie_word_embeddings


def test_slices_are_not_saved_as_a_model(tmp_path: Path) -> None:
    """What a training framework passes on: the rank's own state_dict."""
    at = whole(case("llama"))

    def task(group: Group, model: Any) -> None:
        with pytest.raises(UserError, match="rank's slices"):
            model.save_pretrained(tmp_path / "slices", state_dict=model.state_dict())

    ask_split(at, hand_plan(at.config, 2), task)
    assert not (tmp_path / "slices").exists()


def test_a_copy_of_a_split_model_is_refused_but_layers_may_be_copied() -> None:
    """PEFT copies single layers (modules_to_save)."""
    at = whole(case("llama"))

    def task(group: Group, model: Any) -> None:
        with pytest.raises(UserError, match="cannot be copied"):
            copy.deepcopy(model)
        layer = copy.deepcopy(model.lm_head)
        assert layer.group is group
        assert layer.weight is not model.lm_head.weight

    ask_split(at, hand_plan(at.config, 2), task)


def test_adapters_added_after_the_split_are_refused_in_training_only() -> None:
    """Their gradients would be parts on each rank, and nothing would tell."""
    at = whole(case("llama"))

    def task(group: Group, model: Any) -> None:
        base = model.lm_head
        model.lm_head = nn.Sequential(base, nn.Linear(base.out_features, base.out_features, dtype=torch.float64))
        with torch.no_grad():
            model(at.ids)
        with pytest.raises(UserError, match=r"added after the split.*lm_head"):
            model(at.ids)

    ask_split(at, hand_plan(at.config, 2), task)


def test_under_autocast() -> None:
    """bfloat16 products between float32 parameters: near the whole model under the same autocast."""
    at = whole(case("llama-bias"))
    mine = copy.deepcopy(at.model).float()

    def logits(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(at.ids, labels=at.ids)
        out.loss.backward()
        return out.logits.detach().float()

    expected = logits(mine)
    for found in ask_split(at, hand_plan(at.config, 2), lambda group, model: logits(model.float())):
        assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
