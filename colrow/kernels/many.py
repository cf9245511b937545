"""many.h from Python: products of a prompt's tokens with weights in bfloat16 or int8, where the processor multiplies pairs of bfloat16
itself and has nothing faster (AMX), which torch's products use."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from typing import Protocol

import torch

from . import library as c
from .library import GROUP
from .panels import ROWS, padded
from .parts import in_parts

LEAST = 16  # tokens for which torch's products, which have code of their own for a few, are left
MOST = 1  # threads: with more, torch's, which wait for work in a loop, would keep the others from their shares


class Many(ctypes.Structure):
    """As in many.h."""

    _fields_ = (
        ("block", c.Block),
        *((name, c_int64) for name in ("n", "count", "x_stride")),
        *((name, c_void_p) for name in ("x", "bias", "out", "ride")),
        ("job", c_int64),
    )


class Rider(Protocol):
    """Something else that is to be multiplied by the same weights as prompts are: a decoding step (engine/riding.py)."""

    def job(self, weight: int) -> tuple[int, int] | None:
        """Its products (a Task of multiply.h) and which of them is the one with this weight, if one is due."""

    def made(self) -> None:
        """The product that `job` gave has been made."""


class _Now(threading.local):
    rider: Rider | None = None


_now = _Now()


@contextmanager
def riding(rider: Rider) -> Iterator[None]:
    """Within, weights that this thread multiplies a prompt by are multiplied by what the rider has for them too."""
    before, _now.rider = _now.rider, rider
    try:
        yield
    finally:
        _now.rider = before


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be had, or does nothing for this processor."""
    found = c.library_or_none()
    if found is None or not found.kp_many_helps():
        return None
    found.kp_many.argtypes = [ctypes.POINTER(Many), c_int64, c_int64]
    return found


def product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, rows: int, bias: torch.Tensor | None, few: bool = False
) -> torch.Tensor | None:
    """x Wᵀ + bias, [..., rows] of x [..., n], all in bfloat16 on the CPU; a weight with `scales` is int8 in panels (panels.py). A token's
    results are the same bits alone and beside others. None where the library cannot do it, where sizes do not fit, and for less than
    `LEAST` tokens unless they are `few` of more."""
    n, found = x.shape[-1], library()
    if found is None or n == 0 or n % 2 or rows == 0 or x.numel() < (n if few else LEAST * n):
        return None
    if torch.get_num_threads() > MOST or not weight.is_contiguous():
        return None
    panels, groups = padded(rows, n)
    size = (rows, n) if scales is None else (panels, groups * GROUP // 2, ROWS, 2)
    if weight.shape != size or (bias is not None and bias.shape != (rows,)):
        return None
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if any(t.dtype not in (torch.bfloat16, torch.int8) or t.device.type != "cpu" for t in tensors):
        return None
    given = x.reshape(-1, n)
    given = given if given.stride(1) == 1 else given.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], rows)
    block = c.Block(weight.data_ptr(), None if scales is None else scales.data_ptr(), rows, 0)
    places = (given.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    rider = _now.rider
    due = None if rider is None else rider.job(weight.data_ptr())
    asked = Many(block, n, len(given), given.stride(0), *places, *(due or ()))
    asked.tensors = given, weight, scales, bias, out  # of threads that go on where Ctrl-C ends this call
    if any(in_parts(found.kp_many, asked)):
        raise MemoryError("no memory for the products of a prompt")
    if rider is not None and due is not None:
        rider.made()
    return out
