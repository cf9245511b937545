"""Parameters that no file holds since the model computes them: tables of sinusoidal positions (Marian).

transformers leaves them out when it saves a model and says so in the class (`_keys_to_ignore_on_save`, `_keys_to_ignore_on_load_missing`);
when it loads one, the model's own `_init_weights` makes them. Here the same, whole, on every rank, which then keeps its piece. What an
initializer draws at random, or leaves alone, is not such a parameter: it runs over two different fillings and must give the same twice.
Not here: buffers (load.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..planning import models


def left_out(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of `names` that the model's class says may be missing in files."""
    patterns = [*(model._keys_to_ignore_on_save or ()), *(model._keys_to_ignore_on_load_missing or ())]
    found = re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
    return [name for name in names if found is not None and found.search(name)]


def computed(config: PreTrainedConfig, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The values, whole, in float32, of those parameters of a model of this config that its initializers compute."""
    wanted = list(names)
    if not wanted:
        return {}
    with torch.device("meta"):
        model = models.build(config, dtype=torch.float32)
    out: dict[str, torch.Tensor] = {}
    state = torch.get_rng_state()
    for name in wanted:
        path, _, leaf = name.rpartition(".")
        module, owner = model.get_submodule(path), _owner(model, path)
        first, second = (_filled(owner, module, leaf, value) for value in (0.0, 1.0))
        if torch.equal(first, second):
            out[name] = first
    torch.set_rng_state(state)
    return out


def _owner(model: nn.Module, path: str) -> PreTrainedModel:
    """The nearest transformers model around a module."""
    parts = path.split(".")
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    return next(module for module in around if isinstance(module, PreTrainedModel))


def _filled(owner: PreTrainedModel, module: nn.Module, leaf: str, value: float) -> torch.Tensor:
    """The module's parameter after its initializer found it full of `value`; its other parameters stay on meta."""
    old = module._parameters[leaf]
    with models.BUILDING, torch.no_grad():
        filled = module._parameters[leaf] = nn.Parameter(torch.full(module.get_parameter(leaf).shape, value), requires_grad=False)
        try:
            owner._init_weights(module)
        finally:
            module._parameters[leaf] = old
    return filled.detach()
