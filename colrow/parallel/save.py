"""`model.save_pretrained` on a split model: rank 0 writes the whole model, as transformers writes it.

Without this each rank would write its own slices under the names of the whole tensors. Every rank must call it; rank 0 holds the whole
model in memory meanwhile. Models that fit on no single rank are exported slice by slice (checkpoint/export).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils import logging

from ..comm import collectives
from ..errors import UserError
from .collect import whole_parameters, whole_tensor
from .state import State


@contextmanager
def quiet() -> Iterator[None]:
    """transformers draws no progress bars within."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def install(model: nn.Module, state: State) -> None:
    """Wraps the model's own `save_pretrained`. Does nothing for models without one, or on one rank."""
    original: Any = getattr(model, "save_pretrained", None)
    if original is None or state.group.size == 1:
        return

    def save_pretrained(directory: Any, *args: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for name, entry in state.plan.names():
            if state_dict is not None and name in state_dict and tuple(state_dict[name].shape) != entry.shape:
                found = f"{tuple(state_dict[name].shape)} for {name} of shape {entry.shape}"
                raise UserError("the state_dict given to save_pretrained has a rank's slices", found, "none: the whole model is collected")
        if state_dict is None:
            split = {name for name, _ in state.plan.names()}
            buffers = {name: value for name, value in model.state_dict().items() if name not in split}
            for b in (b for b in state.plan.buffers if b.name in buffers):
                buffers[b.name] = whole_tensor(buffers[b.name], b.partition, state.group, f"buffers.{b.name}")
            state_dict = whole_parameters(model, everywhere=False) | buffers
        if state.group.rank == 0:
            original(directory, *args, state_dict=state_dict, **kwargs)
        collectives.barrier(state.group, "save_pretrained")

    model.save_pretrained = save_pretrained  # type: ignore[assignment]
