"""Data parallel replicas of split models under torchrun: three steps equal the unsplit model's on the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colrow.errors import UserError
from colrow.train.replicas import Replicas


@pytest.mark.process
@pytest.mark.parametrize(("dp", "tp", "mode"), [(2, 2, "off"), (2, 2, "again"), (1, 2, "off")])
def test_replicas_of_split_models(dp: int, tp: int, mode: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={dp * tp}"]
    command = [*launcher, "-m", "tests.replica_ranks", str(dp), str(tp), mode]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == dp * tp


def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs torchrun"):
        Replicas.join(2, 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="4 ranks, and torchrun started, got 3"):
        Replicas.join(2, 2)
    with pytest.raises(UserError, match="at least 1"):
        Replicas.join(0, 2)
