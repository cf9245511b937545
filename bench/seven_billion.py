"""The classic case: a 7B model in bfloat16 (13.5 GB) on two ranks that may take 8 GB each, and one rank that cannot hold it.

    python bench/seven_billion.py FOLDER [--shape llama-2-7b] [--limit-gb 8] [--tokens 32] [--tp 2] [--keep]

Writes random weights of that shape to FOLDER (shard by shard; deleted at the end unless --keep), then runs three commands, each under
RLIMIT_DATA of --limit-gb for every process, and prints what each took:

    colrow run FOLDER --tp 1        must be refused in one line before a weight is read
    colrow run FOLDER --tp 2        must generate
    colrow verify FOLDER --tp 2 --stream --no-train --dtype bfloat16      must find the two models equal

The peak is the most resident memory (VmHWM) that a process of the command had, from the kernel, file pages and libraries included; it must
stay below the limit too. Weights are read in bfloat16, so it is that of opening. While `run` generates, they are kept in 12 bits on
processors that can; what a rank then holds, by its own account, stands beside it. RLIMIT_DATA is what every user can set; a control group
would do as well, where one may be made.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from random_model import config_of, write


@dataclass(frozen=True)
class Outcome:
    """`peaks`: most resident bytes of the processes that held most, largest first."""

    code: int
    seconds: float
    peaks: tuple[int, ...]
    out: str
    err: str


def under_limit(limit: int, *command: str) -> Outcome:
    """`colrow COMMAND` with RLIMIT_DATA `limit` bytes for each of its processes."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    start, peaks = time.perf_counter(), dict[int, int]()
    process = subprocess.Popen(
        [sys.executable, "-m", "colrow", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=lower
    )

    def watch() -> None:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                for one in (parent, *parent.children(recursive=True)):
                    peaks[one.pid] = max(peaks.get(one.pid, 0), peak(one.pid))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, err = process.communicate()
    watcher.join()
    return Outcome(process.returncode, time.perf_counter() - start, tuple(sorted(peaks.values(), reverse=True)), out, err)


def peak(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else "?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--limit-gb", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    folder, limit, tp = options.folder, int(options.limit_gb * 1e9), options.tp
    if folder.exists() and not (folder / "model.safetensors.index.json").is_file():
        parser.error(f"{folder} exists and is no model")
    try:
        start = time.perf_counter()
        if not folder.exists():
            size = write(config_of(options.shape), folder, torch.bfloat16)
            print(f"written       {options.shape}: {size / 1e9:.2f} GB in bfloat16, {time.perf_counter() - start:.0f} s", flush=True)
        print(f"limit         {limit / 1e9:.2f} GB a process (RLIMIT_DATA)\n", flush=True)
        right = [report_alone(folder, limit), report_run(folder, limit, tp, options.tokens), report_verify(folder, limit, tp)]
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("\nas it should be" if all(right) else "\nNOT as it should be")
    return 0 if all(right) else 1


def report_alone(folder: Path, limit: int) -> bool:
    result = under_limit(limit, "run", str(folder), "--tp", "1", "-p", "Hello", "-n", "4")
    lines = result.err.strip().splitlines()
    print(f"one rank      exit code {result.code} after {result.seconds:.1f} s, peak {gb(result.peaks[:1])} GB")
    print(f"              {lines[-1] if lines else 'without a word'}", flush=True)
    return result.code == 2 and len(lines) == 1 and result.peaks[0] < limit / 2


def report_run(folder: Path, limit: int, tp: int, tokens: int) -> bool:
    result = under_limit(limit, "run", str(folder), "--tp", str(tp), "-p", "Once upon a time", "-n", str(tokens))
    rate, load = found(r"([\d.]+) tokens/s", result.err), found(r"load ([\d.]+) s", result.err)
    print(f"{tp} ranks run   exit code {result.code} after {result.seconds:.1f} s, load {load} s, {rate} tokens/s after the first")
    held = ", ".join(re.findall(r"resident, (.*?) of it parameters", result.err))
    print(f"              peak resident {gb(result.peaks[:tp])} GB; of parameters held at the end {held}", flush=True)
    if result.code:
        print(result.err)
    return result.code == 0 and max(result.peaks) < limit


def report_verify(folder: Path, limit: int, tp: int) -> bool:
    command = ("verify", str(folder), "--tp", str(tp), "--stream", "--no-train", "--dtype", "bfloat16")
    result = under_limit(limit, *command)
    print(f"{tp} ranks, proof exit code {result.code} after {result.seconds:.1f} s, peak resident {gb(result.peaks[:tp])} GB")
    print("".join(f"              {line}\n" for line in (result.out + result.err).strip().splitlines()), flush=True)
    return result.code == 0 and max(result.peaks) < limit


def gb(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{size / 1e9:.2f}" for size in sizes)


if __name__ == "__main__":
    sys.exit(main())
