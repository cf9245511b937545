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


def main(options: list[str]) -> int:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    halves = [[f for f in files if bool(FIRST.match(f.name)) is first] for first in (True, False)]
    if (os.cpu_count() or 1) < 2:
        halves = [files]
    start, counts = time.monotonic(), Counter[str]()
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
            counts.update({kind.rstrip("s"): int(n) for n, kind in COUNTS.findall(last)})
    found = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    print(f"==== {found} in {time.monotonic() - start:.0f} s, {len(halves)} processes ====", flush=True)
    return max((process.returncode for process in running), key=abs)


def follow(process: subprocess.Popen, out: int) -> str:
    """Prints what the process has written to the file `out`, until it ends; all of it."""
    text, at = "", 0
    while True:
        ended = process.poll() is not None  # asked before reading, so that nothing written before the end is missed
        new = os.pread(out, 1 << 20, at)
        at += len(new)
        text += new.decode(errors="replace")
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        if ended and not new:
            return text
        if not new:
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
