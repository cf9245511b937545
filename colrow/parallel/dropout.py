"""Dropout in a split model is refused in training, until the ranks' random numbers are told apart.

Masks on whole activations must be the same on all ranks, masks on slices (attention heads) must differ. Each rank drawing from its own
generator gets the first wrong, one seed for all the second; either way training goes on and looks fine.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError
from .state import State

RATES = ("attention_dropout", "dropout", "activation_dropout")  # plain numbers that transformers' modules pass to functional dropout


def install(model: nn.Module, state: State) -> None:
    """Checked at each training-mode forward of the model: rates are often set after building."""
    if state.group.size == 1:
        return

    def before(module: nn.Module, _: Any) -> None:
        if module.training and (found := active(module)):
            raise UserError("dropout in a split model would differ between ranks", found, "dropout rates of 0, or model.eval()")

    model.register_forward_pre_hook(before)


def active(model: nn.Module) -> str | None:
    """The first module in training mode that drops something, with its rate."""
    for name, module in model.named_modules():
        rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else [getattr(module, key, 0) for key in RATES]
        for rate in rates:
            if module.training and isinstance(rate, float) and rate > 0:
                return f"{name} with {rate}"
    return None
