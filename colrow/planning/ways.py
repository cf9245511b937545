"""The other ways to use the same devices for serving: replicas, pipeline stages, fewer bits, offload; each with its price.

    ways(study) -> [Way("tp=4", ...), Way("2 replicas of tp=2", ...), ...]      the split that was asked for comes first

Times come from the same model as the split's own. Not here: training (fully sharded data parallelism stands in verdict.py), words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import cost
from .links import LINKS
from .memory import RESERVE, Memory
from .study import BATCHES, Row, Study
from .timing import Time

BITS = {8: 8.5 / 16, 4: 4.5 / 16}
"""Share of the bytes of 16-bit weights: blocks of 32 values with a 16-bit scale, as llama.cpp's Q8_0 and Q4_0 have them."""

HOST = LINKS["pcie5"]  # over which offloaded weights come


@dataclass(frozen=True)
class Way:
    """`one`: tokens a second of one batch, which its users see; `every`: of all devices together, each replica or stage with a batch of its
    own. `largest`: bytes on the fullest device. `full`: of all together when caches fill the memory, with `batch` sequences each (0 where
    that was not computed)."""

    name: str
    one: float
    every: float
    largest: float
    fits: bool
    full: float = 0.0
    batch: int = 0


def ways(study: Study) -> list[Way]:
    """Of the devices that were asked for. Ways that do not fit are listed too, if there is a reason to ask for them."""
    n, row = study.ranks, study.row
    found = [_way(study, f"tp={n}, as asked", row.decode.tokens_per_second, 1, row, 1)]
    if n == 1 or study.machine.device.shared or study.question.train:
        return found
    return [*found, *_replicas(study), *_stages(study), *_quantized(study), *_offload(study)]


def _largest(row: Row) -> Memory:
    return max(row.memory, key=lambda m: m.total)


def _way(study: Study, name: str, one: float, busy: int, row: Row, stages: int) -> Way:
    """`busy`: so many batches are worked on at once, each by all `stages`, which share the weights and the cache."""
    held = _largest(row)
    size = held.total - (1 - 1 / stages) * (held.parameters + held.cache)
    full, batch = fullest(study, row, 1 / stages)
    return Way(name, one, busy * one, size, size <= study.size * (1 - RESERVE), busy * full, batch)


def fullest(study: Study, row: Row, share: float = 1.0) -> tuple[float, int]:
    """Tokens per second when as many sequences as fit (of `BATCHES`) are decoded at once, and how many; `share`: of the weights that a
    device holds. 0, 0 where not one fits."""
    held, q = _largest(row), study.question
    room = study.size * (1 - RESERVE) - held.total + held.cache + (1 - share) * held.parameters
    batch = max((b for b in BATCHES if b * held.cache / q.batch <= room), default=0)
    return (row.by_batch[BATCHES.index(batch)].tokens_per_second, batch) if batch else (0.0, 0)


def _smaller(study: Study) -> list[Row]:
    """Degrees that share the devices out."""
    return [row for t, row in study.rows.items() if t < study.ranks and study.ranks % t == 0]


def _replicas(study: Study) -> Iterator[Way]:
    for row in reversed(_smaller(study)):
        if row.fits(study.size):
            times = study.ranks // row.ranks
            yield _way(study, f"{times} replicas of tp={row.ranks}", row.decode.tokens_per_second, times, row, 1)


def _stages(study: Study) -> Iterator[Way]:
    """Stages of equal length pass one activation on: the widest and the narrowest split that leave stages."""
    hidden = max((p.logical_bytes for p in study.row.traffic if p.section == "blocks"), default=0)
    degrees = _smaller(study)
    inside = [row for row in degrees if study.machine.hosts(row.ranks) == 1]
    for row in dict.fromkeys(found.ranks for found in (*inside[-1:], *degrees[:1])):
        stages = study.ranks // row
        link = study.machine.joins(study.ranks)
        pass_on = link.start + link.hop + hidden / link.bandwidth
        time = study.rows[row].decode.total + (stages - 1) * pass_on
        name = f"{stages} stages of tp={row}" if row > 1 else f"{stages} pipeline stages"
        yield _way(study, name, study.question.batch / time, stages, study.rows[row], stages)


def _quantized(study: Study) -> Iterator[Way]:
    """Fewer bits for the weights on fewer devices, where 16 bits need more: the fewest that are enough."""
    if study.question.dtype_bytes != 2:
        return
    for bits, share in BITS.items():
        for row in _smaller(study):
            held = _largest(row)
            size = held.total - (1 - share) * held.parameters
            if not row.fits(study.size) and size <= study.size * (1 - RESERVE):
                times, q = study.ranks // row.ranks, study.question
                light = tuple(lighter(study, time, held.cache * time.tokens / q.batch, share) for time in row.by_batch)
                one = lighter(study, row.decode, held.cache, share).tokens_per_second
                full, batch = fullest(study, replace(row, by_batch=light), share)
                name = f"{bits} bits, tp={row.ranks}" + (f", {times} replicas" if times > 1 else "")
                yield Way(name, one, times * one, size, True, times * full, batch)
                break


def lighter(study: Study, time: Time, cache: float, share: float) -> Time:
    """A decoded step with weights of fewer bits: of reading all but the bytes of `cache` shrinks, products stay those of 16 bits."""
    device = study.machine.device
    of_cache = min(time.reading, cache / (device.read * device.efficiency[0]))
    return replace(time, reading=(time.reading - of_cache) * share + of_cache)


def _offload(study: Study) -> Iterator[Way]:
    """One device and what does not fit on it in the host's memory, read over PCIe for every token."""
    alone = study.rows.get(1)
    if alone is None or alone.fits(study.size):
        return
    held = _largest(alone)
    room = study.size * (1 - RESERVE) - (held.total - held.parameters)
    if room <= 0:
        return
    away = (held.parameters - room) / held.parameters * alone.decode.reading  # of the reading, where experts are not all read
    device = study.machine.device
    seconds = alone.decode.total - away + away * device.read * device.efficiency[0] / HOST.bandwidth
    one = study.question.batch / seconds
    yield Way("1 device and offload", one, study.ranks * one, held.total - held.parameters + room, True)


def fully_sharded(study: Study) -> tuple[int, int, float]:
    """Bytes that a rank sends in a training step, with FSDP and with this split, and the tokens of a step at which they are the same."""
    q, plan = study.question, study.row.plan
    weights = cost.total(cost.fully_sharded(plan, q.dtype_bytes)).sent
    split = cost.total(p for phase in cost.STEP for p in cost.predict(plan, q.batch, q.context, phase, q.dtype_bytes)).sent
    return weights, split, weights / split * q.batch * q.context if split else float("inf")
