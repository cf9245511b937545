"""`colrow bench`: measures this machine and writes it as a preset."""

from __future__ import annotations

from pathlib import Path

import psutil

from ..api import the_dtype
from ..comm import launch
from ..comm.group import Group
from ..engine import calibrate
from ..errors import UserError
from ..planning import links
from .screen import note, say
from .units import nbytes


def rank(group: Group, dtype: str, seconds: float) -> tuple[calibrate.Measured, str]:
    """On every rank: what it measured, and over what."""
    return calibrate.measure(group, the_dtype(dtype), seconds), group.transport.kind


def show(ranks: int, backend: str, dtype: str, seconds: float, file: Path | None) -> None:
    results = launch.run(rank, ranks, (dtype, seconds), backend)
    found, kind = [m for m, _ in results], results[0][1]
    device, link = calibrate.presets(found, kind, psutil.virtual_memory().total / ranks)
    for number, m in enumerate(found):
        say(f"rank {number}: reads {nbytes(m.read)}/s, {m.flops / 1e9:,.0f} GFLOP/s of {dtype}")
    say(f"between products: {1e6 * device.per_op:.1f} µs to start an op, {nbytes(device.touch)}/s of activations")
    if ranks > 1:
        say(f"all-reduce over {kind}: {', '.join(f'{nbytes(size)} in {1e6 * seconds:,.1f} µs' for size, seconds in link.times)}")
    if file is None:
        return
    try:
        links.save(file, link, device)
    except OSError as error:
        raise UserError("the preset cannot be written", f"{file}: {error.strerror}", "--calibrate machine.json") from error
    note(f"written: {file}; use it with colrow plan MODEL --device {file}")
