"""Writes a Llama model's folder as a GGUF file for llama.cpp, in bfloat16 or Q8_0, tensor by tensor.

    python bench/gguf_model.py FOLDER OUT.gguf [--kind BF16|Q8_0]

Only plain Llama (no biases, no scaled rotary positions), which is what bench/random_model.py makes, with its tokenizer of byte-level pairs.
Norms are float32, as in llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path, out: Path, kind: Kind) -> None:
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    beside = out.with_suffix(f".{os.getpid()}")
    w = gguf.GGUFWriter(beside, "llama")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(width)
    w.add_value_length(width)
    w.add_rope_dimension_count(width)
    w.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind is Kind.Q8_0 else gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(w, json.loads((folder / "tokenizer.json").read_text())["model"], config)
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(folder / name, "pt") for name in set(places.values())}
    order = [name for name in places if name.removesuffix(".weight") in OUTSIDE or name.startswith("model.layers.")]

    def shape(name: str) -> list[int]:
        return list(files[places[name]].get_slice(name).get_shape())

    def stored(name: str) -> Kind:
        return kind if len(shape(name)) == 2 else Kind.F32

    for name in order:  # sizes first, then the data, one tensor at a time
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored(name)]
        w.add_tensor_info(there(name), shape(name), np.float32, prod(shape(name)) // per_block * block_bytes, stored(name))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name in order:
        values = files[places[name]].get_tensor(name)
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        w.write_tensor_data(gguf.quants.quantize(values.float().numpy(), stored(name)))
    w.close()
    beside.rename(out)


def _add_vocabulary(w: gguf.GGUFWriter, model: dict[str, Any], config: dict[str, Any]) -> None:
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names += [f"<unused {at}>" for at in range(len(names), config["vocab_size"])]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(names)
    w.add_token_types([gguf.TokenType.NORMAL] * len(names))
    w.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    w.add_eos_token_id(config["eos_token_id"])
    w.add_add_bos_token(False)


def there(name: str) -> str:
    """llama.cpp's name of a parameter."""
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring features, transformers those half a head apart: rows of a head in llama.cpp's order."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=["BF16", "Q8_0"], default="BF16")
    options = parser.parse_args()
    write(options.folder, options.out, Kind[options.kind])
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
