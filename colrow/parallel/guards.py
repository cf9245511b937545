"""What would train wrongly without a word is refused, until it is done right.

* Parameters that were added after the split. The plan does not know them: beside a cut layer their gradients are parts on each rank, which
  nobody would sum, and each rank would have drawn other first values. Adapters that PEFT itself put there compute wrongly even untrained:
  they are refused at once. Those of adapters.py are in the plan.
* A balance loss over experts that the plan was not made for: the router's gradient is then a part on each rank and is summed, but its share
  from this loss is whole on every rank and would count once per rank. A plan made with `output_router_logits` in the config sums earlier.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .state import State

BALANCE = "output_router_logits"  # of transformers' configs and forwards: adds the balance loss too


def install(model: nn.Module, state: State) -> None:
    """Asked at each forward pass of the model that may be trained on: rates are set, and adapters added, after building."""
    if state.group.size == 1:
        return

    parts = any(entry.grad == "partial" for entry in state.plan.tensors.values())
    planned = bool(getattr(getattr(model, "config", None), BALANCE, False))

    def before(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        if state.adapters is None and "peft_config" in vars(module):
            raise UserError("PEFT put an adapter into a split model by itself", works="colrow.add_adapter(model, config) instead")
        if not torch.is_grad_enabled():
            return
        asked = kwargs.get(BALANCE)
        if parts and not planned and bool(getattr(getattr(module, "config", None), BALANCE, False) if asked is None else asked):
            raise UserError(
                "the plan was made without the experts' balance loss", f"{BALANCE}=True", f"{BALANCE}=True in the config it is made of"
            )
        known = {name for name, _ in state.plan.names()}  # an adapter changes the plan
        if added := [name for name, p in module.named_parameters() if p.requires_grad and name not in known]:
            what = "a parameter was added after the split: its gradient may be a part on each rank"
            raise UserError(what, added[0], "colrow.add_adapter(model, config) for adapters")

    model.register_forward_pre_hook(before, with_kwargs=True)
