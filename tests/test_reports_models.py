"""Field bug reports about single architectures, each run from files to tokens as its reporter would have (`replay_report`).

Fused layouts that a flat cut scrambles without a word, norms and gates of heads, windows, and layers that a plan forgot.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from colrow.planning.derive import derive
from colrow.planning.plan import Plan

from .test_reports import replay_report
from .tiny import TOKENS

SIZES: dict[str, Any] = {**TOKENS, "num_hidden_layers": 2, "max_position_embeddings": 64}
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


def rows_of(plan: Plan, name: str, rank: int) -> set[int]:
    """Indices along the cut dim that a rank holds."""
    return {i for a, b in plan.tensor(name).partition.pieces[rank] for i in range(a, b)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_o06_phi_is_as_right_as_llama(ranks: int, tmp_path: Path) -> None:
    """Biased layers beside each other: the row bias once, partial rotary, no flat cut of anything."""
    cfg = tf.PhiConfig(**SIZES, hidden_size=48, num_attention_heads=6, intermediate_size=96, partial_rotary_factor=0.5)
    plan = replay_report(cfg, ranks, tmp_path)
    assert plan.tensor("model.layers.0.mlp.fc2.bias").role == "whole"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("parallel", [True, False])
def test_o07_neox_interleaves_its_heads(parallel: bool, ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 96}
    cfg = tf.GPTNeoXConfig(**SIZES, **sizes, rotary_pct=0.25, use_parallel_residual=parallel)
    plan = replay_report(cfg, ranks, tmp_path)
    name = "gpt_neox.layers.0.attention.query_key_value"
    for rank in range(ranks):
        rows = rows_of(plan, f"{name}.weight", rank)
        assert rows == {24 * (row // 24) + i for row in rows for i in range(24)}, "whole heads of 3 x head_dim rows"
        assert rows == rows_of(plan, f"{name}.bias", rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_o07_bloom_interleaves_its_heads(ranks: int, tmp_path: Path) -> None:
    plan = replay_report(tf.BloomConfig(**TOKENS, hidden_size=48, n_head=6, n_layer=2), ranks, tmp_path)
    rows = rows_of(plan, "transformer.h.1.self_attention.query_key_value.weight", 1)
    assert rows == {24 * (row // 24) + i for row in rows for i in range(24)}


FALCONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "groups": ({"new_decoder_architecture": True, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2}, (2,)),
    "one KV head": (
        {"multi_query": True, "new_decoder_architecture": False, "hidden_size": 56, "num_attention_heads": 7},
        (2, 3),
    ),
    "alibi": (
        {
            "alibi": True,
            "multi_query": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "bias": True,
            "hidden_size": 48,
            "num_attention_heads": 6,
        },
        (2, 3),
    ),
}


@pytest.mark.parametrize(("layout", "ranks"), [(layout, n) for layout, (_, degrees) in FALCONS.items() for n in degrees])
def test_o08_falcons_three_layouts(layout: str, ranks: int, tmp_path: Path) -> None:
    plan = replay_report(tf.FalconConfig(**TOKENS, num_hidden_layers=2, **FALCONS[layout][0]), ranks, tmp_path)
    fused = plan.tensor("transformer.h.0.self_attention.query_key_value.weight").partition
    assert fused.dim == 0
    if layout == "one KV head":
        assert all(
            set(range(7 * 8, 9 * 8)) <= rows_of(plan, "transformer.h.0.self_attention.query_key_value.weight", r) for r in range(ranks)
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_o09_gate_and_up_are_cut_each(ranks: int, tmp_path: Path) -> None:
    cfg = tf.Phi3Config(**{**WIDE, "intermediate_size": 88})
    plan = replay_report(cfg, ranks, tmp_path)
    for rank in range(ranks):
        rows = rows_of(plan, "model.layers.0.mlp.gate_up_proj.weight", rank)
        gate = {row for row in rows if row < 88}
        assert rows == gate | {row + 88 for row in gate}, "the rank's up rows are those of its gate rows"


@pytest.mark.parametrize("ranks", [2, 4])
def test_o12_glm_with_two_groups_and_half_rotary(ranks: int, tmp_path: Path) -> None:
    cfg = tf.GlmConfig(**WIDE, head_dim=8, partial_rotary_factor=0.5, attention_bias=True)
    replay_report(cfg, ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_o14_norms_of_single_heads_are_cut_with_them(ranks: int, tmp_path: Path) -> None:
    """Cohere has weights [heads, head_dim]: a rank's own heads. Qwen3 has one weight for all heads: whole."""
    cfg = tf.CohereConfig(**WIDE, use_qk_norm=True, logit_scale=0.25)
    plan = replay_report(cfg, ranks, tmp_path / "cohere")
    norm = plan.tensor("model.layers.0.self_attn.q_norm.weight")
    assert norm.shape == (8, 8)
    assert norm.partition.dim == 0
    assert norm.partition.pieces == plan.attention[0].query.pieces
    plan = replay_report(tf.Qwen3Config(**WIDE, head_dim=8), ranks, tmp_path / "qwen3")
    assert plan.tensor("model.layers.0.self_attn.q_norm.weight").partition.is_whole


def test_o14_stablelms_norm_modules_of_each_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    cfg = tf.StableLmConfig(**SIZES, **sizes, qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.25)
    replay_report(cfg, 2, tmp_path)


@pytest.mark.parametrize("family", [tf.Gemma2Config, tf.Gemma3TextConfig])
def test_o19_windows_caps_and_scales(family: type[tf.PreTrainedConfig], tmp_path: Path) -> None:
    """A prompt of 12 and 8 tokens past a window of 4; scores and logits capped; layers of both kinds."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0} if family is tf.Gemma2Config else {}
    sizes = {**WIDE, "num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
    cfg = family(**sizes, **caps, layer_types=["sliding_attention", "full_attention"])
    replay_report(cfg, 2, tmp_path)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_o20_state_space_layers(groups: int, tmp_path: Path) -> None:
    """The gated norm is over all of d_inner, whatever the number of groups. What is not cut says why."""
    sizes = {"hidden_size": 32, "expand": 2, "head_dim": 8, "num_heads": 8, "state_size": 8, "num_hidden_layers": 2}
    cfg = tf.Mamba2Config(**TOKENS, **sizes, n_groups=groups)
    plan = replay_report(cfg, 2, tmp_path)
    whole = [t for t in plan.tensors.values() if t.partition.is_whole and prod(t.shape) > 64]
    assert all(any(t.name.split(".")[-2] in note.subject for note in plan.notes) for t in whole), "whole without a note"


def test_o20_layers_that_a_plan_forgot(tmp_path: Path) -> None:
    """Qwen3-Next's linear attention is cut by its heads like the other."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    cfg = tf.Qwen3NextConfig(**WIDE, head_dim=16, **linear, **experts, layer_types=["linear_attention", "full_attention"])
    plan = derive(cfg, 2)
    assert not plan.tensor("model.layers.0.linear_attn.in_proj_qkvz.weight").partition.is_whole
    assert plan.tensor("model.layers.0.linear_attn.out_proj.weight").role == "row"
    replay_report(cfg, 2, tmp_path)
