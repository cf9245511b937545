"""many.h from Python: products of tokens in bfloat16 with weights in bfloat16, int8 or compact, where the processor multiplies pairs of
bfloat16 itself. Of a prompt's tokens torch's own are faster where there is AMX, which they use."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from typing import Protocol

import torch

from . import compact
from . import library as c
from .library import GROUP, Dtype
from .panels import ROWS, padded
from .parts import in_parts

LEAST = 16  # tokens for which torch's products, which have code of their own for a few, are left
DTYPES = {torch.bfloat16: Dtype.BF16, torch.int8: Dtype.INT8, torch.uint8: Dtype.COMPACT}
MOST = 1  # threads: with more, torch's, which wait for work in a loop, would keep the others from their shares


class Many(ctypes.Structure):
    """As in many.h."""

    _fields_ = (
        ("block", c.Block),
        *((name, c_int64) for name in ("dtype", "n", "count", "x_stride")),
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
    found = c.with_pairs()
    if found is not None:
        found.kp_many.argtypes = [ctypes.POINTER(Many), c_int64, c_int64]
    return found


def helps() -> bool:
    """Whether torch has nothing faster for a prompt's tokens."""
    found = library()
    return found is not None and bool(found.kp_many_helps())


def does(x: torch.Tensor, weight: torch.Tensor, rows: int, bias: torch.Tensor | None) -> bool:
    """Whether `product` can be had of a few tokens: whether there is the library, and sizes fit."""
    n = x.shape[-1]
    if library() is None or n == 0 or n % 2 or rows == 0 or torch.get_num_threads() > MOST or not weight.is_contiguous():
        return False
    if weight.shape != _shape(weight.dtype, rows, n) or (bias is not None and bias.shape != (rows,)):
        return False
    tensors = [x, weight] if bias is None else [x, weight, bias]
    return all(t.dtype in DTYPES and t.device.type == "cpu" for t in tensors)


def product(
    x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None, rows: int, bias: torch.Tensor | None, few: bool = False
) -> torch.Tensor | None:
    """x Wᵀ + bias, [..., rows] of x [..., n], all in bfloat16 on the CPU; a weight with something `beside` it is int8 in panels (panels.py)
    or compact (compact.py). A token's results are the same bits alone and beside others. None where it cannot be had and where torch's
    may be faster, as for less than `LEAST` tokens; unless a `few` are wanted."""
    n, found = x.shape[-1], library()
    if found is None or not does(x, weight, rows, bias) or x.numel() == 0 or not (few or (helps() and x.numel() >= LEAST * n)):
        return None
    given = x.reshape(-1, n)
    given = given if given.stride(1) == 1 else given.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], rows)
    block = c.Block(weight.data_ptr(), None if beside is None else beside.data_ptr(), rows, 0)
    places = (given.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    rider = _now.rider
    due = None if rider is None else rider.job(weight.data_ptr())
    asked = Many(block, DTYPES[weight.dtype], n, len(given), given.stride(0), *places, *(due or ()))
    asked.tensors = given, weight, beside, bias, out  # of threads that go on where Ctrl-C ends this call
    if any(in_parts(found.kp_many, asked)):
        raise MemoryError("no memory for the products of a prompt")
    if rider is not None and due is not None:
        rider.made()
    return out


def _shape(dtype: torch.dtype, rows: int, n: int) -> tuple[int, ...]:
    """Of a weight [rows, n] as it is kept in `dtype`."""
    if dtype is torch.int8:
        panels, groups = padded(rows, n)
        return panels, groups * GROUP // 2, ROWS, 2
    return (-(-rows // 2), compact.size(2, n)) if dtype is torch.uint8 else (rows, n)
