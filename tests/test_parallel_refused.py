"""Plans and models that cannot be carried out are refused, in words, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import empty, parallelize, split
from colrow.parallel.state import State
from colrow.partition import Partition, even
from colrow.planning.plan import Attention, Edit, Plan, Region, TensorPlan

from . import tiny
from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask_split, case, whole, worst


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
