"""Runs the zoo: one architecture at a time, each in a process of its own with a limit on time and memory; what is known is kept in a cache.

A row that crashes or hangs is a row that says so. Results are kept by architecture and by a digest of the sources that made them, so an
interrupted run goes on where it was, and a change of the code makes everything stale.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

import colrow

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 240.0  # seconds for one architecture
MEMORY_LIMIT = 8 << 30
Row = dict[str, Any]


def digest() -> str:
    """Of the versions and every source file that takes part."""
    state = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in (Path(colrow.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()[:16]


class Cache:
    """Rows as JSON files, one an architecture, in a folder outside of the tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> Row | None:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def write(self, name: str, row: Row) -> None:
        part = self.folder / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(row, indent=1))
        part.replace(self.folder / f"{name}.json")


def run(names: Iterable[str], degrees: tuple[int, ...], cache: Cache, keep: Callable[[Row], bool], say: Callable[[str], None]) -> None:
    """Measures those whose row is missing, or not worth keeping by `keep`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.zoo.row"])
    for name in names:
        known = cache.read(name)
        if known is not None and keep(known):
            continue
        row = one(context, name, degrees)
        cache.write(name, row)
        say(f"{name:24} {brief(row)}")


def one(context: Any, name: str, degrees: tuple[int, ...]) -> Row:
    """One architecture in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, name, degrees), daemon=True)
    row: Row = {"architecture": name, "digest": digest()}
    start = time.monotonic()
    child.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(max(start + TIME_LIMIT - time.monotonic(), 0)):
                row["stopped"] = f"no end after {TIME_LIMIT:.0f} s"
                break
            row.update(ours.recv())
    except EOFError:
        child.join(10)
        if child.exitcode and "stopped" not in row:
            row["stopped"] = f"the process ended with code {child.exitcode}"
    finally:
        child.kill()
        child.join()
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _child(pipe: Any, name: str, degrees: tuple[int, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of models
    from .row import measure

    try:
        measure(name, degrees, pipe.send)
    except BaseException as error:  # a row, whatever it is
        pipe.send({"stopped": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]})
    pipe.close()


def brief(row: Row) -> str:
    """A line for whoever watches."""
    out = [f"{row['seconds']:5.0f} s"]
    for key in sorted((k for k in row if k[:2] == "tp" and k[2:].isdigit()), key=lambda k: int(k[2:])):
        part = row[key]
        state = f"WRONG {part['wrong'][:150]}" if "wrong" in part else "equal"
        out.append(
            f"{key} {part['coverage']:.2f}/{part['attention'] if part['attention'] is None else round(part['attention'], 2)} {state}"
        )
    if row.get("real", {}).get("coverage") is not None:
        out.append(f"real {row['real']['coverage']:.3f}")
    if "stopped" in row:
        out.append(f"STOPPED {row['stopped'][:150]}")
    return " | ".join(out)
