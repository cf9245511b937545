"""Tail: the layers after a model's last attention. A prompt's next token needs of them what they make of the last token alone: of a model
of 22 blocks they are 4 % of a prompt's products.

Which layers these are is heard while a prompt goes through the model, and a second pass with the last token alone must leave each score,
key and value as it is, bit for bit; else they stay as they are. A layer's result is then one token where it was all of them, and what is
added to it counts for the last one only. Layers that other blocks use too are none.

Not here: scores of all tokens, few tokens, other dtypes than bfloat16, processors without `many` (parallel/prompt_products.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..errors import RankError
from ..kernels import many
from ..parallel import prompt_attention
from .forward import Forward
from .stopping import context_limit

TOKENS, ROWS = many.LEAST, 2  # of the prompts that are tried


def find(model: Any, group: Group) -> int:
    """Marks the layers; returns how many there are. A collective: the model runs."""
    for module in model.modules():
        module.colrow_tail = False
    if not all(gather_objects(_able(model, group), group, "engine.tail")):  # ranks of several hosts may have different processors
        return 0
    ids = torch.tensor([[7 * at + 3 + row for at in range(TOKENS)] for row in range(ROWS)]) % model.config.get_text_config().vocab_size
    layers, expected = _heard(model, ids)
    for layer in layers:
        layer.colrow_tail = True  # type: ignore[assignment]
    same = not layers or _same(_results(model, ids), expected)
    if all(gather_objects(same, group, "engine.tail")):
        return len(layers)
    for layer in layers:
        layer.colrow_tail = False  # type: ignore[assignment]
    return 0


def _able(model: Any, group: Group) -> bool:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    context = context_limit(model.config)
    cpu = group.device.type == "cpu" and dtypes == {torch.bfloat16} and many.helps()
    return cpu and (context is None or context >= TOKENS) and not model.config.is_encoder_decoder


def _heard(model: Any, ids: torch.Tensor) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """The linear layers that get all tokens after the last attention, each for the only time; and what the model gives."""
    heard: list[nn.Module | None] = []

    def hear(layer: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], torch.Tensor) and given[0].dim() > 1 and given[0].shape[-2] == TOKENS:
            heard.append(layer)

    hooks = [x.register_forward_pre_hook(hear) for x in model.modules() if isinstance(x, nn.Linear)]
    try:
        with prompt_attention.listening(lambda: heard.append(None)):
            results = _results(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    if None not in heard:
        return [], results
    times, after = Counter(map(id, heard)), len(heard) - heard[::-1].index(None)
    return [
        layer for layer in heard[after:] if layer is not None and times[id(layer)] == 1 and getattr(layer, "colrow_prompts", False)
    ], results


def _results(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Scores, keys and values; nothing where the model's code fails, since it may want all tokens somewhere."""
    try:
        scores, past = Forward(model)(ids, None, None)
        return [scores, *(x for layer in past.layers for x in (layer.keys, layer.values))]
    except (RankError, MemoryError):  # this rank's own trouble: who waits for it in the model should hear of that
        raise
    except Exception:
        return []


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
