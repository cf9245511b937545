"""The C library of kernels/ as ctypes sees it: its structures, the numbers of its operations, its functions.

Every class here mirrors the struct of the same name in a C file beside it: keep both alike.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import c_double, c_float, c_int, c_int64, c_void_p

from .. import native

DIMS = 4
GROUP = 64  # int8 weights that share a scale
AGAIN, FAILED, SUM_DUE, PRODUCT_DUE = -1, -2, -3, -4


class Op(enum.IntEnum):
    COPY = 0
    NEG = 1
    EXP = 2
    RSQRT = 3
    SQRT = 4
    RECIPROCAL = 5
    SQUARE = 6
    SIGMOID = 7
    SILU = 8
    TANH = 9
    RELU = 10
    GELU = 11
    GELU_TANH = 12
    ABS = 13
    TRUTH = 14
    NOT = 15
    ADD = 17
    SUB = 18
    MUL = 19
    DIV = 20
    MAXIMUM = 21
    MINIMUM = 22
    FILL = 23
    MEAN = 25
    SUM = 26
    MAX = 27
    PRODUCT = 29
    EXPERTS = 30
    ATTEND = 31
    TOPK = 32
    TAKE = 33
    SCATTER = 34
    REDUCE = 35


class Kind(enum.IntEnum):
    """Of an operand."""

    IN_ARENA = 0
    CONSTANT = 1
    NUMBER = 2


class Dtype(enum.IntEnum):
    """Of weights and caches. The first three are also the payload's in comm/shm.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    COMPACT = 4


class Operand(ctypes.Structure):
    _fields_ = (("kind", c_int64), ("at", c_int64), ("stride", c_int64 * DIMS), ("number", c_double))


class Instruction(ctypes.Structure):
    _fields_ = (
        ("op", c_int64),
        ("shape", c_int64 * DIMS),
        ("out", Operand),
        ("a", Operand),
        ("b", Operand),
        ("c", Operand),
        ("more", c_void_p),
    )


class Block(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("scale", c_void_p), ("rows", c_int64), ("out", c_int64))


class Weights(ctypes.Structure):
    _fields_ = (("dtype", c_int64), ("width", c_int64), ("count", c_int64), ("blocks", ctypes.POINTER(Block)))


class Experts(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int64),
        ("width", c_int64),
        ("rows", c_int64),
        ("slots", c_int64),
        ("experts", c_int64),
        ("weight", c_void_p),
        ("stride", c_int64),
    )


class TopK(ctypes.Structure):
    _fields_ = (("lines", c_int64), ("n", c_int64), ("k", c_int64), ("forced", ctypes.POINTER(c_int64)), ("gap", c_float))


class Attention(ctypes.Structure):
    _fields_ = (
        ("layer", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("window", c_int64),
        ("latent", c_int64),
        ("kv_of", ctypes.POINTER(c_int64)),
        ("sinks", ctypes.POINTER(c_float)),
        ("slopes", ctypes.POINTER(c_float)),
        ("bias", ctypes.POINTER(c_float)),
        ("reach", c_int64),
        ("source", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int64),
    )


class Sum(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("site", c_int64),
        ("calls", c_int64),
        ("moved", c_int64),
        ("seconds", c_double),
        ("waited", c_double),
        ("ended", c_double),
    )


class Row(ctypes.Structure):
    _fields_ = (
        ("arena", c_void_p),
        ("length", c_int64),
        ("capacity", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sources", c_int64),
        ("source_keys", c_void_p),
        ("source_values", c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """NativeUnavailable where it can neither be found nor compiled."""
    found = native.PROGRAM.load()
    found.kp_run.argtypes = [c_void_p, ctypes.POINTER(Row), c_int, ctypes.POINTER(c_int64), c_int]
    found.kp_run.restype = c_int64
    found.kp_open.argtypes = [ctypes.POINTER(Instruction), c_int64, c_int, c_int, c_void_p, c_void_p, c_void_p]
    found.kp_ride.argtypes = [c_void_p, c_int]
    found.kp_open.restype = found.kp_payload.restype = found.kp_ride.restype = c_void_p
    found.kp_close.argtypes = found.kp_payload.argtypes = [c_void_p]
    found.kp_rows.argtypes = [ctypes.POINTER(Block), c_int64, c_int, c_void_p, c_int64, c_int64]
    found.kp_make.argtypes = [c_void_p, c_int64]
    found.kp_spend.argtypes = [c_void_p, ctypes.POINTER(c_double)]
    found.kp_close.restype = found.kp_rows.restype = found.kp_make.restype = found.kp_spend.restype = None
    return found


def with_pairs() -> ctypes.CDLL | None:
    """None where it cannot be had, or the processor does not multiply pairs of bfloat16 itself."""
    found = library_or_none()
    return found if found is not None and found.kp_has_pairs() else None


@functools.cache
def library_or_none() -> ctypes.CDLL | None:
    """None where it can neither be found nor compiled."""
    try:
        return library()
    except native.NativeUnavailable:
        return None
