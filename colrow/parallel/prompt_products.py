"""Products of a prompt in bfloat16 on a CPU, by kernels/many.h where it helps: faster than torch's there, and a token's results are the
same bits whatever other tokens there are.

Layers look at the mark that `install` leaves, as attention does (prompt_attention.py). Not here: single tokens, other dtypes and devices,
gradients, more threads than `many` helps; they are torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels import many


class Linear(nn.Linear):
    """nn.Linear, a prompt's products apart."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(self, input, self.bias)


def install(model: nn.Module) -> None:
    """The model's linear layers may make prompts' products by `many` from now on, those that are not cut too."""
    for module in model.modules():
        module.colrow_prompts = True  # type: ignore[assignment]
        if type(module) is nn.Linear:
            module.__class__ = Linear


class _Now(threading.local):
    last = False


_now = _Now()


@contextmanager
def last_alone() -> Iterator[None]:
    """Within, layers that are marked `colrow_tail` compute the last token's results only: [..., 1, features] of [..., tokens, features]."""
    before, _now.last = _now.last, True
    try:
        yield
    finally:
        _now.last = before


@torch.library.custom_op("colrow::few_product", mutates_args=())
def few_product(x: torch.Tensor, values: torch.Tensor, beside: torch.Tensor, rows: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Of a few tokens with a weight that is kept otherwise (kept.py), which would take longer to be made anew than to be multiplied by. An
    op of its own, so that whoever records a model finds it."""
    made = many.product(x, values, beside, rows, bias, few=True)
    assert made is not None  # whoever calls it has asked `many.does`
    return made


def linear(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + bias, by a layer with nn.Linear's weight."""
    last = _now.last and getattr(layer, "colrow_tail", False)
    x = x[..., -1:, :] if last else x
    if x.dtype is torch.bfloat16 and getattr(layer, "colrow_prompts", False) and not torch.is_grad_enabled():
        kept = layer._buffers.get("kept")
        weight, beside = (layer.weight, None) if kept is None else (kept, layer.beside)
        few = 0 < x.numel() < many.LEAST * x.shape[-1]
        if few and kept is not None and many.does(x, kept, layer.out_features, bias):
            return few_product(x, kept, layer.beside, layer.out_features, bias)
        made = many.product(x, weight, beside, layer.out_features, bias, few=last)
        if made is not None:
            return made
    return F.linear(x, layer.weight, bias)
