"""Real processes that fail, are killed or are told to end: one line, every process gone, whoever was the first."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colrow.comm import launch
from colrow.comm.ranks import Ranks
from colrow.errors import RankError, UserError

from . import comm_ranks
from .processes import ROOT, SECONDS, all_gone, environment, gone, ranks_left, session


@pytest.mark.process
def test_the_nursery_is_killed() -> None:
    with Ranks(2) as ranks:
        found = ranks.run(comm_ranks.about)
        (nursery,) = ranks_left()
        items = ranks.stream(comm_ranks.steps, (10**9,))
        assert next(items) == (0, 0)
        os.kill(nursery, signal.SIGKILL)
        with pytest.raises(RankError, match="killed by SIGKILL"):
            list(items)
        assert all_gone([f["pid"] for f in found])


@pytest.mark.process
def test_ranks_end_with_the_nursery_before_the_parent_does_anything() -> None:
    with Ranks(2) as ranks:
        found = ranks.run(comm_ranks.about)
        (nursery,) = ranks_left()
        os.kill(nursery, signal.SIGKILL)
        assert all_gone([f["pid"] for f in found])


@pytest.mark.process
def test_an_import_that_fails_is_told() -> None:
    with (
        pytest.raises(RankError, match=r"rank 0 failed: ModuleNotFoundError: No module named 'no_such'"),
        Ranks(2, imports=("no_such",)) as ranks,
    ):
        ranks.run(comm_ranks.about)
    assert not ranks_left()


@pytest.mark.process
def test_a_killed_rank_whose_own_children_live_on(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that the rank forked holds all its pipes open; the rank's end is seen all the same."""
    with pytest.raises(RankError, match="killed by SIGKILL"):
        launch.spawn(comm_ranks.fails, 2, ("killed beside its child",), "gloo")
    worker = int(capfd.readouterr().err.removeprefix("pid "))
    assert not gone(worker), "the end was seen only when the worker had ended"
    os.kill(worker, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "backend", "error", "text"),
    [
        ("user", "gloo", UserError, r"no such model, got x; try: demo"),
        ("user", "auto", UserError, r"no such model, got x; try: demo"),
        ("bug", "gloo", RankError, r"rank 1 failed: ZeroDivisionError: on purpose"),
        ("killed", "gloo", RankError, r"rank 1 was killed by SIGKILL.*"),
        ("killed", "auto", RankError, r"rank 1 was killed by SIGKILL.*"),
        ("hidden", "gloo", RankError, r"rank 1 was killed by SIGKILL.*"),
        ("exit", "gloo", RankError, r"rank 1 ended with exit code 3 before it was done"),
        ("sys.exit", "gloo", RankError, r"rank 1 failed: SystemExit: 4"),
    ],
)
def test_the_first_failure_is_the_message(
    how: str, backend: str, error: type[Exception], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error) as caught:
        launch.spawn(comm_ranks.fails, 2, (how,), backend)
    assert re.fullmatch(text, str(caught.value))
    assert not ranks_left()
    assert "Traceback" not in capfd.readouterr().err
    if how == "bug":
        assert "comm_ranks.py" in str(caught.value.__cause__), "the rank's own traceback is lost"


@pytest.mark.process
def test_a_process_ends_with_its_code_though_its_output_cannot_be_written() -> None:
    """Else a forked rank would go on with what the nursery does."""
    program = "import sys; from colrow.comm import child; sys.stdout = open('/dev/full', 'w'); sys.stdout.write('x'); child.end(7)"
    assert subprocess.run([sys.executable, "-c", program], env=environment(), stderr=subprocess.DEVNULL).returncode == 7


@pytest.mark.process
def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(RankError, match=r"rank \d failed: .*[Pp]ickle.*|rank \d failed: .*local object.*"):
        launch.spawn(comm_ranks.unpicklable, 2, backend="gloo")
    assert not ranks_left()


class Program:
    """`python -m tests.comm_ranks waits`, in a process group of its own, as a terminal starts it."""

    def __init__(self, program: str, backend: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.comm_ranks", program, backend],
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[int]:
        """The ranks' process numbers, once both run the program."""
        assert self.process.stderr is not None
        lines = [self.process.stderr.readline() for _ in range(2)]
        assert all(line.startswith("pid ") for line in lines), lines
        return [int(line.split()[1]) for line in lines]

    def end(self, whom: str, number: signal.Signals) -> tuple[int, str, float]:
        """Sends the signal to the parent or, as a terminal does, to all: exit code, what was printed since, seconds until the end."""
        start = time.monotonic()
        if whom == "all":
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        try:
            _, text = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, text, time.monotonic() - start


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "backend", "whom", "number", "code", "text"),
    [
        ("waits", "gloo", "all", signal.SIGINT, 130, "interrupted\n"),
        ("waits", "auto", "parent", signal.SIGINT, 130, "interrupted\n"),
        ("waits", "gloo", "parent", signal.SIGTERM, -signal.SIGTERM, ""),
        ("waits", "gloo", "all", signal.SIGTERM, -signal.SIGTERM, ""),
        ("waits", "auto", "parent", signal.SIGKILL, -signal.SIGKILL, ""),
        ("computes", "gloo", "all", signal.SIGINT, 130, "interrupted\n"),
        ("computes", "gloo", "parent", signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_signals_end_everything(program: str, backend: str, whom: str, number: signal.Signals, code: int, text: str) -> None:
    running = Program(program, backend)
    ranks = running.ranks()
    everybody = session(running.process.pid)
    assert set(ranks) < set(everybody)
    found, printed, seconds = running.end(whom, number)
    assert all_gone(everybody)
    assert (found, printed) == (code, text)
    assert seconds < SECONDS


@pytest.mark.process
def test_ranks_leave_signals_for_all_to_their_parent() -> None:
    """From the first moment of each: the whole group gets SIGTERM and SIGINT again and again while ranks start and work."""
    command = [sys.executable, "-m", "tests.comm_ranks", "minds", "auto"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        while not select.select([process.stdout], [], [], 0.02)[0]:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.killpg(process.pid, number)
        assert process.stdout.readline() == "[3.0, 3.0] True\n"
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)


@pytest.mark.process
@pytest.mark.parametrize("spawned", [False, True])
def test_a_rank_that_gets_sigterm_goes_on_until_its_parent_ends_it(spawned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Ranks(2, imports=("starts_a_thread",) if spawned else ()) as ranks:
        found = ranks.run(comm_ranks.about)
        for pid in [*ranks_left(), *(f["pid"] for f in found)]:
            os.kill(pid, signal.SIGTERM)
        assert all(ranks.run(comm_ranks.forked_heeds_sigterm)), "what a rank forks is ended by it"
        items = ranks.stream(comm_ranks.steps, (10**9,))
        assert next(items) == (0, 0)
        items.close()  # type: ignore[attr-defined]
        assert not ranks_left()
        assert all_gone([f["pid"] for f in found])


@pytest.mark.process
def test_ctrl_c_while_ranks_import() -> None:
    running = Program("waits", "gloo")
    everybody: list[int] = []
    until = time.monotonic() + 60
    while len(everybody) < 3 and time.monotonic() < until:  # the parent, the nursery, and multiprocessing's resource tracker
        time.sleep(0.02)
        everybody = session(running.process.pid)
    code, printed, _ = running.end("all", signal.SIGINT)
    assert all_gone(everybody)
    assert (code, printed) == (130, "interrupted\n")


@pytest.mark.process
def test_the_parent_is_killed_while_the_nursery_imports(tmp_path: Path) -> None:
    """Whatever it is doing then, and though no rank is there yet to see it."""
    (tmp_path / "sleeps.py").write_text("import os, time\nos.write(2, b'pid %d\\n' % os.getpid())\ntime.sleep(600)\n")
    start = "with Ranks(2, imports=('sleeps',)) as ranks:\n        ranks.run(print)\n"
    (tmp_path / "program.py").write_text(f"from colrow.comm.ranks import Ranks\nif __name__ == '__main__':\n    {start}")
    command = [sys.executable, tmp_path / "program.py"]
    with subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        nursery = int(parent.stderr.readline().removeprefix("pid "))
        everybody = session(parent.pid)
        assert nursery in everybody
        parent.kill()
        assert all_gone([pid for pid in everybody if pid != parent.pid])
