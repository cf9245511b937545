"""`make test`: its last line and its exit status, for halves that pass, fail, crash or are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import halves

PASSES = "def test_one() -> None: pass\n"
FAILS = "def test_one() -> None: assert False\n"
CRASHES = "import os, signal\ndef test_one() -> None: pass\ndef test_two() -> None: os.kill(os.getpid(), signal.SIGKILL)\n"


def files(folder: Path, *texts: str) -> list[list[Path]]:
    found = [folder / f"test_{number}.py" for number in range(len(texts))]
    for file, text in zip(found, texts, strict=True):
        file.write_text(text)
    return [[file] for file in found]


@pytest.mark.process
@pytest.mark.parametrize(
    ("texts", "code", "line"),
    [
        ((PASSES, PASSES), 0, "==== 2 passed in"),
        ((FAILS, PASSES), 1, "==== 1 failed, 1 passed in"),
        ((PASSES, CRASHES), -9, "2 processes; a process was cut short, exit code -9 ===="),
        ((PASSES, ""), 0, "==== 1 passed in"),
        (("", ""), 5, "==== nothing in"),
    ],
)
def test_the_status_and_the_line_are_those_of_both(
    texts: tuple[str, str], code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halves.run(files(tmp_path, *texts), ["-p", "no:cacheprovider"]) == code
    assert line in capsys.readouterr().out.splitlines()[-1]


WAITS = """
import pathlib, time
def test_one() -> None: pass
def test_two() -> None:
    pathlib.Path(__file__).with_suffix(".began").touch()
    time.sleep(300)
"""
PROGRAM = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells take from what runs in the background
from tests.halves import run
sys.exit(run([[Path(file)] for file in sys.argv[1:]], []))
"""


@pytest.mark.process
def test_after_ctrl_c_both_halves_say_how_far_they_came(tmp_path: Path) -> None:
    parts = [file for [file] in files(tmp_path, WAITS, WAITS)]
    command = [sys.executable, "-c", PROGRAM, *map(str, parts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not all(file.with_suffix(".began").exists() for file in parts):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes in front
        out = process.communicate()[0]
    assert process.returncode == 2
    assert out.splitlines()[-1].startswith("==== 2 passed in")
