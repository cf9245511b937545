"""How experts are computed: as grouped products where torch has them, else one after the other.

transformers' modules for experts hold one tensor with a matrix per expert, and compute with what they are given, so a split model needs no
layer class for them: a rank's matrices are narrower. But transformers' default, grouped products, wants rows of a multiple of 16 bytes and
no float64. The plan cuts experts so that narrower ones keep to it where they can; where they cannot, or the whole model could not either,
the plain loop over experts runs instead, which gives the same numbers. Not here: biases that count on one rank (once.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..planning.models import compute_experts, routed
from ..planning.plan import Plan

ROW = 16  # bytes


def choose(model: Any, plan: Plan | None = None) -> None:
    """Leaves transformers' choice where it can run on every rank; `plan` None: on the model as it is."""
    if not any(part.config._experts_implementation == "grouped_mm" for part in routed(model)):
        return
    if any(p.dtype is torch.float64 or any(n * p.element_size() % ROW for n in shape[1:]) for p, shape in _matrices(model, plan)):
        compute_experts(model, "eager")


def _matrices(model: nn.Module, plan: Plan | None) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
    """The parameters with a matrix per expert, with their shapes on each rank."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch."):
            continue
        for key, parameter in module.named_parameters(path, recurse=False):
            if parameter.dim() != 3:
                continue
            if plan is None:
                yield parameter, tuple(parameter.shape)
            else:
                entry = plan.tensor(key)
                yield from ((parameter, entry.partition.local_shape(entry.shape, rank)) for rank in range(plan.ranks))
