"""Panels: int8 weights as kernels/int8.h reads them, and as the rows that they stand for.

Thirty-two rows lie side by side, pair of weights by pair of weights, so that a thread that multiplies by them reads one stretch of memory
from its beginning to its end. Rows and groups are filled up with zeros.
"""

from __future__ import annotations

import ctypes

import torch

from . import library as c
from .library import GROUP, Dtype
from .parts import in_parts

ROWS = 32  # PANEL_ROWS in product.h
_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


def padded(rows: int, width: int) -> tuple[int, int]:
    """Panels, and groups of a row."""
    return -(-rows // ROWS), -(-width // GROUP)


def packed(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [panels * 32, groups * 64] and its scales [panels * 32, groups] as views [panels, pairs, 32, 2] and [panels, groups, 32]."""
    panels, groups = padded(*numbers.shape)
    return numbers.view(panels, ROWS, -1, 2).transpose(1, 2), scales.view(panels, ROWS, groups).transpose(1, 2)


def rows(numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes to `out` [rows, width] the weight that panels stand for, each number times its scale, in its dtype."""
    found = c.library_or_none() if out.dtype in _DTYPES else None
    if out.numel() and found is not None:
        block = c.Block(numbers.data_ptr(), scales.data_ptr(), out.shape[0], 0)
        block.tensors = numbers, scales, out  # of threads that go on where Ctrl-C ends this call
        in_parts(found.kp_rows, ctypes.byref(block), out.shape[1], _DTYPES[out.dtype], out.data_ptr())
    elif out.numel():
        whole = numbers.transpose(1, 2).reshape(len(numbers) * ROWS, -1)
        factors = scales.transpose(1, 2).reshape(len(whole), -1).repeat_interleave(GROUP, 1)
        out.copy_((whole * factors)[: out.shape[0], : out.shape[1]])
    return out
