"""`colrow bench`: measures this machine and writes it as a preset."""

from __future__ import annotations

from pathlib import Path

import psutil

from ..api import the_dtype
from ..comm import launch
from ..comm.group import Group
from ..engine import calibrate, pace
from ..engine.decoder import TOLERANCE
from ..errors import UserError
from ..planning import links
from .screen import note, say
from .units import nbytes


def rank(group: Group, dtype: str, seconds: float) -> tuple[calibrate.Measured, pace.Paced | None, str]:
    """On every rank: what it measured, for programs too where there are any for this dtype and device, and over what."""
    kind = the_dtype(dtype)
    found = calibrate.measure(group, kind, seconds)
    has_programs = kind in TOLERANCE and group.device.type == "cpu"
    return found, pace.measure(group, kind, seconds) if has_programs else None, group.transport.kind


def show(ranks: int, backend: str, dtype: str, seconds: float, file: Path | None) -> None:
    results = launch.run(rank, ranks, (dtype, seconds), backend)
    found, paced, kind = [m for m, _, _ in results], [p for _, p, _ in results if p is not None], results[0][2]
    memory = psutil.virtual_memory().total / ranks
    device, link = calibrate.presets(found, kind, memory)
    program = pace.presets(paced, kind, memory) if paced else None
    for number, m in enumerate(found):
        say(f"rank {number}: reads {nbytes(m.read)}/s, {m.flops / 1e9:,.0f} GFLOP/s of {dtype}")
    say(f"between products: {1e6 * device.per_op:.1f} µs to start an op, {nbytes(device.touch)}/s of activations")
    if ranks > 1:
        say(f"all-reduce over {kind}: {', '.join(f'{nbytes(size)} in {1e6 * seconds:,.1f} µs' for size, seconds in link.times)}")
    if program is not None:
        for line in program_lines(*program):
            say(line)
    if file is None:
        return
    try:
        links.save(file, link, device, program)
    except OSError as error:
        raise UserError("the preset cannot be written", f"{file}: {error.strerror}", "--calibrate machine.json") from error
    note(f"written: {file}; use it with colrow plan MODEL --device {file}")


def program_lines(device: links.Device, link: links.Link) -> list[str]:
    """What the engine's programs in C were measured to do."""
    reads = ", ".join(f"{nbytes(rate)}/s of {nbytes(size)}" for size, rate in device.reads)
    steps = " to ".join(f"{1e6 * seconds:,.0f}" for _, seconds in device.steps)
    lines = [
        f"programs in C, all ranks together: read {reads} over and over; {device.flops / 1e9:,.0f} GFLOP/s of further sequences",
        f"  a rank: {device.attend / 1e9:.1f} billion numbers of keys and values a second; {steps} µs a step beside its instructions",
    ]
    sums = ", ".join(f"{nbytes(size)} in {1e6 * seconds:,.1f} µs" for size, seconds in link.times)
    return [*lines, *([f"  sums: {sums}"] if sums else [])]
