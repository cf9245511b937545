"""PyTorch .bin files: an older format that is a pickle, and so could run code. Only `weights_only=True` opens them here.

The files are mapped, not read: a slice copies what it needs. `bytes_read` counts the bytes of the slices. Prefer safetensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import UserError, first_line
from ..partition import Range
from .pages import empty
from .safetensors import read_weight_map
from .source import TensorInfo, local_shape, size_of

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"


class BinSource:
    """The tensors of one directory (see source.Source)."""

    def __init__(self, tensors: dict[str, tuple[torch.Tensor, Path]]) -> None:
        self._tensors = tensors
        self.tensors = {
            key: TensorInfo(tuple(t.shape), t.dtype, t.nbytes, path, str(t.dtype).removeprefix("torch."))
            for key, (t, path) in tensors.items()
        }
        self.unlisted: dict[str, Path] = {}
        self.bytes_read = 0

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._tensors[key][0]
        out = empty(local_shape(tensor.shape, dim, ranges), dtype or tensor.dtype)
        at = 0
        for start, stop in ranges if dim is not None else ():
            out.narrow(dim, at, stop - start).copy_(tensor.narrow(dim, start, stop - start))  # type: ignore[arg-type]
            at += stop - start
        if dim is None:
            out.copy_(tensor)
        self.bytes_read += out.numel() * tensor.dtype.itemsize
        return out

    def close(self) -> None:
        self._tensors = {}


def open_directory(path: Path) -> BinSource | None:
    """The source of a directory; None where it has no .bin files. UserError where a file cannot be opened without running code."""
    single, index = path / SINGLE, path / INDEX
    if single.exists():
        return BinSource(_load(single))
    if not index.exists():
        return None
    weight_map = read_weight_map(index)
    loaded = {name: _load(path / name) for name in sorted(set(weight_map.values()))}
    absent = [key for key, name in weight_map.items() if key not in loaded[name]]
    if absent:
        raise UserError(f"{index} says that {weight_map[absent[0]]} holds a tensor that it does not hold", absent[0], "download both again")
    return BinSource({key: loaded[name][key] for key, name in weight_map.items()})


def _load(path: Path) -> dict[str, tuple[torch.Tensor, Path]]:
    if not size_of(path):
        raise UserError(f"{path} is empty", "0 bytes", "delete it and download it again")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as e:
        raise UserError(f"{path} holds more than weights or is damaged, and opening it could run code", works="safetensors files") from e
    except Exception as e:  # the unpickler trusts the bytes: an empty stack is an IndexError
        raise UserError(f"{path} is damaged", first_line(e), "delete it and download it again") from e
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise UserError(f"{path} is not a dict of tensors", type(state).__name__, "the file that save_pretrained() wrote")
    return {key: (tensor, path) for key, tensor in state.items()}


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
