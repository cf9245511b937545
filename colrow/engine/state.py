"""State: whether a model still computes what it computed, for what was made of it before (a decoding program). Not here: what is made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

SAMPLED = 64  # elements of a tensor


def state(model: nn.Module, without: Sequence[torch.Tensor] = ()) -> list[Any]:
    """Equal as long as a model computes the same: its modules with their plain settings (PEFT's merged and disabled adapters among them),
    and for each tensor its place, its version, and some elements all over it, as writing through `.data` leaves the version as it was.
    `without`: tensors that the model writes anew in each pass."""
    found: list[Any] = []
    for module in model.modules():
        found.append((id(module), type(module), [(k, repr(v)) for k, v in vars(module).items() if _is_plain(v)]))
    for x in itertools.chain(model.parameters(), model.buffers()):
        if any(x is other for other in without):
            continue
        every = max(x.numel() // SAMPLED, 1)
        sample = x.detach().view(-1)[::every] if x.is_contiguous() else x.detach().flatten()[::every]
        version = 0 if x.is_inference() else x._version
        found.append((x.data_ptr(), x.dtype, x.shape, version, sample.contiguous().view(torch.uint8).tolist()))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
