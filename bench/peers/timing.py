"""What every contestant of bench/decode.py is asked and how it answers. Only the standard library: peers run in environments of their own.

A peer's script gets the model as its first argument and prints one line of JSON last: `rate`, tokens per second after the first (the median
of the steps), `prefill`, tokens per second of a prompt of `LONG`, and `how`, what ran.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

PROMPT, LONG = 32, 512


def prompt(length: int) -> list[int]:
    return [7 * at % 31999 + 1 for at in range(length)]


def rate(times: Sequence[float]) -> float:
    """Steps per second, by the median, of the moments at which they ended."""
    return 1 / statistics.median(after - before for before, after in itertools.pairwise(times))


def seconds(task: Callable[[], Any], times: int = 3) -> float:
    """The median, after one call that does not count."""
    task()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        task()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def answer(times: Sequence[float], long: float, how: str) -> None:
    """`times`: when the tokens came; `long`: seconds of the long prompt."""
    print("\n" + json.dumps({"rate": rate(times), "prefill": LONG / long, "how": how}), flush=True)
