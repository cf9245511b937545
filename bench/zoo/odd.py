"""Fields that cannot be guessed from a config class's defaults by rules about names: the few exceptions, field by field ("a.b" for nested).

Each is here because the class's own defaults do not build or run when they are made small (or at all), or leave out a kind of layer.
"""

from __future__ import annotations

from typing import Any

MLA: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 9}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = ["sliding_attention", "full_attention"]
SHARED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": 2}

STAGES: dict[str, Any] = {"out_features": ["stage2"], "out_indices": [2]}

FIELDS: dict[str, dict[str, Any]] = {
    "beit": STAGES,
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 12, "n_embd": 96, "rotary_dim": 4},  # heads lie in four blocks
    "cohere_compass_text": {"num_hidden_layers": 2, "layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, ROPE)},
    "dbrx": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 3,
        "attn_config.clip_qkv": 8.0,
        "ffn_config.moe_num_experts": 4,
        "ffn_config.moe_top_k": 2,
    },
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "o_groups": 3},
    "dinov2": STAGES,
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 101, "mask_token_id": 3, "pad_token_id": 0},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "intermediate_size": 51},
    "glmasr": {"audio_config.intermediate_size": 288},  # features of four frames are regrouped by it
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "led": {"attention_window": 14, "max_encoder_position_embeddings": 64},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "llama4": {
        "vision_config.hidden_size": 72,
        "vision_config.num_attention_heads": 9,
        "vision_config.intermediate_size": 288,  # of four patches together
        "vision_config.projector_input_dim": 28,
        "vision_config.projector_output_dim": 28,
        "vision_config.vision_output_dim": 28,
    },
    "longformer": {"attention_window": 4},
    "mllama": {"vision_config.intermediate_layers_indices": [0], "vision_config.vision_output_dim": 72},
    "nemo_speechlm": {"head_config.audio_hidden_size": 72},
    "mobilebert": {"true_hidden_size": 72, "intra_bottleneck_size": 72},
    "qwen4_exp_text": {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 72},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 72, "hidden_size": 72},
    "voxtral": {"audio_token_id": 100, "audio_config.intermediate_size": 288},
    "xlstm": {"num_heads": 8, "hidden_size": 64, "embedding_dim": 64, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 144,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "attention_hidden_size": 144,
        "attention_head_dim": 16,
        "n_mamba_heads": 9,
        "mamba_headdim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
}

REAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(KINDS, ROPE)},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gemma3": {"vision_config.image_size": 896, "vision_config.patch_size": 14},
    "granitemoehybrid": {"num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 5, "full_attention", *["linear_attention"] * 2]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_asr": {"audio_config.output_dim": 2048},
    "qwen3_5": {"vision_config.out_hidden_size": 4096},
    "qwen3_5_moe": {"vision_config.out_hidden_size": 2048},
    "voxtral": {"audio_token_id": 24},
    "xmod": {"default_language": "en_XX"},
}
"""What a config class leaves open, or sets so that its parts do not fit together, at the sizes of published models."""

BROKEN: dict[str, str] = {
    "cpmant": "in transformers it decodes with its cache only when it is given the whole text again at each step",
    "gemma3n": "its picture tower comes from the packages timm and pillow, which are not installed here; its text model is gemma3n_text",
    "gemma4_assistant": "the class's own defaults are refused by its own check; it drafts from another model's keys and values, not alone",
    "gemma4_unified_assistant": "it drafts from another model's keys and values, which it must be given; alone it takes no tokens",
    "llama4": "in transformers 5.24 its forward reads outputs of pictures that its text model does not give; that is llama4_text",
    "musicgen": "transformers' auto class hands its decoder the config of the whole, which lacks what the decoder reads",
    "musicgen_melody": "transformers' auto class hands its decoder the config of the whole, which lacks what the decoder reads",
    "reformer": "in transformers its backward pass refuses a model in eval mode, where alone two runs can be compared",
    "xlstm": "in transformers its cache has the shape of other heads than its layers, so that it decodes in no tiny size that was tried",
}
"""What does not run as a whole in transformers itself, so that there is nothing to compare a split with: why, in words. Counts only where
the row failed."""
