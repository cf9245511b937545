"""Verdict: what a study says, in plain words. Two questions are kept apart: split to fit, and split for speed; decode and prefill.

Every sentence is a condition on the study's numbers; nothing is said about a model by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import cost
from .links import LINKS, Link, Machine
from .study import BATCHES, Row, Study
from .timing import Time, collectives


@dataclass(frozen=True)
class Say:
    """One sentence and what it is about."""

    about: str
    text: str


def verdict(study: Study) -> list[Say]:
    return [*_fit(study), *_speed(study), *_limits(study), *_ways_out(study), *_shape(study)]


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count < 100e9 else f"{count / 1e9:.0f} GB"


def _fit(study: Study) -> Iterator[Say]:
    q, row, smallest = study.question, study.row, study.smallest_that_fits
    what = f"Training on {q.batch} x {q.context:,} tokens" if q.train else f"Serving {q.batch} x {q.context:,} tokens"
    needed = max((m.total for m in row.training or row.memory), default=0)
    size = gigabytes(study.size)
    if smallest is None:
        yield Say(
            "fit",
            f"{what} fits into no split up to {max(study.rows)} devices of {size}; the largest rank of tp={row.ranks} "
            f"needs {gigabytes(needed)}.",
        )
    elif smallest == 1:
        yield Say("fit", f"{what} fits on one device of {size}: no split is needed to fit.")
    else:
        yield Say("fit", f"{what} needs a split: tp={smallest} is the smallest that fits devices of {size}.")
    if row.ranks != smallest or smallest == 1:
        word = "fits" if row.fits(study.size) else "does not fit"
        yield Say("fit", f"At tp={row.ranks} the largest rank needs {gigabytes(needed)} of {size}, which {word} (a tenth is left free).")
    if row.largest_context > 0 and not q.train:
        longest = getattr(study.config, "max_position_embeddings", None)
        beyond = f", more than the model's {longest:,}" if longest and row.largest_context > longest else ""
        yield Say("fit", f"At tp={row.ranks} up to {row.largest_context:,} tokens of context fit for batch {q.batch}{beyond}.")


def _speed(study: Study) -> Iterator[Say]:
    best_decode = max(study.rows.values(), key=lambda r: r.decode.tokens_per_second)
    best_prefill = max(study.rows.values(), key=lambda r: r.prefill.tokens_per_second)
    for word, best, pick in (("decoding", best_decode, "decode"), ("prefill", best_prefill, "prefill")):
        if study.ranks == 1:
            continue
        here: Time = getattr(study.row, pick)
        alone: Time = getattr(study.rows[1], pick) if 1 in study.rows else here
        gain = here.tokens_per_second / alone.tokens_per_second
        first = all(m.fits(study.size) for m in study.rows[1].memory) if 1 in study.rows else True
        than = "one device" if first else "one device, were it large enough"
        text = f"tp={study.ranks} gives {rate(here)}, {gain:.2g} times {than} ({rate(alone)}); {reason(here)}."
        if gain < 1:
            text += " A split for speed does not pay here."
        elif best.ranks not in (study.ranks, 1):
            text += f" tp={best.ranks} would be the fastest, {rate(getattr(best, pick))}."
        yield Say(word, text)
    if study.machine.device.shared and study.ranks > 1:
        yield Say("speed", "The ranks share one memory bus: two processes on it gain capacity per process, not speed.")


def rate(time: Time) -> str:
    return f"{time.tokens_per_second:,.3g} tokens/s" if time.tokens_per_second < 1000 else f"{time.tokens_per_second:,.0f} tokens/s"


def reason(time: Time) -> str:
    """What rules, with its share."""
    words = {
        "reading": "reading weights and cache rules",
        "computing": "the products rule",
        "latency": "the latency of collectives rules",
        "moving": "moving bytes rules",
        "touching": "what lies between products rules",
        "starting": "starting ops one by one rules",
        "updating": "the optimizer rules",
    }
    return f"{words[time.rules]}, {100 * time.parts[time.rules] / time.total:.0f} % of the time"


def _limits(study: Study) -> Iterator[Say]:
    row, link = study.row, study.machine.joins(study.ranks)
    if row.ranks == 1:
        return
    t = row.decode
    sent = cost.total(row.traffic, "ring", "blocks")
    share = 100 * sent.sent * t.tokens_per_second / study.question.batch / link.bandwidth
    limit = "latency" if t.latency > t.moving else "bandwidth"
    yield Say(
        "link",
        f"A decoded step makes {sent.calls} all-reduces in the blocks, {sent.logical_bytes:,} bytes; a ring sends {sent.sent:,} bytes "
        f"from each rank, {share:.2g} % of what {link.words} can carry. Of the collectives' time {limit} limits: {1e3 * t.latency:.3g} ms "
        f"against {1e3 * t.moving:.3g} ms.",
    )
    crossing = next((b for b, time in zip(BATCHES, row.by_batch, strict=True) if time.moving > time.latency), None)
    if crossing:
        yield Say("link", f"From batch {crossing} on, bytes cost more than latency.")
    pays = [b for b, here, alone in zip(BATCHES, row.by_batch, study.rows[1].by_batch, strict=True) if here.total < alone.total]
    if not pays:
        yield Say("break-even", f"At no batch up to {BATCHES[-1]:,} does tp={row.ranks} decode faster than one device.")
    elif len(pays) < len(BATCHES):
        yield Say(
            "break-even", f"tp={row.ranks} decodes faster than one device at batch {pays[0]} to {pays[-1]} (of 1 to {BATCHES[-1]:,})."
        )
    domain = study.machine.link.domain
    if domain and row.ranks > domain:
        yield Say(
            "link", f"{study.machine.link.words} joins {domain} devices: tp={row.ranks} leaves that domain and meets at {link.words}."
        )
    others = (LINKS[name] for name in ("pcie4", "100gbe", "10gbe", "1gbe"))
    slower = [o for o in others if o.bandwidth < link.bandwidth and (not o.domain or row.ranks <= o.domain)]
    if slower and not study.machine.device.shared:
        costs = (f"{_over(study, other, t):,.3g} and {_over(study, other, row.prefill):,.0f} over {other.words}" for other in slower)
        yield Say("link", f"The same split over other links, tokens/s decoding and prefill: {'; '.join(costs)}.")


def _over(study: Study, link: Link, time: Time) -> float:
    """Tokens per second of a pass whose collectives go over another link; decoding or prefill, as its tokens tell."""
    q = study.question
    found = (
        study.row.traffic if time is study.row.decode else cost.predict(study.row.plan, q.batch, q.context, "prefill", q.dtype_bytes, False)
    )
    latency, moving = collectives(found, Machine(study.machine.device, replace(link, domain=0)))
    return replace(time, latency=latency, moving=moving).tokens_per_second


def _ways_out(study: Study) -> Iterator[Say]:
    """Other uses of the same number of devices."""
    n, row, smallest = study.ranks, study.row, study.smallest_that_fits
    if n == 1:
        return
    if smallest is not None and smallest < n and n % smallest == 0 and not study.machine.device.shared:
        fewer = study.rows[smallest]
        together = n // smallest * fewer.decode.tokens_per_second
        yield Say(
            "instead",
            f"{n // smallest} replicas of tp={smallest} serve {together:,.3g} tokens/s in all at batch {study.question.batch} each, where "
            f"tp={n} serves {row.decode.tokens_per_second:,.3g}: replicas for throughput, the split for the time of one answer.",
        )
    slow = row.decode.latency + row.decode.moving > max(row.decode.reading, row.decode.computing)
    if slow:
        hop = study.machine.joins(n)
        steps = (n - 1) * (hop.start + hop.hop)
        stage = study.rows[1].decode.total + steps
        yield Say(
            "instead",
            f"Over {hop.words} collectives take longer than the work between them. {n} pipeline stages would pass {n - 1} small messages a "
            f"token: {study.question.batch / stage:,.3g} tokens/s for one answer, and all stages busy with {n} of them.",
        )
    if study.question.train:
        moved = cost.total(cost.fully_sharded(row.plan, study.question.dtype_bytes)).sent
        step = cost.total(p for phase in cost.STEP for p in cost.predict(row.plan, *_at(study), phase, study.question.dtype_bytes)).sent
        yield Say(
            "instead",
            f"FSDP over {n} devices holds the same share of parameters and optimizer; with rings each rank sends {gigabytes(moved)} a step "
            f"whatever the batch, this split {gigabytes(step)} for {study.question.batch} x {study.question.context:,} tokens.",
        )
    elif smallest is None or smallest > 1:
        whole = study.rows[1].memory[0]
        for bits, share in ((8, 0.53), (4, 0.28)):
            if whole.total - whole.parameters * (1 - share) <= study.size * 0.9:
                yield Say("instead", f"Quantized to {bits} bits (scales included) the model fits on one device of {gigabytes(study.size)}.")
                break
        yield Say(
            "instead",
            "Offload to host memory reads the rest of the weights over PCIe for every token: slower by the ratio of the bandwidths.",
        )


def _at(study: Study) -> tuple[int, int]:
    return study.question.batch, study.question.context


def _shape(study: Study) -> Iterator[Say]:
    row = study.row
    kv = {a.kv.size for a in row.plan.attention}
    if kv and row.ranks > min(kv):
        heads = min(kv)
        yield Say("shape", f"tp={row.ranks} above the number of KV groups copies KV heads: the cache stops shrinking at {heads}.")
    uneven = _uneven(row)
    if uneven > 1.01:
        yield Say(
            "shape", f"tp={row.ranks} is uneven: the largest rank holds {uneven:.2f} times an equal share, and the others wait for it."
        )
    bad = [n for n, r in study.rows.items() if n != row.ranks and _uneven(r) > 1.01]
    if bad:
        yield Say("shape", f"Also uneven: tp={', '.join(map(str, bad))}.")
    whole = [note.subject for note in row.plan.notes]
    if whole:
        yield Say(
            "shape",
            f"Whole on every rank: {', '.join(whole[:3])}{' ...' if len(whole) > 3 else ''}.",
        )


def _uneven(row: Row) -> float:
    """The largest rank's share of what is cut, times the number of ranks."""
    held = [
        sum(
            t.partition.local_size(r) * (t.shape[1 - (t.partition.dim or 0)] if len(t.shape) == 2 else 1)
            for t in row.plan.tensors.values()
            if t.partition.dim is not None
        )
        for r in range(row.ranks)
    ]
    return max(held) * len(held) / sum(held) if sum(held) else 1.0
