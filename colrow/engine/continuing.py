"""Continuing: whether several tokens that go on from a cache come out as they would in one pass over all that came before.

Prompts are read in pieces (scheduler.py), and a conversation goes on from what its last turn left (generate.Memory). Two kinds of models
cannot do that, in transformers' own code: recurrent states begin again with zeros where more than one token comes (Mamba's), and rotary
frequencies that depend on the length of the sequence so far (longrope, dynamic) leave keys behind that were turned by others. Such a model
gets a prompt whole. What it then decodes, token by token, is what transformers' `generate` decodes, but for one thing: of Phi-3 `generate`
computes the keys again at the length where its frequencies change.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ..comm.collectives import gather_objects
from ..comm.group import Group
from .forward import Forward

SEEN = 3  # tokens of the trial


def continues(forward: Forward, group: Group, context: int | None) -> bool:
    """The same on every rank. A collective: the model runs."""
    if forward.model.config.is_encoder_decoder:  # an encoder reads its prompt whole
        return True
    phase, group.counters.phase = group.counters.phase, "prepare"
    ids = torch.arange(1, SEEN + 1, device=group.device)[None] % forward.model.config.get_text_config().vocab_size
    mine = _keeps_positions(forward, ids) and _keeps_keys(forward, ids, context or 0)
    group.counters.phase = phase
    return all(gather_objects(mine, group, "engine.continuing"))


def _keeps_positions(forward: Forward, ids: torch.Tensor) -> bool:
    """Whether the cache is keys and values of positions, and in no layer a state that stands for all of them."""
    past = forward(ids, None, None)[1]
    layers = getattr(past, "layers", None)  # a cache of two caches has none (BLT's)
    if not isinstance(past, Cache) or not layers:
        return False
    return not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def _keeps_keys(forward: Forward, ids: torch.Tensor, context: int) -> bool:
    """Whether keys are the same with a last token that is as far away as the model goes. Of the two passes the far one comes first, since
    frequencies that have grown shrink again only with a short sequence."""
    if not forward.takes_positions or context <= SEEN:
        return True
    near = torch.arange(SEEN, device=ids.device)[None]
    far = near.clone()
    far[0, -1] = context - 1
    a, b = (_first_keys(forward, ids, positions) for positions in (far, near))
    return torch.equal(a, b)


def _first_keys(forward: Forward, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of all tokens but the last, in the first layer that has them."""
    past: Any = forward.begun(ids, positions)
    return next(layer.keys for layer in past.layers if layer.is_initialized)[:, :, :-1].clone()
