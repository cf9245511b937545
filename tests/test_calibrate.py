"""Calibration: positive numbers, presets that give back what was measured, and a file that plan reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colrow.__main__ import main
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import calibrate, pace
from colrow.errors import UserError
from colrow.planning import cost, links, timing


def test_one_rank() -> None:
    found = calibrate.measure(single(), seconds=0.02)
    assert min(found.read, found.flops, found.decode, found.prefill, found.train) > 0
    assert found.exchange == ()
    calibrate.presets([found], "auto", 1e9)


def test_ranks_measure_together() -> None:
    def rank(group: Group) -> calibrate.Measured:
        return calibrate.measure(group, seconds=0.02)

    found = run_threads(rank, 2)
    assert all(len(m.exchange) == len(calibrate.SIZES) and min(m.exchange) > 0 for m in found)
    device, link = calibrate.presets(found, "threads", 1e9)
    assert link.among == 2
    assert min(device.per_op, device.touch, device.gradient) > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_presets_give_back_what_was_measured(ranks: int) -> None:
    """The slowest rank's; the reference model's three times are explained."""
    times = (2e-5, 3e-5, 1e-4, 2e-3)
    slow = calibrate.Measured(5e9, 4e10, times, 0.05, 0.2, 0.9)
    fast = calibrate.Measured(6e9, 5e10, tuple(t / 2 for t in times), 0.04, 0.1, 0.7)
    device, link = calibrate.presets([slow, *[fast] * (ranks - 1)], "shm", 1e9)
    assert (device.read, device.flops) == (ranks * 5e9, ranks * 4e10)
    here = links.Machine(device, link)
    for size, seconds in zip(calibrate.SIZES, times, strict=True):
        latency, moving = timing.collective(cost.Predicted("all_reduce", "x", 1, size, tuple(range(ranks)), unit=4), here)
        assert latency == 2e-5
        assert latency + moving == pytest.approx(seconds)
    between = cost.Predicted("all_reduce", "x", 2, (64 << 10) + (512 << 10), tuple(range(ranks)), unit=4)
    assert 2 * 3e-5 < sum(timing.collective(between, here)) < 2 * 1e-4
    _, plan, model = calibrate.reference(ranks)
    assert timing.prefill(plan, model, here, 1, calibrate.ROWS, 4).total == pytest.approx(0.2)
    assert timing.train(plan, model, here, 1, calibrate.ROWS, 4).total == pytest.approx(0.9)
    assert timing.decode(plan, model, here, 1, calibrate.ROWS, 4).total == pytest.approx(0.05)
    other = cost.Predicted("all_reduce", "x", 1, 4 << 20, tuple(range(ranks + 1)), unit=4)  # more ranks than measured: by the formula
    assert sum(timing.collective(other, here)) > 0


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("device", "memory", "16GB"), ("device", "flops", -1.0), ("device", "read", 0), ("link", "hop", None), ("link", "bandwidth", 1e999)],
)
def test_a_preset_with_a_number_that_is_none_is_refused(part: str, field: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    links.save(file, links.LINKS["nvlink4"], links.DEVICES["h100"])
    data = json.loads(file.read_text())
    data[part][field] = value
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"not a preset with a {part}, got .*{field} is "):
        links.machine(str(file))


def test_the_command_writes_what_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "READ", (1 << 20, 2 << 20, 12 << 20))
    file = tmp_path / "machine.json"
    assert main(["bench", "--calibrate", str(file), "--seconds", "0.05"]) == 0
    assert "µs to start an op" in capsys.readouterr().out
    assert links.machine(str(file)).device.source.startswith("measured on 1 rank")
    assert main(["plan", "qwen2.5-0.5b", "--tp", "2", "--device", str(file)]) == 0
    assert "this machine" in capsys.readouterr().out
    assert main(["bench", "--calibrate", str(tmp_path / "no" / "machine.json"), "--seconds", "0.05"]) == 2
