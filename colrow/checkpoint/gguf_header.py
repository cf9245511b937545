"""The header of a GGUF file: metadata and table of tensors, without reading a weight.

Layout (version 2 and 3, little-endian): magic, version, tensor count, metadata count; metadata (key, type, value); the tensor table (name,
sizes with the fastest-moving first, type, offset); padding; data. `without_vocabulary` writes a small file with the same header less the
vocabulary, for transformers' own config reader, which takes seconds to walk 100,000 strings.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf

from ..errors import UserError
from .source import size_of

# type number -> struct format of the fixed-size metadata values; 8 is a string, 9 an array
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
AGAIN = "delete it and download it again (incomplete download?)"


@dataclass(frozen=True)
class Stored:
    """One tensor as the file has it: `shape` in torch's order, `start` its first byte, `kind` ggml's type."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int

    @property
    def block(self) -> tuple[int, int]:
        """Values and bytes of one block; (1, itemsize) for plain numbers."""
        return gguf.GGML_QUANT_SIZES[self.kind]

    @property
    def nbytes(self) -> int:
        values, size = self.block
        return prod(self.shape) // values * size


@dataclass(frozen=True)
class Header:
    """`values` are the scalars and strings of the metadata, and the lengths of its arrays; `spans` where each entry lies in the file."""

    path: Path
    values: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    table: tuple[int, int]  # span of the tensor table
    tensors: dict[str, Stored]

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])


class _Cursor:
    """Reads values one after the other. `struct.error` past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values[0] if len(values) == 1 else values

    def string(self) -> str:
        start = self.at + 8
        self.at = start + struct.unpack_from("<Q", self.data, self.at)[0]
        if self.at > len(self.data):
            raise struct.error("a string ends past the file")
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(FORMATS[kind])
        inner, count = self.take("<IQ")
        if inner in FORMATS:
            self.at += count * struct.calcsize(FORMATS[inner])
        else:
            for _ in range(count):
                self.value(inner)
        return count


def read(path: Path) -> Header:
    """UserError naming the file where it is not a whole GGUF file."""
    size = size_of(path)
    if not size:
        raise UserError(f"{path} is empty", "0 bytes", AGAIN)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            from .source import beginning  # imports torch, which a look at the header can do without

            raise UserError(f"{path} is not a GGUF file", beginning(path), AGAIN)
        cursor = _Cursor(data)
        try:
            header = _parse(path, cursor)
        except (struct.error, KeyError, ValueError, MemoryError) as e:
            raise UserError(
                f"{path} is cut off or damaged inside its header", f"{size} bytes, {type(e).__name__} at {cursor.at}", AGAIN
            ) from e
    needed = max((t.start + t.nbytes for t in header.tensors.values()), default=0)
    if not header.tensors:
        raise UserError(f"{path} holds no tensors", "metadata only", AGAIN)
    if needed > size:
        raise UserError(f"{path} is cut off", f"{size} bytes of {needed}", AGAIN)
    return header


def _parse(path: Path, cursor: _Cursor) -> Header:
    version, tensor_count, value_count = cursor.take("<4xIQQ")
    if version not in (2, 3):
        raise UserError(f"{path} has a version of GGUF that colrow does not read", version, "a file of version 2 or 3, little-endian")
    values, spans = {}, {}
    for _ in range(value_count):
        start = cursor.at
        key = cursor.string()
        values[key] = cursor.value(cursor.take("<I"))
        spans[key] = (start, cursor.at)
    if "general.architecture" not in values:
        raise UserError(f"{path} does not say its architecture", "no general.architecture", "a GGUF file of a language model")
    start, entries = cursor.at, []
    for _ in range(tensor_count):
        name = cursor.string()
        sizes = [cursor.take("<Q") for _ in range(cursor.take("<I"))]
        kind, offset = cursor.take("<IQ")
        entries.append((name, tuple(reversed(sizes)), gguf.GGMLQuantizationType(kind), offset))
    alignment = values.get("general.alignment", ALIGNMENT)
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: Stored(shape, kind, base + offset) for name, shape, kind, offset in entries}
    return Header(path, values, spans, (start, cursor.at), tensors)


def without_vocabulary(header: Header, to: Path, vocab_key: str) -> None:
    """Write a file whose header lacks the tokenizer's arrays and has `vocab_key` instead; its tensors are a hole that takes no space."""
    arrays = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"}
    kept = [span for key, span in header.spans.items() if key not in arrays]
    added = b""
    if vocab_key not in header.values and "tokenizer.ggml.tokens" in header.values:
        name = vocab_key.encode()
        added = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, header.values["tokenizer.ggml.tokens"])
    with open(header.path, "rb") as source, open(to, "wb") as out:
        out.write(source.read(8) + struct.pack("<QQ", len(header.tensors), len(kept) + bool(added)))
        for start, stop in (*kept, header.table):
            if (start, stop) == header.table:
                out.write(added)
            source.seek(start)
            out.write(source.read(stop - start))
        out.truncate(header.path.stat().st_size)
