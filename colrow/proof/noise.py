"""Noise in every parameter of a model, so that no fault can hide behind a zero bias or a unit norm.

Fresh transformers models have zero biases and unit norms: a bias added once per rank, or a norm weight cut wrongly, changes nothing there.
Not here: real weights; they are tested as they are.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def add_noise(model: nn.Module, seed: int = 0) -> None:
    """Overwrites matrices and shifts everything else, in place, the same for the same seed whatever the dtype.

    Tensors of two and more dims become N(0, 1/sqrt(m)), m the geometric mean of the last two sizes, so that activations neither vanish nor
    grow whichever way the matrix lies. Vectors and scalars (biases, norm scales, sinks) keep their initial value plus N(0, 0.3): a norm
    stays near the value that its author meant, a bias becomes plainly not zero. Floating buffers that are saved with the model are learned
    values in disguise and are treated alike.
    """
    draw = torch.Generator().manual_seed(seed)
    state = model.state_dict(keep_vars=True)
    done: set[int] = set()
    with torch.no_grad():
        for tensor in state.values():
            if id(tensor) in done or not tensor.is_floating_point():  # a tied parameter has two names
                continue
            done.add(id(tensor))
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() < 2:
                tensor.add_(0.3 * noise)
            else:
                tensor.copy_(noise / math.sqrt(math.sqrt(tensor.shape[-1] * tensor.shape[-2])))
