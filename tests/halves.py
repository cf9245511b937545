"""The test suite as two processes side by side, for a machine of two cores: `make test`.

    python -m tests.halves [options of pytest]

The first half's output comes as it is made, the second's after it, and then one line for both. Which file belongs to which half was chosen
by what they take. `python -m pytest` is the same suite in one process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

FIRST = re.compile(r"test_([a-l]|proof)")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|errors?|warnings?)")
SUMMARY = re.compile(r" in \d+(\.\d+)?s\b")
NO_TESTS, ENDED = 5, (0, 1, 5)  # exit codes of pytest


def main(options: list[str]) -> int:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    halves = [[f for f in files if bool(FIRST.match(f.name)) is first] for first in (True, False)]
    return run(halves if len(os.sched_getaffinity(0)) > 1 else [files], options)


def run(halves: list[list[Path]], options: list[str]) -> int:
    """Each in a process of its own, at the same time. 0 only if pytest ended each with 0; a half without tests to run is no failure."""
    start, counts, cut_short = time.monotonic(), Counter[str](), []
    with ExitStack() as files_of_output:
        outputs = [files_of_output.enter_context(tempfile.TemporaryFile()) for _ in halves]
        command = [sys.executable, "-m", "pytest", *options]
        running = [
            subprocess.Popen([*command, *map(str, half)], stdout=out, stderr=subprocess.STDOUT)
            for half, out in zip(halves, outputs, strict=True)
        ]
        for process, out in zip(running, outputs, strict=True):
            text = follow(process, out.fileno())
            last = next((line for line in reversed(text.splitlines()) if SUMMARY.search(line)), "")
            if process.returncode not in ENDED:  # a signal, or one of pytest's codes for a run that did not come to its end
                cut_short.append(f"; a process was cut short, exit code {process.returncode}")
            counts.update({kind.rstrip("s"): int(n) for n, kind in COUNTS.findall(last)})
    found = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing"
    print(f"==== {found} in {time.monotonic() - start:.0f} s, {len(halves)} processes{''.join(cut_short)} ====", flush=True)
    codes = [process.returncode for process in running]
    return max((code for code in codes if code != NO_TESTS or set(codes) == {NO_TESTS}), key=abs)


def follow(process: subprocess.Popen, out: int) -> str:
    """Prints what the process has written to the file `out`, until it ends; all of it. Ctrl-C reaches the process too, which then ends."""
    text, at = "", 0
    while True:
        try:
            ended = process.poll() is not None  # asked before reading, so that nothing written before the end is missed
            new = os.pread(out, 1 << 20, at)
            if not new and not ended:
                time.sleep(0.2)
        except KeyboardInterrupt:
            continue
        at += len(new)
        text += new.decode(errors="replace")
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        if ended and not new:
            return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
