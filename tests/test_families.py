"""Every family through the real path: a derived plan, the applier with ranks as threads, compared with the whole model in float64.

`prove` asks both for logits, cached decoding, loss, every gradient, an SGD and an AdamW step; compares the bits of what several ranks hold;
and counts every collective against the plan's prediction.
"""

from __future__ import annotations

from math import prod

import pytest
from transformers import PreTrainedConfig

from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.proof.compare import Comparison
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from .families import FAMILIES
from .faults import plant

COVERED = 0.97  # share of the parameter elements that are cut
LESS = {"bert": 0.84, "opt": 0.89}
"""Positions (and token types, and the dense layer of BERT's head between two norms) stay whole: much in so narrow a model."""


def config(family: str) -> PreTrainedConfig:
    return FAMILIES[family]()


def share(plan: Plan) -> float:
    counts = [(prod(t.shape), not t.partition.is_whole) for t in plan.tensors.values()]
    return sum(n for n, cut in counts if cut) / sum(n for n, _ in counts)


def proven(family: str, ranks: int) -> Comparison:
    cfg = config(family)
    return prove(Small(cfg, derive(cfg, ranks), ()))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_whole_model(family: str, ranks: int) -> None:
    cfg = config(family)
    plan = derive(cfg, ranks)
    assert share(plan) >= LESS.get(family, COVERED)
    assert plan.attention, "the attention is whole"
    assert prove(Small(cfg, plan, ())).ok


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "glm"])
def test_more_ranks_than_heads_or_kv_heads(family: str) -> None:
    assert proven(family, 8).ok


def test_norms_of_each_head_get_the_sum_of_all_heads() -> None:
    """O-31: the weight of Qwen3's q_norm serves all heads, each rank sees its own."""
    plan = derive(config("qwen3"), 2)
    assert {plan.tensor(f"model.layers.0.self_attn.{n}_norm.weight").grad for n in "qk"} == {"partial"}


@pytest.mark.parametrize(
    ("family", "fault", "at"),
    [
        ("gemma2", "drop g", "model.embed_tokens"),
        ("gemma3", "drop f", "model.layers.1.pre_feedforward_layernorm"),
        ("gpt-neox", "bias on every rank", ""),
        ("gpt-neox", "drop f", "gpt_neox.layers.0.input_layernorm"),
        ("qwen3", "rotated head map", ""),
        ("bert", "drop g", "bert.encoder.layer.1.attention.output.dense"),
        ("phi3", "drop the sum of copied heads", ""),
    ],
)
def test_a_planted_fault_is_seen(family: str, fault: str, at: str) -> None:
    with plant(fault, at), pytest.raises(GateRefused, match="looks like a bug"):
        proven(family, 4 if "heads" in fault else 2)


def test_an_f_on_two_modules_inputs_is_one_all_reduce() -> None:
    """GPT-NeoX: both norms of a parallel block read the same tensor; f stands at both inputs and sums once."""
    plan = derive(config("gpt-neox"), 2)
    inputs = [r for r in plan.regions if r.op == "copy" and r.place == "input"]
    assert [r.shares for r in inputs[:2]] == ["", inputs[0].name]


def test_a_models_own_embedding_keeps_what_it_does() -> None:
    """Gemma multiplies what it looks up, OPT shifts the position ids: both leave the lookup to nn.Embedding."""
    plan = derive(config("gemma3"), 2)
    assert plan.tensor("model.embed_tokens.weight").role == "vocab"
