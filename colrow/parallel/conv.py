"""Convolutions of which each channel goes through by itself (depthwise), on the rank's own channels.

Their parameters are cut before; only the numbers of channels and groups that torch reads have to follow. Not here: other convolutions,
which no plan cuts (planning/sums.py).
"""

from __future__ import annotations

from torch import nn


def make_local(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
    """The layer's weight is the rank's already."""
    layer.groups = layer.in_channels = layer.out_channels = layer.weight.shape[0]
