"""Field bug reports of other systems, each run from files to tokens as its reporter would have: the recipe is `replay_report`.

A tiny model with noise in every parameter is saved as several safetensors files, planned, split over ranks as threads, loaded slice by
slice, and compared with the unsplit transformers model in float32: logits of 2 x 12 ids, 8 greedy steps through the cache after a 12-token
prompt, and every parameter put together again bit for bit. Reports about files (O-22 to O-26) are in test_checkpoint*.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from colrow.checkpoint import model_dir
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel import build, collect, load
from colrow.planning.derive import derive
from colrow.planning.plan import Plan

from . import tiny

STEPS = 8
TOLERANCE = 1e-5  # of the largest logit


@dataclass(frozen=True)
class Seen:
    """What a model shows: logits (2, 12, V), greedy ids (8,), and its whole parameters."""

    logits: torch.Tensor
    tokens: list[int]
    parameters: dict[str, torch.Tensor]


def llama(**changes: object) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**tiny.TOKENS, **sizes, **changes})


def observe(model: torch.nn.Module, cfg: PreTrainedConfig) -> tuple[torch.Tensor, list[int]]:
    ids = tiny.ids(cfg)
    with torch.no_grad():
        logits = model(ids).logits
        out = model.generate(ids[:1], max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    return logits, out[0, ids.shape[1] :].tolist()


def observe_rank(group: Group, directory: Path, plan: Plan, cfg: PreTrainedConfig) -> Seen:
    model = build.split(build.empty(cfg, torch.float32), plan, group)
    load.from_source(model, model_dir.find(str(directory)).source(), dtype=torch.float32)
    model.eval()
    logits, tokens = observe(model, cfg)
    return Seen(logits, tokens, collect.whole_parameters(model))


def replay_report(cfg: PreTrainedConfig, ranks: int, directory: Path) -> Plan:
    """Save, plan, split, load, compare. Returns the plan, for what a report says of it."""
    model = tiny.whole(cfg, torch.float32)
    model.save_pretrained(directory, max_shard_size="20KB")
    logits, tokens = observe(model, cfg)
    plan = derive(model_dir.find(str(directory)).config(), ranks)
    for seen in run_threads(observe_rank, ranks, directory, plan, cfg):
        assert seen.logits.shape[-1] == cfg.vocab_size
        assert (seen.logits - logits).abs().max() <= TOLERANCE * logits.abs().max()
        assert seen.tokens == tokens
        for name, parameter in model.named_parameters():
            assert torch.equal(seen.parameters[name], parameter), name
    return plan


def head_counts(plan: Plan) -> list[int]:
    return [plan.attention[0].query.local_size(rank) for rank in range(plan.ranks)]


@pytest.mark.parametrize(
    ("hidden", "heads", "inter", "ranks", "expected"),
    [(96, 6, 100, 4, [2, 2, 1, 1]), (96, 6, 100, 5, [2, 1, 1, 1, 1]), (56, 7, 100, 2, [4, 3]), (56, 7, 100, 3, [3, 2, 2])],
)
def test_o01_query_heads_not_divisible(hidden: int, heads: int, inter: int, ranks: int, expected: list[int], tmp_path: Path) -> None:
    cfg = llama(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=inter)
    plan = replay_report(cfg, ranks, tmp_path)
    assert head_counts(plan) == expected
    gate = plan.tensor("model.layers.0.mlp.gate_proj.weight").partition
    assert [gate.local_size(rank) for rank in range(ranks)] == [inter // ranks + (rank < inter % ranks) for rank in range(ranks)]


@pytest.mark.parametrize(("heads", "kv", "ranks"), [(8, 2, 4), (8, 2, 8), (4, 1, 2), (4, 1, 4), (8, 2, 3), (8, 2, 5)])
def test_o02_fewer_kv_heads_than_ranks(heads: int, kv: int, ranks: int, tmp_path: Path) -> None:
    cfg = llama(num_attention_heads=heads, num_key_value_heads=kv, head_dim=16)
    plan = replay_report(cfg, ranks, tmp_path)
    used = [{plan.attention[0].kv_of[h] for a, b in plan.attention[0].query.pieces[r] for h in range(a, b)} for r in range(ranks)]
    assert [plan.attention[0].kv.local_size(r) for r in range(ranks)] == [len(u) for u in used], "a rank holds just the KV heads it uses"


@pytest.mark.parametrize(("vocab", "ranks"), [(101, 2), (101, 3), (101, 4), (5, 4)])
def test_o03_vocabulary_with_no_divisor(vocab: int, ranks: int, tmp_path: Path) -> None:
    cfg = llama(num_attention_heads=4, num_key_value_heads=4, vocab_size=vocab)
    plan = replay_report(cfg, ranks, tmp_path)
    head, embedding = plan.tensor("lm_head.weight"), plan.tensor("model.embed_tokens.weight")
    assert head.partition == embedding.partition
    assert head.partition.size == vocab


@pytest.mark.parametrize("ranks", [2, 4])
def test_o05_biases_follow_their_heads(ranks: int, tmp_path: Path) -> None:
    cfg = Qwen2Config(
        **{**tiny.TOKENS, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 100},
        num_hidden_layers=2,
    )
    plan = replay_report(cfg, ranks, tmp_path)
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj"
        assert plan.tensor(f"{name}.bias").partition == plan.tensor(f"{name}.weight").partition


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_o10_gpt2_is_stored_transposed(ranks: int, tmp_path: Path) -> None:
    cfg = GPT2Config(**tiny.TOKENS, n_embd=48, n_head=6, n_layer=2, n_positions=32)
    plan = replay_report(cfg, ranks, tmp_path)
    square = plan.tensor("transformer.h.0.attn.c_proj.weight")
    assert square.role == "row"
    assert square.partition.dim == 0, "Conv1D stores (in, out): a row-parallel cut is along dim 0"


@pytest.mark.parametrize(
    ("sizes", "ranks"), [({"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, r) for r in (2, 4)]
)
def test_o11_heads_times_head_dim_is_not_hidden(sizes: dict[str, int], ranks: int, tmp_path: Path) -> None:
    replay_report(llama(**sizes), ranks, tmp_path)


def test_the_recipe_can_fail(tmp_path: Path) -> None:
    """A saved model that differs from the reference in one element must be seen."""
    cfg = llama(num_attention_heads=4, num_key_value_heads=2)
    model = tiny.whole(cfg, torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] += 0.01
    model.save_pretrained(tmp_path)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path)
    logits, _ = observe(tiny.whole(cfg, torch.float32), cfg)
    assert (observe(changed, cfg)[0] - logits).abs().max() > 10 * TOLERANCE * logits.abs().max()
