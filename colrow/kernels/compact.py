"""compact.h from Python: bfloat16 weights in twelve bits each, and as the rows that they are."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch

from . import library as c
from .library import Dtype
from .parts import in_parts

BLOCK, BLOCK_BYTES = 128, 192  # COMPACT_BLOCK and COMPACT_BYTES in compact.h
TABLE = 16  # upper bytes
SAMPLE = 1 << 20  # weights, at most, among which the most frequent upper bytes are looked for
WORTH = 0.875  # of a weight's bytes: what does not become smaller than this stays as it is
LARGEST = 1 << 24  # numbers of a row: places in it are written in 24 bits


class Compacting(ctypes.Structure):
    """As in compact.h."""

    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("rows", "n")),
        *((name, c_void_p) for name in ("beside", "out", "counts")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be had, or there are no products of compact weights: they need a processor that multiplies pairs of bfloat16."""
    found = c.with_pairs()
    if found is not None:
        found.kp_compact.argtypes, found.kp_compact.restype = [ctypes.POINTER(Compacting), c_int64, c_int64], None
    return found


def size(rows: int, width: int) -> int:
    """Bytes of the rows, two of which lie together, without what lies beside them: that is a thousandth where weights are spread as normal
    numbers are."""
    return -(-rows // 2) * 2 * -(-width // BLOCK) * BLOCK_BYTES


def compact(weight: torch.Tensor, empty: Callable[..., torch.Tensor] = torch.empty) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[rows, n] in bfloat16 -> bytes [pairs of rows, blocks * 384], and the words that lie beside them; `empty` makes the room for the
    bytes. None where there is no library, or where it would save little: in narrow matrices, and in those whose numbers are of very
    different sizes."""
    found = library()
    rows, n = weight.shape
    if found is None or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or n > LARGEST or weight.numel() == 0:
        return None
    most = int(WORTH * weight.nbytes)
    if size(rows, n) > most:
        return None
    weight = weight.detach().contiguous()
    every = weight.view(torch.int16)[:: max(1, weight.numel() // SAMPLE)]
    table = ((every >> 8) & 0xFF).flatten().bincount(minlength=256).topk(TABLE).indices.to(torch.uint8)
    begins = torch.zeros(rows + 1, dtype=torch.int32)
    asked = Compacting(weight.data_ptr(), rows, n, table.data_ptr(), None, begins[1:].data_ptr())
    asked.tensors = weight, table, begins  # of threads that go on where Ctrl-C ends this call
    in_parts(found.kp_compact, asked)
    words = begins.sum(dtype=torch.int64)
    if size(rows, n) + 4 * (TABLE // 4 + rows + 1 + words) > most:
        return None
    lists = torch.zeros(int(words), dtype=torch.int32)
    beside = torch.cat([table.view(torch.int32), begins.cumsum(0, dtype=torch.int32), lists])
    out = empty((-(-rows // 2), size(2, n)), dtype=torch.uint8)
    asked = Compacting(weight.data_ptr(), rows, n, beside.data_ptr(), out.data_ptr(), None)
    asked.tensors = weight, beside, out
    in_parts(found.kp_compact, asked)
    return out, beside


def rows(values: torch.Tensor, beside: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes to `out` [rows, n] in bfloat16 the weight that `compact` was given."""
    found = library()
    assert found is not None
    block = c.Block(values.data_ptr(), beside.data_ptr(), out.shape[0], 0)
    block.tensors = values, beside, out
    in_parts(found.kp_rows, ctypes.byref(block), out.shape[1], Dtype.COMPACT, out.data_ptr())
    return out
