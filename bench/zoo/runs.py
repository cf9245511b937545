"""Whether a tiny model runs at all: a forward pass on real tensors, as a whole, the way transformers' own tests would call it."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from colrow.proof.whole import build


def runs(config: PreTrainedConfig, length: int = 7) -> str:
    """ "", or why it does not run."""
    try:
        with torch.no_grad():
            model = build(config, torch.float32)
            ids = torch.zeros(2, length, dtype=torch.long)
            more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
            if model.main_input_name == "input_ids":
                model(input_ids=ids, **more)
            else:
                return f"takes {model.main_input_name}"
    except Exception as error:  # a model may refuse a size with an error of any kind
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return ""
