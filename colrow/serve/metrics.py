"""Metrics: counts of what the server did, as Prometheus reads them and as the page shows them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from .bridge import Bridge

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
WINDOW = 5.0  # seconds over which the page's rate is taken


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    sum: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1
        self.counts = [count + (value <= edge) for count, edge in zip(self.counts, BUCKETS, strict=True)]


@dataclass
class Metrics:
    """Counted by the event loop alone."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # by outcome: the HTTP status, or "disconnected"
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def tokens(self, count: int) -> None:
        self.new_tokens += count
        self._recent.append((time.monotonic(), count))

    def ended(self, outcome: str) -> None:
        self.requests[outcome] = self.requests.get(outcome, 0) + 1

    @property
    def rate(self) -> float:
        """New tokens per second over the last few seconds, of all requests together."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()
        since = now - self._recent[0][0] if self._recent else 0.0
        return sum(count for _, count in self._recent) / max(since, 1.0)


def resident(bridge: Bridge) -> list[int]:
    """Bytes of resident memory by rank; 0 for one that is gone."""
    found = []
    for pid in bridge.ready.pids if bridge.ready is not None else ():
        try:
            found.append(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            found.append(0)
    return found


def shown(metrics: Metrics, bridge: Bridge, model: str, chat: bool) -> dict[str, Any]:
    """What the page shows."""
    stats, ready = bridge.stats, bridge.ready
    return {
        "model": model,
        "chat": chat,
        "state": bridge.state,
        "context": ready.context if ready else None,
        "tokens_per_second": round(metrics.rate, 2),
        "running": stats.running,
        "waiting": stats.waiting,
        "resident": resident(bridge),
        "parameters": list(ready.parameters) if ready else [],
        "collectives_per_token": round(stats.decode_calls / stats.decode_tokens, 2) if stats.decode_tokens else None,
    }


def prometheus(metrics: Metrics, bridge: Bridge) -> str:
    """The text format, version 0.0.4."""
    stats, ready = bridge.stats, bridge.ready
    lines: list[str] = []

    def put(name: str, kind: str, help: str, values: list[tuple[str, float]]) -> None:
        lines.extend([f"# HELP colrow_{name} {help}", f"# TYPE colrow_{name} {kind}"])
        lines.extend(
            f"colrow_{name}{labels} {value:g}" if value != int(value) else f"colrow_{name}{labels} {int(value)}" for labels, value in values
        )

    put("up", "gauge", "1 while requests can be answered.", [("", float(bridge.state == "ok"))])
    put("requests_total", "counter", "HTTP requests by outcome.", [(f'{{outcome="{k}"}}', v) for k, v in sorted(metrics.requests.items())])
    put("prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", [("", metrics.prompt_tokens)])
    put("new_tokens_total", "counter", "Tokens generated.", [("", metrics.new_tokens)])
    put("running", "gauge", "Sequences that hold a cache.", [("", stats.running)])
    put("waiting", "gauge", "Sequences that wait for room.", [("", stats.waiting)])
    put("cache_tokens", "gauge", "Positions of the cache.", [("", ready.cache_tokens if ready else 0)])
    put("cache_used_tokens", "gauge", "Positions of the cache that running sequences hold.", [("", stats.used)])
    put("cache_kept_tokens", "gauge", "Positions of prompts' beginnings that are kept for later requests.", [("", stats.kept)])
    put("shared_tokens_total", "counter", "Prompt tokens that were not computed again.", [("", stats.shared)])
    put("paused_total", "counter", "Sequences that gave up their place for a while, for want of cache.", [("", stats.paused)])
    put("steps_total", "counter", "Steps of the engine.", [("", stats.steps)])
    put("decode_tokens_total", "counter", "Tokens decoded after a request's first.", [("", stats.decode_tokens)])
    put("decode_collectives_total", "counter", "Collectives of the model while decoding, on rank 0.", [("", stats.decode_calls)])
    memory = [(f'{{rank="{rank}"}}', float(size)) for rank, size in enumerate(resident(bridge))]
    put("resident_bytes", "gauge", "Resident memory by rank.", memory)
    for name, help, histogram in (
        ("first_token_seconds", "From a request to its first token.", metrics.first_token),
        ("request_seconds", "From a request to its end.", metrics.whole),
    ):
        lines.extend(_histogram(f"colrow_{name}", help, histogram))
    return "\n".join(lines) + "\n"


def _histogram(name: str, help: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} histogram"
    for edge, count in zip((*BUCKETS, "+Inf"), (*histogram.counts, histogram.count), strict=True):
        yield f'{name}_bucket{{le="{edge}"}} {count}'
    yield f"{name}_sum {histogram.sum:g}"
    yield f"{name}_count {histogram.count}"
