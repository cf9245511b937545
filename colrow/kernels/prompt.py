"""prompt.c from Python: the attention of a prompt in bfloat16, where the processor multiplies pairs of bfloat16 itself."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from .. import native
from .parts import in_parts


class Prompt(ctypes.Structure):
    """As in prompt.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "causal")),
        *((name, c_void_p) for name in ("q", "k", "v", "mask", "out")),
        *((name, c_int64 * 3) for name in ("q_stride", "k_stride", "v_stride")),
        ("mask_stride", c_int64 * 2),
        ("scale", c_float),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be had, or does nothing for this processor."""
    try:
        found = native.PROMPT.load()
    except native.NativeUnavailable:
        return None
    found.kq_supported.restype = found.kq_attend.restype = c_int
    found.kq_attend.argtypes = [ctypes.POINTER(Prompt), c_int64, c_int64]
    return found if found.kq_supported() else None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor | None:
    """query [B, H, S, d], key [B, KV, T, d], value [B, KV, T, e], bool mask [B or 1, 1, S, T]; returns [B, S, H, e]. None where the
    library cannot do it. Causal: the last query sees all keys, each one before it one less."""
    found = library()
    if found is None or any(x.stride(-1) != 1 for x in (query, key, value)):
        return None
    (batch, heads, queries, width), (_, kv_heads, keys, width_v) = query.shape, value.shape
    out = value.new_empty(batch, queries, heads, width_v)
    seen = None if mask is None else mask.expand(batch, 1, queries, keys).contiguous()
    sizes = (batch, heads, kv_heads, queries, keys, width, width_v, int(causal))
    places = (query.data_ptr(), key.data_ptr(), value.data_ptr(), None if seen is None else seen.data_ptr(), out.data_ptr())
    strides = ((c_int64 * 3)(*x.stride()[:3]) for x in (query, key, value))
    asked = Prompt(*sizes, *places, *strides, (c_int64 * 2)(queries * keys, keys), scale)
    asked.tensors = query, key, value, seen, out  # of threads that go on where Ctrl-C ends this call
    if any(in_parts(found.kq_attend, asked)):
        raise MemoryError("no memory for the attention of a prompt")
    return out
