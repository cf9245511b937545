"""Models that listen: sounds stand among the tokens, both towers are planned from one trace with a sound in it, and proven with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedConfig

from colrow.planning.derive import derive
from colrow.planning.graph import Graph
from colrow.planning.inputs import fitting
from colrow.planning.models import build
from colrow.planning.trace import trace
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from .families import LLAMA
from .faults import plant
from .test_families import share

WHISPER: dict[str, Any] = {
    "d_model": 36,
    "encoder_layers": 2,
    "encoder_attention_heads": 9,
    "encoder_ffn_dim": 51,
    "num_mel_bins": 12,
    "max_source_positions": 16,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_mel_bins": 12,
    "max_source_positions": 16,
    "intermediate_size": 144,
}

HEARING: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2-audio": lambda: tf.Qwen2AudioConfig(
        text_config=LLAMA | {"model_type": "qwen2"},
        audio_config={"model_type": "qwen2_audio_encoder", **WHISPER},
        audio_token_index=100,
    ),
    "voxtral": lambda: tf.VoxtralConfig(text_config=LLAMA, audio_config=ENCODER, audio_token_id=100),
    "musicflamingo": lambda: tf.MusicFlamingoConfig(
        text_config=LLAMA | {"model_type": "qwen2"},
        audio_config={"model_type": "audioflamingo3_encoder", **ENCODER},
        audio_token_id=100,
        audio_bos_token_id=98,
        audio_eos_token_id=99,
    ),
}


@pytest.mark.parametrize(("family", "ranks"), [("qwen2-audio", 2), ("voxtral", 3), ("musicflamingo", 2)])
def test_both_towers_are_split_and_proven(family: str, ranks: int) -> None:
    config = HEARING[family]()
    plan = derive(config, ranks)
    assert "input_features" in plan.inputs
    assert len(plan.attention) == 4
    assert share(plan) > 0.75
    found = prove(Small(config, plan, ()))
    assert found.ok
    assert found.of("tokens")[0].name == "6 greedy tokens"


def test_a_planted_fault_is_seen() -> None:
    config = HEARING["qwen2-audio"]()
    with plant("drop g", "audio_tower.layers.0.fc2"), pytest.raises(GateRefused, match="looks like a bug"):
        prove(Small(config, derive(config, 2), ()))


def test_a_sound_takes_its_places_among_the_tokens() -> None:
    model = build(HEARING["voxtral"](), dtype=torch.float32).eval()
    given = fitting(model, 2, 7)
    assert given["input_features"].shape == (2, 12, 32)
    assert (given["input_ids"] == 100).sum(1).tolist() == [4, 4], "32 frames, halved by a convolution, four taken together"
    assert model(**given).logits.shape == (2, given["input_ids"].shape[1], 101)


def test_what_is_put_in_the_places_of_a_sound_is_no_part_of_later_steps() -> None:
    """Its rotations are computed from where the sound lies among the tokens, but a later step brings no sound."""
    graph = Graph(trace(HEARING["musicflamingo"]()))
    made = {graph.trace.module_of(op): graph.in_steps[op.outputs[0]] for op in graph.trace.ops if op.outputs and op.outputs[0] >= 0}
    assert not made["model.multi_modal_projector.linear_2"]
    assert made["model.language_model.layers.1.mlp.down_proj"]


def test_of_inputs_that_are_all_wrong_the_nearest_says_why() -> None:
    """Features four times as many as a config's own sizes allow: the reason is told of the spectrogram that came furthest."""
    config = HEARING["voxtral"]()
    config.audio_config.intermediate_size = 51
    plan = derive(config, 2)
    assert plan.inputs == ("input_ids",)
    (note,) = (n for n in plan.notes if n.subject == "inputs other than tokens")
    assert "51" in note.text
