"""Small copies are found by search: what a plan depends on stays, the rest becomes small, and no architecture is known by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, Llama4TextConfig, LlamaConfig, Qwen2Config

import colrow.proof
from colrow.errors import UserError
from colrow.planning.derive import derive
from colrow.proof import probe, whole
from colrow.proof.gate import gate
from colrow.proof.integers import Integers, candidates
from colrow.proof.probe import shapes
from colrow.proof.shrink import SMALL_ENOUGH, shrink
from colrow.proof.structure import structure

from . import tiny

FULL = {
    "llama": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    ),
    "llama-70b": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
    "qwen2": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
    ),
    "gpt2": GPT2Config(),
}


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("llama-70b", 3), ("qwen2", 3), ("gpt2", 2), ("gpt2", 5)])
def test_the_copy_is_small_and_its_plan_has_the_structure_of_the_full_one(name, ranks):
    config = FULL[name]
    plan = derive(config, ranks)
    small = shrink(config, ranks, plan=plan)
    assert shapes(small.config).elements < 2 * SMALL_ENOUGH
    assert structure(small.plan) == structure(plan)
    assert small.config.num_hidden_layers == 2
    assert small.config.num_attention_heads == config.num_attention_heads
    assert getattr(small.config, "num_key_value_heads", None) == getattr(config, "num_key_value_heads", None)
    assert (small.config.vocab_size % ranks == 0) == (config.vocab_size % ranks == 0)
    for token in ("bos_token_id", "eos_token_id"):
        assert (getattr(small.config, token) or 0) < small.config.vocab_size
    assert {heads.query for heads in small.plan.attention} == {heads.query for heads in plan.attention}


def test_one_layer_of_each_kind_is_kept():
    config = Gemma2Config(num_hidden_layers=26, layer_types=["full_attention"] * 13 + ["sliding_attention"] * 13)
    small = shrink(config, 2)
    assert small.config.layer_types == ["full_attention", "sliding_attention"]


LLAMA4 = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 192, "intermediate_size_mlp": 256, "num_attention_heads": 8}
LLAMA4 |= {"num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 4, "max_position_embeddings": 256, "attention_chunk_size": 32}
LLAMA4 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(("step", "layers"), [(1, 2), (2, 4)])
def test_a_config_that_lists_the_numbers_of_its_layers_gets_a_copy_with_each_kind(step, layers):
    """Llama 4: experts in all layers or in every second one, by number, and one layer of four without positions. Of step 2 the first layers
    of each kind are 0, 1 and 3; kept alone, the last would be number 2, which has no experts."""
    config = Llama4TextConfig(**LLAMA4, num_hidden_layers=8, interleave_moe_layer_step=step)
    small = shrink(config, 2)
    assert small.config.num_hidden_layers == layers
    assert structure(small.plan) == structure(derive(config, 2))
    assert shapes(small.config).kinds == shapes(config).kinds


def test_the_gate_passes_llama_4():
    config = Llama4TextConfig(**LLAMA4, num_hidden_layers=8, interleave_moe_layer_step=2)
    assert gate(config, derive(config, 2), cache=False).largest < 1e-10


def test_a_small_config_is_its_own_copy():
    config = tiny.config("qwen2")
    assert shrink(config, 2).changes == ()
    assert str(shrink(config, 2)) == "the config as it is"


def test_a_plan_of_another_structure_has_no_small_copy():
    config = FULL["llama"]
    other = derive(config, 2, (3, 1))
    with pytest.raises(UserError, match="structure"):
        shrink(config, 2, plan=other)


@pytest.mark.parametrize(("n", "ranks"), [(49152, 2), (50257, 3), (1536, 5), (28672, 8), (101, 2), (997, 4)])
def test_candidates_divide_by_the_ranks_as_the_full_size_does(n, ranks):
    found = candidates(n, 16, ranks)
    assert found
    assert all(16 <= m < n and (m % ranks == 0) == (n % ranks == 0) for m in found)
    assert found[0] < 64


def test_states_are_not_changed_and_lists_of_layers_are_cut_alike():
    integers = Integers(Gemma2Config(num_hidden_layers=6, vocab_size=1000, pad_token_id=999))
    before = repr(integers.state)
    cut = integers.with_depth(integers.state, ("num_hidden_layers",), 6, [1, 4])
    assert cut["layer_types"] == [integers.state["layer_types"][i] for i in (1, 4)]
    narrow = integers.with_values(cut, {("vocab_size",): 20})
    assert narrow["pad_token_id"] == 19
    assert repr(integers.state) == before
    assert ("vocab_size", 1000, 20) in integers.changes(narrow)


def test_no_architecture_is_known_by_name():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = {name for name in CONFIG_MAPPING_NAMES if len(name) > 4 and name != "shift"}
    for file in Path(colrow.proof.__file__).parent.glob("*.py"):
        code = [line.split("#")[0] for line in file.read_text().splitlines()]
        quoted = {part for line in code for part in line.split('"')[1::2]}
        assert not names & quoted, file.name


def test_a_model_that_cannot_be_built_on_fake_tensors_still_runs_on_them(monkeypatch):
    """DeepSeek-V4 converts parts of itself while it is built, which fake tensors refuse (or not, by what is in memory)."""
    built = []

    def build(config, dtype, *more):
        device = str(torch.get_default_device())
        built.append(device)
        if device != "meta":
            raise RuntimeError("_apply(): Couldn't swap DeepseekV4HyperConnection.fn")
        return whole.build(config, dtype, *more)

    config = tiny.config("llama-tied")
    found = probe.shapes(config)
    monkeypatch.setattr(probe, "RUN_FOR_REAL", 0)
    monkeypatch.setattr(probe, "build", build)
    assert probe.runs(config, found)
    assert built == ["cpu", "meta"]
    monkeypatch.setattr(probe, "_filled", lambda model: model)
    assert not probe.runs(config, found), "what is on meta is no fake tensor"


def test_shapes_are_those_of_the_config_whatever_was_looked_at_before():
    sizes = [probe.shapes(tiny.config("llama", vocab_size=n)).sizes["lm_head.weight"] for n in (101, 53, 101)]
    assert sizes == [(101, 72), (53, 72), (101, 72)]
    assert probe.shapes(tiny.config("llama")) is probe.shapes(tiny.config("llama"))
