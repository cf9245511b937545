"""Master weights: what the optimizer changes where the model computes in 16 bits.

A step of AdamW moves a weight by about the learning rate; bfloat16 has 8 bits of mantissa and rounds such a step away. So every 16-bit
parameter gets a float32 copy that is the one that is trained, and the model's is rounded from it after each step. Gradients move into the
copy's `.grad` as they arrive and are added there in float32, so accumulation over micro-batches does not round either, and the model's own
gradient is freed at once. Parameters of 32 bits and more are their own masters.

    master = MasterWeights(model)
    optimizer = torch.optim.AdamW(master.parameters.values())       # any optimizer, nothing wrapped
    ...; loss.backward(); optimizer.step(); master.write_back(); optimizer.zero_grad()

Copies of a parameter on several ranks get the same gradients in the same bits, so their masters stay equal too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .gradients import trainable


class MasterWeights:
    """`parameters`: by the plan's names, what an optimizer should hold. A model must not be given two."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in trainable(model).items():
            self.parameters[name] = parameter
            if parameter.dtype in (torch.bfloat16, torch.float16):
                master = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                self.parameters[name] = master
                self._pairs.append((parameter, master))

    def of_parameters(self) -> dict[torch.Tensor, nn.Parameter]:
        """The master of each of the model's parameters that has another one than itself."""
        return dict(self._pairs)

    @torch.no_grad()
    def write_back(self) -> None:
        """The model's parameters become their masters, rounded. To be called after each step of the optimizer."""
        for parameter, master in self._pairs:
            parameter.copy_(master)
            parameter.grad = None  # DDP leaves zeros there


@torch.no_grad()
def _move_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    grad, parameter.grad = parameter.grad, None
    if grad is None:
        return
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)
