"""Int8: the weights of linear layers as whole numbers of 8 bits, with one scale for each 64 neighbours in a row. For inference alone.

Decoding reads a bit more than half the bytes of bfloat16. Programs multiply by the numbers as they are (kernels/int8.h), for which a column
is rounded to 16 bits of each group's largest; of the modules see kept.py. Activations, norms, biases, embeddings and the cache keep their
dtype.

A rank quantizes its own slice: groups begin at its first input feature, so different numbers of ranks round differently. The
model is loaded in its own dtype first, so that is what a rank must have room for.

Not here: calibration with data, int8 arithmetic on activations, reading files that are quantized already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.pages import empty, give_back
from ..kernels.library import GROUP
from ..kernels.panels import ROWS, packed, padded
from ..kernels.panels import rows as rows_of
from . import kept

STEPS = 127  # of a scale, in each direction


@dataclass(frozen=True)
class Quantized:
    """Bytes that the layers' weights take now, and the error of weights: root mean square, in parts of that of the weights."""

    layers: int
    nbytes: int
    error: float

    def __str__(self) -> str:
        return f"int8: {self.layers} layers on this rank, their weights off by {self.error:.2%} (root mean square)"


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, n] -> int8 and float32 scales, as panels (kernels/panels.py). The largest of a group is exact but for the scale's own
    rounding."""
    (rows, n), (panels, groups) = values.shape, padded(*values.shape)
    filled = torch.zeros(panels * ROWS, groups * GROUP)
    filled[:rows, :n] = values
    grouped = filled.view(-1, groups, GROUP)
    scales = grouped.abs().amax(2) / STEPS
    numbers = (grouped / torch.where(scales == 0, 1.0, scales)[..., None]).round().to(torch.int8)
    views = packed(numbers.view(filled.shape), scales)
    return tuple(empty(view.shape, view.dtype).copy_(view) for view in views)  # type: ignore[return-value]  # others were passing ones


@torch.library.custom_op("colrow::dequantized", mutates_args=())
def dequantized(numbers: torch.Tensor, scales: torch.Tensor, rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight as the modules see it. An op of its own, so that whoever records a model finds the numbers behind the weight."""
    return rows_of(numbers, scales, torch.empty(rows, n, dtype=dtype))


def quantize_layers(model: nn.Module) -> Quantized:
    """Every nn.Linear and Conv1D of the model, in place, layer by layer. Their parameters are gone afterwards."""
    layers, nbytes, error, total = 0, 0, 0.0, 0.0
    for module, weight in kept.layers(model):
        numbers, scales = quantize(weight)
        kept.keep(module, weight, numbers, scales, "dequantized")
        made = dequantized(numbers, scales, *weight.shape, weight.dtype).float()
        error += float((made - weight.float()).square().sum())
        total += float(weight.float().square().sum())
        layers, nbytes = layers + 1, nbytes + numbers.nbytes + scales.nbytes
    give_back()
    return Quantized(layers, nbytes, (error / total) ** 0.5 if total else 0.0)
