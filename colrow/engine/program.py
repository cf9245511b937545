"""Program: one decoding step of a split model without its modules, as a list of instructions that C runs in one call.

    program = Program(compiled, group, threads)
    logits = program.run([7, 9], [slot_a, slot_b])     # the next tokens of two sequences: [2, columns of this rank]

Each row has an arena of its own, so a row's numbers do not depend on the others. Python computes what depends on the token or its position
alone, starts the run, and books the sums over ranks that C has made through shared memory; over other transports the run stops at each
sum and Python makes it. A program is used only after it has been compared with the modules (decoder.py).
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..comm import collectives
from ..comm.counters import Tally
from ..comm.group import Group
from ..comm.shm import ShmTransport
from ..errors import RankError
from ..kernels import library as c
from ..kernels.library import Op
from .arena import Arena
from .coded import DTYPES, code
from .compiled import Compiled
from .light import Light
from .slots import Slot

ROWS = 64  # at most in one call of C: ROWS_MAX of kernels/program.c


class Program:
    """`compiled` as C runs it on this rank. `dtype` of the model: of its cache, and of what ranks exchange."""

    def __init__(self, compiled: Compiled, group: Group, dtype: torch.dtype, threads: int = 1) -> None:
        self.compiled, self._group, self.dtype = compiled, group, dtype
        kinds = {weight.values.dtype for step in compiled.steps for weight in step.weights}
        self.int8, self.compact = torch.int8 in kinds, torch.uint8 in kinds
        self._arena = Arena(compiled)
        self._light = Light(compiled, self._arena, ROWS)
        self.code, self._keep = code(compiled, self._arena, dtype)
        self._sums = self._all(Op.REDUCE, c.Sum)
        self._routers = [router for choice, router in self._all(Op.TOPK, c.TopK) if choice.routes]
        self._library = c.library()
        shm = group.transport if isinstance(group.transport, ShmTransport) else None
        handle, functions = shm.raw() if shm is not None else (None, (None, None))
        self._shm = shm
        self._handle = self._library.kp_open(self.code, len(self.code), threads, DTYPES[dtype], handle, *functions)
        if not self._handle:
            raise MemoryError("no memory for a program")
        self._arenas: list[torch.Tensor] = []
        self._rows = (c.Row * ROWS)()
        self._widths = [entry.x.numel() for entry, _ in self._sums]
        self._keys: dict[int, list[tuple[str, str]]] = {}  # of call sites, by rows
        self._numbered = (0, 0)  # for how many rows C has the numbers of call sites, and when
        self._spent: Any = None
        self._at, self._resumed = ctypes.c_int64(0), 0

    def _all(self, op: Op, kind: Any) -> list[tuple[Any, Any]]:
        """Of the steps of one kind what was recorded, and what C has of it."""
        pairs = zip(self.compiled.steps, self.code, strict=True)
        return [(step.entry, ctypes.cast(at.more, ctypes.POINTER(kind)).contents) for step, at in pairs if step.op is op]

    def run(self, tokens: Sequence[int], slots: Sequence[Slot]) -> torch.Tensor:
        """The scores [rows, columns] after one more token of each slot, in float32. A collective of all ranks, which pass as many."""
        parts = [self._run(tokens[at : at + ROWS], slots[at : at + ROWS]) for at in range(0, len(tokens), ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def run_as(self, chosen: Sequence[torch.Tensor], token: int, slot: Slot) -> tuple[torch.Tensor, float]:
        """As `run` of one row, but that the routers choose as the modules' did: `chosen` has their places, in order. With it the most that
        such a choice gives away, in parts of the largest score; infinity where there were other choices than the program has."""
        if [places.numel() for places in chosen] != [router.lines * router.k for router in self._routers]:
            return self.run([token], [slot]), float("inf")
        forced = [(ctypes.c_int64 * places.numel())(*places.flatten().tolist()) for places in chosen]
        for router, places in zip(self._routers, forced, strict=True):
            router.forced, router.gap = places, 0.0
        try:
            return self.run([token], [slot]), max((router.gap for router in self._routers), default=0.0)
        finally:
            for router in self._routers:
                router.forced = None

    def watch(self, wanted: bool) -> Any:
        """From now on the seconds of each instruction, sums included, are added up in what is returned; or no longer."""
        self._spent = (ctypes.c_double * len(self.code))() if wanted else None
        self._library.kp_spend(self._handle, self._spent)
        return self._spent

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], slots: Sequence[Slot]) -> torch.Tensor:
        self.begin(tokens, slots)
        self.go_on(len(tokens))
        return self.end(slots)

    @functools.cached_property
    def products(self) -> dict[int, list[int]]:
        """By the instruction's number the addresses of the weights of each product."""
        found = self._all(Op.PRODUCT, c.Weights)
        numbers = (at for at, step in enumerate(self.compiled.steps) if step.op is Op.PRODUCT)
        return {at: [weights.blocks[i].weight for i in range(weights.count)] for at, (_, weights) in zip(numbers, found, strict=True)}

    def ride(self, rides: bool) -> int:
        """From now on the caller makes the products, or no longer. The address of what is to be done where a run stops."""
        return int(self._library.kp_ride(self._handle, rides))

    def make(self, place: int) -> None:
        """The product at this place of the instruction where the run has stopped."""
        self._library.kp_make(self._handle, place)

    # ---- A step of at most ROWS rows, in parts ----

    def begin(self, tokens: Sequence[int], slots: Sequence[Slot]) -> None:
        """What C is to know of the rows."""
        while len(self._arenas) < len(tokens):
            self._arenas.append(torch.zeros(self._arena.size))
        for row, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            slot.reserve()
            self._light.fill(self._arenas[row], token, slot.length)
            own = (slot.length, slot.capacity, ctypes.addressof(slot.keys), ctypes.addressof(slot.values))
            source = (slot.sources, ctypes.addressof(slot.source_keys), ctypes.addressof(slot.source_values))
            self._rows[row] = c.Row(self._arenas[row].data_ptr(), *own, *source)
        self._at, self._resumed = ctypes.c_int64(0), 0

    def go_on(self, rows: int) -> int | None:
        """Runs to the end: None. Where the caller makes the products (`ride`), to the next one, whose instruction's number comes back.
        C stops now and then while it waits for the other ranks, so that signals are handled here."""
        self._sites(rows)
        try:
            while status := self._library.kp_run(self._handle, self._rows, rows, ctypes.byref(self._at), self._resumed):
                self._resumed = 1
                if status == c.PRODUCT_DUE:
                    return self._at.value
                if status == c.SUM_DUE:
                    self._sum(self._at.value, rows)
                elif status == c.FAILED:
                    raise self._shm.failure() if self._shm is not None else MemoryError("no memory for a step of a program")
        except BaseException as error:  # Ctrl-C: the others must not wait for a rank that does not come back
            if self._shm is not None and not isinstance(error, RankError):
                self._shm.give_up(type(error).__name__)
            raise
        return None

    def end(self, slots: Sequence[Slot]) -> torch.Tensor:
        """The scores. Slots are one position longer."""
        for slot in slots:
            slot.length += 1
        if self._shm is not None and self._sums:
            self._book(len(slots))
        return torch.stack([self._arena.view(self._arenas[row], self.compiled.logits)[0] for row in range(len(slots))])

    # ---- Sums over ranks ----

    def _sites(self, rows: int) -> None:
        """The numbers of the call sites in C, which a transport may have forgotten since."""
        if self._shm is None:
            return
        if (rows, self._shm.forgotten) == self._numbered:
            return
        if rows not in self._keys:
            self._keys[rows] = [(e.name, f"sum of {rows}x{width}") for (e, _), width in zip(self._sums, self._widths, strict=True)]
        for (_, place), number in zip(self._sums, self._shm.sites(self._keys[rows]), strict=True):
            place.site = number
        self._numbered = rows, self._shm.forgotten

    def _sum(self, at: int, rows: int) -> None:
        """Makes the sum at instruction `at`, of which C has written this rank's part."""
        step = self.compiled.steps[at]
        count, kind = rows * step.entry.x.numel(), ctypes.c_float if self.dtype is torch.float32 else ctypes.c_uint16
        place = (kind * count).from_address(self._library.kp_payload(self._handle))
        payload = torch.frombuffer(place, dtype=self.dtype, count=count)
        begun = time.perf_counter()
        collectives.all_reduce(payload, self._group, step.entry.name, inplace=True)
        if self._spent is not None:
            self._spent[at] += time.perf_counter() - begun

    def _book(self, rows: int) -> None:
        for (entry, done), width in zip(self._sums, self._widths, strict=True):
            tally = Tally(1, rows * width * self.dtype.itemsize, done.moved, done.waited, max(done.seconds - done.waited, 0.0))
            self._group.counters.record("all_reduce", entry.name, tally, done.ended)
            done.moved, done.seconds, done.waited = 0, 0.0, 0.0

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.kp_close(self._handle)
            self._handle = None
