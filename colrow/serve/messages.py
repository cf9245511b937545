"""What the HTTP side and rank 0 say to each other, and the server's settings. Data only.

To rank 0: a Request, an `Abort`, or `Stop`. From rank 0: `Ready` once, then lists of outputs, and `Stats` now and then.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """`cache_bytes`: of all caches of one rank together, None for two fifths of the memory that is free on the host after loading, shared
    by its ranks. `chunk`: prompt tokens a step. `beside`: the same where others decode, None for what the engine takes.
    `queue`: requests that may wait. `seconds`: how long a request may take, waiting included.
    `body`: bytes of a request. `drain`: seconds in which running requests may end after SIGTERM. `fast`: decode
    sequences as rows of one batch (engine/together.py)."""

    cache_bytes: int | None = None
    chunk: int = 256
    beside: int | None = None
    running: int = 64
    queue: int = 2048
    seconds: float = 600.0
    body: int = 8 << 20
    fast: bool = False
    drain: float = 30.0


@dataclass(frozen=True)
class Abort:
    id: int


@dataclass(frozen=True)
class Stop:
    """Nothing comes after it."""


def meeting_place() -> Any:
    """An address for multiprocessing's Listener, where rank 0 will come. On Linux a name that is not in the file system: whatever looks for
    open ports would be taken for rank 0, which would then wait forever. Elsewhere a port."""
    return f"\0colrow-{secrets.token_hex(16)}" if sys.platform == "linux" else ("127.0.0.1", 0)


@dataclass(frozen=True)
class Where:
    """Where rank 0 finds the HTTP side."""

    address: Any
    key: bytes


@dataclass(frozen=True)
class Ready:
    """`context`: the longest sequence, prompt and new tokens, that model and cache allow. `pids` and `parameters` (bytes) by rank.
    `shares`: whether beginnings of prompts are kept for later requests. `starts`: how many tokens the decoder of an encoder-decoder begins
    with, 0 for other models."""

    context: int
    vocab: int
    cache_tokens: int
    pids: tuple[int, ...]
    parameters: tuple[int, ...]
    shares: bool = True
    starts: int = 0

    def room(self, prompt: int) -> int:
        """New tokens that fit behind a prompt of so many; negative where it is too long itself."""
        if not self.starts or prompt > self.context:
            return self.context - prompt
        return min(self.context, self.cache_tokens - prompt) - self.starts


@dataclass(frozen=True)
class Stats:
    """Of the engine since it started; `running`, `waiting`, `used` (positions of the cache that running sequences hold) and `kept` (those
    of beginnings kept for later) are of now. `shared`: positions that were taken from kept ones; `paused`: sequences that gave up their
    place for a while. `decode_calls`: collectives of rank 0 while it decoded `decode_tokens`."""

    running: int = 0
    waiting: int = 0
    used: int = 0
    kept: int = 0
    shared: int = 0
    paused: int = 0
    steps: int = 0
    decode_tokens: int = 0
    decode_calls: int = 0
