"""Tied weights that the files contradict.

A config may tie the head to the embedding while the files hold a head of its own. transformers then compares the two: equal ones stay tied,
different ones do not, with a warning. Here the same question is answered before the model is planned, by the bytes in the files, so that
plan, gate and load all see the model that is really there.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from .source import Source

log = logging.getLogger(__name__)
STEP_BYTES = 8 << 20
AUTOS: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)


def as_stored(config: PreTrainedConfig, source: Source) -> PreTrainedConfig:
    """The config, untied where the files hold two different tensors for a tied pair."""
    if not getattr(config, "tie_word_embeddings", False):
        return config
    found: Any = next((c for c in (auto._model_mapping.get(type(config), None) for auto in AUTOS) if c), None)
    model = found[0] if isinstance(found, tuple) else found
    pairs = getattr(model, "_tied_weights_keys", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    for target, origin in pairs.items():
        one, other = _stored(target, prefix, source), _stored(origin, prefix, source)
        if one and other and not same(source, one, other):
            log.warning(
                "the config ties %s and %s, but the files hold different values: they are not tied (as in transformers)", one, other
            )
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
            return config
    return config


def same(source: Source, one: str, other: str) -> bool:
    """Whether two stored tensors have equal values; read piece by piece, up to the first difference."""
    a, b = source.tensors[one], source.tensors[other]
    if a.shape != b.shape or a.dtype is None or b.dtype is None:
        return False
    rows = a.shape[0]
    step = max(1, STEP_BYTES * rows // max(1, a.nbytes))
    ranges = [((at, min(at + step, rows)),) for at in range(0, rows, step)]
    wide = torch.promote_types(a.dtype, b.dtype)
    return all(torch.equal(source.read(one, 0, r, wide), source.read(other, 0, r, wide)) for r in ranges)


def _stored(name: str, prefix: str, source: Source) -> str | None:
    """The key of a parameter, whether or not the files write the base model's prefix."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((n for n in candidates if n in source.tensors), None)
