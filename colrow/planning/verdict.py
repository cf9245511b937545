"""Verdict: what a study says, in plain words. Two questions are kept apart: split to fit, and split for speed; decode and prefill.

Every sentence is a condition on the study's numbers; nothing is said about a model by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import cost, memory
from .links import LINKS, Link, Machine
from .study import BATCHES, Row, Study
from .timing import Time, collective, collectives
from .ways import fullest, fully_sharded, ways


@dataclass(frozen=True)
class Say:
    """One sentence and what it is about."""

    about: str
    text: str


def verdict(study: Study) -> list[Say]:
    return [
        *_advice(study),
        *_trust(study),
        *_fit(study),
        *_speed(study),
        *_engine(study),
        *_training(study),
        *_limits(study),
        *_ways_out(study),
        *_shape(study),
    ]


def amount(count: float) -> str:
    """Bytes as data sheets and networks count them: "16.4 kB", "35.3 GB"."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def _advice(study: Study) -> Iterator[Say]:
    """Which degree: the fewest devices that come near the quickest answer, and those that make most of each device."""
    if study.question.train:
        return
    fitting = [row for row in study.rows.values() if row.fits(study.size)]
    if not fitting:
        return
    quickest = max(fitting, key=lambda r: r.decode.tokens_per_second)
    best = quickest.decode.tokens_per_second
    enough = next(r for r in fitting if r.decode.tokens_per_second >= 0.8 * best)
    busiest = max(fitting, key=lambda r: fullest(study, r)[0] / r.ranks)
    more = f"; tp={quickest.ranks} would make {number(best)}" if quickest is not enough else ""
    text = f"for quick answers tp={enough.ranks} ({rate(enough.decode)} at batch {study.question.batch}{more})"
    if enough is busiest:
        text += ", which also makes the most of each device"
    elif not study.machine.device.shared:
        rates, batch = fullest(study, busiest)
        each = f"{number(rates / busiest.ranks)} tokens/s a device, {batch} sequences at once"
        text += f"; for the most tokens in all tp={busiest.ranks}, in replicas ({each})"
    yield Say("take", f"Of the degrees that fit, {text}.")


QUICK = 4e-3  # seconds of a token, below which published runs took 1.5 times as long and more (docs/planner.md)


def _trust(study: Study) -> Iterator[Say]:
    """Where the numbers are known to promise too much."""
    quick = [n for n, row in study.rows.items() if row.decode.total < QUICK]
    if quick and study.machine.device.efficiency != (1.0, 1.0) and not study.question.train:
        yield Say(
            "trust",
            f"Tokens of less than {1e3 * QUICK:.0f} ms (tp={', '.join(map(str, quick))}) are a bound that kernels hardly keep up with: "
            f"published runs took 1.5 times as long at 2.6 ms, twice at 1.6 ms. Take the order of the degrees, not the numbers.",
        )


def _engine(study: Study) -> Iterator[Say]:
    """What decodes, and what is assumed of it."""
    if study.question.train:
        return
    device, by_modules = study.machine.device, study.row.modules
    if by_modules is not None:
        yield Say(
            "engine",
            f"Decoding is that of colrow's engine with one step of the model recorded as a program in C, which it makes where its scores "
            f"are the modules' (`colrow run` says so); by the model's modules tp={study.ranks} would make {rate(by_modules)}.",
        )
        if study.row.compact:
            held = max(study.row.memory, key=lambda m: m.opening)
            yield Say(
                "engine",
                f"It keeps bfloat16 weights of linear layers in 12 bits, the same to the bit, where a rank has one thread: each rank reads "
                f"and holds less once it is open, {amount(held.parameters)} of parameters of {amount(held.opening)} while it opens; "
                f"--no-compact keeps them in 16.",
            )
    elif not device.per_op:
        yield Say(
            "engine",
            "Decoding is a bound, for an engine that starts ops ahead or records them. colrow's own runs the model's modules op by op on "
            "such devices; how fast that is was not measured.",
        )


def _fit(study: Study) -> Iterator[Say]:
    q, row, smallest = study.question, study.row, study.smallest_that_fits
    what = f"Training on {q.batch} x {q.context:,} tokens" if q.train else f"Serving {q.batch} x {q.context:,} tokens"
    needed = max((m.most for m in row.training or row.memory), default=0)
    size = amount(study.size)
    if smallest is None:
        yield Say(
            "fit",
            f"{what} fits into no split up to {max(study.rows)} devices of {size}; the largest rank of tp={row.ranks} "
            f"needs {amount(needed)}.",
        )
    elif smallest == 1:
        yield Say("fit", f"{what} fits on one device of {size}: no split is needed to fit.")
    else:
        yield Say("fit", f"{what} needs a split: tp={smallest} is the smallest that fits devices of {size}.")
    if row.ranks > 1 or smallest != 1:
        word = "fits" if row.fits(study.size) else "does not fit"
        yield Say("fit", f"At tp={row.ranks} the largest rank needs {amount(needed)} of {size}, which {word} (a tenth is left free).")
    if row.largest_context == memory.LONGEST:
        yield Say("fit", f"At tp={row.ranks} the cache does not grow: any context fits for batch {q.batch}.")
    elif row.largest_context > 0 and not q.train:
        longest = getattr(study.config, "max_position_embeddings", None)
        beyond = f", more than the model's {longest:,}" if longest and row.largest_context > longest else ""
        yield Say("fit", f"At tp={row.ranks} up to {row.largest_context:,} tokens of context fit for batch {q.batch}{beyond}.")


def _speed(study: Study) -> Iterator[Say]:
    best_decode = max(study.rows.values(), key=lambda r: r.decode.tokens_per_second)
    best_prefill = max(study.rows.values(), key=lambda r: r.prefill.tokens_per_second)
    for word, best, pick in (("decoding", best_decode, "decode"), ("prefill", best_prefill, "prefill")):
        if study.ranks == 1 or study.question.train:
            continue
        here: Time = getattr(study.row, pick)
        alone: Time = getattr(study.rows[1], pick) if 1 in study.rows else here
        gain = here.tokens_per_second / alone.tokens_per_second
        first = all(m.fits(study.size) for m in study.rows[1].memory) if 1 in study.rows else True
        than = "one device does" if first else "one device would, were it large enough"
        text = f"tp={study.ranks} makes {rate(here)}, {gain:.2g} times what {than} ({rate(alone)}); {reason(here)}."
        if gain < 1:
            text += " A split for speed does not pay here."
        elif best.ranks not in (study.ranks, 1):
            text += f" tp={best.ranks} would be the fastest, with {rate(getattr(best, pick))}."
        yield Say(word, text)
    if study.machine.device.shared and study.ranks > 1:
        yield Say("speed", "The ranks share one memory bus: two processes on it gain capacity per process, not speed.")


def rate(time: Time) -> str:
    return f"{number(time.tokens_per_second)} tokens/s"


def number(value: float) -> str:
    """Three digits, none of them lost: "0.0123", "66.1", "1,410"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def reason(time: Time) -> str:
    """What rules, with its share."""
    words = {
        "reading": "reading weights and cache rules",
        "computing": "attention and products rule",
        "latency": "the latency of collectives rules",
        "moving": "moving bytes rules",
        "touching": "what lies between products rules",
        "starting": "starting ops and steps rules",
        "updating": "the optimizer rules",
    }
    return f"{words[time.rules]}, {100 * time.parts[time.rules] / time.total:.0f} % of the time"


def _limits(study: Study) -> Iterator[Say]:
    row, link = study.row, study.machine.joins(study.ranks)
    if row.ranks == 1:
        return
    if study.machine.hosts(row.ranks) > 1:
        yield from _hosts(study)
    if study.question.train:
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
    others = [LINKS[name] for name in ("pcie4", "100gbe", "10gbe", "1gbe")]
    slower = [o for o in others if o.bandwidth < link.bandwidth and (not o.domain or study.machine.hosts(row.ranks) == 1)]
    if slower and not study.machine.device.shared:
        costs = (f"{number(_over(study, o, t))} and {number(_over(study, o, row.prefill))} over {o.words}" for o in slower)
        yield Say("link", f"The same split over other links, tokens/s decoding and prefill: {'; '.join(costs)}.")


def _hosts(study: Study) -> Iterator[Say]:
    """What it costs to leave a host: the same all-reduce inside one and between several, and the widest split that stays inside."""
    machine, row = study.machine, study.row
    found = next((p for p in row.traffic if p.op == "all_reduce" and p.section == "blocks"), None)
    inside = max((n for n in study.rows if machine.hosts(n) == 1), default=0)
    if found is None or not inside:
        return
    least = replace(found, ranks=tuple(range(inside)))
    far, near = (1e6 * sum(collective(p, machine)) / p.calls for p in (found, least))
    gains = []
    for word, pick in (("decoding", "decode"), ("prefill", "prefill")):
        here, there = (getattr(r, pick).tokens_per_second for r in (row, study.rows[inside]))
        gains.append(f"{word} {100 * (here / there - 1):+.0f} %")
    yield Say(
        "link",
        f"tp={row.ranks} leaves its host: {machine.hosts(row.ranks)} hosts of {machine.domain} devices, {machine.link.words} inside and "
        f"{machine.between.words} between. An all-reduce of {found.logical_bytes // found.calls:,} bytes takes {far:.3g} µs, inside one "
        f"host at tp={inside} {near:.3g} µs. Against tp={inside} the {row.ranks // inside} times as many devices give {', '.join(gains)}.",
    )


def _over(study: Study, link: Link, time: Time) -> float:
    """Tokens per second of a pass whose collectives go over another link (between hosts, where there are several)."""
    q, machine = study.question, study.machine
    found = (
        study.row.traffic if time is study.row.decode else cost.predict(study.row.plan, q.batch, q.context, "prefill", q.dtype_bytes, False)
    )
    far = machine.hosts(study.ranks) > 1
    latency, moving = collectives(found, replace(machine, between=link) if far else Machine(machine.device, replace(link, domain=0)))
    return replace(time, latency=latency, moving=moving).tokens_per_second


def _training(study: Study) -> Iterator[Say]:
    row, q = study.row, study.question
    if row.step is None:
        return
    tokens = q.batch * q.context
    text = f"A step of {tokens:,} tokens takes {number(row.step.total)} s at tp={row.ranks}, {rate(row.step)}; {reason(row.step)}."
    best = max(study.rows.values(), key=lambda r: r.step.tokens_per_second / r.ranks if r.step and r.fits(study.size) else 0.0)
    if best.step is not None and best.fits(study.size) and best.ranks != row.ranks:
        text += f" Most tokens a device: tp={best.ranks}, {number(best.step.tokens_per_second / best.ranks)} tokens/s each."
    yield Say("training", text)
    largest = max(row.training, key=lambda m: m.total)
    if not row.fits(study.size) and largest.total - largest.activations <= study.size * (1 - memory.RESERVE):
        yield Say(
            "training",
            f"Without activations the largest rank would need {amount(largest.total - largest.activations)}, which fits: recompute them "
            f"(gradient checkpointing), or take fewer tokens a step and accumulate.",
        )
    elif not row.fits(study.size):
        state = largest.gradients + largest.optimizer
        yield Say(
            "training",
            f"Gradients and AdamW take {amount(state)} of a rank's {amount(largest.total)}: they would have to be spread over more devices "
            f"(FSDP, ZeRO), or LoRA trained instead.",
        )
    if row.ranks > 1:
        moved, step, even = fully_sharded(study)
        yield Say(
            "training",
            f"FSDP over the same {row.ranks} devices holds as little; with rings each rank sends {amount(moved)} a step whatever the "
            f"batch, this split {amount(step)} for {tokens:,} tokens: from {even:,.0f} tokens a step on FSDP moves less, and it needs a "
            f"sequence for every device.",
        )


def _ways_out(study: Study) -> Iterator[Say]:
    """What the other uses of the same devices (ways.py) come to."""
    found = ways(study)
    if len(found) < 2 or study.question.train:
        return
    asked, fitting = found[0], [w for w in found if w.fits]
    if not fitting:
        return
    one, every = max(fitting, key=lambda w: w.one), max(fitting, key=lambda w: w.full)
    if one is asked:
        text = f"No other way to use these {study.ranks} devices answers one batch sooner"
    else:
        text = f"One batch is answered soonest by {one.name}: {number(one.one)} tokens/s against {number(asked.one)}"
    if every.full > asked.full:
        text += f"; memory filled with sequences, most tokens in all come from {every.name}: {number(every.full)} "
        text += f"tokens/s against {number(asked.full)}"
    yield Say("instead", f"{text}.")


def _shape(study: Study) -> Iterator[Say]:
    row = study.row
    kv = {a.kv.size for a in row.plan.attention}
    if kv and all(h.cut for h in study.model.heads) and row.ranks > min(kv):
        heads = min(kv)
        yield Say("shape", f"tp={row.ranks} above the number of KV groups copies KV heads: the cache stops shrinking at {heads}.")
    yield from _kept(study)
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


def _kept(study: Study) -> Iterator[Say]:
    """What is unusual about the cache."""
    heads, q = study.model.heads, study.question
    latent = [h for h in heads if not h.cut]
    if latent:
        size = sum((h.key + h.value) * h.kv for h in latent) * q.dtype_bytes
        yield Say("shape", f"Attention keeps a latent of {size:,} bytes a token, whole on every rank: the cache does not shrink with tp.")
    windows = sorted({h.window for h in heads if h.window})
    if windows:
        those = ", ".join(f"{w:,}" for w in windows)
        count = sum(h.window > 0 for h in heads)
        yield Say("shape", f"{count} of {len(heads)} layers keep a window of {those} tokens only: their cache stops growing there.")


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
