"""Models whose code does one thing that others do not: sizes that are compared, states of a class of their own, sound beside each token,
patches of tokens, towers with experts, configs that write other numbers to files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from bench.zoo import sizes
from colrow.engine.forward import Forward
from colrow.errors import UserError
from colrow.planning import lengths, measured, models
from colrow.planning.derive import derive
from colrow.planning.inputs import PATCHES, TOKENS, cut_behind, patches
from colrow.planning.ints import Told, Tracked
from colrow.planning.plan import Plan
from colrow.planning.trace import empty_model, trace
from colrow.proof import whole
from colrow.proof.exercise import questions
from colrow.proof.gate import GateRefused, prove
from colrow.proof.integers import Integers
from colrow.proof.shrink import Small

from .families import PLAIN
from .families import TOKENS as IDS


def clip() -> tf.CLIPTextConfig:
    return tf.CLIPTextConfig(**PLAIN | {"max_position_embeddings": 32})


def cpmant() -> tf.CpmAntConfig:
    return tf.CpmAntConfig(
        vocab_size=101, hidden_size=40, num_attention_heads=9, dim_head=8, dim_ff=51, num_hidden_layers=2, prompt_length=8
    )


def realtime() -> Any:
    audio = {"vocab_size": 101, "hidden_size": 36, "intermediate_size": 51, "num_hidden_layers": 1, "num_attention_heads": 9}
    audio |= {"num_mel_bins": 16, "head_dim": 8, "sliding_window": 8, "model_type": "voxtral_realtime_encoder"}
    text = {**PLAIN, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": True}
    text |= {"sliding_window": None, "num_hidden_layers": 1, "model_type": "voxtral_realtime_text"}
    return tf.VoxtralRealtimeConfig(audio_config=audio, text_config=text)


def blt() -> tf.BltConfig:
    part: dict[str, Any] = {"vocab_size": 101, "hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 1, "intermediate_size": 51}
    towers = {f"{name}_config": part | {"hidden_size_global": 40} for name in ("encoder", "decoder", "global", "patcher")}
    config = tf.BltConfig(vocab_size=101, **towers, encoder_hash_byte_group_vocab=53, local_attention_window_len=4)
    config.num_hidden_layers = 1  # of which transformers makes the cache
    return config


def cut(plan: Plan, part: str) -> bool:
    found = [t for t in plan.tensors.values() if part in t.name]
    assert found
    return all(not t.partition.is_whole for t in found)


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_table_whose_rows_are_compared_with_a_length_stays_whole(ranks: int) -> None:
    """CLIP refuses texts that are longer than its table of positions has rows: of 32 rows a rank would have 4, for a text of 13 tokens."""
    plan = derive(clip(), ranks)
    assert cut(plan, "token_embedding")
    assert not cut(plan, "position_embedding")
    assert "comparison" in plan.tensor("embeddings.position_embedding.weight").reason
    assert prove(Small(clip(), plan, ())).ok


def test_comparisons_are_told() -> None:
    told: list[Any] = []
    size = Told.about(8, ("size", 0, 1), lambda how, other: told.append((how, int(other))))
    heads = Tracked.of(8, ("attribute", "layer", "heads"))
    assert size < 13
    assert not size > Told.about(9, ("size", 1, 0), lambda how, other: told.append((how, int(other))))
    assert heads == size
    assert torch.Size([size]) == (8,)
    assert told == [("lt", 13), ("gt", 9), ("lt", 8), ("eq", 8), ("eq", 8)]
    assert {size: "hashed"}[8] == "hashed"  # type: ignore[index]


def test_a_state_of_the_model_s_own_keeps_its_heads_whole() -> None:
    """xLSTM makes its state in the sizes of its config, on every rank alike."""
    config = tf.xLSTMConfig(**IDS, hidden_size=128, num_hidden_layers=1, num_heads=8)
    plan = derive(config, 2)
    assert cut(plan, ".ffn.")
    assert not cut(plan, ".mlstm_layer.q.")
    ids = {TOKENS: torch.zeros(2, 7, dtype=torch.long, device="meta")}
    assert models.keeps_state(empty_model(config, "eager"), ids)
    assert not models.keeps_state(empty_model(tf.MambaConfig(**IDS, hidden_size=32, num_hidden_layers=1), "eager"), ids)
    assert prove(Small(config, plan, ())).ok


def test_sound_beside_each_token() -> None:
    config = realtime()
    assert set(trace(config).inputs) == {TOKENS, "input_features"}
    plan = derive(config, 2)
    assert cut(plan, "audio_tower.layers.0.self_attn.q_proj")
    assert cut(plan, "language_model.layers.0.self_attn.q_proj")
    asked = questions(whole.build(config, torch.float64))
    assert (asked.steps, len(asked.following), set(asked.following[0])) == (6, 6, {"input_features"})
    found = prove(Small(config, plan, ()))
    assert found.ok
    assert any(item.kind == "decoding" for item in found.items)


def test_the_sound_of_each_token() -> None:
    example = {TOKENS: torch.arange(5).reshape(1, 5), "input_features": torch.arange(40.0).reshape(1, 2, 20)}
    first, following = cut_behind(example, 3)
    assert (first[TOKENS].tolist(), first["input_features"].shape) == ([[0, 1, 2]], (1, 2, 12))
    assert [sorted(f) for f in following] == [["input_features"]] * 2
    assert following[1]["input_features"].tolist() == [[[16, 17, 18, 19], [36, 37, 38, 39]]]


def test_patches_of_tokens() -> None:
    config = blt()
    assert set(trace(config).inputs) == {TOKENS, PATCHES}
    plan = derive(config, 2)
    assert cut(plan, "global_transformer.layers.0.self_attn.q_proj")
    assert not cut(plan, "patcher.")
    assert prove(Small(config, plan, ())).ok


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_patches_are_of_all_tokens(tokens: int) -> None:
    found = patches(2, tokens)
    assert found.sum(1).tolist() == [tokens] * 2
    assert found.shape[1] == 1 + tokens // 2


def test_lengths_that_a_step_has() -> None:
    half: lengths.Length = ("//", ("+", "S", 2), 2)
    assert lengths.step(("+", "S", 17)) == "S"
    assert lengths.value(lengths.step(("*", "S", 4)), {"S": 1}) == 4
    assert lengths.value(lengths.step(("*", half, 3)), {"S": 1}) == 3
    assert lengths.step(("+", "E", 1)) == ("+", "E", 1)
    twice = measured.fitted("S", {n: 2 * ((n + 2) // 2) for n in (7, 8, 9, 12, 13)})
    assert lengths.value(twice, {"S": 30}) == 32


def test_a_model_that_reads_the_whole_text_again() -> None:
    """CPM-Ant: everything is proven but steps, of which it has none, and the engine, which makes steps, says so."""
    config = cpmant()
    plan = derive(config, 2)
    found = prove(Small(config, plan, ()))
    assert found.ok
    assert {"logits", "gradients"} <= {item.kind for item in found.items}
    assert not any(item.kind == "decoding" for item in found.items)
    with pytest.raises(UserError, match="reads the whole text again"):
        Forward(whole.build(config, torch.float32))


def test_of_several_classes_the_first_is_built() -> None:
    """transformers' auto classes build none of two classifiers (DeiT's) from a config that names neither."""
    config = tf.DeiTConfig(**PLAIN, image_size=32, patch_size=8)
    assert models.model_class(config) is tf.DeiTForImageClassification
    plan = derive(config, 3)
    assert plan.architecture == "DeiTForImageClassification"
    assert prove(Small(config, plan, ())).ok
    config.architectures = ["DeiTForImageClassificationWithTeacher"]
    assert models.model_class(config) is tf.DeiTForImageClassificationWithTeacher


def test_experts_in_towers() -> None:
    """The model around them says that it has none, and some layers have a config of their own."""
    model = empty_model(sizes.config("dots3_note"), "eager")
    assert {type(m).__name__ for m in models.routed(model)} >= {"Dots3NoteVisionModel", "Dots3NoteTextModel"}
    ways = {c._experts_implementation for m in model.modules() if type(m).__name__.endswith("Experts") and (c := m.config)}
    assert ways == {"batched_mm"}


def test_the_numbers_of_a_config_are_those_of_its_fields() -> None:
    """Dory counts a layer's two halves in files."""
    config = tf.DoryConfig(num_hidden_layers=4, n_input_layers=1, n_output_layers=1)
    integers = Integers(config)
    assert integers.state["num_hidden_layers"] == 4
    assert config.to_dict()["num_hidden_layers"] == 8
    again = integers.config(integers.state)
    assert (again.num_hidden_layers, again.layer_types) == (4, config.layer_types)


def test_a_table_cut_all_the_same_is_seen() -> None:
    config = clip()
    plan = derive(config, 8)
    rows = plan.tensor("embeddings.position_embedding.weight")
    object.__setattr__(rows, "partition", type(rows.partition)(0, tuple(((4 * r, 4 * r + 4),) for r in range(8))))
    object.__setattr__(rows, "role", "vocab")
    with pytest.raises(GateRefused):
        prove(Small(config, plan, ()))


def test_several_codebooks() -> None:
    """MusicGen: a row of ids for each codebook, a head for each, and the mean of their losses."""
    sound = {"num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 16, "codebook_dim": 48, "hidden_size": 48}
    text = {"d_model": 40, "d_kv": 8, "d_ff": 51, "num_layers": 1, "num_heads": 5, "vocab_size": 101, "model_type": "t5"}
    writer = {"vocab_size": 101, "hidden_size": 48, "ffn_dim": 51, "num_hidden_layers": 1, "num_attention_heads": 6, "num_codebooks": 3}
    writer |= {"pad_token_id": 101, "bos_token_id": 101, "dropout": 0.0, "max_position_embeddings": 64}
    parts: dict[str, Any] = {"text_encoder": text, "audio_encoder": sound | {"model_type": "encodec"}, "decoder": writer}
    config = tf.MusicgenConfig(**parts, architectures=["MusicgenForConditionalGeneration"])
    asked = questions(whole.build(config, torch.float64))
    assert asked.inputs["decoder_input_ids"].shape == (6, 13)
    assert asked.labels is not None
    assert asked.labels.shape == (2, 13, 3)
    plan = derive(config, 2)
    assert cut(plan, "lm_heads.2")
    assert prove(Small(config, plan, ())).ok
