"""Presets: what links and devices can do, each with its source. Bandwidths are per direction, in bytes per second.

Vendors add both directions of NVLink (900 GB/s of an H100 are 450 each way) and quote products with sparsity; the numbers here do neither.
Latencies of NCCL's rings are those that NCCL itself plans with (src/graph/tuning.cc, low-latency protocol): 6.6 µs to start, then 0.6 µs a
hop over NVLink, 1.0 over PCIe, 2.7 over a network. `colrow bench --calibrate` writes a measured preset of the present machine.

Not here: what a plan makes of them (timing.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError

if TYPE_CHECKING:
    from .wire import Algorithm  # leads to torch, which takes seconds; names are checked before

_NCCL = "latency: NCCL src/graph/tuning.cc (ring, LL)"
_TCP = "latency: 25 µs a message over TCP, a common value for kernel sockets in one rack, not measured here"


@dataclass(frozen=True)
class Link:
    """One collective takes `start` + steps * `hop` + bytes sent / `bandwidth` seconds. `domain`: most ranks it joins; 0 = any number.
    `each`: every device has an adapter of its own, so that a host's ranks send side by side; else they share the host's.
    `times`: measured instead, (bytes, seconds) of all-reduces among `among` ranks, by rising size."""

    name: str
    words: str
    bandwidth: float
    hop: float
    start: float
    source: str
    domain: int = 0
    algorithms: tuple[Algorithm, ...] = ("ring", "tree")
    times: tuple[tuple[int, float], ...] = ()
    among: int = 0
    each: bool = True


@dataclass(frozen=True)
class Device:
    """`read`: memory bandwidth; `flops`: dense 16-bit products per second; `memory` in bytes; `shared`: all ranks of a host share `read`,
    `flops`, `touch` and `gradient` (processes on one CPU). `efficiency`: what of `read` and `flops` code reaches, assumed for data sheets,
    1 for measured ones. What follows `overlap` is 0 where code is good enough for it not to matter, as a bound assumes."""

    name: str
    words: str
    read: float
    flops: float
    memory: float
    source: str
    shared: bool = False
    efficiency: tuple[float, float] = (0.75, 0.5)
    overlap: bool = True  # weights are read while products are computed; else one after the other
    per_op: float = 0.0  # seconds to start one op; 0 where they are started ahead or recorded
    touch: float = 0.0  # bytes per second of ops between products (norms, gates, residuals), read and written
    gradient: float = 0.0  # bytes of gradients per second that a backward pass adds to what its products take
    reads: tuple[tuple[float, float], ...] = ()  # of programs: bytes per second by the bytes that all ranks read over and over again
    attend: float = 0.0  # of programs: numbers of keys and values per second that one rank's attention looks at
    steps: tuple[tuple[float, float], ...] = ()  # of programs: seconds that a step takes beside its instructions, by the bytes it reads
    per_score: float = 0.0  # and to choose, for each score of a rank
    per_row: float = 0.0  # and for each further sequence of a step, beside its instructions
    cores: int = 0  # that ranks share, where their attention is looked at; 0: each has its own
    compact: bool = False  # of programs: bfloat16 weights of linear layers are kept in 12 bits by ranks of one thread (planning/compact.py)

    def keeps_compact(self, ranks: int) -> bool:
        """Whether so many ranks, which share out the cores, keep weights in 12 bits."""
        return self.compact and self.cores // ranks <= 1

    def reading(self, size: float) -> float:
        """Bytes per second while all ranks together read `size` bytes in turn, part of which a cache may keep for the next time."""
        return 1 / between([(at, 1 / rate) for at, rate in self.reads], size) if self.reads else self.read * self.efficiency[0]

    def beside(self, size: float) -> float:
        """Seconds that a step takes beside its instructions, where ranks read `size` bytes, which push all else out of the caches."""
        return between(self.steps, size)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x by (x, y) points with rising x; beyond them that of the nearest.

    >>> between([(2.0, 10.0), (4.0, 30.0)], 3.0), between([(2.0, 10.0), (4.0, 30.0)], 8.0)
    (20.0, 30.0)
    """
    for (a, low), (b, high) in pairwise(points):
        if x < b:
            return low + max(x - a, 0) * (high - low) / (b - a)
    return points[-1][1]


def _nvlink(name: str, words: str, gigabytes: float, source: str, domain: int = 8) -> Link:
    return Link(name, words, gigabytes * 1e9, 0.6e-6, 6.6e-6, f"{source}; {_NCCL}", domain, ("ring", "tree", "one-shot", "two-shot"))


def _ethernet(name: str, words: str, bandwidth: float, hop: float, start: float, latency: str) -> Link:
    return Link(name, words, bandwidth, hop, start, f"IEEE 802.3; {latency}", each=False)


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        _nvlink("nvlink3", "NVLink 3", 300, "NVIDIA A100 data sheet: 600 GB/s, both directions"),
        _nvlink("nvlink4", "NVLink 4", 450, "NVIDIA H100 data sheet: 900 GB/s, both directions"),
        _nvlink("nvlink5", "NVLink 5", 900, "NVIDIA Blackwell data sheet: 1.8 TB/s, both directions"),
        Link("pcie4", "PCIe 4.0 x16", 31.5e9, 1e-6, 6.6e-6, f"PCI-SIG: 16 GT/s, 128b/130b, 16 lanes; {_NCCL}", 8),
        Link("pcie5", "PCIe 5.0 x16", 63e9, 1e-6, 6.6e-6, f"PCI-SIG: 32 GT/s, 128b/130b, 16 lanes; {_NCCL}", 8),
        Link("hdr", "InfiniBand HDR", 25e9, 2.7e-6, 6.6e-6, f"IBTA: 200 Gbit/s; {_NCCL}"),
        Link("ndr", "InfiniBand NDR", 50e9, 2.7e-6, 6.6e-6, f"IBTA: 400 Gbit/s; {_NCCL}"),
        _ethernet("100gbe", "100 Gbit Ethernet", 12.5e9, 10e-6, 10e-6, "latency: assumed for RoCE, not measured here"),
        _ethernet("25gbe", "25 Gbit Ethernet", 3.125e9, 25e-6, 20e-6, _TCP),
        _ethernet("10gbe", "10 Gbit Ethernet", 1.25e9, 25e-6, 20e-6, _TCP),
        _ethernet("1gbe", "1 Gbit Ethernet", 0.125e9, 25e-6, 20e-6, _TCP),
        Link("shm", "shared memory", 12e9, 2e-6, 8e-6, "measured on two cores of a Xeon", 0, ("one-shot", "two-shot")),
    )
}

_GB = 1e9
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", "A100 SXM 80 GB", 2.039e12, 312e12, 80 * _GB, "NVIDIA A100 data sheet"),
        Device("h100", "H100 SXM 80 GB", 3.35e12, 989e12, 80 * _GB, "NVIDIA H100 data sheet (1,979 with sparsity, halved)"),
        Device("h200", "H200 SXM 141 GB", 4.8e12, 989e12, 141 * _GB, "NVIDIA H200 data sheet (1,979 with sparsity, halved)"),
        Device("b200", "B200 180 GB", 7.7e12, 2250e12, 180 * _GB, "NVIDIA HGX B200 data sheet (4.5 PFLOPS with sparsity, halved)"),
        Device("rtx3090", "RTX 3090", 936e9, 71e12, 24 * _GB, "NVIDIA GA102 white paper, float32 accumulation"),
        Device("rtx4090", "RTX 4090", 1008e9, 165.2e12, 24 * _GB, "NVIDIA Ada white paper, float32 accumulation"),
        Device("rtx5090", "RTX 5090", 1792e9, 209.5e12, 32 * _GB, "NVIDIA RTX Blackwell white paper, float32 accumulation"),
        Device("l40s", "L40S", 864e9, 362e12, 48 * _GB, "NVIDIA L40S data sheet (733 with sparsity, halved)"),
        Device("cpu", "two cores of a Xeon", 25e9, 1.5e12, 24 * _GB, "measured: AVX-512 loads, torch bf16 products", True, (0.6, 0.8)),
    )
}

_PROGRAM = "reading: C loops over bfloat16 at 0.85 to 0.95 of AVX-512 loads, two cores of a Xeon; the rest: two cores of an EPYC"
PROGRAMS: dict[str, tuple[Device, Link]] = {
    "cpu": (
        Device(
            "cpu",
            "two cores of a Xeon",
            25e9,
            0.3e12,
            24 * _GB,
            _PROGRAM,
            True,
            (0.9, 1.0),
            False,
            per_op=0.2e-6,
            attend=8e9,
            steps=((64e6, 0.6e-3), (384e6, 1.1e-3)),
            per_score=5e-9,
            per_row=8e-5,
            cores=2,
        ),
        Link("shm", "shared memory", 12e9, 2e-6, 4e-6, _PROGRAM, 0, ("one-shot", "two-shot")),
    )
}
"""What the engine's programs in C (engine/program.py) make of a device, where it decodes by them."""

USUAL_LINK = {"a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "rtx5090": "pcie5", "cpu": "shm"}
BEYOND = "ndr"  # joins hosts, where nothing else is said
Preset = TypeVar("Preset", Link, Device)


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, what joins those of one host (`per_host` of them, 0: as many as the link joins), and what joins hosts.
    `program`: the same ranks while the engine's programs in C decode; None where it decodes by the model's modules, or nothing is known."""

    device: Device
    link: Link
    between: Link = LINKS[BEYOND]
    per_host: int = 0
    program: Machine | None = None

    @property
    def domain(self) -> int:
        """Devices that meet without leaving their host; 0: any number."""
        return self.per_host or self.link.domain

    @property
    def plain(self) -> Machine:
        """The same for other weights than bfloat16 ones."""
        if self.program is None:
            return self
        return replace(self, program=replace(self.program, device=replace(self.program.device, compact=False)))

    def keeps_compact(self, ranks: int) -> bool:
        return self.program is not None and self.program.device.keeps_compact(ranks)

    def hosts(self, ranks: int) -> int:
        return ceil(ranks / self.domain) if self.domain else 1

    def joins(self, ranks: int) -> Link:
        """The link that limits `ranks` ranks: the slowest on their way."""
        return self.link if self.hosts(ranks) == 1 else self.between


RATES = ("bandwidth", "read", "flops", "memory")  # of which nothing is 0
PROGRAM = "program"  # in a file, the part that is about the engine's programs


def link(name: str, part: str = "") -> Link:
    """A preset, or the one in a file that `colrow bench --calibrate` wrote, in its `part`. UserError for neither."""
    return _preset(name, LINKS, Link, "link", part)


def device(name: str, part: str = "") -> Device:
    return _preset(name, DEVICES, Device, "device", part)


def usual_link(of: Device) -> Link:
    """The link that such devices are joined by; PCIe 4 where the maker sells none faster."""
    return LINKS[USUAL_LINK.get(of.name, "pcie4")]


def machine(of_device: str, of_link: str = "", between: str = BEYOND, per_host: int = 0) -> Machine:
    """Presets by name; without a link, the one that is usual for the device (a measured preset's own)."""
    found = device(of_device)
    usual = link(of_device) if Path(of_device).is_file() else usual_link(found)
    program = PROGRAMS.get(of_device.lower())
    if program is None and Path(of_device).is_file() and PROGRAM in _read(of_device):
        program = device(of_device, PROGRAM), link(of_device, PROGRAM)
    return Machine(found, link(of_link) if of_link else usual, link(between), per_host, Machine(*program) if program else None)


def _read(name: str) -> Any:
    return json.loads(Path(name).read_text(encoding="utf-8"))


def _preset(name: str, known: dict[str, Preset], kind: type[Preset], word: str, part: str) -> Preset:
    if name.lower() in known:
        return known[name.lower()]
    if Path(name).is_file():
        try:
            data = (_read(name)[part] if part else _read(name))[word]
            return _plausible(kind(**{key: _frozen(value) for key, value in data.items()}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"the file is not a preset with a {word}", f"{name}: {error}", "a file of colrow bench --calibrate") from error
    raise UserError(f"no {word} of this name", name, f"{', '.join(known)}, or a file of colrow bench --calibrate")


def _plausible(found: Preset) -> Preset:
    """ValueError for a number that nothing can be computed from: the file may have been written by hand."""
    for field in fields(found):
        value = getattr(found, field.name)
        numeric = field.type in ("float", "int")
        if (numeric and not (isinstance(value, float | int) and 0 <= value < inf)) or (field.name in RATES and not value):
            raise ValueError(f"{field.name} is {value!r}")
    return found


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def save(path: Path, of_link: Link, of_device: Device, program: tuple[Device, Link] | None = None) -> None:
    """A measured pair, in the form that --link and --device read, and that of programs."""
    data: dict[str, Any] = {"link": asdict(of_link), "device": asdict(of_device)}
    if program is not None:
        data[PROGRAM] = {"link": asdict(program[1]), "device": asdict(program[0])}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
