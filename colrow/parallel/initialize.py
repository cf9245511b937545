"""First weights for a model that is trained from nothing: the same for any number of ranks, and never the whole model in one memory.

The distribution is the model's own (transformers' `_init_weights`, with all that a family does there). Parameter by parameter, the model
is on meta but for that one, which is drawn whole from a seed of its own name and cut. So a rank holds its pieces and one whole parameter,
and the pieces put together have the same bits however many ranks there are. Each rank draws everything; nothing is sent.
"""

from __future__ import annotations

import hashlib
import math
import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..planning.plan import TensorPlan
from .build import empty
from .load import Progress, fill, with_owner
from .state import state_of

_DRAWING = threading.Lock()  # transformers draws from torch's generator, which threads share


def initialize(
    model: PreTrainedModel,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Fill a split model (on meta) with first weights, drawn in float32 from `seed`. `dtype` as for from_source."""
    whole = empty(model.config, torch.float32)
    names = {module: name for name, module in whole.named_modules()}
    inits = [(owner, module, names[module]) for owner, module in with_owner(whole)]

    rank = state_of(model).group.rank

    def piece(entry: TensorPlan, wanted: torch.dtype) -> torch.Tensor:
        drawn = _draw(whole, entry, inits, seed)
        return entry.partition.split(drawn, rank).to(wanted, copy=True).contiguous()

    fill(model, piece, dtype, device, progress)


def _draw(whole: nn.Module, entry: TensorPlan, inits: list[tuple[Any, nn.Module, str]], seed: int) -> torch.Tensor:
    """One parameter of the whole model. The initializers that could write to it run, children first; on meta they draw nothing."""
    path, _, key = entry.name.rpartition(".")
    owner, parameter = whole.get_submodule(path), nn.Parameter(torch.full(entry.shape, math.nan), requires_grad=False)
    on_meta, owner._parameters[key] = owner._parameters[key], parameter
    try:
        with _DRAWING, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{entry.name}".encode(), digest_size=7).digest(), "big"))
            for of, module, at in reversed(inits):
                if f"{entry.name}.".startswith(f"{at}." if at else ""):
                    of._init_weights(module)
    finally:
        owner._parameters[key] = on_meta
    if bool(parameter.isnan().any()):
        what = f"{type(whole).__name__}._init_weights does not write {entry.name}, or not all of it"
        raise UserError(what, works="starting from weights in files")
    return parameter.data
