"""Shapes of well-known models, so that they can be planned offline: `config("llama-3-70b")`.

Numbers of the published config.json files, nothing else: no weights, no tokenizer, and no part in how a model is split (that is derived
from its ops, whatever its name). A directory of the same name is read instead where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    """`sizes` in the order of _SIZES."""
    return {"model_type": "llama", **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": False, **more}


def _qwen2(*sizes: int, **more: Any) -> dict[str, Any]:
    return _llama(*sizes) | {"model_type": "qwen2"} | more


def _qwen3(*sizes: int) -> dict[str, Any]:
    return _llama(*sizes) | {"model_type": "qwen3", "head_dim": 128}


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = _llama(hidden, 4 * hidden, layers, heads, 4, 151936, 40960)
    experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8}
    return sizes | {"model_type": "qwen3_moe", "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": []} | experts


def _mixtral(*sizes: int) -> dict[str, Any]:
    return _llama(*sizes) | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_TIED = {"tie_word_embeddings": True}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=5e5),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=5e5),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256, 131072, rope_theta=5e5),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **_TIED),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, 32768, **_TIED),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, 32768),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064, 32768),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, 151936, 40960),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, 151936, 40960),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 8, 32000, 32768),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 8, 32000, 65536),
    "deepseek-v3": _llama(7168, 18432, 61, 128, 128, 129280, 163840)
    | {"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "q_lora_rank": 1536}
    | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, **_LATENT},
    "deepseek-v2-lite": _llama(2048, 10944, 27, 16, 16, 102400, 163840)
    | {"model_type": "deepseek_v2", "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": None}
    | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "greedy", **_LATENT},
}


def known(name: str) -> bool:
    return name.lower() in SHAPES


def config(name: str, dtype: str = "bfloat16") -> PreTrainedConfig:
    """The transformers config of a known shape. UserError for an unknown name."""
    if not known(name):
        raise UserError("no model shape of this name", name, ", ".join(SHAPES))
    from transformers import AutoConfig  # takes seconds, and known() is asked before

    shape = dict(SHAPES[name.lower()])
    return AutoConfig.for_model(shape.pop("model_type"), **shape, dtype=dtype)
