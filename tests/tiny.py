"""Small models with odd sizes and noise in every parameter: what every equality test starts from.

Fresh transformers models have zero biases and unit norms, which hides most bugs of tensor parallelism (a bias added once per rank, a norm
weight cut wrongly). `whole` therefore overwrites every parameter: weights N(0, 0.05), biases N(0, 0.5), norm scales 1 + N(0, 0.3).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

TOKENS: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    **TOKENS,
}

FAMILIES = ("llama", "llama-tied", "llama-bias", "qwen2", "gpt2")


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a family, with changes. Head sizes times heads differ from the hidden size only where a test asks for it."""
    match family:
        case "llama":
            return LlamaConfig(**{**GROUPED, **changes})
        case "llama-tied":
            return LlamaConfig(**{**GROUPED, "tie_word_embeddings": True, **changes})
        case "llama-bias":
            return LlamaConfig(**{**GROUPED, "attention_bias": True, "mlp_bias": True, **changes})
        case "qwen2":
            return Qwen2Config(**{**GROUPED, **changes})
        case "gpt2":
            sizes = {"n_embd": 54, "n_head": 9, "n_layer": 2, "n_inner": 51, "n_positions": 64}
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return GPT2Config(**{**TOKENS, **sizes, **dropout, **changes})
    raise KeyError(family)


def whole(cfg: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0, attention: str | None = "eager") -> PreTrainedModel:
    """The unsplit model in eval mode with noise everywhere, the same for the same seed whatever the dtype."""
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation=attention, dtype=torch.float32)
    add_noise(model, seed)
    return model.to(dtype).eval()


def add_noise(model: torch.nn.Module, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=draw)
            if name.endswith("bias"):
                p.copy_(0.5 * noise)
            elif p.dim() == 1:
                p.copy_(1 + 0.3 * noise)
            else:
                p.copy_(0.05 * noise)


def ids(cfg: PreTrainedConfig, batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    """Random token ids that include 0 and the last id, so that both ends of a cut vocabulary are looked up."""
    draw = torch.Generator().manual_seed(seed)
    out = torch.randint(0, cfg.vocab_size, (batch, length), generator=draw)
    out[0, 0], out[0, 1] = 0, cfg.vocab_size - 1
    return out
