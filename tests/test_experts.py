"""Mixture of experts and latent attention through the real path: a derived plan, the applier with ranks as threads, compared with the whole
model in float64. `prove` compares logits, cached decoding, loss, every gradient, an SGD and an AdamW step, and counts every collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import transformers as tf
from transformers import PreTrainedConfig

from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.replay import check
from colrow.planning.trace import trace
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from .faults import plant

TOKENS: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 27, "num_hidden_layers": 2, "max_position_embeddings": 64, **TOKENS}
HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: tf.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=21),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **SIZES,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=25,
    ),
}


def config(family: str) -> PreTrainedConfig:
    return FAMILIES[family]()


def share(plan: Plan) -> float:
    counts = [(prod(t.shape), not t.partition.is_whole) for t in plan.tensors.values()]
    return sum(n for n, cut in counts if cut) / sum(n for n, _ in counts)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_whole_model(family: str, ranks: int) -> None:
    cfg = config(family)
    plan = derive(cfg, ranks)
    assert share(plan) >= 0.97
    assert plan.attention, "the attention is whole"
    assert prove(Small(cfg, plan, ())).ok


@pytest.mark.parametrize("family", FAMILIES)
def test_the_derivation_replayed(family: str) -> None:
    cfg = config(family)
    assert check(trace(cfg), derive(cfg, 3)).worst < 1e-10


def test_routed_and_shared_experts_are_reduced_once() -> None:
    plan = derive(config("qwen2-moe"), 2)
    sums = [r.module for r in plan.regions if r.op == "reduce" and r.module.startswith("model.layers.0.")]
    assert sums == ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp"]


def test_the_router_is_whole_and_its_gradient_is_summed() -> None:
    """O-31: each rank sees its own slices of the experts only."""
    entry = derive(config("mixtral"), 2).tensor("model.layers.0.mlp.gate.weight")
    assert entry.partition.is_whole
    assert entry.grad == "partial"


def test_the_gate_and_up_halves_of_an_expert_are_cut_alike() -> None:
    plan = derive(config("mixtral"), 2)
    fused, down = (plan.tensor(f"model.layers.0.mlp.experts.{n}") for n in ("gate_up_proj", "down_proj"))
    assert (fused.role, down.role) == ("column", "row")
    assert (fused.partition.dim, fused.partition.pieces[1]) == (1, ((14, 27), (41, 54)))
    assert (down.partition.dim, down.partition.pieces[1]) == (2, ((14, 27),))


@pytest.mark.parametrize(
    ("family", "fault", "at"),
    [
        ("mixtral", "drop g", "model.layers.0.mlp.experts"),
        ("qwen2-moe", "drop g", "model.layers.1.mlp"),
        ("qwen3-moe", "drop f", "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_planted_fault_is_seen(family: str, fault: str, at: str) -> None:
    cfg = config(family)
    with plant(fault, at), pytest.raises(GateRefused, match="looks like a bug"):
        prove(Small(cfg, derive(cfg, 2), ()))


def test_a_routers_gradient_that_is_not_summed_is_seen() -> None:
    cfg = config("mixtral")
    plan = derive(cfg, 2)
    name = "model.layers.1.mlp.gate.weight"
    broken = replace(plan, tensors=plan.tensors | {name: replace(plan.tensor(name), grad="whole")})
    with pytest.raises(GateRefused):
        prove(Small(cfg, broken, ()))
