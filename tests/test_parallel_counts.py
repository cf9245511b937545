"""Collectives are counted, and there are exactly as many as Megatron's scheme needs: none is spent on what could have been shared."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from colrow.comm.group import Group
from colrow.parallel.collect import whole_gradients
from colrow.parallel.head import sharded_logits
from colrow.planning.plan import Plan, Region

from .hand_plans import hand_plan
from .splitting import TOLERANCE, Whole, ask_split, case, next_token_loss, whole, worst

BLOCKS = {"llama": "model.layers.{}.", "qwen2": "model.layers.{}.", "gpt2": "transformer.h.{}."}


def counted(at: Whole, plan: Plan, sharded: bool = False) -> Counter[tuple[str, str, str]]:
    """Calls of (phase, op, name) of a training step: forward with labels, then backward. The same on every rank, or it fails."""

    def task(group: Group, model: Any) -> Counter[tuple[str, str, str]]:
        group.counters.reset()
        group.counters.phase = "forward"
        with sharded_logits(model) if sharded else contextlib.nullcontext():
            loss = model(at.ids, labels=at.ids).loss
        group.counters.phase = "backward"
        loss.backward()
        return Counter({site: tally.calls for site, tally in group.counters.sites.items()})

    first, *others = ask_split(at, plan, task)
    for other in others:  # sums over sub-groups concern their members only
        assert {s: n for s, n in other.items() if ".copies." not in s[2]} == {s: n for s, n in first.items() if ".copies." not in s[2]}
    return first


def calls(found: Counter[tuple[str, str, str]], phase: str, prefix: str, op: str = "all_reduce") -> int:
    return sum(n for (p, o, name), n in found.items() if (p, o) == (phase, op) and name.startswith(prefix))


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_has_two_all_reduces_each_way(family: str) -> None:
    at = whole(case(family))
    found = counted(at, hand_plan(at.config, 3))  # 9 and 3 heads on 3 ranks: no KV head is copied
    for layer in range(2):
        assert calls(found, "forward", BLOCKS[family].format(layer)) == 2
        assert calls(found, "backward", BLOCKS[family].format(layer)) == 2
    assert calls(found, "forward", "loss") <= 3
    assert calls(found, "backward", "loss") == 0
    embedding = "transformer.drop" if family == "gpt2" else "model.embed_tokens"
    norm = "transformer.ln_f" if family == "gpt2" else "model.norm"
    assert (calls(found, "forward", embedding), calls(found, "backward", embedding)) == (1, 0)
    assert (calls(found, "forward", norm), calls(found, "backward", norm)) == (0, 1)
    blocks, loss = 2 * 2, calls(found, "forward", "loss")
    assert calls(found, "forward", "") == blocks + 1 + loss, "nothing else is reduced"
    assert calls(found, "backward", "") == blocks + 1, "nothing else is reduced"


def test_logits_are_gathered_once_and_only_where_they_are_wanted() -> None:
    at = whole(case("llama"))
    plan = hand_plan(at.config, 2)
    assert calls(counted(at, plan), "forward", "model.output.logits", "all_gather") == 1
    assert calls(counted(at, plan, sharded=True), "forward", "", "all_gather") == 0


def test_copied_heads_cost_one_sum_a_parameter_and_set_of_holders() -> None:
    at = whole(case("qwen2"))
    found = counted(at, hand_plan(at.config, 2))
    copies = {name: n for (_, _, name), n in found.items() if ".copies." in name}
    parameters = [f"model.layers.{i}.self_attn.{p}_proj.{k}" for i in range(2) for p in "kv" for k in ("weight", "bias")]
    assert copies == {f"{name}.copies.grad": 1 for name in parameters}


def test_token_and_position_embeddings_are_reduced_once() -> None:
    """Both tables cut along their rows, their partial sums added first: one all-reduce where two tables would pay two."""
    at = whole(case("gpt2"))
    plan = hand_plan(at.config, 3)
    found = counted(at, plan)
    assert calls(found, "forward", "transformer.drop") == 1
    assert calls(found, "forward", "transformer.w") == 0
    value, where = worst(at.answers, ask_split(at, plan))
    assert value <= TOLERANCE, where


def test_f_at_the_inputs_of_its_consumers_is_still_one() -> None:
    """The same plan with f written at q, k, v and at gate and up: they are given the same tensor, so they share one all-reduce."""
    at = whole(case("llama"))
    plan = hand_plan(at.config, 3)

    def moved(region: Region) -> list[Region]:
        for norm, consumers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            if region.op == "copy" and region.module.endswith(norm):
                block = region.module.removesuffix(norm)
                return [replace(region, module=block + c, place="input", arg="input") for c in consumers]
        return [region]

    moved_plan = replace(plan, regions=tuple(r for region in plan.regions for r in moved(region)))
    found = counted(at, moved_plan)
    assert calls(found, "backward", "model.layers.") == 4
    gradients = ask_split(at, moved_plan, lambda group, model: _gradients(model, at.ids))
    for name, grad in gradients[0].items():
        assert (grad - at.answers.tensors[f"gradient of {name}"]).abs().max() <= TOLERANCE, name


def _gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    next_token_loss(model(ids).logits, ids).backward()
    return whole_gradients(model)
