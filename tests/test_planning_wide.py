"""The deriver on models it was not written for: a plan for each, nothing refused by the applier's check, and what they share holds."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.replay import check

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Field names that most configs know; each of the others gets its own below."""

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen3": {},
    "gemma2": {},
    "olmo2": {},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "cohere": {},
    "stablelm": {},
    "starcoder2": {},
    "persimmon": {},
    "granitemoe": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 48},
    "bloom": {"n_head": 6, "n_layer": 2},
    "falcon": {"multi_query": True, "num_key_value_heads": None, "head_dim": None},
    "gptj": {"n_embd": 48, "n_head": 6, "n_layer": 2, "rotary_dim": 4},
    "bert": {},
    "albert": {"embedding_size": 24},
    "t5": {"d_model": 48, "d_kv": 8, "num_heads": 6, "d_ff": 40, "num_layers": 2},
    "mamba2": {"num_heads": 12, "state_size": 16, "n_groups": 1, "chunk_size": 4},
}


def config(name: str) -> PreTrainedConfig:
    fields = COMMON | MODELS[name]
    return CONFIG_MAPPING[name](**{k: v for k, v in fields.items() if v is not None})


def share(plan: Plan) -> float:
    """Share of the parameter elements that are cut."""
    counts = [(prod(t.shape), not t.partition.is_whole) for t in plan.tensors.values()]
    return sum(n for n, cut in counts if cut) / sum(n for n, _ in counts)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gets_a_plan_that_replays(name: str) -> None:
    cfg = config(name)
    plan = derive(cfg, 3)
    assert share(plan) > 0.08
    assert not [t.reason for t in plan.tensors.values() if "rule does not fit" in t.reason]
    report = check(cfg, plan)
    zero = ("k_proj.bias", "key.bias")  # the gradient of a key's bias is 0: softmax does not feel what is added to all scores
    wrong = {n: x for n, x in {**report.outputs, **report.gradients}.items() if x > 1e-9 and not n.endswith(zero)}
    assert not wrong


def test_ints_of_a_modules_config_become_edits() -> None:
    """Phi-3 cuts q, k and v apart at self.config.num_attention_heads * head_dim, and goes on from there."""
    plan = derive(config("phi3"), 4)
    edits = {e.attribute: e.values for e in plan.edits if e.module == "model.layers.0.self_attn"}
    assert edits == {"config.num_attention_heads": (2, 2, 1, 1), "num_key_value_heads": (1, 2, 1, 1)}
    assert plan.tensor("model.layers.0.self_attn.qkv_proj.weight").partition.pieces[1] == ((16, 32), (48, 80))


def test_a_module_that_runs_twice_has_each_region_once() -> None:
    plan = derive(config("albert"), 2)
    names = [(r.name, r.op) for r in plan.regions]
    assert len(names) == len(set(names))
    assert sum(op == "reduce" for _, op in names) == 3
