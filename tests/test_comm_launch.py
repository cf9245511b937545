"""Starting real processes, by colrow and by torchrun: results, cores, threads, what connects them, and what cannot be started."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from colrow.comm import launch
from colrow.comm.ranks import Ranks, share_of_cores
from colrow.errors import RankError, UserError

from . import comm_ranks
from .processes import ROOT, all_gone, environment, ranks_left


@pytest.mark.process
def test_results_cores_and_threads() -> None:
    found = launch.spawn(comm_ranks.about, 2, backend="auto")
    assert [(f["rank"], f["size"], f["total"]) for f in found] == [(0, 2, 3.0), (1, 2, 3.0)]
    for f in found:
        cores, threads = share_of_cores(f["rank"], 2)
        assert f["threads"] == threads
        assert not cores or tuple(f["cores"]) == cores
    assert all_gone([f["pid"] for f in found])
    assert not ranks_left()


@pytest.mark.process
def test_ranks_are_forked_from_one_process_unless_an_import_has_started_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for imports, forked in (("json", True), ("starts_a_thread", False)):
        with Ranks(2, imports=(imports,)) as ranks:
            (parent, first), (other, second) = ranks.run(comm_ranks.origin)
            assert parent == other != os.getpid()
            assert first == second == forked
    assert not ranks_left()


@pytest.mark.process
def test_locks_that_a_job_has_made_are_given_back() -> None:
    """Else multiprocessing's resource tracker warns of them when the program ends."""
    command = [sys.executable, "-m", "tests.comm_ranks", "keeps_a_lock", "gloo"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
def test_freed_memory_stays_with_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    assert launch.spawn(comm_ranks.pages_of_scratch, 1)[0][-1] < 100
    for name, value in (("MALLOC_PERTURB_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.perturb=0")):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            assert launch.spawn(comm_ranks.pages_of_scratch, 1)[0][-1] > 10_000, "the user's settings should stand"


@pytest.mark.process
def test_several_jobs_and_a_stream_on_the_same_ranks() -> None:
    with Ranks(2, "gloo", imports=("json",)) as ranks:
        first = ranks.run(comm_ranks.about)
        assert list(ranks.stream(comm_ranks.steps, (3,))) == [(0, 0), (0, 2), (0, 4)]
        assert [f["pid"] for f in ranks.run(comm_ranks.about)] == [f["pid"] for f in first]
        items = ranks.stream(comm_ranks.steps, (10**9,))
        assert next(items) == (0, 0)
        items.close()  # a caller who has seen enough
        assert all_gone([f["pid"] for f in first])
        with pytest.raises(RankError, match="have ended"):
            ranks.run(comm_ranks.about)


@pytest.mark.process
def test_two_programs_at_once_and_from_threads() -> None:
    """No port, file or name is common, and no signal handler is needed, which only the main thread may set."""
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(launch.spawn, comm_ranks.about, 2, backend="gloo") for _ in range(2)]
        assert [[f["total"] for f in result.result()] for result in running] == [[3.0, 3.0]] * 2


def test_shares_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 4, 6, 7})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [share_of_cores(rank, 2) for rank in range(2)] == [((1, 3), 2), ((4, 6), 2)]
    for said, threads in (("1", 1), ("7", 2), ("0", 2), ("4,2", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert share_of_cores(1, 2) == ((4, 6), threads)
    assert share_of_cores(7, 8) == ((), 1)


def test_one_rank_runs_here() -> None:
    assert launch.run(comm_ranks.fails, 1, ("none",)) == [None]
    assert list(launch.stream(comm_ranks.steps, 1, (2,))) == [(0, 0), (0, 2)]
    assert launch.run(os_pid, 1) == [os.getpid()]


def os_pid(g: object) -> int:
    return os.getpid()


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is taken where there are GPUs")
def test_gloo_where_memory_cannot_be_shared_and_a_line_that_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = launch.spawn(comm_ranks.without_shared_memory, 2, (str(tmp_path / "store"),), "shm")
    assert found == [
        [
            "gloo",
            "the ranks cannot share memory, got no memory on this host; try: --backend gloo",
            "the ranks cannot share memory, got several hosts; try: --backend gloo",
            f"NCCL needs one GPU per rank and rank {rank} has none, got 0 GPUs; try: --backend gloo",
        ]
        for rank in range(2)
    ]
    line = "colrow: ranks talk over gloo, since they cannot share memory: no memory on this host"
    assert [found for found in capfd.readouterr().err.splitlines() if "colrow" in found] == [line]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_wrong_sizes(size: object) -> None:
    with pytest.raises(UserError, match="whole number of at least 1"):
        launch.spawn(comm_ranks.about, size)  # type: ignore[arg-type]


def test_wrong_backend() -> None:
    with pytest.raises(UserError, match="auto, shm, gloo, nccl"):
        launch.spawn(comm_ranks.about, 2, backend="mpi")


@pytest.mark.process
def test_functions_that_cannot_be_sent() -> None:
    with pytest.raises(UserError, match="top level of a module"):
        launch.spawn(lambda g: None, 2, backend="gloo")
    assert not ranks_left()


@pytest.mark.process
def test_programs_that_cannot_be_imported_again(tmp_path: Path) -> None:
    typed = "from colrow.comm import launch\ndef f(g): pass\nlaunch.spawn(f, 2, backend='gloo')\n"
    done = subprocess.run([sys.executable, "-c", typed], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "a function that is in no file" in done.stderr
    (tmp_path / "unguarded.py").write_text(typed)
    done = subprocess.run(
        [sys.executable, tmp_path / "unguarded.py"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, "the ranks' tracebacks are noise"
    assert '__name__ == "__main__"' in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_torchrun(backend: str) -> None:
    """launch.run on what torchrun has started: every process has all results."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.comm_ranks", "join", backend], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[3.0, 3.0]") == 2
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a number, got x"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_join_says_what_is_missing(variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=text):
        launch.join()
