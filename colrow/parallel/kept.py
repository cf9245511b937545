"""Kept: linear layers whose weights are kept otherwise than torch multiplies by them (int8.py, compact.py). For inference alone.

Programs multiply by what is kept; the modules, which read prompts, see a `weight` that is made anew each time it is asked for, unless
kernels/many.h takes what is kept. So does whoever saves the model; nothing can be loaded into it. Not here: the forms themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .prompt_products import Linear


def layers(model: nn.Module) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each nn.Linear and Conv1D that has a weight, with its weight by rows of output features."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and "weight" in module._parameters and module.weight.numel():
            weight = module.weight.detach()
            yield module, weight.t() if isinstance(module, Conv1D) else weight


@torch.inference_mode(False)
def keep(module: Any, weight: torch.Tensor, values: torch.Tensor, beside: torch.Tensor, op: str) -> None:
    """From now on the layer has `values` and `beside` instead of its `weight` [rows, width]. torch.ops.colrow's `op` makes it of (values,
    beside, rows, width, dtype): an op of its own, so that whoever records a model finds what is behind the weight."""
    module.kept_like, module.kept_by = (*weight.shape, weight.dtype), op
    module.register_buffer("kept", values, persistent=False)
    module.register_buffer("beside", beside, persistent=False)
    del module._parameters["weight"]
    kind: Any = Linear if type(module) is nn.Linear else type(module)
    module.__class__ = _kept_class(kind)


def nbytes(model: nn.Module) -> int:
    """What all layers keep, in bytes; what several share counts once."""
    kept = {id(b): b for m in model.modules() for name, b in m._buffers.items() if name in ("kept", "beside") and hasattr(m, "kept_by")}
    return sum(b.nbytes for b in kept.values() if b is not None)


@functools.cache
def _kept_class(cls: Any) -> Any:
    """The layer's class with a `weight` that is computed."""

    def weight(self: Any) -> torch.Tensor:
        by_rows: torch.Tensor = getattr(torch.ops.colrow, self.kept_by)(self.kept, self.beside, *self.kept_like)
        return by_rows.t() if isinstance(self, Conv1D) else by_rows

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """The last token of a prompt is a view whose strides make torch copy a weight that is no parameter before it multiplies."""
        return cls.forward(self, input.flatten(0, -2).view(input.shape))

    def save(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A model that is saved has all its weights."""
        cls._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def load(self: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refused: what is kept would stay as it is. The last of `rest` are the errors, which torch raises together."""
        rest[-1].append(f"{prefix}weight is kept in another form, for inference alone: load into a model that colrow.load gave")

    body = {"weight": property(weight), "forward": forward, "_save_to_state_dict": save, "_load_from_state_dict": load}
    return type(f"Kept{cls.__name__}", (cls,), body)
