"""Whether a tiny model runs at all: a forward pass on real tensors, as a whole, with whatever it is found to take."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from colrow.planning.inputs import fitting, moved
from colrow.proof.exercise import call
from colrow.proof.whole import build


def runs(config: PreTrainedConfig, length: int = 7) -> str:
    """ "", or why it does not run."""
    try:
        with torch.no_grad():
            model = build(config, torch.float32)
            call(model, moved(fitting(model, 2, length), torch.device("cpu"), model))
    except Exception as error:  # a model may refuse a size with an error of any kind
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return ""
