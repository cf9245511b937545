"""norm.h from Python: root mean square norms of a prompt's tokens in bfloat16."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from . import library as c
from .parts import in_parts


class Norm(ctypes.Structure):
    """As in norm.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "n", "stride", "early")),
        *((name, c_void_p) for name in ("x", "weight", "out")),
        *((name, c_float) for name in ("eps", "more")),
    )


@dataclass(frozen=True)
class Form:
    """x / sqrt(mean of squares + eps) * (more + weight); `early`: x is rounded to bfloat16 before it meets the weight."""

    eps: float
    more: float = 0.0
    early: bool = True


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be had, or does nothing for this processor."""
    found = c.with_pairs()
    if found is not None:
        found.kp_norm.argtypes, found.kp_norm.restype = [ctypes.POINTER(Norm), c_int64, c_int64], None
    return found


def norm(x: torch.Tensor, weight: torch.Tensor, form: Form) -> torch.Tensor | None:
    """Of x [..., n] with weight [n], both in bfloat16 on the CPU; a row's results are the same bits alone and beside others. None where
    it cannot be done."""
    n, found = x.shape[-1], library()
    if found is None or x.numel() == 0 or weight.shape != (n,) or not weight.is_contiguous():
        return None
    if any(t.dtype is not torch.bfloat16 or t.device.type != "cpu" for t in (x, weight)):
        return None
    rows = x.reshape(-1, n)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = x.new_empty(x.shape)
    asked = Norm(len(rows), n, rows.stride(0), form.early, rows.data_ptr(), weight.data_ptr(), out.data_ptr(), form.eps, form.more)
    asked.tensors = rows, weight, out  # of threads that go on where Ctrl-C ends this call
    in_parts(found.kp_norm, asked)
    return out
