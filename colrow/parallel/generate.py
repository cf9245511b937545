"""`model.generate` on a split model: every rank runs transformers' loop on whole, bit-equal logits; random numbers are drawn on rank 0.

Ranks that drew for themselves would soon decode different texts. So within `generate` the drawing functions of torch are intercepted:
rank 0's draw is what all ranks get. Each rank may have any state of its own generator, and processes and threads work alike. For a fast
loop that never gathers logits see engine/.

Not here: stopping by time, which ranks would judge by different clocks (refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from .state import State

DRAWS = {torch.multinomial, torch.bernoulli, torch.rand, torch.randn, torch.randint}
LIKE = {torch.rand_like, torch.randn_like}


class DrawOnce(TorchFunctionMode):
    """Within, rank 0 draws from torch's generator and the other ranks get what it drew."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWS and func not in LIKE:
            return func(*args, **kwargs)
        if self.group.rank and func in LIKE:
            out = torch.empty_like(*args, **kwargs)
        elif self.group.rank:  # only for its shape and dtype, from a generator of its own: threads share torch's with rank 0
            out = func(*args, **kwargs, generator=torch.Generator(_device(args, kwargs)))
        else:
            out = func(*args, **kwargs)
        return collectives.broadcast(out, self.group, "generate.draw", inplace=True)


def _device(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device", "cpu")


def install(model: nn.Module, state: State) -> None:
    """Wraps the model's own `generate`. Does nothing for models without one, or on one rank."""
    original = getattr(model, "generate", None)
    if original is None or state.group.size == 1:
        return

    def generate(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        for settings in (kwargs, vars(given or model.generation_config)):
            if settings.get("max_time") is not None:
                raise UserError("max_time lets each rank stop by its own clock", settings["max_time"], "max_new_tokens")
        kwargs.setdefault("disable_compile", True)  # a step has collectives in it, which a compiler cannot see through
        sharded, state.sharded_logits = state.sharded_logits, False
        try:
            with DrawOnce(state.group):
                return original(*args, **kwargs)
        finally:
            state.sharded_logits = sharded

    model.generate = generate  # type: ignore[assignment]
