"""Calibration: positive numbers, presets that give back what was measured, and a file that plan reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from colrow.__main__ import main
from colrow.comm.group import single
from colrow.engine import calibrate
from colrow.planning import cost, links, timing


def test_one_rank() -> None:
    found = calibrate.measure(single(), seconds=0.02)
    assert min(found.read, found.flops, found.per_op) > 0
    assert (found.small, found.large) == (0, 0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_presets_give_back_the_time_of_both_all_reduces(ranks: int) -> None:
    slow, fast = calibrate.Measured(5e9, 4e10, 8e-6, 2e-5, 2e-3), calibrate.Measured(6e9, 5e10, 7e-6, 1e-5, 1e-3)
    device, link = calibrate.presets([slow, *[fast] * (ranks - 1)], "shm", 1e9)
    assert (device.read, device.flops, device.per_op) == (ranks * 5e9, ranks * 4e10, 8e-6)
    large = cost.Predicted("all_reduce", "x", 1, calibrate.LARGE, tuple(range(ranks)), unit=4)
    latency, moving = timing.collective(large, link)
    assert latency == 2e-5
    assert latency + moving == pytest.approx(2e-3, rel=0.01)


def test_the_command_writes_what_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.json"
    assert main(["bench", "--calibrate", str(file), "--seconds", "0.05"]) == 0
    assert "µs to start an op" in capsys.readouterr().out
    assert links.machine(str(file)).device.source.startswith("measured on 1 rank")
    assert main(["plan", "qwen2.5-0.5b", "--tp", "2", "--device", str(file)]) == 0
    assert "this machine" in capsys.readouterr().out
    assert main(["bench", "--calibrate", str(tmp_path / "no" / "machine.json"), "--seconds", "0.05"]) == 2
