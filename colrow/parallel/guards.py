"""What would train wrongly without a word is refused, until it is done right.

* Parameters that were added after the split (adapters). The plan does not know them: beside a cut layer their gradients are parts on each
  rank, which nobody would sum, and each rank would have drawn other first values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .state import State


def install(model: nn.Module, state: State) -> None:
    """Asked at each forward pass of the model that may be trained on: rates are set, and adapters added, after building."""
    if state.group.size == 1:
        return

    known = {name for name, _ in state.plan.names()}

    def before(module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if added := [name for name, p in module.named_parameters() if p.requires_grad and name not in known]:
            what = "a parameter was added after the split: its gradient may be a part on each rank"
            raise UserError(what, added[0], "adapters that are merged or frozen")

    model.register_forward_pre_hook(before)
