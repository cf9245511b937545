"""Coded: the steps of a compiled program as C reads them, with the places of an arena and the addresses of weights in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..kernels import library as c
from ..kernels.library import DIMS, Dtype, Op
from .arena import Arena
from .compiled import Compiled
from .steps import Choice, Constant, Source, Step
from .tape import NotRecorded

DTYPES = {
    torch.float32: Dtype.F32,
    torch.bfloat16: Dtype.BF16,
    torch.float16: Dtype.F16,
    torch.int8: Dtype.INT8,
    torch.uint8: Dtype.COMPACT,  # kernels/compact.py
}


def code(compiled: Compiled, arena: Arena, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """An array of instructions, and what must live as long as it. `dtype` of the cache."""
    coder = _Coder(arena, dtype)
    kinds: dict[Op, Callable[[Step, Any], None]] = {  # not in the coder, which would keep itself alive, and weights with it
        Op.PRODUCT: coder.product,
        Op.EXPERTS: coder.experts,
        Op.ATTEND: coder.attend,
        Op.TOPK: coder.topk,
        Op.TAKE: coder.take,
        Op.SCATTER: coder.scatter,
        Op.REDUCE: coder.reduce,
    }
    out = (c.Instruction * len(compiled.steps))()
    for step, at in zip(compiled.steps, out, strict=True):
        at.op = step.op
        kinds.get(step.op, coder.elementwise)(step, at)
    return out, coder.keep


class _Coder:
    def __init__(self, arena: Arena, dtype: torch.dtype) -> None:
        self.arena, self.dtype, self.keep = arena, dtype, list[Any]()

    def product(self, step: Step, at: Any) -> None:
        at.a = self._flat(step.sources[0])
        blocks = (c.Block * len(step.outs))()
        for block, out, weight in zip(blocks, step.outs, step.weights, strict=True):
            block.weight, block.rows, block.out = weight.values.data_ptr(), weight.shape[0], self.arena.at(out)
            block.scale = None if weight.beside is None else weight.beside.data_ptr()
            self.keep.append(weight)
        first = step.weights[0]
        self._attach(at, c.Weights(DTYPES[first.values.dtype], first.shape[1], len(blocks), blocks))

    def experts(self, step: Step, at: Any) -> None:
        (weight,) = step.weights
        many, rows, width = weight.shape
        at.out, at.a, at.b = self._flat(step.outs[0]), self._flat(step.sources[0]), self._flat(step.sources[1])
        at.a.stride = (ctypes.c_int64 * DIMS)(width)
        self.keep.append(weight)
        sizes = (DTYPES[weight.values.dtype], width, rows, step.entry, many)
        stride = weight.values.stride(0) * weight.values.itemsize
        self._attach(at, c.Experts(*sizes, weight.values.data_ptr(), stride))

    def attend(self, step: Step, at: Any) -> None:
        heads = step.entry
        at.out = self._flat(step.outs[0])
        for name, x in zip(("a", "b", "c"), step.sources, strict=False):  # the query alone, where nothing is stored
            setattr(at, name, self._flat(x))
        kv_of = (ctypes.c_int64 * len(heads.kv_of))(*heads.kv_of)
        slopes = (ctypes.c_float * len(heads.slopes))(*heads.slopes) if heads.slopes else None
        sinks = None if heads.sinks is None else (ctypes.c_float * len(heads.sinks))(*heads.sinks.tolist())
        bias = None if heads.bias is None else (ctypes.c_float * heads.bias.numel())(*heads.bias.flatten().tolist())
        reach = 0 if heads.bias is None else heads.bias.shape[1]
        sizes = (heads.layer, heads.heads, heads.kv_heads, heads.head_dim, heads.value_dim, heads.window, heads.latent)
        added = (sinks, slopes, bias, reach, heads.source)
        self._attach(at, c.Attention(*sizes, kv_of, *added, heads.scale, heads.softcap, DTYPES[self.dtype]))

    def topk(self, step: Step, at: Any) -> None:
        choice: Choice = step.entry
        at.a, at.out, at.b = map(self._flat, (step.sources[0], *step.outs))
        self._attach(at, c.TopK(lines=step.outs[0].numel() // choice.k, n=choice.n, k=choice.k))

    def take(self, step: Step, at: Any) -> None:
        at.out, at.a, at.b = map(self._flat, (step.outs[0], *step.sources))
        at.shape = (ctypes.c_int64 * DIMS)(*step.entry)

    def scatter(self, step: Step, at: Any) -> None:
        at.out, at.b = self._flat(step.outs[0]), self._flat(step.sources[1])
        at.c = c.Operand(c.Kind.NUMBER, number=step.sources[2])
        at.shape = (ctypes.c_int64 * DIMS)(*step.entry)

    def reduce(self, step: Step, at: Any) -> None:
        at.out = at.a = self._flat(step.outs[0])
        self._attach(at, c.Sum(count=step.outs[0].numel()))

    def elementwise(self, step: Step, at: Any) -> None:
        shape = step.sources[0].shape if step.op in (Op.MEAN, Op.SUM, Op.MAX) else step.outs[0].shape  # type: ignore[union-attr]
        a, b, number = [*step.sources, 0.0, 0.0][:3]
        operands = [self._operand(x, shape) for x in (step.outs[0], a, b)]
        sizes, strides = _merged(list(shape), [o[1] for o in operands])
        if len(sizes) > DIMS:
            raise NotRecorded(f"it works on {len(sizes)} dims at once")
        at.shape = (ctypes.c_int64 * DIMS)(*[1] * (DIMS - len(sizes)), *sizes)
        for name, (operand, _), stride in zip(("out", "a", "b"), operands, strides, strict=True):
            operand.stride = (ctypes.c_int64 * DIMS)(*[0] * (DIMS - len(stride)), *stride)
            setattr(at, name, operand)
        if step.op is Op.FILL:
            at.c = c.Operand(c.Kind.NUMBER, number=number)

    # ---- Operands ----

    def _flat(self, x: Source) -> c.Operand:
        """Of a tensor in one piece."""
        if isinstance(x, Constant):
            self.keep.append(x.value)
            return c.Operand(c.Kind.CONSTANT, x.value.data_ptr())
        assert isinstance(x, torch.Tensor)
        return c.Operand(c.Kind.IN_ARENA, self.arena.at(x))

    def _operand(self, x: Source, shape: torch.Size) -> tuple[c.Operand, list[int]]:
        if isinstance(x, float):
            return c.Operand(c.Kind.NUMBER, 0, number=x), [0] * len(shape)
        return self._flat(x), list((x.value if isinstance(x, Constant) else x).expand(shape).stride())

    def _attach(self, at: Any, more: ctypes.Structure) -> None:
        self.keep.append(more)
        at.more = ctypes.addressof(more)


def _merged(sizes: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same elements in as few dims as possible: dims of size 1 are left out, and neighbours that follow each other become one."""
    dims = [d for d, size in enumerate(sizes) if size != 1] or [len(sizes) - 1] if sizes else []
    out: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in dims:
        if out and all(k[-1] == s[d] * sizes[d] for k, s in zip(kept, strides, strict=True)):
            out[-1] *= sizes[d]
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[d]
        else:
            out.append(sizes[d])
            for k, s in zip(kept, strides, strict=True):
                k.append(s[d])
    return out, kept
