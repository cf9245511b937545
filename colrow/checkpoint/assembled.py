"""Parameters that the files hold in several tensors: experts one by one, gate beside up.

transformers stacks and concatenates such tensors while it loads (`MergeModulelist`, `Concatenate`). Here the stack is never built: a slice
of the model's parameter is put together from slices of the parts, so a rank still reads only its own bytes. Not here: conversions that
permute or split values; `parts_of` says None for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from ..partition import Range
from .pages import empty
from .source import Source, TensorInfo, local_shape


@dataclass(frozen=True)
class Assembly:
    """`rows[i][j]` is the key of part (i, j). `stacked`: i is the index along a new dim 0 (the expert). Rows, or all parts where nothing is
    stacked, are concatenated along `dim`, counted in the model's tensor."""

    rows: tuple[tuple[str, ...], ...]
    stacked: bool
    dim: int

    @property
    def keys(self) -> list[str]:
        return [key for row in self.rows for key in row]


def parts_of(converter: WeightConverter, collected: Mapping[str, list[str]]) -> Assembly | None:
    """How the converter makes one parameter of the `collected` keys {source pattern: keys in order}; None where it does more than that, or
    where patterns have different numbers of keys."""
    columns = [collected.get(pattern, []) for pattern in converter.source_patterns]
    if len(converter.target_patterns) != 1 or len({len(column) for column in columns}) != 1:
        return None
    rows = tuple(zip(*columns, strict=True))
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(columns) == 1:
            return Assembly(rows, stacked=True, dim=1)
        case [MergeModulelist(dim=0), Concatenate(dim=dim)] if dim > 0:
            return Assembly(rows, stacked=True, dim=dim)
        case [Concatenate(dim=dim)] if len(rows) == 1 and dim >= 0:
            return Assembly(rows, stacked=False, dim=dim)
    return None


class AssembledSource:
    """A source in which assembled parameters look like tensors of their own, under the model's names (see source.Source)."""

    def __init__(self, source: Source, assemblies: Mapping[str, Assembly]) -> None:
        self._source, self._assemblies = source, assemblies
        used = {key for assembly in assemblies.values() for key in assembly.keys}
        self.tensors = {key: info for key, info in source.tensors.items() if key not in used}
        self.tensors |= {name: self._info(assembly) for name, assembly in assemblies.items()}
        self.unlisted = source.unlisted

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        if key not in self._assemblies:
            return self._source.read(key, dim, ranges, dtype)
        assembly, info = self._assemblies[key], self.tensors[key]
        out = empty(local_shape(info.shape, dim, ranges), dtype or info.dtype)
        rows = enumerate(assembly.rows)
        if assembly.stacked and dim == 0:
            rows = enumerate(assembly.rows[i] for a, b in ranges for i in range(a, b))
            dim = None
        for number, row in rows:
            self._read_row(row, out[number] if assembly.stacked else out, assembly.dim - assembly.stacked, dim, ranges, assembly.stacked)
        return out

    def close(self) -> None:
        self._source.close()

    def _read_row(
        self, row: tuple[str, ...], out: torch.Tensor, joined: int, dim: int | None, ranges: Sequence[Range], stacked: bool
    ) -> None:
        """Parts side by side along dim `joined` of `out`; `dim` of the cut counts in the model's tensor."""
        cut = None if dim is None else dim - stacked
        start = at = 0
        for key in row:
            size = self._source.tensors[key].shape[joined]
            if cut == joined:  # the part's share of the ranges, in its own numbers
                wanted = [(max(a, start) - start, min(b, start + size) - start) for a, b in ranges if a < start + size and b > start]
                length = sum(b - a for a, b in wanted)
            else:
                wanted, length = list(ranges), size
            if length:
                out.narrow(joined, at, length).copy_(self._source.read(key, cut, wanted, out.dtype))
            start, at = start + size, at + length

    def _info(self, assembly: Assembly) -> TensorInfo:
        infos = [[self._source.tensors[key] for key in row] for row in assembly.rows]
        flat = [info for row in infos for info in row]
        odd = next((info for info in flat if info.dtype is None), flat[0])
        shape = _joined([info.shape for info in infos[0]], assembly.dim - assembly.stacked)
        alike = all([a.shape for a in row] == [b.shape for b in infos[0]] for row in infos)
        if shape is None or not alike:
            shape = ()  # fits no parameter, and so is refused by name
        elif assembly.stacked:
            shape = (len(infos), *shape)
        dtype = None if odd.dtype is None else reduce(torch.promote_types, [info.dtype for info in flat if info.dtype])
        return TensorInfo(shape, dtype, sum(info.nbytes for info in flat), odd.file, odd.stored)


def _joined(shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[int, ...] | None:
    """Shape of tensors side by side along `dim`; None where they do not fit."""
    first = shapes[0]
    if dim >= len(first) or any(s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        return None
    return (*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :])
