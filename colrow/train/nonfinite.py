"""Where a number stopped being a number: the first parameter, or the first module in the order of computation, that is not finite.

Asked once, after a step whose loss or gradient norm is inf or nan: the forward pass is repeated with a look at every module's output. The
ranks do it together, since a slice may be wrong on one rank alone; the earliest of all is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..comm import collectives
from ..comm.group import Group
from ..parallel.head import sharded_logits
from ..planning.trace import leaves
from .step import Batch


def first_not_finite(model: nn.Module, batches: Sequence[Batch], group: Group) -> str:
    """In words. `group`: the ranks that are to name the same place, those of all replicas. A collective of all of them."""
    mine: list[tuple[int, str]] = []
    bad = next((name for name, p in model.named_parameters() if not bool(p.isfinite().all())), None)
    if bad is not None:
        mine.append((-1, f"the parameter {bad} is not finite before the step"))
    count = 0
    handles = []

    def look(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            nonlocal count
            count += 1
            if not mine and any(t.is_floating_point() and not bool(t.isfinite().all()) for t in leaves(output, torch.Tensor)):
                mine.append((count, f"the first output that is not finite is that of {name or 'the model'}"))

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(look(name)))
    try:
        with torch.no_grad(), sharded_logits(model):
            for batch in batches:
                model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found = [place for places in collectives.gather_objects(mine, group, "not_finite") for place in places]
    return min(found)[1] if found else "every output of the forward pass is finite: it arose in the backward pass"
