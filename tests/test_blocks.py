"""Quantized weights lie in blocks along their innermost dim: plans that cut between them, and GGUF files in every type, slice by slice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import colrow
from colrow.__main__ import main
from colrow.checkpoint import gguf_header, model_dir
from colrow.checkpoint.gguf import dequantizes
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.collect import whole_parameters
from colrow.planning.derive import derive
from colrow.proof.gate import prove
from colrow.proof.shrink import Small

from . import tiny

SIZES: dict[str, Any] = {**tiny.TOKENS, "num_hidden_layers": 2, "max_position_embeddings": 64}


def llama(inner: int, heads: int, kv_heads: int, head_dim: int) -> LlamaConfig:
    heads_of_q = {"num_attention_heads": heads, "hidden_size": 8 * heads}
    return LlamaConfig(**SIZES, **heads_of_q, intermediate_size=inner, num_key_value_heads=kv_heads, head_dim=head_dim)


def inner_cuts(plan: colrow.Plan) -> dict[str, tuple[list[int], int]]:
    """{row-parallel weight: (sizes of the ranks, granularity)}"""
    rows = {name: t.partition for name, t in plan.tensors.items() if t.role == "row"}
    return {name: ([p.local_size(r) for r in range(plan.ranks)], p.granularity) for name, p in rows.items()}


@pytest.mark.parametrize("block", [32, 128, 256])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_plans_cut_between_blocks(block: int, ranks: int) -> None:
    """Unevenly where needed: 1,536 are 6 blocks of 256, so 2, 2 and 2 of 3 ranks but 2, 1, 1, 1, 1 of 5; heads of 64 go by fours."""
    plan = derive(llama(1536, 40, 20, 64), ranks, block=block)
    found = inner_cuts(plan)
    assert len(found) == 4
    for name, (sizes, granularity) in found.items():
        assert granularity % block == 0, name
        assert max(sizes) - min(sizes) <= max(block, 64), name
    heads = plan.attention[0].query
    assert [heads.local_size(r) * 64 for r in range(ranks)] == found["model.layers.0.self_attn.o_proj.weight"][0]
    if (block, ranks) == (256, 5):
        assert found["model.layers.1.mlp.down_proj.weight"][0] == [512, 256, 256, 256, 256]


def test_too_few_blocks_are_cut_as_if_there_were_none() -> None:
    """... axis by axis, and the last block may be short."""
    found = inner_cuts(derive(llama(200, 9, 3, 8), 3, block=64))
    assert found["model.layers.0.self_attn.o_proj.weight"][0] == [24, 24, 24], "72 elements are not two blocks"
    assert found["model.layers.0.mlp.down_proj.weight"][0] == [128, 64, 8]
    with pytest.raises(UserError, match="power of two"):
        derive(llama(200, 9, 3, 8), 3, block=48)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plan_in_blocks_is_proven_like_any_other(ranks: int) -> None:
    cfg = llama(130, 9, 3, 8)
    plan = derive(cfg, ranks, block=32)
    assert inner_cuts(plan) != inner_cuts(derive(cfg, ranks))
    assert prove(Small(cfg, plan, ())).ok


KINDS = [kind for kind in gguf.GGMLQuantizationType if gguf.GGML_QUANT_SIZES[kind][0] > 1]
WIDTH, INNER, HEADS, VOCABULARY = 256, 512, 4, 48


def write(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A Llama whose matrices are random blocks of `kind`, as bytes: every bit pattern is a legal one."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(64)
    w.add_block_count(1)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(INNER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    draw = np.random.default_rng(int(kind))

    def matrix(name: str, rows: int, cols: int) -> None:
        raw = draw.integers(0, 256, (rows, cols // values * size), dtype=np.uint8)
        w.add_tensor(name, raw, raw_dtype=kind)

    matrix("token_embd.weight", VOCABULARY, WIDTH)
    w.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    for name, rows, cols in (
        *((f"attn_{n}", WIDTH, WIDTH) for n in ("q", "k", "v", "output")),
        ("ffn_gate", INNER, WIDTH),
        ("ffn_up", INNER, WIDTH),
        ("ffn_down", WIDTH, INNER),
    ):
        matrix(f"blk.0.{name}.weight", rows, cols)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("kind", [k for k in KINDS if dequantizes(k)], ids=lambda k: k.name)
def test_gguf_slices_of_every_type(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Any ranges of both dims, through blocks and between them, are those of what the gguf package makes of the whole tensor."""
    found = model_dir.find(str(write(tmp_path / "model.gguf", kind)))
    source, header = found.source(), gguf_header.read(found.path)
    for name, key, heads in (
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", 0),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", HEADS),
    ):
        stored = header.tensors[key]
        raw = np.fromfile(found.path, np.uint8, stored.nbytes, offset=stored.start).reshape(stored.shape[0], -1)
        with np.errstate(all="ignore"):
            whole = torch.from_numpy(gguf.dequantize(raw, kind))
        whole = whole.view(heads, -1, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape) if heads else whole
        assert whole.shape == stored.shape
        assert whole.isfinite().any()
        cuts = [((0, 128), (130, 131)), ((7, 9), (31, 33), (255, 256)), ((32, 64),), ((whole.shape[1] - 5, whole.shape[1]),)]
        for dim, ranges in [(None, ()), *((d, c) for d in (0, 1) for c in cuts if c[-1][1] <= whole.shape[d])]:
            with np.errstate(all="ignore"):
                piece = source.read(name, dim, ranges)
            expected = whole if dim is None else torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
            torch.testing.assert_close(piece, expected, rtol=0, atol=0, equal_nan=True)


def test_there_are_types_of_every_size() -> None:
    names = {k.name for k in KINDS if dequantizes(k)}
    assert {
        "Q4_0",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ1_S",
        "IQ2_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "TQ1_0",
        "MXFP4",
    } <= names


@pytest.mark.parametrize("kind", [k for k in KINDS if not dequantizes(k)], ids=lambda k: k.name)
def test_a_type_that_cannot_be_dequantized_is_refused_by_name(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    found = model_dir.find(str(write(tmp_path / "model.gguf", kind)))
    with pytest.raises(UserError, match=rf"{kind.name}.*Q8_0") as e:
        found.source()
    assert "\n" not in str(e.value)


def test_ranks_that_cut_between_blocks_read_every_byte_once(tmp_path: Path) -> None:
    """... and with cuts through blocks some twice."""
    found = model_dir.find(str(write(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_K)))
    name = "model.layers.0.mlp.down_proj.weight"
    size = gguf_header.read(found.path).tensors["blk.0.ffn_down.weight"].nbytes

    def read(block: int) -> int:
        cut, source = derive(found.config(), 2, (3, 1), block).tensor(name).partition, found.source()
        for pieces in cut.pieces:
            source.read(name, cut.dim, pieces)
        return source.bytes_read

    assert read(256) == size
    assert read(1) > size


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny.whole(tiny.config("llama"), torch.float32).save_pretrained(folder)
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"by GPTQ.*bits 4.*group_size 128.*GGUF"),
    "awq": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, r"by AWQ.*q_group_size 64.*BF16"),
    "bitsandbytes": ({"load_in_4bit": True}, r"by bitsandbytes.*dequantize\(\)"),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors.*run_compressed=False"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"block-scaled fp8.*\[128, 128\].*dequantize=True"),
    "mxfp4": ({"quant_method": "mxfp4"}, r"MXFP4.*dequantize=True"),
    "another": ({"quant_method": "hqq"}, r"by hqq.*BF16"),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_other_quantized_files_are_refused_by_name(method: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, before a process is started or a weight is read; a plan needs no weights."""
    folder = shutil.copytree(plain, tmp_path / "model")
    said, words = CONFIGS[method]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    for command in (["run", str(folder), "--tp", "2", "-p", "a"], ["train", str(folder), "--data", "d", "--out", str(tmp_path / "o")]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert re.search(words, err), err
        assert err.count("\n") == 1
    with pytest.raises(UserError, match=words):
        model_dir.find(str(folder)).source()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("q_proj.qzeros", "GPTQ OR AWQ"),
        ("q_proj.weight_packed", "compressed-tensors"),
        ("q_proj.weight_scale_inv", "fp8"),
        ("q_proj.weight.absmax", "bitsandbytes"),
        ("q_proj.SCB", "bitsandbytes"),
    ],
)
def test_files_whose_config_says_nothing(tensor: str, words: str, plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {f"model.layers.0.self_attn.{tensor}": torch.ones(2, 1)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=words):
        model_dir.find(str(folder)).source()
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(UserError, match="GPTQ.*bits 4"):
        model_dir.find(str(folder)).source()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("said", [True, False], ids=["the config says so", "the config says nothing"])
def test_o25_block_scaled_fp8_is_refused(said: bool, ranks: int, plain: Path, tmp_path: Path) -> None:
    """vllm #54178, sglang #3345: 192 rows are one and a half blocks of 128, so no even cut has scales of its own.

    Named: what it is, the field or the tensor, and what to do; without scales the dtype."""
    folder = shutil.copytree(plain, tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    fp8 = {name: torch.ones(192, 128).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 1)}
    save_file(tensors | fp8, folder / "model.safetensors")
    if said:
        config = json.loads((folder / "config.json").read_text())
        field = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        (folder / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(UserError, match=r"block-scaled fp8.*(weight_block_size|q_proj\.weight_scale_inv).*BF16"):
        run_threads(lambda group: colrow.load(str(folder), group, gate=False), ranks)
    if not said:
        save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
        with pytest.raises(UserError, match=r"q_proj\.weight.*F8_E4M3"):
            run_threads(lambda group: colrow.load(str(folder), group, gate=False), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kinds", [("bfloat16",), ("float16",), ("float32", "bfloat16", "float16", "float64")], ids=str)
def test_o25_other_dtypes_and_mixtures(kinds: tuple[str, ...], ranks: int, plain: Path, tmp_path: Path) -> None:
    """Each tensor of a file may have a dtype of its own; asked for float32, every rank holds its slices of what transformers loads."""
    folder = shutil.copytree(plain, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    stored = {name: t.to(getattr(torch, kinds[i % len(kinds)])) for i, (name, t) in enumerate(tensors.items())}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def rank(group: Group) -> dict[str, torch.Tensor]:
        return whole_parameters(colrow.load(str(folder), group, dtype="float32", gate=False))

    for found in run_threads(rank, ranks):
        for name, parameter in expected.named_parameters():
            assert found[name].dtype is torch.float32
            assert torch.equal(found[name], parameter), name
