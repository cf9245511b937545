"""Derived plans against Megatron's, written by hand from the config: same cuts, roles, regions, edits and heads at every degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from colrow.errors import UserError
from colrow.partition import Partition
from colrow.planning import stops
from colrow.planning.derive import derive
from colrow.planning.plan import Plan, TensorPlan
from colrow.planning.record import record
from colrow.planning.trace import TraceError

from .hand_plans import hand_plan
from .tiny import FAMILIES, config

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("llama-tied", {}),
    ("llama-bias", {}),
    ("qwen2", {}),
    ("llama-tied", {"vocab_size": 5}),
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False}),
]


def _what(entry: TensorPlan) -> tuple[Any, ...]:
    """What is done to a parameter. Held by all ranks in full is the same said in two ways: whole, or ranges that all overlap."""
    cut = entry.partition
    copied = cut.dim is not None and all(cut.local_size(r) == cut.size for r in range(cut.ranks))
    if copied or (cut.is_whole and entry.grad == "partial"):
        return entry.shape, "copied", entry.aliases
    return entry.shape, cut, entry.role, entry.grad, entry.aliases


def _regions(plan: Plan) -> set[tuple[Any, ...]]:
    return {(r.module, r.place, r.arg, r.op, r.shape, r.partition, r.ranks) for r in plan.regions}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_equals_megatrons_plan(family: str, changes: dict[str, Any], ranks: int) -> None:
    cfg = config(family, **changes)
    derived, hand = derive(cfg, ranks), hand_plan(cfg, ranks)
    assert {n: _what(t) for n, t in derived.tensors.items()} == {n: _what(t) for n, t in hand.tensors.items()}
    assert _regions(derived) == _regions(hand)
    assert {(e.module, e.attribute, e.whole, e.values) for e in derived.edits} == {
        (e.module, e.attribute, e.whole, e.values) for e in hand.edits
    }
    assert [(a.module, a.query, a.kv, a.kv_of, a.head_dim) for a in derived.attention] == [
        (a.module, a.query, a.kv, a.kv_of, a.head_dim) for a in hand.attention
    ]
    assert (derived.architecture, derived.model_type) == (hand.architecture, hand.model_type)


def test_heads_wider_than_hidden() -> None:
    cfg = config("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    derived, hand = derive(cfg, 2), hand_plan(cfg, 2)
    assert {n: t.partition for n, t in derived.tensors.items()} == {n: t.partition for n, t in hand.tensors.items()}


def test_ranks_that_are_more_than_heads_hold_a_copy_that_counts_once() -> None:
    plan = derive(config("llama", num_attention_heads=4, num_key_value_heads=2), 5)
    assert plan.attention[0].query.pieces == (((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),), ((3, 4),))
    assert plan.attention[0].kv.pieces == (((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),), ((1, 2),))
    assert "a copy of the last" in plan.attention[0].reason
    rows = plan.tensor("model.layers.0.self_attn.o_proj.weight").partition
    assert [rows.local_size(rank) for rank in range(5)] == [8, 8, 8, 8, 0]
    assert not plan.notes


def test_one_rank_is_whole_without_regions() -> None:
    plan = derive(config("llama"), 1)
    assert {t.role for t in plan.tensors.values()} == {"whole"}
    assert (plan.regions, plan.edits, plan.attention) == ((), (), ())


def test_weights_cut_in_proportion() -> None:
    plan = derive(config("llama"), 2, weights=(3, 1))
    assert plan.tensor("model.layers.0.mlp.up_proj.weight").partition == Partition(0, (((0, 38),), ((38, 51),)))
    assert plan.attention[0].query == Partition(0, (((0, 7),), ((7, 9),)))
    assert plan.attention[0].kv == Partition(0, (((0, 3),), ((2, 3),)))
    assert plan.weights == (3, 1)
    skewed = derive(config("llama"), 3, weights=(100, 1, 1))
    assert [skewed.attention[0].query.local_size(r) for r in range(3)] == [7, 1, 1], "no rank is left without a head"


@pytest.mark.parametrize(("ranks", "weights"), [(0, None), (2, (1,)), (2, (1, 0))])
def test_impossible_numbers_are_refused(ranks: int, weights: tuple[float, ...] | None) -> None:
    with pytest.raises(UserError):
        derive(config("llama"), ranks, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_json_round_trip(family: str) -> None:
    plan = derive(config(family), 2)
    assert Plan.from_json(plan.to_json()) == plan


def test_two_all_reduces_forward_and_two_backward_per_block() -> None:
    for family in FAMILIES:
        plan = derive(config(family), 3)
        for layer in (0, 1):
            inside = [r.op for r in plan.regions if f".{layer}." in r.module]
            assert sorted(inside) == ["copy", "copy", "reduce", "reduce"], family


def test_why_and_table_read_only_the_plan() -> None:
    plan = derive(config("gpt2"), 3)
    text = plan.why("transformer.h.1.attn.c_attn.weight")
    assert "dim 1" in text
    assert "heads 3-5 of 9" in text
    assert "transformer.h.1.ln_1.output" in text
    shown = str(plan)
    assert "transformer.h.0-1.attn.c_attn.weight" in shown
    assert max(map(len, shown.splitlines())) <= 110
    with pytest.raises(UserError):
        plan.why("transformer.h.9.attn.c_attn.weight")


class Stops(PreTrainedModel):
    """Its inner module cannot be followed: it takes an expert by name, or multiplies what does not fit."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, named: bool) -> None:
        super().__init__(PreTrainedConfig(vocab_size=11))
        self.named, self.inner = named, Inner()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids, self.named)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.up = nn.ModuleDict({"expert_0": nn.Linear(4, 4)}), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, named: bool) -> torch.Tensor:
        layer = self.experts[f"expert_{x.max()}"] if named else self.up
        return layer(x.float().mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (True, r"inner: the model's code chooses something by a name that it makes of a tensor's number$"),
        (False, r"inner.up: sizes of the model's config, or of the input .*: \[\d+, 1\] and \[3, 4\]$"),
    ],
)
def test_where_the_code_of_a_model_stops_is_said_in_words(named: bool, words: str) -> None:
    with torch.device("meta"):
        model = Stops(named).eval()
    with pytest.raises(TraceError, match=words):
        record(model, bypasses=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Tensor on device meta is not on the expected device cpu!"), "numbers of its own"),
        (
            RuntimeError("shape '[2, 14, 3, 3072]' is invalid for input of size 301056"),
            "do not fit together: [2, 14, 3, 3072] and 301056",
        ),
        (RuntimeError("given [4], expected shape [4], but got torch.Size([2, 3])"), "do not fit together: [4] and [2, 3]"),
        (
            RuntimeError("expects them to sum exactly to 3, but got [1, 1]"),
            "RuntimeError (expects them to sum exactly to 3, but got [1, 1])",
        ),
        (RuntimeError("shape '[2, -1, 5]' is invalid for input of size 32"), "do not fit together: [2, -1, 5] and 32"),
        (ValueError("Sounds do not match, tokens: tensor(..., device='meta', size=()), features: 15"), 'for it: "Sounds do not match"'),
        (KeyError("expert_tensor(..., device='meta', size=(), dtype=torch.int64)"), "a name that it makes of a tensor's number"),
        (NotImplementedError("of this kind\nsee elsewhere"), "the model's code stops with NotImplementedError (of this kind)"),
    ],
)
def test_what_code_raises_in_words(error: Exception, said: str) -> None:
    assert stops.words(error).endswith(said) or said in stops.words(error)
    assert "tensor(" not in stops.words(error)
