"""Every family through the real path: a derived plan, the applier with ranks as threads, compared with the whole model in float64.

`prove` asks both for logits, cached decoding, loss, every gradient, an SGD and an AdamW step; compares the bits of what several ranks hold;
and counts every collective against the plan's prediction.
"""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
from transformers import PreTrainedConfig

from colrow.comm.local import run_threads
from colrow.parallel.borders import own_part
from colrow.parallel.build import parallelize
from colrow.partition import Partition
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.proof.compare import Comparison
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from . import tiny
from .families import FAMILIES
from .faults import plant

COVERED = 0.97  # share of the parameter elements that are cut
LESS = {"bert": 0.91, "deepseek-v2": 0.96, "deepseek-v3": 0.92}
"""Token types, and the dense layer of BERT's head between two norms, stay whole: much in so narrow a model.
DeepSeek: the latent projections, of which all heads use all."""

BYPASS = ("mamba2", "mamba2-one-group", "mamba2-four-groups", "bloom", "mpt", "falcon-7b", "falcon-rw", "falcon-40b")
"""Their attention does not go through transformers' AttentionInterface, so the plan has no entry for it: an equal cut of its heads."""


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
    assert plan.attention or family in BYPASS, "the attention is whole"
    assert prove(Small(cfg, plan, ())).ok


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "glm", "mixtral"])
def test_more_ranks_than_heads_or_kv_heads(family: str) -> None:
    assert proven(family, 8).ok


def test_routers_get_the_sum_of_all_slices_of_the_experts() -> None:
    """O-31: a router is whole, but the gradient that comes back to it through the experts is a part."""
    assert derive(config("mixtral"), 2).tensor("model.layers.0.mlp.gate.weight").grad == "partial"


def test_grouped_products_run_on_slices() -> None:
    """float32 and transformers' own implementation of experts: grouped products, which want slices of whole 16 bytes."""
    cfg = config("mixtral")
    cfg.intermediate_size = 112
    plan = derive(cfg, 3)
    cut = plan.tensor("model.layers.0.mlp.experts.down_proj").partition
    assert all(cut.local_size(rank) % 8 == 0 for rank in range(3))
    whole = tiny.whole(cfg, torch.float32)
    ids = tiny.ids(cfg)
    assert whole.config._experts_implementation == "grouped_mm"
    copies = [copy.deepcopy(whole) for _ in range(3)]
    found = run_threads(lambda group: parallelize(copies[group.rank], plan, group)(ids).logits.detach(), 3)
    torch.testing.assert_close(found[2], whole(ids).logits.detach(), rtol=1e-4, atol=1e-5)


def test_norms_of_each_head_get_the_sum_of_all_heads() -> None:
    """O-31: the weight of Qwen3's q_norm serves all heads, each rank sees its own."""
    plan = derive(config("qwen3"), 2)
    assert {plan.tensor(f"model.layers.0.self_attn.{n}_norm.weight").grad for n in "qk"} == {"partial"}


@pytest.mark.parametrize(
    ("family", "fault", "at"),
    [
        ("gemma2", "drop g", "model.embed_tokens"),
        ("gemma3", "drop f", "model.layers.1.pre_feedforward_layernorm"),
        ("gpt-neox-sequential", "bias on every rank", ""),
        ("gpt-neox", "residual on every rank", ""),
        ("cohere", "drop g", "model.layers.1.output"),
        ("olmo2", "mean over the slice", ""),
        ("olmo2", "drop f", "model.layers.1.self_attn.q_norm.mean"),
        ("mamba2-one-group", "mean over the slice", ""),
        ("gpt-neox", "drop f", "gpt_neox.layers.0.input_layernorm"),
        ("qwen3", "rotated head map", ""),
        ("bert", "drop g", "bert.encoder.layer.1.attention.output.dense"),
        ("mixtral", "drop g", "model.layers.1.mlp.experts"),
        ("deepseek-v3", "drop f", "model.layers.1.post_attention_layernorm"),
        ("deepseek-v2", "drop f", "model.layers.1.post_attention_layernorm"),
        ("bloom", "rotated slices", ""),
        ("falcon-rw", "rotated slices", ""),
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


def test_buffers_made_by_the_code_are_cut_like_parameters() -> None:
    """Falcon-H1's multipliers of the mixer's features: written by the initializer of the model around the mixers, in no file."""
    buffers = derive(config("falcon-h1"), 3).buffers
    assert [b.name for b in buffers] == [f"model.layers.{i}.mamba.mup_vector" for i in range(2)]
    assert all(b.partition.local_size(rank) < b.shape[2] for b in buffers for rank in range(3))


def test_a_models_own_embedding_keeps_what_it_does() -> None:
    """Gemma multiplies what it looks up, OPT shifts the position ids: both leave the lookup to nn.Embedding."""
    plan = derive(config("gemma3"), 2)
    assert plan.tensor("model.embed_tokens.weight").role == "vocab"


def test_slopes_are_those_of_all_heads() -> None:
    """O-15: ALiBi is made for all heads and sliced where it enters an attention; batch and heads share a dim in Bloom."""
    region = next(r for r in derive(config("bloom"), 3).regions if r.op == "slice")
    assert (region.module, region.arg) == ("transformer.h.0.self_attention", "alibi")
    assert region.partition == Partition(-3, (((0, 2),), ((2, 4),), ((4, 6),)))
    alibi = torch.arange(18).reshape(18, 1, 1)  # 3 rows of 6 heads
    assert own_part(region.partition, 1, region.name, alibi).flatten().tolist() == [2, 3, 8, 9, 14, 15]
    edited = [e.module for e in derive(config("falcon-rw"), 2).edits]
    assert edited
    assert "transformer" not in edited, "the model makes its slopes for all heads"
