"""What would train wrongly without a word is refused, until it is done right.

* Dropout. Masks on whole activations must be the same on all ranks, masks on slices (attention heads) must differ. Each rank drawing from
  its own generator gets the first wrong, one seed for all the second; either way training goes on and looks fine.
* Parameters that were added after the split (adapters). The plan does not know them: beside a cut layer their gradients are parts on each
  rank, which nobody would sum, and each rank would have drawn other first values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .state import State

RATES = ("attention_dropout", "dropout", "activation_dropout")  # plain numbers that transformers' modules pass to functional dropout


def install(model: nn.Module, state: State) -> None:
    """Asked at each forward pass of the model that may be trained on: rates are set, and adapters added, after building."""
    if state.group.size == 1:
        return

    known = {name for name, _ in state.plan.names()}

    def before(module: nn.Module, _: Any) -> None:
        if module.training and (found := dropping(module)):
            raise UserError("dropout in a split model would differ between ranks", found, "dropout rates of 0, or model.eval()")
        if not torch.is_grad_enabled():
            return
        if added := [name for name, p in module.named_parameters() if p.requires_grad and name not in known]:
            what = "a parameter was added after the split: its gradient may be a part on each rank"
            raise UserError(what, added[0], "adapters that are merged or frozen")

    model.register_forward_pre_hook(before)


def dropping(model: nn.Module) -> str | None:
    """The first module in training mode that drops something, with its rate."""
    for name, module in model.named_modules():
        rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else [getattr(module, key, 0) for key in RATES]
        for rate in rates:
            if module.training and isinstance(rate, float) and rate > 0:
                return f"{name} with {rate}"
    return None
