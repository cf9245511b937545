"""What a shared-memory transport does before it is used: a self-test against torch's sums, and the choice between one step and two.

Both take a few milliseconds. Not here: the tests of the library (tests/test_shm*.py, bench/soak.py), which try far more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .group import Call
from .shm_setup import ShmUnavailable

if TYPE_CHECKING:
    from .shm import ShmTransport

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]


def prepare(transport: ShmTransport, exchange: Exchange) -> None:
    """Tests and tunes. ShmUnavailable on all ranks where one of them got a wrong result; the transport is then closed."""
    problem = first_wrong_result(transport)
    votes = exchange({"problem": problem})
    for vote in votes:
        if vote["problem"]:
            transport.close()
            raise ShmUnavailable(f"the self-test of shared memory failed: {vote['problem']}")
    transport.one_shot_limit = measured_limit(transport)


def first_wrong_result(transport: ShmTransport) -> str | None:
    """A few sizes and dtypes, one step and two, compared bit by bit with the sum in rank order. None where all is right.

    Goes on after a wrong result, since the other ranks, where it may be right, do too.
    """
    wrong = []
    for limit in (0, transport.mapping.slot_bytes):
        transport.one_shot_limit = limit
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
            for numel in (1, 1037, transport.mapping.slot_bytes // dtype.itemsize + 77):
                inputs = [_values(rank, numel, dtype) for rank in range(transport.size)]
                x = inputs[transport.rank].clone()
                transport.all_reduce(x, "sum", Call("all_reduce", "self-test"))
                if not torch.equal(x, ordered_sum(inputs)):
                    wrong.append(f"all_reduce of {numel} {str(dtype).removeprefix('torch.')} on rank {transport.rank}")
    return wrong[0] if wrong else None


def ordered_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order; float16 and bfloat16 in float32, rounded once."""
    short = inputs[0].dtype in (torch.float16, torch.bfloat16)
    total = inputs[0].float() if short else inputs[0].clone()
    for value in inputs[1:]:
        total += value
    return total.to(inputs[0].dtype)


def measured_limit(transport: ShmTransport) -> int:
    """Up to how many bytes one step beats two, by rank 0's clock; at least 16 KiB, where a second wait costs more than all the copying.

    With more ranks than processors a clock says little: 64 KiB then.
    """
    slot = transport.mapping.slot_bytes
    if transport.size == 1 or transport.mapping.crowded:
        return min(slot, 64 << 10)
    limit = min(slot, 16 << 10)
    while 2 * limit <= slot:
        one, two = _median_times(transport, 2 * limit, (slot, 0))
        slower = torch.tensor([one > two], dtype=torch.uint8)
        transport.broadcast(slower, 0, Call("broadcast", "tuning"))  # all ranks must take the same turn
        if slower.item():
            break
        limit *= 2
    return limit


def _median_times(transport: ShmTransport, nbytes: int, limits: tuple[int, ...]) -> list[float]:
    """Seconds of an all-reduce of `nbytes` under each limit, taken in turns so that a disturbance meets all alike."""
    x, call = torch.zeros(nbytes // 4), Call("all_reduce", "tuning")
    times: list[list[float]] = [[] for _ in limits]
    for _ in range(21):
        for limit, seconds in zip(limits, times, strict=True):
            transport.one_shot_limit = limit
            start = time.perf_counter()
            transport.all_reduce(x, "sum", call)
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1, numel + 1, dtype=torch.float64).mul_(rank + 1.37).sin_().mul_(100.0)
    return values.to(dtype)
