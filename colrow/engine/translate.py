"""Encoder-decoders: the prompt goes into the encoder, once; what is generated is the decoder's own sequence.

`Translate(model, prompts)` is to such a model what forward.Forward is to a causal one, for these prompts. `starts` are what the
decoder begins with, which the model's generation config names. Not here: models whose encoder takes no tokens (Whisper); a first token that
the decoder is made to say (rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import UserError
from ..planning.inputs import encoded
from .forward import Forward, local_logits
from .request import Request


class Translate(Forward):
    """`Translate(model, prompts)(ids, None, past)` -> (last logits [rows, columns of this rank], past)."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__(model)
        ids, mask = right_pad(prompts)
        if model.dtype is torch.float64:  # some multiply the mask by its lowest number: in float32, 0 times that is NaN (ProphetNet)
            mask = mask.double()
        self._source, self._mask = ids.to(device), mask.to(device)
        self._encoded: Any = None
        self.starts = [start_tokens(model) for _ in prompts]

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None, past: Any, every: bool = False) -> tuple[torch.Tensor, Any]:
        """`ids` [rows, new tokens] of the decoder; its rows need no mask, they are as long as each other."""
        out = self._decoded(ids, {} if past is None else {str(self.cache_arg): past})
        return (out.logits if every else out.logits[:, -1]), self._past(out)

    def at(self, ids: torch.Tensor, positions: torch.Tensor, past: Any) -> torch.Tensor:
        """As Forward's, of a step that is recorded: positions come from the cache, and a mask, which nobody looks at, keeps those models
        that would make one from counting the positions."""
        return self._decoded(ids, {str(self.cache_arg): past, "decoder_attention_mask": torch.ones_like(ids)}).logits[:, -1]

    def _decoded(self, ids: torch.Tensor, more: dict[str, Any]) -> Any:
        with local_logits(self.model):
            if self._encoded is None:
                self._encoded = encoded(self.model, {"input_ids": self._source, "attention_mask": self._mask})
            more["encoder_outputs"] = self._encoded
            return self.model(attention_mask=self._mask, decoder_input_ids=ids, use_cache=True, **more)


def taken_apart(model: Any, request: Request) -> Request:
    """A request as it came, whose `ids` are the whole prompt, as one for this model: an encoder reads that."""
    if not model.config.is_encoder_decoder:
        return request
    return replace(request, ids=tuple(start_tokens(model)), source=request.ids)


def start_tokens(model: Any) -> list[int]:
    """The token that the decoder starts with. UserError where none is named."""
    sources = (getattr(model, "generation_config", None), model.config)
    found = (getattr(source, name, None) for name in ("decoder_start_token_id", "bos_token_id") for source in sources)
    start = next((token for token in found if isinstance(token, int)), None)
    if start is None:
        raise UserError("nothing says which token the decoder starts with", type(model).__name__, "decoder_start_token_id in config.json")
    return [start]


def right_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [rows, longest]. Padding is on the right, so that an encoder's positions count from the first token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts])
    return ids, torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in prompts])
