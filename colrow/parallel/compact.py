"""Compact: bfloat16 weights of linear layers in twelve bits each, without loss (kernels/compact.h). For inference alone.

Decoding reads three quarters of the bytes, and the memory is let go: what a layer multiplies by stays the same to the bit, which is looked
at, layer by layer, before its weight is given up. Layers that would save little stay as they are; so do norms, biases, embeddings (a head
that shares its weight with one gets compact rows of its own) and experts in one tensor.

Not here: other dtypes and processors; ranks of several threads, where torch's, which wait for work in a loop, would keep those from their
shares that make weights anew for prompts; models without a decoding program, in which they are made anew for each token (open_engine asks
for the program first).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.pages import empty, give_back
from ..kernels import compact as kernel
from ..kernels import many
from . import kept


@dataclass(frozen=True)
class Compacted:
    """Layers on this rank, the bytes that their weights took, and those that they take now."""

    layers: int
    before: int
    nbytes: int

    def __str__(self) -> str:
        return f"weights of {self.layers} layers in {16 * self.nbytes / self.before:.1f} bits, to the bit the same"


@torch.library.custom_op("colrow::uncompacted", mutates_args=())
def uncompacted(values: torch.Tensor, beside: torch.Tensor, rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight as the modules see it. An op of its own, so that whoever records a model finds what is kept behind the weight."""
    return kernel.rows(values, beside, torch.empty(rows, n, dtype=dtype))


def usable() -> bool:
    """Whether this rank keeps bfloat16 weights so: by its processor and its threads."""
    return kernel.library() is not None and torch.get_num_threads() <= many.MOST


def compact_layers(model: nn.Module) -> Compacted | None:
    """Every nn.Linear and Conv1D of the model that this pays for, in place, layer by layer. None where there is none."""
    if not usable():
        return None
    made: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor] | None] = {}  # a weight that layers share is made compact once
    count = before = nbytes = 0
    for module, weight in kept.layers(model):
        key = weight.data_ptr(), weight.shape
        if key not in made:
            made[key] = _exactly(weight)
            if (found := made[key]) is not None:
                before, nbytes = before + weight.nbytes, nbytes + sum(part.nbytes for part in found)
        if (found := made[key]) is not None:
            kept.keep(module, weight, *found, "uncompacted")
            count += 1
            del weight  # the last one too is free when memory is given back
    made.clear()
    give_back()
    return Compacted(count, before, nbytes) if count else None


def _exactly(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    found = kernel.compact(weight, empty)
    if found is None:
        return None
    again = uncompacted(*found, *weight.shape, weight.dtype)
    return found if torch.equal(again.view(torch.int16), weight.contiguous().view(torch.int16)) else None
