"""Layers that are computed again in the backward pass instead of keeping their activations (activation checkpointing), in a split model.

transformers' own switch, used as ever. A split model's layers need two things beside it when they run a second time: the dropout masks of
the pass that is repeated, and its slices of the sequence (`random.contexts`). They are added to what the switch passes on to torch, unless
the caller has given a `context_fn` of their own. Not here: which layers (transformers'), and torch's reentrant variant, which knows no
contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import UserError
from . import random
from .state import State


def install(model: nn.Module, _: State) -> None:
    """Every way of switching it on ends in this method of transformers' models."""
    original: Callable[..., Any] | None = getattr(model, "_set_gradient_checkpointing", None)
    if original is None:
        return

    def switch(enable: bool = True, gradient_checkpointing_func: Any = None, **more: Any) -> None:
        given = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and not given.get("use_reentrant", True) and "context_fn" not in given:
            gradient_checkpointing_func = functools.partial(gradient_checkpointing_func, context_fn=random.contexts(model))
        if gradient_checkpointing_func is not None:
            more["gradient_checkpointing_func"] = gradient_checkpointing_func
        original(enable=enable, **more)

    model._set_gradient_checkpointing = switch  # type: ignore[assignment]


def recompute_layers(model: Any) -> None:
    """Switches it on. UserError where the model's code does not have it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError("this model cannot recompute its layers", type(model).__name__, "training without --recompute")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
