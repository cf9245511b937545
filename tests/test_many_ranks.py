"""More ranks than heads: each head on a rank of its own, the ranks beyond hold a copy of the last that counts nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from transformers import PreTrainedConfig

from colrow.planning.derive import derive
from colrow.planning.replay import check
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from . import adapting
from .families import SIZES
from .test_entries import stablelm
from .tiny import config

FEW: dict[str, Any] = {**SIZES, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
NEXT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "shared_expert_intermediate_size": 21,
    "layer_types": ["linear_attention", "full_attention"],
}
MANY: dict[str, tuple[int, Callable[[], PreTrainedConfig]]] = {
    "llama": (5, lambda: config("llama", num_attention_heads=4, num_key_value_heads=2)),
    "gpt2, with biases": (4, lambda: config("gpt2", n_head=3, n_embd=48)),
    "norms over all heads": (6, lambda: tf.Olmo2Config(**FEW)),
    "norms of single heads": (5, lambda: stablelm(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)),
    "blocks of heads": (5, lambda: tf.CodeGenConfig(n_embd=96, n_head=12, n_layer=2, rotary_dim=4, vocab_size=101, n_positions=64)),
    "linear attention": (5, lambda: tf.Qwen3NextConfig(**FEW | NEXT)),
}


@pytest.mark.parametrize("case", MANY)
def test_proven(case: str) -> None:
    ranks, make = MANY[case]
    plan = derive(make(), ranks)
    assert not [n for n in plan.notes if "att" in n.subject]
    rows = [t.partition for t in plan.tensors.values() if t.role == "row" and t.partition.local_size(ranks - 1) == 0]
    assert len(rows) >= 2
    assert not any(cut.shared() for cut in rows), "a copy counts nowhere"
    assert prove(Small(make(), plan, ())).ok


@pytest.mark.parametrize("case", ["llama", "gpt2, with biases", "norms of single heads"])
def test_the_replay_agrees(case: str) -> None:
    ranks, make = MANY[case]
    assert check(make(), derive(make(), ranks)).ok


def test_with_the_sequence_cut_too() -> None:
    ranks, make = MANY["llama"]
    assert prove(Small(make(), derive(make(), ranks), ()), "again").ok


def test_with_adapters(tmp_path: Path) -> None:
    adapting.check("llama", adapting.EVERY_LINEAR, 5, tmp_path, num_attention_heads=4, num_key_value_heads=2)


def test_a_copy_that_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank multiplies its copy with the rows of the rank before, as if they were its own."""
    ranks, make = MANY["llama"]
    plan = derive(make(), ranks)
    name = "model.layers.0.self_attn.o_proj.weight"
    pieces = plan.tensors[name].partition.pieces
    object.__setattr__(plan.tensors[name].partition, "pieces", (*pieces[:-1], pieces[-2]))
    monkeypatch.setattr("colrow.parallel.check._check_cut", lambda *args: None)
    with pytest.raises(GateRefused):
        prove(Small(make(), plan, ()))


def test_what_cannot_leave_copies_out_stays_whole_and_says_why() -> None:
    """Experts are no linear layers: a rank without a feature of theirs has none, and nothing is copied."""
    sizes = FEW | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 3}
    plan = derive(tf.MixtralConfig(**sizes), 4)
    experts = [t for t in plan.tensors.values() if "experts" in t.name]
    assert not any(t.partition.shared() for t in experts if not t.partition.is_whole)
    assert prove(Small(tf.MixtralConfig(**sizes), plan, ())).ok


def test_no_rank_is_idle_where_another_axis_is_long_enough() -> None:
    """Mamba2 with 2 groups of 4 heads on 3 ranks: the heads of each group are dealt out, not the groups."""
    sizes = {"hidden_size": 32, "expand": 2, "head_dim": 8, "num_heads": 8, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 101}
    plan = derive(tf.Mamba2Config(**sizes, n_groups=2, pad_token_id=0, bos_token_id=1, eos_token_id=2), 3)
    rows = plan.tensor("backbone.layers.0.mixer.out_proj.weight").partition
    assert min(rows.local_size(rank) for rank in range(3)) > 0
