"""Source: the tensors of a checkpoint, read slice by slice.

A source knows every tensor's name, shape and place without having read a weight, and reads exactly the bytes that are asked for: positioned
reads into the memory that keeps them, so a process never holds more than its own slices (a mapped file would count what lies around them as
well). Values are converted to the wanted dtype piece by piece. Not here: what a file looks like (safetensors.py, gguf.py, torch_bin.py),
which tensor belongs to which parameter (names.py), ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from ..errors import UserError
from ..partition import Range, merge_ranges
from .pages import empty

STAGE_BYTES = 4 << 20  # of the buffer through which values of another dtype pass
Run = tuple[int, int]  # (position in the file, number of bytes)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the checkpoint. `shape` is the model's; `dtype` what `read` returns by default, None where colrow cannot read it;
    `stored` the file's word for its dtype ("BF16", "Q4_1"); `nbytes` its size in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    nbytes: int
    file: Path
    stored: str


class Source(Protocol):
    """`bytes_read` counts what was read from the files for tensors, headers not included. `unlisted` are tensors that a file holds but the
    index does not name, with that file: they are not read."""

    tensors: dict[str, TensorInfo]
    unlisted: dict[str, Path]

    @property
    def bytes_read(self) -> int: ...

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The half-open `ranges` along `dim` side by side (`dim` None: everything), on the CPU."""

    def close(self) -> None: ...


class Files:
    """Files read by position, opened at their first use. Counts the bytes. `stage` is one buffer for all conversions: a new one for each
    tensor would leave holes in the heap between parameters that stay."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.stage = torch.empty(0, dtype=torch.uint8)
        self._open: dict[Path, int] = {}

    def fill(self, path: Path, runs: Iterable[Run], into: memoryview) -> None:
        """Write the runs one after the other into `into`, whose size is their sum."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        descriptor, at = self._open[path], 0
        for position, size in runs:
            while size:
                got = os.preadv(descriptor, [into[at : at + size]], position)
                if got <= 0:
                    raise UserError(f"{path} became shorter while it was read", f"nothing at byte {position}", "download it again")
                position, size, at = position + got, size - got, at + got
        self.bytes_read += at

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def local_shape(shape: Sequence[int], dim: int | None, ranges: Sequence[Range]) -> tuple[int, ...]:
    """Shape of the ranges side by side. ValueError where a range leaves the tensor."""
    if dim is None:
        return tuple(shape)
    if any(not 0 <= a < b <= shape[dim] for a, b in ranges) or any(a[1] > b[0] for a, b in pairwise(ranges)):
        raise ValueError(f"ranges {ranges} along dim {dim} do not fit a tensor of shape {tuple(shape)}")
    return tuple(sum(b - a for a, b in ranges) if d == dim else n for d, n in enumerate(shape))


def byte_runs(base: int, shape: Sequence[int], itemsize: int, dim: int | None, ranges: Sequence[Range]) -> Iterator[Run]:
    """Where the ranges of a row-major tensor lie that starts at byte `base`: in the order of the result, neighbours joined."""
    if dim is None:
        yield base, prod(shape) * itemsize
        return
    step = prod(shape[dim + 1 :]) * itemsize  # bytes of one index along `dim`
    joined = merge_ranges(ranges)
    if joined == ((0, shape[dim]),):
        yield base, prod(shape) * itemsize
        return
    for outer in range(prod(shape[:dim])):
        start = base + outer * shape[dim] * step
        for a, b in joined:
            yield start + a * step, (b - a) * step


def batches(runs: Iterable[Run], limit: int) -> Iterator[list[Run]]:
    """The runs in lists of at most `limit` bytes; longer runs are cut."""
    batch: list[Run] = []
    room = limit
    for position, size in runs:
        while size:
            part = min(size, room)
            batch.append((position, part))
            position, size, room = position + part, size - part, room - part
            if not room:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_plain(
    files: Files,
    path: Path,
    base: int,
    shape: Sequence[int],
    stored: torch.dtype,
    dim: int | None,
    ranges: Sequence[Range],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Ranges of a row-major tensor of plain numbers. Memory: the result, and a small buffer if the dtype changes."""
    out = empty(local_shape(shape, dim, ranges), dtype)
    if not out.numel():
        return out
    runs = byte_runs(base, shape, stored.itemsize, dim, ranges)
    if dtype == stored:
        files.fill(path, runs, as_bytes(out))
        return out
    if files.stage.numel() != STAGE_BYTES:
        files.stage = torch.empty(STAGE_BYTES, dtype=torch.uint8)
    flat, memory, at = out.view(-1), as_bytes(files.stage), 0
    for batch in batches(runs, STAGE_BYTES):
        size = sum(n for _, n in batch)
        files.fill(path, batch, memory[:size])
        count = size // stored.itemsize
        flat[at : at + count].copy_(files.stage[:size].view(stored))
        at += count
    return out


def size_of(path: Path) -> int:
    """Bytes of a file of weights. UserError where it cannot be opened: a link to nothing, a directory, somebody else's."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be opened", error.strerror, "a file of weights that you may read") from error


def beginning(path: Path) -> str:
    """What a file that is not what it should be looks like, in words."""
    with open(path, "rb") as file:
        head = file.read(64)
    text = head.decode("utf-8", "replace").strip()
    if text.startswith("version https://git-lfs"):
        return "a git-lfs pointer (run: git lfs pull)"
    if text.lower().startswith(("<!doctype", "<html", "<?xml")):
        return "an HTML page"
    return f"a file that begins with {head[:12]!r}"
