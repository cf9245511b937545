"""The whole model: transformers' own, built from a config, untouched by colrow. It is the reference for everything."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """In eval mode, on the current default device, with transformers' eager attention: plain products and a softmax, nothing fused."""
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
