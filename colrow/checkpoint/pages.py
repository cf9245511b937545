"""Memory for weights: tensors in large pages, where the system has them.

Reading all weights once a token touches each page of 4 KB again, and looking up where it lies costs a tenth to a quarter of the speed of
the memory itself; with pages of 2 MB it costs nothing, and the memory is there sooner. Linux gives large pages to those that ask. Only
pages that lie whole within a tensor become large, so nothing more is held.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14


def empty(shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """torch.empty, to be written once and read often."""
    out = torch.empty(tuple(shape), dtype=dtype)
    start, end = -(-out.data_ptr() // PAGE) * PAGE, (out.data_ptr() + out.nbytes) // PAGE * PAGE
    if start < end and (advise := _madvise()) is not None:
        advise(start, end - start, MADV_HUGEPAGE)  # that it cannot be had is no error
    return out


def give_back() -> None:
    """What was freed goes back to the system, which the C library would keep for later."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = _libc().madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _libc() -> Any:
    return ctypes.CDLL(None)
