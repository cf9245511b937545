"""Building split models: what is kept, the head's contract, and the refusal of whatever cannot be carried out."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from colrow.parallel.head import sharded_logits
from colrow.parallel.state import State, state_of
from colrow.partition import Partition, even
from colrow.planning.plan import Attention, Edit, Plan, Region, TensorPlan

from . import tiny
from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask, ask_split, case, next_token_loss, whole, worst

# --- building


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


# --- the head


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


# --- refusals


def tensor(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, tensors=plan.tensors | {name: replace(plan.tensors[name], **changes)})


def region(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, regions=(*plan.regions, replace(Region("model.norm", "output", "0", "copy", (), ""), **changes)))


UP, DOWN, NORM, EMBED = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.norm.weight", "model.embed_tokens.weight"
ATTENTION = "model.layers.0.self_attn"

REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "other ranks": (lambda p: replace(p, ranks=3), "another number of ranks"),
    "other model": (lambda p: replace(p, architecture="GPT2LMHeadModel"), "another model"),
    "a parameter is missing": (lambda p: replace(p, tensors={n: t for n, t in p.tensors.items() if n != NORM}), "says nothing about"),
    "an unknown parameter": (
        lambda p: replace(p, tensors=p.tensors | {"a.b": TensorPlan("a.b", (1,), even(0, 1, 2), "split", "")}),
        "does not have",
    ),
    "an alias that is not tied": (
        lambda p: replace(tensor(p, EMBED, aliases=("lm_head.weight",)), tensors=_without(p, "lm_head.weight", EMBED)),
        "ties lm_head.weight",
    ),
    "wrong shape": (lambda p: tensor(p, NORM, shape=(71,)), "another shape"),
    "wrong size of a cut": (lambda p: tensor(p, f"{UP}.weight", partition=even(0, 50, 2)), "does not cover"),
    "partition for other ranks": (lambda p: tensor(p, f"{UP}.weight", partition=even(0, 51, 3)), "another number of ranks"),
    "partial gradient of a cut tensor": (lambda p: tensor(p, f"{UP}.weight", grad="partial"), "gradient"),
    "a norm cut": (lambda p: tensor(p, NORM, partition=even(0, 72, 2), role="column"), "cannot cut model.norm.weight"),
    "a row bias cut": (lambda p: tensor(p, f"{DOWN}.bias", partition=even(0, 72, 2)), f"bias of {DOWN}"),
    "a column bias whole": (lambda p: tensor(p, f"{UP}.bias", partition=Partition(None, ((), ()))), f"bias of {UP}"),
    "a bias cut otherwise": (lambda p: tensor(p, f"{UP}.bias", partition=even(0, 51, 2, [3, 1])), f"bias of {UP}"),
    "input features twice": (lambda p: tensor(p, f"{DOWN}.weight", partition=Partition(1, (((0, 30),), ((20, 51),)))), "added twice"),
    "rows twice": (lambda p: tensor(p, EMBED, partition=Partition(0, (((0, 60),), ((50, 101),)))), "each held by one rank"),
    "no sum for a biased row": (lambda p: replace(p, regions=tuple(r for r in p.regions if r.module != DOWN)), "has a bias"),
    "region at no module": (region(module="model.nowhere"), "model.nowhere"),
    "unknown op": (region(op="mystery"), "mystery"),
    "unknown place": (region(place="middle"), "middle"),
    "unknown input": (region(place="input", arg="nothing"), "no input of this name"),
    "a region twice": (lambda p: replace(p, regions=(*p.regions, p.regions[0])), "twice"),
    "a linear layer called split": (lambda p: tensor(p, f"{UP}.bias", partition=Partition(None, ((), ())), role="split"), f"bias of {UP}"),
    "groups with a rank missing": (region(ranks=((0,),)), "each rank once"),
    "gather without a cut": (region(op="gather"), "cannot be gathered"),
    "gather out of order": (region(op="gather", partition=Partition(2, (((4, 8),), ((0, 4),)))), "cannot be gathered"),
    "edit of nothing": (lambda p: replace(p, edits=(Edit(ATTENTION, "number", 1, (1, 1), ""),)), "no such integer"),
    "edit of another value": (lambda p: replace(p, edits=(Edit(ATTENTION, "head_dim", 9, (4, 4), ""),)), "not what the plan expects"),
    "edit for other ranks": (lambda p: replace(p, edits=(Edit(ATTENTION, "head_dim", 8, (8,), ""),)), "one value a rank"),
    "heads of no module": (lambda p: replace(p, attention=(replace(p.attention[0], module="a"),)), "names a module"),
    "query head without its KV head": (
        lambda p: replace(p, attention=(replace(p.attention[0], kv=even(0, 3, 2)),)),
        "without its KV head",
    ),
    "a map of other heads": (lambda p: replace(p, attention=(replace(p.attention[0], kv_of=(0, 1)),)), "do not fit"),
}


def _without(plan: Plan, name: str, tied: str) -> dict[str, TensorPlan]:
    kept = {n: t for n, t in plan.tensors.items() if n != name}
    return kept | {tied: replace(plan.tensors[tied], aliases=(name,))}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_changed(what: str) -> None:
    change, message = REFUSED[what]
    config = tiny.config("llama-bias")
    plan = change(hand_plan(config, 2))

    def rank(group: Group) -> None:
        model = empty(config, torch.float32)
        before = {name: p.shape for name, p in model.named_parameters()}
        with pytest.raises(UserError, match=message):
            split(model, plan, group)
        assert before == {name: p.shape for name, p in model.named_parameters()}
        assert not isinstance(getattr(model, "colrow", None), State)

    run_threads(rank, 2)


def test_a_tie_that_the_plan_does_not_know_is_refused() -> None:
    config = tiny.config("llama-tied")
    plan = hand_plan(config, 1)
    entry = plan.tensors[EMBED]
    apart = replace(
        plan,
        tensors=plan.tensors | {EMBED: replace(entry, aliases=()), "lm_head.weight": replace(entry, name="lm_head.weight", aliases=())},
    )
    with pytest.raises(UserError, match="ties"):
        split(empty(config, torch.float32), apart, single())


def test_a_layer_of_another_class_is_refused() -> None:
    """A subclass of nn.Linear (quantized, adapted) may store its weight in another way."""

    class Other(nn.Linear):
        pass

    config = tiny.config("llama")
    model = empty(config, torch.float32)
    model.lm_head.__class__ = Other
    with pytest.raises(UserError, match="of a Other"):
        split(model, hand_plan(config, 1), single())


def test_split_twice_is_refused() -> None:
    model = parallelize(copy.deepcopy(whole(case("llama")).model), hand_plan(tiny.config("llama"), 1), single())
    with pytest.raises(UserError, match="split already"):
        parallelize(model, hand_plan(tiny.config("llama"), 1), single())


def test_a_plan_survives_its_file() -> None:
    at = whole(case("gpt2"))
    plan = Plan.from_json(hand_plan(at.config, 2).to_json())
    assert plan == hand_plan(at.config, 2)
    value, where = worst(at.answers, ask_split(at, plan))
    assert value <= TOLERANCE, where


def test_integers_in_a_config_become_the_modules_own() -> None:
    """An edit of config.x is seen by that module only; the model's config stays whole."""
    at = whole(case("llama"))
    plan = hand_plan(at.config, 2)
    plan = replace(
        plan,
        edits=(Edit(ATTENTION, "config.num_attention_heads", 9, (5, 4), ""), Edit(ATTENTION, "config.num_key_value_heads", 3, (2, 2), "")),
    )

    def task(group: Group, model: Any) -> tuple[int, int, int]:
        first, second = (layer.self_attn.config for layer in model.model.layers)
        return first.num_attention_heads, second.num_attention_heads, model.config.num_attention_heads

    assert ask_split(at, plan, task) == [(5, 9, 9), (4, 9, 9)]


def test_attention_that_cannot_share_heads_is_refused() -> None:
    at = whole(case("gpt2"))
    plan = hand_plan(at.config, 1)
    shared = replace(plan.attention[0], kv=even(0, 3, 1), kv_of=tuple(h // 3 for h in range(9)))
    assert isinstance(shared, Attention)
    with pytest.raises(UserError, match="share a KV head"):
        split(empty(at.config, torch.float32), replace(plan, attention=(shared,)), single())
