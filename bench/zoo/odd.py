"""Fields that cannot be guessed from a config class's defaults by rules about names: the few exceptions, field by field ("a.b" for nested).

Each is here because the class's own defaults do not build or run when they are made small (or at all), or leave out a kind of layer.
"""

from __future__ import annotations

from typing import Any

MLA: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 9}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = ["sliding_attention", "full_attention"]
SHARED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": 2}

DOTS3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 9,
    "head_dim": 40,  # of the layers with a window, whose heads are the two parts below
    "per_layer_config": {"2": {"qk_nope_head_dim": 32, "num_attention_heads": 9, "num_key_value_heads": 9, "kv_lora_rank": 8}},
}

EMU3 = {"<image>": 100, "<|extra_200|>": 99, "<|visual token 000000|>": 98}
MUSICGEN: dict[str, Any] = {  # the class that checkpoints name; the auto class knows one for the decoder alone
    "audio_encoder.num_filters": 4,
    "audio_encoder.upsampling_ratios": [2, 2],
    "audio_encoder.codebook_size": 16,
    "audio_encoder.codebook_dim": 72,
    "decoder.pad_token_id": 101,  # behind the vocabulary
    "decoder.bos_token_id": 101,
}
NEMO_TOWERS = ("audio_config.asr_config", "audio_config.diarization_config.audio_config", "word_timestamp_config")
QWEN4: dict[str, Any] = {  # the class leaves open what its attention looks positions up with, and has tables of n-grams in no layer
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "number_of_conv_states": 3,
    "ple_embed_dim": 12,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 1,
    "eos_token_id": 100,
}

STAGES: dict[str, Any] = {"out_features": ["stage2"], "out_indices": [2]}

FIELDS: dict[str, dict[str, Any]] = {
    "beit": STAGES,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_config.hidden_size_global": 72,
        "decoder_config.hidden_size_global": 72,
        "encoder_hash_byte_group_vocab": 53,
        "local_attention_window_len": 4,
        "num_hidden_layers": 2,  # transformers makes its cache of so many layers, and the class has no such field
    },
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
    "dory": {  # numbers of layers that add up
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots3_note": {
        **{f"text_config.{field}": value for field, value in DOTS3.items()},
        "vision_config.num_hidden_layers": 2,
        "vision_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.adapter_in_dim": 72,
        "vision_config.adapter_out_dim": 72,
        "audio_config.num_hidden_layers": 2,
        "audio_config.num_key_value_heads": 9,
        "audio_config.adapter_input_size": 72,
        "audio_config.adapter_out_dim": 72,
    },
    "dots3_note_text": DOTS3,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 101, "mask_token_id": 3, "pad_token_id": 0},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "intermediate_size": 51},
    "emu3": {  # which tokens are pictures' says a tokenizer's table; its encoder of pictures is a pyramid of convolutions
        "vocabulary_map": EMU3,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.num_res_blocks": 1,
        "vq_config.attn_resolutions": [1],
        "vq_config.hidden_size": 32,
        "vq_config.num_attention_heads": 1,
        "vq_config.codebook_size": 32,
    },
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
    "musicgen": {"architectures": ["MusicgenForConditionalGeneration"], **MUSICGEN},
    "musicgen_melody": {"architectures": ["MusicgenMelodyForConditionalGeneration"], **MUSICGEN},
    "mllama": {"vision_config.intermediate_layers_indices": [0], "vision_config.vision_output_dim": 72},
    "nemo_speechlm": {
        "audio_config.diarization_config.head_config.audio_hidden_size": 72,
        **dict.fromkeys((f"{tower}.num_key_value_heads" for tower in NEMO_TOWERS), 9),
        "text_config.layers_block_type": ["linear_attention", "moe", "full_attention"],  # a list without a number of layers beside it
    },
    "mobilebert": {"true_hidden_size": 72, "intra_bottleneck_size": 72},
    "qwen4_exp": {**{f"text_config.{field}": value for field, value in QWEN4.items()}, "text_config.eos_token_id": 96},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 72},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 72, "hidden_size": 72},
    "vibevoice_asr": {
        f"{tower}_tokenizer_encoder_config.{field}": value
        for tower in ("acoustic", "semantic")
        for field, value in {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}.items()
    },
    "voxtral": {"audio_token_id": 100, "audio_config.intermediate_size": 288},
    "xlstm": {"num_heads": 8, "hidden_size": 128, "embedding_dim": 128, "num_blocks": 2},  # its cache takes multiples of 128 alone
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
    "emu3": {"vocabulary_map": EMU3},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gemma3": {"vision_config.image_size": 896, "vision_config.patch_size": 14},
    "granitemoehybrid": {"num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 5, "full_attention", *["linear_attention"] * 2]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "musicgen": {"architectures": ["MusicgenForConditionalGeneration"]},
    "musicgen_melody": {"architectures": ["MusicgenMelodyForConditionalGeneration"]},
    "nemo_speechlm": {  # the first layers of each part
        "text_config.layers_block_type": ["linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention"],
        **dict.fromkeys((f"{tower}.num_hidden_layers" for tower in NEMO_TOWERS[:2]), 8),
    },
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_asr": {"audio_config.output_dim": 2048},
    "qwen3_5": {"vision_config.out_hidden_size": 4096},
    "qwen3_5_moe": {"vision_config.out_hidden_size": 2048},
    "vibevoice_asr": {
        f"{tower}_tokenizer_encoder_config.{field}": value
        for tower in ("acoustic", "semantic")
        for field, value in {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}.items()
    },
    "voxtral": {"audio_token_id": 24},
    "xlstm": {"num_hidden_layers": 8, "num_blocks": 8},  # two names of one number
    "xmod": {"default_language": "en_XX"},
}
"""What a config class leaves open, or sets so that its parts do not fit together, at the sizes of published models."""

BROKEN: dict[str, str] = {
    "gemma3n": "its picture tower is timm's, for which transformers asks for pillow and timm (and timm for torchvision): not installed "
    "where this page is made; its text model is gemma3n_text",
    "gemma4_assistant": "its own check refuses the class's defaults (hidden_size_per_layer_input must be 0); it drafts as the next one",
    "gemma4_unified_assistant": "it drafts from the keys and values of another model, `shared_kv_states`, and refuses to run without them",
    "llama4": "with a picture or without, it reads `image_outputs` of its text model, and in transformers 5.24 there are none; its "
    "text model is llama4_text",
    "reformer": "its backward pass asserts training mode, in which dropout makes each run another; colrow compares in eval mode",
}
"""What does not run as a whole in transformers itself, so that there is nothing to compare a split with: why, in words. Counts only where
the row failed."""
