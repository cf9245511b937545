"""Axes that only some architectures have: decays of single heads in buffers, experts that add their rows to a sum one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers as tf

from colrow.parallel import conv
from colrow.planning.derive import derive
from colrow.planning.graph import Graph
from colrow.planning.replay import check
from colrow.planning.trace import trace
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from .families import PLAIN, WIDE
from .faults import plant
from .test_families import share


def minimax() -> tf.MiniMaxConfig:
    kinds = {"layer_types": ["linear_attention", "full_attention"], "block_size": 4}
    return tf.MiniMaxConfig(**WIDE, **kinds, num_local_experts=4, num_experts_per_tok=2)


def dbrx() -> tf.DbrxConfig:
    experts: dict[str, Any] = {"ffn_hidden_size": 51, "moe_num_experts": 4, "moe_top_k": 2}
    heads: dict[str, Any] = {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10000.0}
    sizes: dict[str, Any] = {"d_model": 72, "n_heads": 9, "n_layers": 2, "max_seq_len": 64, "vocab_size": 101}
    return tf.DbrxConfig(**sizes, attn_config=heads, ffn_config=experts)


@pytest.mark.parametrize("ranks", [2, 5])
def test_decays_of_heads_in_buffers_are_cut_with_them(ranks: int) -> None:
    """Lightning attention in blocks of 4 tokens, of which a prompt has several; what is made of a buffer is made of its slice."""
    config = minimax()
    plan = derive(config, ranks)
    names = ("query_decay", "key_decay", "diagonal_decay", "slope_rate")
    assert {b.name for b in plan.buffers} == {f"model.layers.0.self_attn.{name}" for name in names}
    assert share(plan) > 0.98
    assert check(config, plan).ok
    assert prove(Small(config, plan, ())).ok


def test_a_buffer_cut_elsewhere_is_seen() -> None:
    config = minimax()
    plan = derive(config, 2)
    for buffer in plan.buffers:
        object.__setattr__(buffer.partition, "pieces", buffer.partition.pieces[::-1])
    with pytest.raises(GateRefused):
        prove(Small(config, plan, ()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_experts_are_added_as_partial_sums(ranks: int) -> None:
    config = dbrx()
    plan = derive(config, ranks)
    assert share(plan) > 0.98
    sums = [r.name for r in plan.regions if r.op == "reduce" and "ffn" in r.name]
    assert sums == [f"transformer.blocks.{i}.ffn.experts.output" for i in range(2)], "one a layer, not one an expert"
    assert check(config, plan).ok
    assert prove(Small(config, plan, ())).ok


def test_a_dropped_sum_of_experts_is_seen() -> None:
    config = dbrx()
    with plant("drop g", "transformer.blocks.1.ffn.experts"), pytest.raises(GateRefused):
        prove(Small(config, derive(config, 2), ()))


def test_nothing_is_sent_of_which_nobody_knows_how_much_it_is() -> None:
    graph = Graph(trace(dbrx()))
    made = [call.outputs["0"] for call in graph.trace.calls if call.module.endswith("ffn.experts.mlp")]
    assert made
    assert not any(graph.leaving[v] or graph.entering[v] for v in made)


def test_a_flag_that_is_never_set_is_not_followed() -> None:
    """one_hot with a class more than there are experts: the loop over those that have tokens ends before it."""
    t = trace(dbrx())
    found = [op.outputs[0] for op in t.ops if op.name == "nonzero" and t.values[op.outputs[0]].shape[1] == 1]
    assert [t.values[v].shape[0] for v in found] == [4, 4]


def test_a_norm_that_runs_twice_has_no_f_of_its_own() -> None:
    """NanoChat norms its embeddings and its last layer with one module: the head's f stands where the norm runs for it alone."""
    config = tf.NanoChatConfig(**WIDE)
    plan = derive(config, 2)
    assert share(plan) > 0.99
    assert not [r for r in plan.regions if r.module == "model.norm"]
    assert check(config, plan).ok
    assert prove(Small(config, plan, ())).ok


@pytest.mark.parametrize("ranks", [2, 8])
def test_layers_with_the_kv_heads_of_earlier_ones(ranks: int) -> None:
    """More ranks than KV heads: the query heads of all layers that share them are dealt out alike."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {**WIDE, "num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2, "sliding_window": 4, "intermediate_size": 51}
    config = tf.Gemma3nTextConfig(
        **sizes, hidden_size_per_layer_input=16, vocab_size_per_layer_input=101, activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0]
    )
    plan = derive(config, ranks)
    assert [plan.tensor(f"model.layers.{i}.mlp.gate_proj.weight").role for i in range(4)] == ["column"] * 4  # the first by its deviation
    assert len(plan.attention) == 4
    assert len({heads.query for heads in plan.attention}) == 1
    assert prove(Small(config, plan, ())).ok


def recurrent_gemma() -> tf.RecurrentGemmaConfig:
    sizes: dict[str, Any] = {**WIDE, "hidden_size": 72, "lru_width": 72, "num_hidden_layers": 3, "attention_window_size": 4}
    return tf.RecurrentGemmaConfig(**sizes)


@pytest.mark.parametrize("ranks", [2, 8])
def test_depthwise_convolutions_and_states_that_modules_keep(ranks: int) -> None:
    """Recurrent blocks: cut by the heads of their gates; the state of a step is made in the block's code, by an int of its own."""
    config = recurrent_gemma()
    plan = derive(config, ranks)
    assert share(plan) > 0.98
    assert plan.tensor("model.layers.0.temporal_block.conv_1d.weight").partition.dim == 0
    assert any(edit.attribute == "lru_width" for edit in plan.edits)
    assert prove(Small(config, plan, ())).ok


def test_depthwise_convolutions_over_heads_in_two_dims() -> None:
    sizes = {k: v for k, v in PLAIN.items() if k != "num_key_value_heads"}
    config = tf.NystromformerConfig(**sizes, segment_means_seq_len=13, num_landmarks=13)
    plan = derive(config, 3)
    assert plan.tensor("nystromformer.encoder.layer.0.attention.self.conv.weight").partition.dim == 0
    assert check(config, plan).ok
    assert prove(Small(config, plan, ())).ok


def test_channels_of_a_convolution_that_are_another_ranks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recurrent_gemma()
    monkeypatch.setattr(conv, "make_local", lambda layer: None)
    with pytest.raises(GateRefused):
        prove(Small(config, derive(config, 2), ()))


def longcat() -> tf.LongcatFlashConfig:
    """6 experts and 3 that hand on what they get; 2 of the 9 for each token."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {"n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 2, "expert_ffn_hidden_size": 21, "ffn_hidden_size": 51}
    sizes: dict[str, Any] = {**PLAIN, "num_attention_heads": 9, "head_dim": 8, "num_layers": 1, **latent, **experts}
    sizes.pop("num_hidden_layers")
    sizes.pop("intermediate_size")
    return tf.LongcatFlashConfig(**sizes, routed_scaling_factor=2.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_experts_hand_on_counts_once_among_partial_sums(ranks: int) -> None:
    config = longcat()
    plan = derive(config, ranks)
    assert [plan.tensor(f"model.layers.0.mlp.experts.{name}").role for name in ("gate_up_proj", "down_proj")] == ["column", "row"]
    (alone,) = (r for r in plan.regions if r.op == "once")
    assert (alone.module, alone.place) == ("model.layers.0.mlp.experts.identity_expert", "input")
    assert [r.name for r in plan.regions if r.op in ("reduce", "hold") and ".mlp." in r.name] == ["model.layers.0.mlp.output"]
    assert prove(Small(config, plan, ())).of("decoding")
    assert prove(Small(config, plan, ()), "again").ok


def test_what_is_handed_on_by_every_rank_is_seen() -> None:
    config = longcat()
    plan = derive(config, 2)
    wrong = replace(plan, regions=tuple(r for r in plan.regions if r.op != "once"))
    with pytest.raises(GateRefused):
        prove(Small(config, wrong, ()))
