"""Safetensors directories: headers read and checked in full before a weight is touched, then slices by position.

A directory is one `model.safetensors`, or an index (`model.safetensors.index.json`) and the files it names. The index is the authority:
files beside it are not looked at, tensors that it does not list are not read. Everything that can be wrong with a file is found here and
said in one line that names it. Format: an 8-byte little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, then
the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..partition import Range
from .source import Files, TensorInfo, beginning, read_plain, size_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "delete it and download it again (incomplete download?)"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LONGEST_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class Place:
    info: TensorInfo
    start: int  # byte in the file


class SafetensorsSource:
    """The tensors of one directory (see source.Source)."""

    def __init__(self, places: dict[str, Place], unlisted: dict[str, Path]) -> None:
        self._places, self._files = places, Files()
        self.tensors = {key: place.info for key, place in places.items()}
        self.unlisted = unlisted

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        place = self._places[key]
        info, stored = place.info, readable(key, place.info)
        return read_plain(self._files, info.file, place.start, info.shape, stored, dim, ranges, dtype or stored)

    def close(self) -> None:
        self._files.close()


def readable(key: str, info: TensorInfo) -> torch.dtype:
    """The dtype of a tensor that colrow can read. UserError for the others (8-bit floats, packed formats)."""
    if info.dtype is None:
        raise UserError(
            f"{info.file} holds {key} in a dtype that colrow does not read",
            info.stored,
            "load it in transformers with dequantize=True and save_pretrained() it in bfloat16",
        )
    return info.dtype


def open_directory(path: Path) -> SafetensorsSource | None:
    """The source of a directory, every header checked; None where it has no safetensors. UserError where a file is wrong."""
    single, index = path / SINGLE, path / INDEX
    if not single.exists() and index.exists():
        return _from_index(index)
    if not single.exists():
        others = sorted(path.glob("*.safetensors"))
        if len(others) > 1:
            raise UserError(f"{path} has several weight files and no {INDEX}", f"{len(others)} files", "download the index as well")
        if not others:
            return None
        single = others[0]
    return SafetensorsSource(read_header(single), {})


def _from_index(index: Path) -> SafetensorsSource:
    weight_map = read_weight_map(index)
    headers = {name: read_header(index.parent / name) for name in sorted(set(weight_map.values()))}
    absent = [(key, name) for key, name in weight_map.items() if key not in headers[name]]
    if absent:
        key, name = absent[0]
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise UserError(f"{index} says that {name} holds tensors that it does not hold", key + more, "download both again")
    places = {key: headers[name][key] for key, name in weight_map.items()}
    unlisted = {key: index.parent / name for name, header in headers.items() for key in header if key not in weight_map}
    return SafetensorsSource(places, unlisted)


def read_weight_map(index: Path) -> dict[str, str]:
    """The index's {tensor: file}. UserError where it is no index, leaves its directory or names files that are not there."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{index} is not an index of weight files", beginning(index) or type(e).__name__, "download it again") from e
    if outside:
        raise UserError(f"{index} names a file outside its directory", outside[0], "plain file names")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(f"{index} names {len(missing)} of {len(names)} files that are not there", listed, "finish the download")
    return weight_map


def read_header(path: Path) -> dict[str, Place]:
    """Every tensor of one file with its place. UserError naming the file where it is not a whole safetensors file."""
    size = size_of(path)
    if not size:
        raise UserError(f"{path} is empty", "0 bytes", AGAIN)
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER or (length > size - 8 and not _json_starts(file)):
            raise UserError(f"{path} is not a safetensors file", beginning(path), AGAIN)
        if length > size - 8:
            raise UserError(f"{path} is cut off inside its header", f"{size} bytes of at least {8 + length}", AGAIN)
        text = file.read(length)
    try:
        header = json.loads(text)
        entries = {key: _entry(value) for key, value in header.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} has a damaged header", f"{type(e).__name__}: {str(e)[:80]}", AGAIN) from e
    if not entries:
        raise UserError(f"{path} holds no tensors", "metadata only", AGAIN)
    _check_layout(path, entries, size - 8 - length)
    return {key: _place(path, 8 + length, entry) for key, entry in entries.items()}


Entry = tuple[str, tuple[int, ...], int, int]  # dtype, shape, first byte and end in the data


def _entry(value: dict[str, Any]) -> Entry:
    start, end = value["data_offsets"]
    return str(value["dtype"]), tuple(int(n) for n in value["shape"]), int(start), int(end)


def _check_layout(path: Path, entries: dict[str, Entry], found: int) -> None:
    """Tensors lie one behind the other, are as long as their shape says, and fill the file."""
    at = 0
    for key, (dtype, shape, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != at or end < start:
            what = "overlapping tensors" if start < at else "a gap between tensors"
            raise UserError(f"{path} has {what}", f"{key} at bytes {start} to {end}, expected from {at}", AGAIN)
        if dtype in DTYPES and end - start != prod(shape) * DTYPES[dtype].itemsize:
            raise UserError(f"{path} gives {key} another size than its shape", f"{end - start} bytes for {dtype} {list(shape)}", AGAIN)
        at = end
    if at != found:
        what = "is cut off" if found < at else "is longer than its header says"
        raise UserError(f"{path} {what}", f"{found} bytes of weights, {at} needed", AGAIN)


def _place(path: Path, data: int, entry: Entry) -> Place:
    dtype, shape, start, end = entry
    return Place(TensorInfo(shape, DTYPES.get(dtype), end - start, path, dtype), data + start)


def _json_starts(file: Any) -> bool:
    at = file.tell()
    first = file.read(1)
    file.seek(at)
    return first == b"{"
