"""Continuing: whether several tokens that go on from a cache come out as they would in one pass over all that came before.

Prompts are read in pieces (scheduler.py), and a conversation goes on from what its last turn left (generate.Memory). Two kinds of models
cannot do that, in transformers' own code: recurrent states begin again with zeros where more than one token comes (Mamba's), and rotary
frequencies that depend on the length of the sequence so far (longrope, dynamic) leave keys behind that were turned by others. Such a model
gets a prompt whole. What it then decodes, token by token, is what transformers' `generate` decodes. Some models (Phi-3) tell `generate` to
drop the cache at the length where their frequencies change, and to compute all tokens again; so `begins_anew` asks them where that is.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from transformers import DynamicCache
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


def begins_anew(forward: Forward, context: int | None) -> int | None:
    """The number of tokens at which `generate` drops the cache of all before the last and computes them again; None where it never does.
    The model's own preparation for `generate` is asked, about a cache of few positions before so many tokens. No collective: it answers
    by its config. What it would drop at a length, it would drop at any greater one."""
    past = DynamicCache()
    past.update(torch.zeros(1, 1, SEEN, 1), torch.zeros(1, 1, SEEN, 1), 0)
    name, device = str(forward.cache_arg), next(forward.model.parameters()).device

    def keeps(tokens: int) -> bool:
        ids = torch.zeros(1, 1, dtype=torch.long, device=device).expand(1, tokens)
        return forward.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **{name: past}).get(name) is not None

    try:
        if context is None or context <= SEEN or keeps(context) or not keeps(SEEN + 1):
            return None
    except Exception:  # it prepares nothing, or wants to be told more
        return None
    return bisect_left(range(context), True, SEEN + 1, key=lambda tokens: not keeps(tokens))


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
