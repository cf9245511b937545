"""Mixture of experts and latent attention through the real path: a derived plan, the applier with ranks as threads, compared with the whole
model in float64. `prove` compares logits, cached decoding, loss, every gradient, an SGD and an AdamW step, and counts every collective."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedConfig

from colrow.checkpoint.model_dir import find
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import experts
from colrow.parallel.build import empty, parallelize
from colrow.parallel.collect import whole_gradients
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.replay import check
from colrow.planning.trace import trace
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small
from colrow.proof.verify import verify

from . import tiny
from .faults import plant

TOKENS: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 27, "num_hidden_layers": 2, "max_position_embeddings": 64, **TOKENS}
HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}

GROUPED: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LATENT: dict[str, Any] = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
}

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
    "gpt-oss": lambda: tf.GptOssConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "phimoe": lambda: tf.PhimoeConfig(**{**SIZES, **GROUPED}, num_local_experts=4),
    "granitemoe": lambda: tf.GraniteMoeConfig(**{**SIZES, **GROUPED}, num_local_experts=4, num_experts_per_tok=2),
    "llama4": lambda: tf.Llama4TextConfig(
        **SIZES, **HEADS, intermediate_size_mlp=29, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=16
    ),
    "glm4-moe": lambda: tf.Glm4MoeConfig(
        **SIZES,
        **HEADS,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "deepseek-v2": lambda: tf.DeepseekV2Config(**SIZES, **LATENT, topk_method="greedy", first_k_dense_replace=1),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**SIZES, **LATENT, n_group=2, topk_group=1, first_k_dense_replace=1),
    "deepseek-v3-plain-queries": lambda: tf.DeepseekV3Config(**SIZES, **{**LATENT, "q_lora_rank": None}, n_group=2, topk_group=1),
}


LESS = {"deepseek-v2": 0.92, "deepseek-v3": 0.92, "deepseek-v3-plain-queries": 0.95}
"""The latents of MLA stay whole: much in so narrow a model."""


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
    assert share(plan) >= LESS.get(family, 0.97)
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
        ("gpt-oss", "drop g", "model.layers.1.mlp.experts"),
        ("deepseek-v3", "drop g", "model.layers.1.mlp"),
        ("deepseek-v2", "drop f", "model.layers.0.input_layernorm"),
    ],
)
def test_a_planted_fault_is_seen(family: str, fault: str, at: str) -> None:
    cfg = config(family)
    with plant(fault, at), pytest.raises(GateRefused, match="looks like a bug"):
        prove(Small(cfg, derive(cfg, 2), ()))


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("mixtral", "model.layers.1.mlp.gate.weight", {"grad": "whole"}),
        ("gpt-oss", "model.layers.1.mlp.experts.down_proj_bias", {"once": False}),
        ("deepseek-v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", {"grad": "whole"}),
    ],
)
def test_a_parameter_in_a_wrong_state_is_seen(family: str, name: str, changes: dict[str, Any]) -> None:
    """A router whose gradient is not summed, an expert's bias that each rank adds, a latent's gradient that is not summed."""
    cfg = config(family)
    plan = derive(cfg, 2)
    broken = replace(plan, tensors=plan.tensors | {name: replace(plan.tensor(name), **changes)})
    with pytest.raises(GateRefused):
        prove(Small(cfg, broken, ()))


def test_a_bias_of_experts_counts_on_one_rank() -> None:
    """O-16: it is added to partial sums, and weighted by the router."""
    entry = derive(config("gpt-oss"), 3).tensor("model.layers.0.mlp.experts.down_proj_bias")
    assert (entry.partition.is_whole, entry.once, entry.grad) == (True, True, "partial")


def test_a_plan_with_such_a_bias_is_the_same_from_json() -> None:
    plan = derive(config("gpt-oss"), 2)
    assert Plan.from_json(plan.to_json()) == plan


def test_latents_are_whole_and_heads_are_cut() -> None:
    """O-18: q_b, kv_b and o by heads; the latents, which all heads share, by nothing."""
    plan = derive(config("deepseek-v3"), 2)
    at = "model.layers.0.self_attn."
    assert [plan.tensor(f"{at}{n}.weight").role for n in ("q_b_proj", "kv_b_proj", "o_proj")] == ["column", "column", "row"]
    assert all(plan.tensor(f"{at}{n}.weight").role == "whole" for n in ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"))
    assert [plan.attention[0].query.local_size(r) for r in range(2)] == [3, 2]


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_the_implementation_that_transformers_takes_by_itself(family: str) -> None:
    """Grouped products, in float32; the comparisons above run the experts one after the other, as there are no grouped ones in float64."""
    cfg = config(family)
    cfg.update({k: 32 for k in ("intermediate_size", "moe_intermediate_size") if hasattr(cfg, k)})
    plan = derive(cfg, 3)
    cut = plan.tensor("model.layers.1.mlp.experts.down_proj").partition
    assert [cut.local_size(r) for r in range(3)] == [16, 8, 8]  # multiples of 8: the grouped products of torch ask for it
    model, ids = tiny.whole(cfg, torch.float32), tiny.ids(cfg)
    assert model.config._experts_implementation == "grouped_mm"
    copies = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def answers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        out = model(ids, labels=ids)
        out.loss.backward()
        return {"logits": out.logits.detach(), "loss": out.loss.detach()}

    def rank(group: Group) -> dict[str, torch.Tensor]:
        split = parallelize(copies[group.rank], plan, group)
        return answers(split) | whole_gradients(split)

    expected = answers(model) | {n: p.grad for n, p in model.named_parameters()}
    for found in run_threads(rank, plan.ranks):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-5 * value.abs().max().item()), name


def test_experts_kept_one_by_one_in_files_are_read_by_slices(tmp_path: Path) -> None:
    """Mixtral's files hold a tensor for each expert and each of its matrices; the model one for all, gate and up beside each other."""
    model = tiny.whole(config("mixtral"), torch.float32)
    model.save_pretrained(tmp_path)
    report = verify(find(str(tmp_path)), 3, backend="threads", train=False)
    assert report.equal


@pytest.mark.parametrize(("width", "chosen"), [(32, "grouped_mm"), (27, "eager")])
def test_rows_too_odd_for_grouped_products_run_one_expert_after_the_other(width: int, chosen: str) -> None:
    cfg = config("mixtral")
    cfg.intermediate_size = width
    model = empty(cfg, torch.float32)
    assert model.config._experts_implementation == "grouped_mm"
    experts.choose(model, derive(cfg, 2))
    assert model.config._experts_implementation == chosen


def test_deepseek_v3_at_its_real_size() -> None:
    """671 billion parameters, planned without one of them: two all-reduces a layer and one for the embedding."""
    plan = derive(tf.DeepseekV3Config(), 8)
    assert sum(prod(t.shape) for t in plan.tensors.values()) > 670e9
    assert share(plan) > 0.998
    assert sum(r.op == "reduce" for r in plan.regions) == 1 + 2 * 61


def test_a_balance_loss_in_the_config_is_planned_for() -> None:
    """The router's output then has whole uses too: f stands behind it, and its gradient is whole."""
    found, expected = with_balance(asked=None, planned=True)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6 * value.abs().max().item()), name


def test_a_balance_loss_that_was_not_planned_for_is_refused() -> None:
    with pytest.raises(UserError, match="balance loss"):
        with_balance(asked=True, planned=False)


def with_balance(asked: bool | None, planned: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of rank 0 and of the whole model, with the balance loss asked for at the call or in the config."""
    cfg = config("mixtral")
    cfg.output_router_logits, cfg.router_aux_loss_coef = planned, 0.5
    plan = derive(cfg, 2)
    model, ids = tiny.whole(cfg), tiny.ids(cfg)
    model.set_experts_implementation("eager")
    copies = [copy.deepcopy(model) for _ in range(2)]

    def train(model: torch.nn.Module) -> None:
        model(ids, labels=ids, **({} if asked is None else {"output_router_logits": asked})).loss.backward()

    def rank(group: Group) -> dict[str, torch.Tensor]:
        split = parallelize(copies[group.rank], plan, group)
        train(split)
        return whole_gradients(split)

    train(model)
    return run_threads(rank, 2)[0], {n: p.grad for n, p in model.named_parameters()}
