"""The worked examples compute what they say, number by number, and print it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_feed_forward_by_hand_equals_autograd() -> None:
    example = importlib.import_module("feed_forward")
    for what, found, expected in example.by_hand():
        torch.testing.assert_close(found, expected, msg=what)
    assert example.shard(0).dx_partial.shape == (3, 3)
    assert not torch.allclose(example.shard(0).dx_partial, example.dense().dx), "one rank alone has only a part of dX"


@pytest.mark.process
def test_feed_forward_on_two_processes() -> None:
    out = subprocess.run([sys.executable, EXAMPLES / "feed_forward.py"], capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("equal") == 5 + 7
    assert "DIFFERENT" not in out.stdout


def test_boundary_numbers() -> None:
    example = importlib.import_module("boundary")
    b = example.right()
    assert b.hidden.tolist() == [[1, 1, 0, 6]]
    assert [p.tolist() for p in b.partial] == [[[1, 1]], [[6, -6]]]
    assert b.summed.tolist() == b.dense.tolist() == [[7, -5]]
    assert example.bytes_before(128, 4096, 2) == 1_048_576
    assert example.bytes_after(128, 1024, 2) == 262_144
    for found, expected in (example.wrong_cut(), example.bias_on_every_rank()):
        assert not torch.equal(found, expected)


def test_boundary_prints(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("boundary").main()
    out = capsys.readouterr().out
    assert "[7.0, -5.0] equal" in out
    assert "relu(1) + relu(-1) = 1, relu(1 + -1) = 0" in out
