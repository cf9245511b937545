"""Curves in TensorBoard's file format: read back field by field, checksums against a known one, runs that go on. The curve as a PNG."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from colrow.cli.options import check_png
from colrow.errors import UserError
from colrow.train.events import EventFile, masked_crc
from colrow.train.journal import Journal
from colrow.train.trainer import Evaluation, Resumed, Step


def unmasked(value: int) -> int:
    value = (value - 0xA282EAD8) & 0xFFFFFFFF
    return (value >> 17 | value << 15) & 0xFFFFFFFF


def test_the_checksum_is_that_of_rfc_3720() -> None:
    assert unmasked(masked_crc(b"123456789")) == 0xE3069283
    assert unmasked(masked_crc(bytes(32))) == 0x8A9136AA


def events(path: Path) -> list[bytes]:
    data, out = path.read_bytes(), []
    while data:
        length, crc = struct.unpack("<QI", data[:12])
        event, check = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])[0]
        assert (crc, check) == (masked_crc(data[:8]), masked_crc(event))
        out.append(event)
        data = data[16 + length :]
    return out


def test_records_read_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add(300, {"loss": 1.5})
    version, event = events(file.path)
    assert version[9:] == b"\x1a\x0dbrain.Event:2"
    assert event[9:] == b"\x10\xac\x02" + b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15" + struct.pack("<f", 1.5)


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    def step(number: int) -> Step:
        return Step(number, 9, 2.0 / number, 1.0, 1e-3, 100, 0.5)

    first = Journal(tmp_path, "run")
    for event in (step(1), step(2), Evaluation(2, 1.0), step(3)):
        first.add(event)
    second = Journal(tmp_path, "run")
    second.add(Resumed(2, tmp_path))
    second.add(step(3))
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert [event[10] for event in events(path)[1:]] == [1, 2, 2, 3]


def test_the_curve_as_a_png(tmp_path: Path) -> None:
    """Pixels: the curve's color where it was drawn, more of it with more steps; a point alone is seen, steps without a number are not."""
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    path, dark = tmp_path / "loss.png", []
    journal = Journal(tmp_path, "run", path)
    journal.draw()
    assert not path.exists(), "no steps yet"
    for number, loss in enumerate((3.0, 2.0, float("nan"), 1.0), 1):
        journal.add(Step(number, 4, loss, 1.0, 1e-3, 100, 0.5))
        journal.draw()
        pixels = image.imread(path)[:, 120:, :3]  # without the numbers at the left
        dark.append(int(((pixels - [0x22 / 255, 0x44 / 255, 0x77 / 255]).__abs__().max(2) < 0.02).sum()))
    assert pixels.shape[0] > 400
    assert dark[0] > 0
    assert dark[0] < dark[1] == dark[2]
    assert dark[3] > 500


def test_a_png_that_cannot_be_drawn_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_png(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_png(tmp_path / "loss.png")
    for path, words in ((tmp_path / "loss.jpg", "as a PNG"), (tmp_path / "none" / "loss.png", "no directory")):
        with pytest.raises(UserError, match=words):
            check_png(path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package matplotlib"):
        check_png(tmp_path / "loss.png")


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path)
    for number in range(1, 4):
        file.add(number, {"loss": 1.0 / number})
    found = loader.EventAccumulator(str(tmp_path)).Reload()
    assert [round(scalar.value, 6) for scalar in found.Scalars("loss")] == [1.0, 0.5, 0.333333]
