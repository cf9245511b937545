"""GGUF: slices of quantized, permuted and transposed tensors are the slices of what transformers makes of the whole file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel

from colrow.checkpoint import gguf_header, model_dir
from colrow.errors import UserError
from colrow.parallel import load

from . import files

SIZES = {"llama": (96, 6, 2), "qwen2": (96, 6, 2), "gpt2": (96, 6, 6)}  # width (whole blocks of 32), query and KV heads
INNER, VOCABULARY = 160, 96


def write(path: Path, family: str, kind: gguf.GGMLQuantizationType) -> Path:
    """A GGUF file with the names llama.cpp writes, and random blocks."""
    width, heads, kv_heads = SIZES[family]
    head, inner = width // heads, 4 * width if family == "gpt2" else INNER  # transformers takes no other GPT-2 from GGUF
    w = gguf.GGUFWriter(path, family)
    w.add_context_length(64)
    w.add_block_count(2)
    w.add_embedding_length(width)
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    if family == "gpt2":
        w.add_layer_norm_eps(1e-5)
    else:
        w.add_head_count_kv(kv_heads)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(head)
        w.add_rope_freq_base(10000.0)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    draw = np.random.default_rng(0)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = draw.standard_normal((rows, cols), dtype=np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            w.add_tensor(name, values)
        else:
            w.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        w.add_tensor(name, draw.standard_normal(size, dtype=np.float32))

    matrix("token_embd.weight", VOCABULARY, width)
    vector("output_norm.weight", width)
    for layer in range(2):
        at = f"blk.{layer}."
        vector(at + "attn_norm.weight", width)
        vector(at + "ffn_norm.weight", width)
        matrix(at + "attn_output.weight", width, width)
        matrix(at + "ffn_up.weight", inner, width)
        matrix(at + "ffn_down.weight", width, inner)
        if family == "gpt2":
            matrix(at + "attn_qkv.weight", 3 * width, width)
            for name, size in (("attn_qkv", 3 * width), ("attn_output", width), ("ffn_up", inner), ("ffn_down", width)):
                vector(at + name + ".bias", size)
            for name in ("attn_norm", "ffn_norm"):
                vector(at + name + ".bias", width)
            continue
        matrix(at + "ffn_gate.weight", inner, width)
        for name, size in (("attn_q", width), ("attn_k", kv_heads * head), ("attn_v", kv_heads * head)):
            matrix(at + name + ".weight", size, width)
            if family == "qwen2":
                vector(at + name + ".bias", size)
    if family == "gpt2":
        matrix("position_embd.weight", 1024, width)
        vector("output_norm.bias", width)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32", "F16"])
def test_equal_to_transformers(family, kind, tmp_path):
    path = write(tmp_path / "model.gguf", family, gguf.GGMLQuantizationType[kind])
    found = model_dir.find(str(path))
    whole = reference(path)
    plan = files.plan(found.config(), 3)
    models = [files.split(found.config(), plan, rank) for rank in range(3)]
    for model in models:
        assert load.from_source(model, found.source()) == ()
    merged = files.merged(models, plan)
    for name, p in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(merged[name], p), name


@pytest.mark.parametrize("family", SIZES)
def test_every_cut_of_every_tensor(family, tmp_path):
    """Whole heads, parts of heads and parts of blocks, along both dims."""
    path = write(tmp_path / "model.gguf", family, gguf.GGMLQuantizationType.Q8_0)
    source = model_dir.find(str(path)).source()
    for name, p in reference(path).named_parameters():
        for dim, size in enumerate(p.shape):
            for ranges in [((0, size // 3),), ((size // 3, size // 2), (size - 5, size)), ((7, 8), (9, min(40, size))), ((0, size),)]:
                expected = torch.cat([p.detach().narrow(dim, a, b - a) for a, b in ranges], dim)
                assert torch.equal(source.read(name, dim, ranges), expected), (name, dim, ranges)


def test_only_the_ranges_are_read(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    source = model_dir.find(str(path)).source()

    def read(name: str, dim: int, *ranges: tuple[int, int]) -> int:
        before = source.bytes_read
        source.read(name, dim, ranges)
        return source.bytes_read - before

    row = 96 // 32 * 34
    assert read("model.embed_tokens.weight", 0, (3, 10)) == 7 * row
    assert read("model.layers.0.self_attn.q_proj.weight", 0, (16, 48)) == 32 * row  # two heads
    assert read("model.layers.0.self_attn.o_proj.weight", 1, (32, 64)) == 96 * 34
    assert read("model.layers.0.self_attn.o_proj.weight", 1, (30, 66)) == 96 * 3 * 34  # the blocks that cover them
    assert read("model.norm.weight", 0, (1, 3)) == 8


def test_config_without_the_vocabulary_is_the_same(tmp_path):
    for family in SIZES:
        path = write(tmp_path / f"{family}.gguf", family, gguf.GGMLQuantizationType.Q8_0)
        ours = model_dir.find(str(path)).config().to_dict()
        theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
        assert ours == theirs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b[:-1], ("cut off",)),
        (lambda b: b[:100], ("cut off",)),
        (lambda b: b"", ("empty",)),
        (lambda b: b"<html>" + b, ("an HTML page",)),
        (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], ("version", "9")),
        (lambda b: b.replace(b"llama", b"lalma"), ("lalma",)),
    ],
)
def test_damage(change, words, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as e:
        model_dir.find(str(path)).source()
    assert "\n" not in str(e.value)
    assert all(word in str(e.value) for word in ("model.gguf", *words)), str(e.value)


def test_a_tensor_in_a_form_that_is_not_understood_is_refused(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32)
    header = gguf_header.read(path)

    class Squares:
        def process(self, weights, name, **more):
            from types import SimpleNamespace

            return SimpleNamespace(weights=weights**2, name=name)

    from colrow.checkpoint.gguf import layout

    with pytest.raises(UserError, match=r"blk\.0\.attn_q\.weight"):
        layout(Squares(), header, "blk.0.attn_q.weight")


def test_demo_tensors_equal_the_gguf_packages():
    """By the gguf package alone: the embedding, and query and key rows with llama.cpp's rotary order undone by hand."""
    found = files.demo()
    source = found.source()
    stored = gguf_header.read(found.path)

    def by_hand(key: str, heads: int = 0) -> torch.Tensor:
        t = stored.tensors[key]
        raw = np.fromfile(found.path, np.uint8, t.nbytes, offset=t.start).reshape(t.shape[0], -1)
        w = torch.from_numpy(gguf.dequantize(raw, t.kind))
        return w.view(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape) if heads else w

    for name, key, heads in [
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight", 0),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight", 0),
    ]:
        whole = by_hand(key, heads)
        assert torch.equal(source.read(name, None, ()), whole), name
        for dim, ranges in [(0, ((64, 192),)), (0, ((0, 64), (100, 101))), (1, ((320, 576),)), (1, ((5, 7), (31, 33)))]:
            expected = torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
            assert torch.equal(source.read(name, dim, ranges), expected), (name, dim)


def test_demo_tokenizer_and_config():
    found = files.demo()
    config, tokenizer = found.config(), found.tokenizer()
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert config.tie_word_embeddings
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert "Hello" in tokenizer.decode(ids["input_ids"] if isinstance(ids, dict) or hasattr(ids, "input_ids") else ids)
