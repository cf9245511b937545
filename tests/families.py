"""Tiny configs of many families, with the sizes that break the usual symmetries: odd vocabulary and intermediate size, heads x head_dim
different from the hidden size, KV heads that do not divide the ranks, windows shorter than the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf
from transformers import PreTrainedConfig

TOKENS: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 51, "num_hidden_layers": 2, "max_position_embeddings": 64, **TOKENS}
GROUPED: dict[str, Any] = {**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
EVEN: dict[str, Any] = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
PLAIN: dict[str, Any] = {**SIZES, "hidden_size": 48, "num_attention_heads": 6}
WINDOW = 4
EXPERTS: tuple[dict[str, Any], ...] = (
    {"num_local_experts": 4, "num_experts_per_tok": 2},
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 21},
)
LATENT: dict[str, Any] = {
    **PLAIN,
    "num_key_value_heads": 6,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 21,
}

MAMBA: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 32,
    "expand": 2,
    "head_dim": 8,
    "num_heads": 8,
    "state_size": 8,
    "num_hidden_layers": 2,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral": lambda: tf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen3": lambda: tf.Qwen3Config(**GROUPED),
    "gemma": lambda: tf.GemmaConfig(**GROUPED),
    "gemma2": lambda: tf.Gemma2Config(
        **WIDE, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **WIDE, query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: tf.PhiConfig(**PLAIN, partial_rotary_factor=0.5),
    "phi3": lambda: tf.Phi3Config(**EVEN),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**PLAIN, rotary_pct=0.25, use_parallel_residual=True),
    "gpt-neox-sequential": lambda: tf.GPTNeoXConfig(**PLAIN, rotary_pct=0.25, use_parallel_residual=False),
    "gptj": lambda: tf.GPTJConfig(**TOKENS, n_embd=48, n_head=6, n_layer=2, rotary_dim=4, n_positions=64, n_inner=51),
    "opt": lambda: tf.OPTConfig(
        **TOKENS,
        hidden_size=48,
        num_attention_heads=6,
        ffn_dim=51,
        num_hidden_layers=2,
        max_position_embeddings=64,
        word_embed_proj_dim=48,
    ),
    "cohere": lambda: tf.CohereConfig(**EVEN, use_qk_norm=False, logit_scale=0.25),
    "cohere-norm": lambda: tf.CohereConfig(**EVEN, use_qk_norm=True, logit_scale=0.25),
    "stablelm": lambda: tf.StableLmConfig(**EVEN, partial_rotary_factor=0.5, use_qkv_bias=True),
    "glm": lambda: tf.GlmConfig(**EVEN, head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "granite": lambda: tf.GraniteConfig(**EVEN, residual_multiplier=0.5, logits_scaling=2.0, attention_multiplier=0.3),
    "olmo": lambda: tf.OlmoConfig(**EVEN, clip_qkv=0.7),
    "stablelm-parallel": lambda: tf.StableLmConfig(**EVEN, partial_rotary_factor=0.5, use_parallel_residual=True),
    "stablelm-qk": lambda: tf.StableLmConfig(**EVEN, partial_rotary_factor=0.5, qk_layernorm=True),  # a norm for each head
    "olmo2": lambda: tf.Olmo2Config(**EVEN),
    "olmo3": lambda: tf.Olmo3Config(**EVEN, sliding_window=WINDOW),
    "olmoe": lambda: tf.OlmoeConfig(**EVEN, num_experts=4, num_experts_per_tok=2),
    "minimax-m2": lambda: tf.MiniMaxM2Config(**EVEN, head_dim=8, **EXPERTS[0]),
    "starcoder2": lambda: tf.Starcoder2Config(**EVEN),
    "bert": lambda: tf.BertConfig(**PLAIN, is_decoder=True),
    "mixtral": lambda: tf.MixtralConfig(**EVEN, **EXPERTS[0]),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(**EVEN, **EXPERTS[1], shared_expert_intermediate_size=27),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**EVEN, head_dim=8, **EXPERTS[1]),
    "deepseek-v2": lambda: tf.DeepseekV2Config(**LATENT, q_lora_rank=None),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**LATENT, q_lora_rank=16),
    "mamba2": lambda: tf.Mamba2Config(**MAMBA, n_groups=2),
    "mamba2-one-group": lambda: tf.Mamba2Config(**MAMBA, n_groups=1),
    "mamba2-four-groups": lambda: tf.Mamba2Config(**MAMBA, n_groups=4),
    "falcon-h1": lambda: tf.FalconH1Config(
        **EVEN,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        ssm_multipliers=[0.5, 2.0, 0.7, 1.5, 3.0],
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **EVEN, head_dim=8, **EXPERTS[0], sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "bloom": lambda: tf.BloomConfig(**TOKENS, hidden_size=48, n_head=6, n_layer=2),
    "mpt": lambda: tf.MptConfig(**TOKENS, d_model=48, n_heads=6, n_layers=2, max_seq_len=64),
    "falcon-7b": lambda: tf.FalconConfig(
        **TOKENS, multi_query=True, new_decoder_architecture=False, hidden_size=56, num_attention_heads=7, num_hidden_layers=2
    ),
    "falcon-rw": lambda: tf.FalconConfig(
        **TOKENS,
        alibi=True,
        multi_query=False,
        new_decoder_architecture=False,
        parallel_attn=False,
        bias=True,
        hidden_size=48,
        num_attention_heads=6,
        num_hidden_layers=2,
    ),
    "falcon-40b": lambda: tf.FalconConfig(
        **TOKENS, new_decoder_architecture=True, hidden_size=64, num_attention_heads=8, num_kv_heads=2, num_hidden_layers=2
    ),
}

RELATIVE: dict[str, Any] = {
    "vocab_size": 101,
    "decoder_start_token_id": 0,
    "d_model": 40,
    "d_kv": 8,
    "num_heads": 6,
    "d_ff": 51,
    "num_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
"""O-17: heads x d_kv is not d_model, and 6 heads on 4 ranks."""

TWO_SIDED: dict[str, Any] = {
    **TOKENS,
    "decoder_start_token_id": 2,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 51,
    "decoder_ffn_dim": 53,
}
PICTURES: dict[str, Any] = {"intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}

TRANSLATORS: dict[str, Callable[[], PreTrainedConfig]] = {
    "t5": lambda: tf.T5Config(**RELATIVE),
    "flan-t5": lambda: tf.T5Config(**RELATIVE, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": lambda: tf.MT5Config(**RELATIVE),
    "umt5": lambda: tf.UMT5Config(**RELATIVE),
    "t5gemma": lambda: tf.T5GemmaConfig(encoder={**EVEN, "head_dim": 8}, decoder={**EVEN, "head_dim": 8}, **TOKENS),
    "bart": lambda: tf.BartConfig(**TWO_SIDED, max_position_embeddings=64),
    "mbart": lambda: tf.MBartConfig(**TWO_SIDED, max_position_embeddings=64),
    "marian": lambda: tf.MarianConfig(**TWO_SIDED, max_position_embeddings=64),
    "pegasus": lambda: tf.PegasusConfig(**TWO_SIDED, max_position_embeddings=64),
    "m2m100": lambda: tf.M2M100Config(**TWO_SIDED, max_position_embeddings=64),
    "whisper": lambda: tf.WhisperConfig(**TWO_SIDED, max_source_positions=20, max_target_positions=32, num_mel_bins=8),
}
"""Encoder-decoders."""

OWN_CODE: dict[str, Callable[[], PreTrainedConfig]] = {
    "mvp": lambda: tf.MvpConfig(**TWO_SIDED, max_position_embeddings=64),
    "led": lambda: tf.LEDConfig(**TWO_SIDED, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=4),
    "fsmt": lambda: tf.FSMTConfig(**TWO_SIDED, langs=["en", "de"], src_vocab_size=101, tgt_vocab_size=101, max_position_embeddings=64),
}
"""Encoder-decoders whose attention is code of their own."""

ENCODERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: tf.BertConfig(**PLAIN),
    "bert-alone": lambda: tf.BertConfig(**PLAIN, architectures=["BertModel"]),
    "bert-classifier": lambda: tf.BertConfig(**PLAIN, architectures=["BertForSequenceClassification"]),
    "roberta": lambda: tf.RobertaConfig(**PLAIN),
    "distilbert": lambda: tf.DistilBertConfig(**TOKENS, dim=48, hidden_dim=51, n_layers=2, n_heads=6, max_position_embeddings=64),
    "electra": lambda: tf.ElectraConfig(**PLAIN, embedding_size=24),
    "albert": lambda: tf.AlbertConfig(**PLAIN, embedding_size=24),
    "modernbert": lambda: tf.ModernBertConfig(**PLAIN, local_attention=8, cls_token_id=1, sep_token_id=2),
    "t5-encoder": lambda: tf.T5Config(**RELATIVE, architectures=["T5EncoderModel"]),
    "vit": lambda: tf.ViTConfig(hidden_size=48, **PICTURES),
    "clip": lambda: tf.CLIPConfig(projection_dim=20, text_config=PLAIN, vision_config={"hidden_size": 36, **PICTURES}),
    "siglip": lambda: tf.SiglipConfig(
        text_config={**PLAIN, "projection_size": 48}, vision_config={"hidden_size": 48, **PICTURES, "num_attention_heads": 4}
    ),
}
"""O-21: of text, of pictures (3 heads), of both."""

ROTARY: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
TOWER: dict[str, Any] = {"hidden_size": 36, **PICTURES}
DEEP: dict[str, Any] = {"depth": 2, "hidden_size": 48, "num_heads": 3, "patch_size": 4}
MARKS: dict[str, Any] = {"image_token_id": 100, "video_token_id": 99, "vision_start_token_id": 98, "vision_end_token_id": 97}
LLAMA: dict[str, Any] = {"model_type": "llama", **WIDE}

SEEING: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": lambda: tf.LlavaConfig(
        text_config=LLAMA, vision_config={"model_type": "clip_vision_model", **TOWER}, image_token_id=100, image_seq_length=16
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config={**WIDE, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=98,
        eoi_token_index=99,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **WIDE},
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        image_token_index=100,
        projection_dim=45,
        hidden_size=45,
    ),
    "qwen2-vl": lambda: tf.Qwen2VLConfig(text_config={**EVEN, **ROTARY}, vision_config={**DEEP, "embed_dim": 48, "mlp_ratio": 2}, **MARKS),
    "qwen2.5-vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**EVEN, **ROTARY},
        vision_config={**DEEP, "intermediate_size": 53, "out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
        **MARKS,
    ),
    "qwen3-vl": lambda: tf.Qwen3VLConfig(
        text_config={**EVEN, "head_dim": 8, **ROTARY},
        vision_config={
            **DEEP,
            "intermediate_size": 53,
            "out_hidden_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **MARKS,
    ),
    "idefics3": lambda: tf.Idefics3Config(text_config=LLAMA, vision_config=TOWER, image_token_id=100, scale_factor=2),
    "smolvlm": lambda: tf.SmolVLMConfig(text_config=LLAMA, vision_config=TOWER, image_token_id=100, scale_factor=2),
    "internvl": lambda: tf.InternVLConfig(
        text_config={"model_type": "qwen2", **EVEN},
        vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=100,
        image_seq_length=4,
        downsample_ratio=0.5,
    ),
    "mllama": lambda: tf.MllamaConfig(
        text_config={**EVEN, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        vision_config={
            **{k: v for k, v in TOWER.items() if k != "num_attention_heads"},
            "attention_heads": 3,
            "num_global_layers": 1,
            "max_num_tiles": 2,
            "vision_output_dim": 72,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=100,
    ),
    "llava-next": lambda: tf.LlavaNextConfig(
        text_config=LLAMA, vision_config={"model_type": "clip_vision_model", **TOWER}, image_token_id=100, image_grid_pinpoints=[[16, 16]]
    ),
}
"""Of pictures and text. LLaVA-NeXT cuts pictures up by sizes that it reads itself: followed with its tokens alone."""
