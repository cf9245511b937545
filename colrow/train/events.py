"""Scalars by step in TensorBoard's own file format, written without TensorBoard.

A file is records of a length, a checksum of it, the bytes, and a checksum of those (TFRecord, CRC-32C masked as its documentation says);
the bytes are a protocol buffer `Event` with the fields wall_time (1, double), step (2, varint), file_version (3, text) and summary (5),
whose values (1) have a tag (1, text) and a simple_value (2, float). Nothing else of the format is needed for curves.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def _table() -> tuple[int, ...]:
    out = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        out.append(value)
    return tuple(out)


TABLE = _table()


class EventFile:
    """One run's curves, in a file of `directory`. A run that starts anew or goes on replaces the file that was there."""

    def __init__(self, directory: Path) -> None:
        for old in directory.glob("events.out.tfevents.*.colrow"):
            old.unlink()
        self.path = directory / f"events.out.tfevents.{int(time.time())}.colrow"
        self._append(_text(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_text(1, _text(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items())
        self._append(b"\x10" + _varint(step) + _text(5, summary))

    def _append(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        with self.path.open("ab") as file:
            file.write(length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event)))


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _text(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data
