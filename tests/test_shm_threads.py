"""The C part with ranks as threads over one mapping, watched by ThreadSanitizer: no data race, and a planted one is seen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from colrow.native import SHM, compiler_command

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-fno-math-errno", "-pthread"]


def build(root: Path, out: Path) -> Path:
    compiler = compiler_command()
    if not compiler:
        pytest.skip("no C compiler")
    done = subprocess.run([*compiler, *FLAGS, str(root / "tests/shm_threads.c"), "-o", str(out)], capture_output=True, text=True)
    if done.returncode and "tsan" in done.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, ranks: int, operations: int, seed: int) -> subprocess.CompletedProcess[str]:
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # ThreadSanitizer cannot place its memory under every randomised layout
    return subprocess.run([*fixed, str(program), str(ranks), str(operations), str(seed)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("threads") / "shm_threads")


@pytest.mark.parametrize(("ranks", "operations"), [(1, 200), (2, 1000), (3, 500), (4, 300), (8, 60)])
def test_no_data_race(program: Path, ranks: int, operations: int) -> None:
    done = run(program, ranks, operations, seed=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "ok\n"
    assert "WARNING" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("step, memory_order_acquire) == g->step", "step, memory_order_relaxed) == g->step"),
        ("(2 * (uint64_t)rank + (step & 1))", "(2 * (uint64_t)rank + 0 * (step & 1))"),
    ],
    ids=["relaxed load", "one slot instead of two"],
)
def test_a_planted_race_is_seen(right: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "colrow/comm").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/shm_threads.c", tmp_path / "tests")
    for source in SHM.sources:
        shutil.copy(ROOT / "colrow" / source, tmp_path / "colrow" / source)
    place = tmp_path / "colrow/comm/shm_wait.h"
    text = place.read_text()
    assert text.count(right) == 1
    place.write_text(text.replace(right, wrong))
    done = run(build(tmp_path, tmp_path / "planted"), 3, 300, seed=1)
    assert done.returncode != 0
    assert "data race" in done.stderr or "wrong" in done.stderr
