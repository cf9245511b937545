"""Arena: where each shadow of a compiled step lies in a row's memory, and the step's instructions with those places in them.

Memory is given again as soon as its last reader is done, so an arena is as large as what is live at one time, and stays in the cache.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ..kernels import library as c
from ..kernels.library import DIMS, Dtype, Op
from .compiled import Compiled
from .recorded import NotRecorded
from .steps import Constant, Source, Step, memory

_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.int8: Dtype.INT8}
LINE = 16  # floats; every place begins at a multiple of it


class Arena:
    """`size` in floats."""

    def __init__(self, compiled: Compiled) -> None:
        self._places: dict[int, int] = {}  # memory of a shadow -> where it lies
        self.size = self._lay_out(compiled)

    def _lay_out(self, compiled: Compiled) -> int:
        last: dict[int, int] = {}
        sizes: dict[int, int] = {}
        first: dict[int, list[int]] = {}

        def used(x: Any, at: int) -> None:
            if isinstance(x, torch.Tensor):
                key = memory(x)
                if key not in sizes:
                    sizes[key] = -(-x.untyped_storage().nbytes() // 4 // LINE) * LINE
                    first.setdefault(at, []).append(key)
                last[key] = at

        for _, shadow in compiled.inputs:
            used(shadow, -1)
        for at, step in enumerate(compiled.steps):
            for x in (*step.outs, *step.sources):
                used(x, at)
        used(compiled.logits, len(compiled.steps))
        free: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for key, at in last.items():
            ends.setdefault(at, []).append(key)
        total = 0
        for at in range(-1, len(compiled.steps) + 1):
            for key in first.get(at, ()):
                room = free.get(sizes[key])
                self._places[key] = room.pop() if room else total
                total = max(total, self._places[key] + sizes[key])
            for key in ends.get(at, ()):
                free.setdefault(sizes[key], []).append(self._places[key])
        return max(total, LINE)

    def at(self, shadow: torch.Tensor) -> int:
        return self._places[memory(shadow)] + int(shadow.storage_offset())

    def view(self, arena: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
        return arena.as_strided(shadow.shape, shadow.stride(), self.at(shadow))

    # ---- Instructions ----

    def code(self, compiled: Compiled, dtype: torch.dtype) -> tuple[Any, list[Any]]:
        """An array of instructions, and what must live as long as it."""
        out, keep = (c.Instruction * len(compiled.steps))(), list[Any]()
        for step, at in zip(compiled.steps, out, strict=True):
            at.op = step.op
            if step.op is Op.PRODUCT:
                self._product(step, at, keep)
            elif step.op is Op.ATTEND:
                self._attend(step, at, dtype, keep)
            elif step.op is Op.REDUCE:
                at.out = at.a = self._flat(step.outs[0])
                _attach(at, c.Sum(count=step.outs[0].numel()), keep)
            else:
                self._elementwise(step, at, keep)
        return out, keep

    def _flat(self, x: torch.Tensor) -> c.Operand:
        return c.Operand(c.Kind.IN_ARENA, self.at(x))

    def _product(self, step: Step, at: Any, keep: list[Any]) -> None:
        at.a = self._flat(step.sources[0])  # type: ignore[arg-type]
        blocks = (c.Block * len(step.outs))()
        for block, out, weight in zip(blocks, step.outs, step.weights, strict=True):
            block.weight, block.rows, block.out = weight.values.data_ptr(), weight.values.shape[0], self.at(out)
            block.scale = None if weight.scales is None else weight.scales.data_ptr()
            keep.append(weight)
        first = step.weights[0].values
        _attach(at, c.Weights(_DTYPES[first.dtype], first.shape[1], len(blocks), blocks), keep)

    def _attend(self, step: Step, at: Any, dtype: torch.dtype, keep: list[Any]) -> None:
        entry = step.entry
        at.out = self._flat(step.outs[0])
        at.a, at.b, at.c = map(self._flat, step.sources)  # type: ignore[arg-type]
        kv_of = (ctypes.c_int64 * len(entry.kv_of))(*entry.kv_of)
        kind = Dtype.BF16 if dtype is torch.bfloat16 else Dtype.F32
        heads = (entry.layer, entry.q.shape[1], entry.k.shape[1], entry.k.shape[3], entry.v.shape[3], entry.window)
        _attach(at, c.Attention(*heads, kv_of, entry.scale, entry.softcap, kind), keep)

    def _elementwise(self, step: Step, at: Any, keep: list[Any]) -> None:
        shape = step.sources[0].shape if step.op in (Op.MEAN, Op.SUM) else step.outs[0].shape  # type: ignore[union-attr]
        sources = [*step.sources, 0.0][:2]
        operands = [self._operand(x, shape, keep) for x in (step.outs[0], *sources)]
        sizes, strides = _merged(list(shape), [o[1] for o in operands])
        if len(sizes) > DIMS:
            raise NotRecorded(f"it works on {len(sizes)} dims at once")
        at.shape = (ctypes.c_int64 * DIMS)(*[1] * (DIMS - len(sizes)), *sizes)
        for name, (operand, _), stride in zip(("out", "a", "b"), operands, strides, strict=True):
            operand.stride = (ctypes.c_int64 * DIMS)(*[0] * (DIMS - len(stride)), *stride)
            setattr(at, name, operand)

    def _operand(self, x: Source, shape: torch.Size, keep: list[Any]) -> tuple[c.Operand, list[int]]:
        if isinstance(x, Constant):
            keep.append(x.value)
            return c.Operand(c.Kind.CONSTANT, x.value.data_ptr()), list(x.value.expand(shape).stride())
        if isinstance(x, torch.Tensor):
            return self._flat(x), list(x.expand(shape).stride())
        return c.Operand(c.Kind.NUMBER, 0, number=x), [0] * len(shape)


def _attach(at: Any, more: ctypes.Structure, keep: list[Any]) -> None:
    keep.append(more)
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
