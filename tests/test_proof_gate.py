"""The gate passes what is right, refuses every planted fault, and remembers passes of exactly what was tested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colrow.planning.derive import derive
from colrow.proof import gate, gate_cache

from . import plant, tiny

ATTENTION = {"llama-bias": "model.layers.1.self_attn", "gpt2": "transformer.h.1.attn"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_healthy_models_pass(family, ranks):
    config = tiny.config(family)
    result = gate.gate(config, derive(config, ranks))
    assert not result.cached
    assert result.comparison.ok
    assert result.largest < 1e-12
    assert {"logits", "loss", "decoding", "tokens", "gradients", "SGD", "AdamW", "collectives"} < set(result.comparison.kinds())


@pytest.mark.parametrize("ranks", [1, 5, 8])
def test_other_degrees_pass(ranks):
    config = tiny.config("llama-tied")
    assert gate.gate(config, derive(config, ranks)).largest < 1e-12


def test_unequal_ranks_pass():
    config = tiny.config("llama")
    assert gate.gate(config, derive(config, 2, (3, 1))).comparison.ok


def test_a_full_sized_config_is_gated_by_a_small_copy():
    config = tiny.config("llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=12, head_dim=64, vocab_size=4000)
    result = gate.gate(config, derive(config, 2))
    assert result.comparison.ok
    assert "num_hidden_layers 12 -> 2" in result.copy


def refusal(config, plan) -> str:
    with pytest.raises(gate.GateRefused) as refused:
        gate.gate(config, plan)
    text = str(refused.value)
    assert "\n" not in text
    assert not any(gate_cache.folder().glob("*"))  # only passes are remembered
    return text


@pytest.mark.parametrize(("family", "where"), [("llama", "layers.1.self_attn"), ("qwen2", "layers.0.mlp"), ("gpt2", "h.1.mlp"), ("llama", "embed")])
def test_a_dropped_collective_is_refused(family, where):
    config = tiny.config(family)
    text = refusal(config, plant.without(derive(config, 2), "reduce", where))
    assert f"{where}" in text
    assert "looks like a bug" in text


def test_a_missing_f_is_refused():
    config = tiny.config("llama")
    text = refusal(config, plant.without(derive(config, 2), "copy", "layers.1.input_layernorm"))
    assert "the forward pass is right; first on the way back, the gradient of model.layers.1.input_layernorm.weight" in text


@pytest.mark.parametrize(
    ("family", "fault", "named"),
    [
        ("llama-bias", plant.doubled_bias("model.layers.0.self_attn.o_proj"), "the output of model.layers.0.self_attn.o_proj"),
        ("gpt2", plant.doubled_bias("transformer.h.1.mlp.c_proj"), "the output of transformer.h.1.mlp.c_proj"),
        ("llama", plant.rotated_heads("model.layers.1.self_attn"), "the input of model.layers.1.self_attn.o_proj"),
        ("llama-bias", plant.bias_per_rank("model.layers.1.mlp.down_proj"), "the gradient of model.layers.1.mlp.down_proj.bias"),
        ("llama", plant.replica_drifts("model.layers.1.input_layernorm.weight"), "model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_wrong_applier_is_refused_and_the_place_is_named(family, fault, named, monkeypatch):
    right = gate.build.split

    def wrong(model, plan, group):
        model = right(model, plan, group)
        fault(model, group)
        return model

    monkeypatch.setattr(gate.build, "split", wrong)
    config = tiny.config(family)
    assert named in refusal(config, derive(config, 2))


def test_a_wrong_prediction_is_refused(monkeypatch):
    right = gate_predict = __import__("colrow.planning.cost", fromlist=["predict"]).predict
    monkeypatch.setattr("colrow.planning.cost.predict", lambda *args: right(*args)[1:])
    config = tiny.config("llama")
    assert "collectives" in refusal(config, derive(config, 2))
    assert gate_predict is right


def test_a_crash_of_the_applier_is_a_refusal(monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(gate.build, "split", broken)
    config = tiny.config("llama")
    assert "ZeroDivisionError: of all things" in refusal(config, derive(config, 2))


def test_passes_are_remembered_for_exactly_this_config_and_plan():
    config = tiny.config("llama")
    plan = derive(config, 2)
    first, second = gate.gate(config, plan), gate.gate(config, plan)
    assert (first.cached, second.cached) == (False, True)
    assert second.checks == first.checks
    keys = {
        gate_cache.key(config, plan),
        gate_cache.key(config, derive(config, 3)),
        gate_cache.key(config, replace(plan, regions=plan.regions[1:])),
        gate_cache.key(tiny.config("llama", rms_norm_eps=1e-3), plan),
    }
    assert len(keys) == 4


def test_a_damaged_or_unwritable_cache_only_costs_time(tmp_path, monkeypatch):
    config = tiny.config("llama")
    plan = derive(config, 2)
    gate.gate(config, plan)
    file = next(gate_cache.folder().glob("*.json"))
    file.write_text('{"copy": ')
    assert not gate.gate(config, plan).cached
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert not gate.gate(config, plan).cached
