"""Replicas of split models: a step of dp x tp ranks is the unsplit model's step on all of its rows. Real processes: DDP knows no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colrow.comm.ranks import Ranks
from colrow.errors import UserError
from colrow.train.replicas import Replicas

from . import replica_ranks, tiny
from .replica_ranks import STEPS, run, steps_of_whole
from .test_engine_text import byte_level

HERE = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.parametrize(("hosts", "mode"), [(1, "again"), (2, "off")])
def test_replicas_under_torchrun(hosts: int, mode: str) -> None:
    """The library's loop, dp=2 and tp=2, by one torchrun and by two that play two hosts (whose ranks cannot share memory)."""
    several = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    where = ["--standalone"] if hosts == 1 else several
    launcher = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={4 // hosts}"]
    command = [*launcher, "-m", "tests.replica_ranks", "2", "2", mode]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE) for _ in range(hosts)]
    done = [(process, *process.communicate(timeout=280)) for process in started]
    assert all(process.returncode == 0 for process, _, _ in done), "".join(err[-3000:] for _, _, err in done)
    assert sum(out.count("ok") for _, out, _ in done) == 4


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.process
def test_the_trainers_steps_are_the_whole_models_at_any_dp_and_tp(tmp_path: Path) -> None:
    """float64, clipped AdamW, windows that are not full, one with fewer rows than replicas; saved at 2 x 2, resumed at 4 x 1 and 1 x 4."""
    losses, norms, expected = steps_of_whole()
    with Ranks(4) as ranks:

        def check(dp: int, out: Path | None, until: int | None, first: int) -> None:
            results = ranks.run(run, (dp, out, until))
            for found, found_norms, tokens, parameters in results:
                assert found == pytest.approx(losses[first : until or STEPS], abs=1e-10)
                assert found_norms == pytest.approx(norms[first : until or STEPS], rel=1e-9)
                assert tokens == results[0][2]
                for name, p in expected.items() if until is None else ():
                    assert (parameters[name] - p).abs().max() <= 1e-10, name

        check(2, None, None, 0)
        check(2, tmp_path / "a", 2, 0)
        check(4, tmp_path / "a", 4, 2)
        check(1, tmp_path / "a", None, 4)
        written = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir())
        assert written == ["step-00000004", f"step-{STEPS:08d}"], "one writer, nothing unfinished"
        ranks.run(replica_ranks.sixteen_bits)
        ranks.run(replica_ranks.dropout, (tmp_path / "b",))
        ranks.run(replica_ranks.experts)
        with pytest.raises(UserError, match="labels of micro-batch 0 differs between rank 0 and rank 1"):
            ranks.run(replica_ranks.other_data)


def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs torchrun"):
        Replicas.join(2, 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="4 ranks, and torchrun started, got 3"):
        Replicas.join(2, 2)
    with pytest.raises(UserError, match="at least 1"):
        Replicas.join(0, 2)


@pytest.mark.process
def test_the_command_with_replicas(tmp_path: Path) -> None:
    """dp=2 x tp=2 started by the command, in bfloat16 with masters: the losses of tp=1, one checkpoint, gone on with at dp=2 x tp=1."""
    tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256), attention="sdpa").bfloat16().save_pretrained(tmp_path / "m")
    byte_level().save_pretrained(tmp_path / "m")
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": f"one more line, number {n}"}) for n in range(24)))
    common = ["train", tmp_path / "m", "--data", tmp_path / "d.jsonl", "--eval", tmp_path / "d.jsonl", "--length", 48, "--lr", 0.01]

    def losses(out: str, *more: object) -> list[float]:
        command = [sys.executable, "-m", "colrow", *common, "--out", tmp_path / out, "--no-gate", *more]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        lines = map(json.loads, (tmp_path / out / "log.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["event"] != "savedat"]

    both = losses("both", "--tp", 2, "--dp", 2, "--steps", 4)
    assert both == pytest.approx(losses("one", "--tp", 1, "--steps", 4), rel=2e-2)
    more = losses("both", "--dp", 2, "--steps", 6)
    assert more[:5] == both, "the lines of the steps that were done before are kept"
    assert len(more) == 8
    assert torch.isfinite(torch.tensor(more)).all()
