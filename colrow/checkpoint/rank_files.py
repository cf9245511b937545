"""A training checkpoint as files: each rank's pieces in a safetensors file of its own, and which ranges of which tensor they are.

    step-00000200/
      state.json                    format, step, tensors (shape, partition, dtypes), what else the trainer keeps
      rank-0-of-2.safetensors       "weights/NAME", "master/NAME", "optimizer.exp_avg/NAME", ...: the rank's pieces
      config.json ...               what a plain Hugging Face directory needs beside its weights

A directory of that name is whole: it is written under another name and renamed when all ranks are done (train/checkpoint.py). Read through
`Source`, slice by slice, it is one set of whole tensors: any other number of ranks and any other cut can ask for its ranges, and of copied
ranges the lowest holder's are read. Not here: writing, optimizers, ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..partition import Partition, Range
from .safetensors import SafetensorsSource, read_header
from .source import TensorInfo

STATE = "state.json"
FORMAT = 1
PREFIX = "step-"


def file_name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def directory_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def complete(directory: Path) -> list[Path]:
    """The whole checkpoints in a directory, oldest first. What was being written when something ended has another name."""
    found = [p for p in directory.glob(f"{PREFIX}*") if p.name[len(PREFIX) :].isdecimal() and (p / STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name[len(PREFIX) :]))


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was opened: `state` is state.json's content. `source(section)` has the tensors under their plain names."""

    path: Path
    state: dict[str, Any]
    files: tuple[SafetensorsSource, ...]

    @property
    def step(self) -> int:
        return self.state["step"]

    def sections(self) -> tuple[str, ...]:
        """ "weights", perhaps "master", and "optimizer.KEY" for each state of the optimizer."""
        return tuple(sorted({key.split("/", 1)[0] for file in self.files for key in file.tensors}))

    def source(self, section: str) -> RankFilesSource:
        return RankFilesSource(self, section)

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_checkpoint(path: Path) -> Saved:
    """Opens a checkpoint, or the last whole one in a directory of them; all headers are read. UserError where there is none."""
    if not (path / STATE).is_file():
        found = complete(path) or complete(path / "checkpoints")
        if not found:
            raise UserError("there is no training checkpoint in", path, "the --out directory of colrow train")
        path = found[-1]
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        ranks, version = state["ranks"], state["format"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{path / STATE} is not the state of a checkpoint", f"{type(error).__name__}: {error}", "an older checkpoint"
        ) from error
    if version != FORMAT:
        raise UserError(f"{path} was written in another format", version, f"format {FORMAT}")
    missing = [file_name(r, ranks) for r in range(ranks) if not (path / file_name(r, ranks)).is_file()]
    if missing:
        raise UserError(f"{path} lacks the file of a rank", missing[0], "an older checkpoint")
    files = tuple(SafetensorsSource(read_header(path / file_name(rank, ranks)), {}) for rank in range(ranks))
    return Saved(path, state, files)


class RankFilesSource:
    """The whole tensors of one section (see source.Source)."""

    def __init__(self, saved: Saved, section: str) -> None:
        self._saved, self._section = saved, section
        self._cuts: dict[str, Partition] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.unlisted: dict[str, Path] = {}
        for name, entry in saved.state["tensors"].items():
            key = f"{section}/{name}"
            holder = next((file for file in saved.files if key in file.tensors), None)
            if holder is not None:
                info, shape = holder.tensors[key], tuple(entry["shape"])
                self._cuts[name] = Partition.from_json(entry["partition"])
                self.tensors[name] = TensorInfo(shape, info.dtype, info.nbytes, info.file, info.stored)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._saved.files)

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The half-open `ranges` along `dim` side by side (`dim` None: everything)."""
        cut = self._cuts[key]
        if cut.dim is None:
            return self._file(0, key).read(f"{self._section}/{key}", dim, ranges, dtype)
        wanted = list(ranges) if dim == cut.dim else [(0, cut.size)]
        pieces = [self._piece(key, cut, rank, at, dtype) for rank, at in held(cut, wanted)]
        if not pieces:
            return self._file(0, key).read(f"{self._section}/{key}", cut.dim, (), dtype)
        out = torch.cat(pieces, cut.dim)
        if dim is None or dim == cut.dim:
            return out
        return torch.cat([out.narrow(dim, a, b - a) for a, b in ranges], dim) if ranges else out.narrow(dim, 0, 0)

    def _piece(self, key: str, cut: Partition, rank: int, at: Range, dtype: torch.dtype | None) -> torch.Tensor:
        return self._file(rank, key).read(f"{self._section}/{key}", cut.dim, [at], dtype)

    def _file(self, rank: int, key: str) -> SafetensorsSource:
        file = self._saved.files[rank]
        if f"{self._section}/{key}" not in file.tensors:
            raise UserError(
                f"{self._saved.path / file_name(rank, len(self._saved.files))} lacks", f"{self._section}/{key}", "an older checkpoint"
            )
        return file

    def close(self) -> None:
        self._saved.close()


def held(cut: Partition, wanted: Sequence[Range]) -> Iterator[tuple[int, Range]]:
    """Where the wanted stretches lie, in their order: (lowest holder, range along the cut dim in its own piece)."""
    segments = cut.segments()
    for start, stop in wanted:
        for segment in segments:
            a, b = max(start, segment.start), min(stop, segment.stop)
            if a < b:
                rank = segment.ranks[0]
                at = cut.local_offset(rank, a)
                assert at is not None
                yield rank, (at, at + b - a)
