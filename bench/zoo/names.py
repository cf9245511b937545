"""Which architectures are in the zoo: all that transformers' auto classes build a language model of, and the encoders people know best."""

from __future__ import annotations

from transformers.models.auto import modeling_auto as auto

ENCODERS = ("vit", "deit", "beit", "dinov2", "clip_text_model", "clip_vision_model", "siglip_vision_model")

GROUPS = {
    "decoder": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING,
}


def architectures() -> dict[str, str]:
    """model type -> group, each once, in the order of the groups."""
    found: dict[str, str] = {}
    for group, mapping in GROUPS.items():
        for name in sorted(mapping._model_mapping):
            found.setdefault(name, group)
    found.update((name, "vision") for name in ENCODERS)
    return found
