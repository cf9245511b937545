"""The gate passes what is right, at every degree, and remembers passes of exactly what was tested. What it refuses:
test_proof_faults.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig

from colrow.planning.derive import derive
from colrow.proof import exercise, gate, gate_cache
from colrow.proof.reference import reference

from . import tiny


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


def test_gradients_that_are_zero_but_for_rounding_are_not_measured_against_nothing():
    """A softmax cancels the bias of the keys."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "ffn_dim": 51, "num_hidden_layers": 2, "max_position_embeddings": 32}
    config = OPTConfig(**tiny.TOKENS, **sizes, word_embed_proj_dim=48, dropout=0.0)
    result = gate.gate(config, derive(config, 2))
    assert result.largest < 1e-11


def test_unequal_ranks_pass():
    config = tiny.config("llama")
    assert gate.gate(config, derive(config, 2, (3, 1))).comparison.ok


def test_a_full_sized_config_is_gated_by_a_small_copy():
    config = tiny.config("llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=12, head_dim=64, vocab_size=4000)
    result = gate.gate(config, derive(config, 2))
    assert result.comparison.ok
    assert "num_hidden_layers 12 -> 2" in result.copy


def test_a_copy_that_is_not_a_number_proves_nothing():
    config = tiny.config("llama", rms_norm_eps=float("nan"))
    with pytest.raises(gate.GateRefused, match="does not run as a whole.*logits: the whole model gives 2626 of 2626 entries"):
        gate.gate(config, derive(config, 2), cache=False)


def no_number(which):
    """Of both models alike: an answer that is NaN while those before it are right."""

    def call(model, inputs, **more):
        out = exercise_call(model, inputs, **more)
        if which == "loss" and "labels" in more:
            out.loss = out.loss + float("nan")
        elif which == "gradients" and "labels" in more:
            out.loss.register_hook(lambda g: g * float("nan"))
        elif which == "decoding" and more.get("use_cache"):
            out.logits = out.logits * float("nan")
        return out

    return call


exercise_call = exercise.call
NAMED = {"loss": "the loss", "gradients": "the gradient of model.embed_tokens.weight", "decoding": "cached decoding"}


def test_scores_that_a_model_rules_out_are_numbers(monkeypatch):
    """-inf in the same places of both."""
    config = tiny.config("llama")

    def call(model, inputs, **more):
        out = exercise_call(model, inputs, **more)
        if "labels" not in more:
            out.logits = out.logits.index_fill(-1, torch.tensor([3]), float("-inf"))
        return out

    monkeypatch.setattr(exercise, "call", call)
    assert gate.gate(config, derive(config, 2), cache=False).comparison.ok


@pytest.mark.parametrize("which", NAMED)
def test_nan_on_both_sides_is_refused(which, monkeypatch):
    """By the whole model's own answers, and, were those not looked at, where the two are compared."""
    config = tiny.config("llama")
    plan = derive(config, 2)
    monkeypatch.setattr(exercise, "call", no_number(which))
    with pytest.raises(gate.GateRefused, match=rf"does not run as a whole.*{NAMED[which]}: the whole model gives .* no finite number"):
        gate.gate(config, plan, cache=False)
    if which == "gradients":
        return  # no optimizer takes a step with them
    monkeypatch.setattr(gate, "reference", lambda *asked: replace(reference(*asked), unfit=""))
    with pytest.raises(gate.GateRefused, match=r"differs from the whole.* the whole model gives .*nothing can be proven beside it"):
        gate.gate(config, plan, cache=False)


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


def test_a_plan_is_derived_once_for_what_it_depends_on(tmp_path, monkeypatch):
    config = tiny.config("llama")
    expected, uneven = derive(config, 2), derive(config, 2, (3.0, 1.0))
    assert gate_cache.planned(config, 2) == expected
    monkeypatch.setattr(gate_cache, "derive", lambda *_: uneven)  # whatever is derived from now on is this
    assert gate_cache.planned(config, 2) == gate_cache.planned(tiny.config("llama"), 2, ()) == expected
    assert gate_cache.planned(config, 2, (3.0, 1.0)) == gate_cache.planned(config, 3) == uneven
    assert gate_cache.planned(tiny.config("llama", rms_norm_eps=1e-3), 2) == uneven
    for file in gate_cache.folder().glob("*.json"):
        file.write_text(file.read_text()[:-20])
    assert gate_cache.planned(config, 2) == uneven, "a damaged file is no plan"


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
