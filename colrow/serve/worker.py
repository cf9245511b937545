"""Worker: what the ranks do in a server. Rank 0 takes requests from the HTTP side, all ranks step, rank 0 yields what comes out."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from typing import Any

import torch

from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..engine.account import parameter_bytes
from ..engine.batch import Batch
from ..engine.blocks import plain
from ..engine.engine import Engine
from ..engine.forward import Forward
from ..engine.request import Output, Request
from ..engine.scheduler import BLOCK
from ..engine.translate import Translate, start_tokens
from ..parallel import room
from .messages import Abort, Limits, Ready, Stats, Stop, Where

SECONDS = 0.5  # between two Stats
SHARE = 0.4  # of the free memory, for the caches of all ranks of this host


def work(group: Group, engine: Engine, limits: Limits, where: Where) -> Iterator[Ready | list[Output] | Stats]:
    """Runs until `Stop` comes, or the HTTP side is gone. A collective of all ranks."""
    size, shares = measure_cache(engine)  # after the engine was opened: weights are kept as they stay, and what that freed is free
    budget = limits.cache_bytes or int(room.share(group) * SHARE)
    cache_tokens = max(budget // size // BLOCK, 1) * BLOCK
    mine = (os.getpid(), parameter_bytes(engine.model), cache_tokens)
    pids, parameters, tokens = zip(*gather_objects(mine, group, "serve.ready"), strict=True)
    beside = {} if limits.beside is None else {"beside": limits.beside}
    chunk = max(limits.chunk, limits.beside or 0)
    batch = Batch(engine, min(tokens), fast=limits.fast, chunk=chunk, max_running=limits.running, share=shares, **beside)
    inbox = Inbox(where) if group.rank == 0 else None
    vocab = engine.model.config.get_text_config().vocab_size
    starts = len(start_tokens(engine.model)) if engine.model.config.is_encoder_decoder else 0
    yield Ready(min(engine.context or min(tokens), min(tokens)), vocab, min(tokens), pids, parameters, shares, starts)
    told, stats = 0.0, Stats()
    outputs: list[Output] = []
    while True:
        if inbox is not None:
            for command in inbox.take(wait=batch.idle):
                _obey(batch, command)
        if not batch.step(outputs.extend):
            return
        if outputs:
            yield outputs
            outputs = []
        if batch.scheduler is not None and (batch.idle or time.monotonic() - told > SECONDS):
            now = _stats(batch)
            if now != stats:
                told, stats = time.monotonic(), now
                yield stats


class Inbox:
    """Commands from the HTTP side, read by a thread so that a step never waits for a pipe. Rank 0's."""

    def __init__(self, where: Where) -> None:
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        connection = Client(where.address, authkey=where.key)

        def read() -> None:
            try:
                while True:
                    self._commands.put(connection.recv())
            except (EOFError, OSError):
                self._commands.put(Stop())

        threading.Thread(target=read, name="inbox", daemon=True).start()

    def take(self, wait: bool) -> list[Any]:
        """All commands that have come; with `wait` at least one."""
        found = [self._commands.get()] if wait else []
        while True:
            try:
                found.append(self._commands.get_nowait())
            except queue.Empty:
                return found


def _obey(batch: Batch, command: Request | Abort | Stop) -> None:
    if isinstance(command, Request):
        batch.add(command)
    elif isinstance(command, Abort):
        batch.abort(command.id)
    else:
        batch.close()


def measure_cache(engine: Engine) -> tuple[int, bool]:
    """Bytes of this rank's cache for one position of one sequence, measured on a cache that the model itself makes, so it holds for every
    kind; and whether pieces of it can be kept for other sequences. Of an encoder-decoder, what a position of the prompt and one of the
    answer take together. A collective (the model runs)."""
    phase, engine.group.counters.phase = engine.group.counters.phase, "start"
    device, encodes = engine.group.device, engine.model.config.is_encoder_decoder
    forward = Translate(engine.model, [[0]], device) if encodes else Forward(engine.model)
    _, past = forward(torch.zeros(1, 1, dtype=torch.int64, device=device), None, None)
    engine.group.counters.phase = phase
    return max(_nbytes(past, set()), 1), plain(past)


def _nbytes(value: Any, seen: set[int], depth: int = 0) -> int:
    """Bytes of all tensors that hang on a cache, whatever its class."""
    if id(value) in seen or depth > 4:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_nbytes(part, seen, depth + 1) for part in value)
    if isinstance(value, dict) or hasattr(value, "__dict__"):
        parts = value.values() if isinstance(value, dict) else vars(value).values()
        return sum(_nbytes(part, seen, depth + 1) for part in parts)
    return 0


def _stats(batch: Batch) -> Stats:
    scheduler = batch.scheduler
    assert scheduler is not None
    calls = batch.group.counters.total(phase="decode").calls
    now = {"running": len(scheduler.running), "waiting": len(scheduler.waiting), "used": scheduler.used}
    so_far = {"shared": scheduler.shared, "paused": scheduler.paused, "steps": batch.number, "decode_tokens": batch.decoded}
    return Stats(**now, kept=scheduler.prefixes.positions, **so_far, decode_calls=calls)
