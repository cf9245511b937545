"""The planner's page: one model on one machine as a self-contained HTML file. `page(name, study)` returns its text.

Sections: figures, verdict, the block's diagram, memory, traffic, time, parameters with their reasons, sources. Every number comes from the
study; this module arranges them.
"""

from __future__ import annotations

from ..planning import cost, verdict, ways
from ..planning.memory import Memory
from ..planning.study import BATCHES, Row, Study
from ..planning.timing import Part
from ..planning.why import explain, folded, runs
from . import diagram
from .charts import Bar, Line, bars, legend, lines
from .html import Safe, document, duration, join, short, size, tag

_MEMORY = (
    ("ka", "parameters", "parameters"),
    ("kb", "cache", "KV cache"),
    ("kc", "activations", "activations"),
    ("kd", "gradients", "gradients"),
    ("ke", "optimizer", "optimizer"),
    ("kf", "buffers", "buffers of collectives"),
)
_TIME: tuple[tuple[str, Part, str], ...] = (
    ("ka", "reading", "reading"),
    ("kb", "computing", "products"),
    ("ke", "latency", "latency"),
    ("kd", "moving", "moving bytes"),
    ("kc", "touching", "between products"),
    ("kf", "starting", "starting ops"),
    ("kg", "updating", "optimizer"),
)


def page(name: str, study: Study) -> str:
    """`name` as the user typed it."""
    body = tag(
        "main",
        _header(name, study),
        _section("Verdict", _verdict(study)),
        _section("The block on every rank", _diagram(study)),
        _section("Memory of a rank", _memory(study)),
        _section("Traffic between ranks", _traffic(study)),
        _section("Time", _time(study)),
        _section("Parameters and reasons", _parameters(study)),
        _sources(study),
    )
    return document(f"{name} on {study.ranks} ranks", body)


def _section(title: str, *content: str) -> Safe:
    return tag("section", tag("h2", title), *content)


def _header(name: str, study: Study) -> Safe:
    row, q, machine = study.row, study.question, study.machine
    blocks = cost.total(row.traffic, "ring", "blocks")
    figures = [
        (size(max(m.parameters for m in row.memory)), "parameters on the largest rank"),
        (size(max(row.cache_per_token)), "KV cache a token and rank"),
        (f"{short(row.decode.tokens_per_second)}/s", f"tokens decoded, batch {q.batch}"),
        (f"{short(row.prefill.tokens_per_second)}/s", f"tokens of a prompt of {q.context:,}"),
        (f"{blocks.calls}", "all-reduces a token in the blocks"),
        (size(blocks.sent), "sent by each rank for a token (ring)"),
    ]
    tiles = [tag("div", tag("b", number), tag("span", words), class_="tile") for number, words in figures]
    joined = f", joined by {machine.joins(study.ranks).words}" if study.ranks > 1 else ""
    ranks = f"{study.ranks} x {machine.device.words}{joined}"
    return tag(
        "header",
        tag("p", "colrow plan", class_="eyebrow"),
        tag("h1", f"{name}, tp={study.ranks}"),
        tag("p", f"{row.plan.architecture} on {ranks}. {q.batch} x {q.context:,} tokens, {q.dtype_bytes} bytes an element.", class_="lead"),
        tag("div", *tiles, class_="tiles"),
    )


def _verdict(study: Study) -> Safe:
    groups: dict[str, list[str]] = {}
    for s in verdict.verdict(study):
        groups.setdefault(s.about, []).append(s.text)
    said = [tag("li", tag("span", about, class_="about"), tag("div", *(tag("p", t) for t in texts))) for about, texts in groups.items()]
    return tag("ul", *said, class_="verdict")


def _diagram(study: Study) -> Safe:
    q = study.question
    drawn = diagram.block(study.row.plan, q.batch, q.context, q.dtype_bytes)
    keys = legend(
        ("whole", "whole: the same on every rank"),
        ("slice", "slice: a part of the features"),
        ("partial", "partial: one of several summands"),
    )
    buttons = [
        tag("button", "Forward", value="forward", type="button", aria_pressed="true"),
        tag("button", "Backward", value="backward", type="button", aria_pressed="false"),
    ]
    ways = (
        tag("p", "Forward, left to right: f copies, and g adds the partial sums of all ranks.", class_="way forward"),
        tag("p", "Backward, right to left: g copies, and f adds the parts of the gradient of its input.", class_="way backward"),
    )
    return tag("div", keys, tag("div", *buttons, class_="switch", role="group", aria_label="direction"), *ways, drawn, data_way="forward")


def _stack(m: Memory) -> tuple[tuple[str, float, str], ...]:
    return tuple((kind, float(getattr(m, key)), f"{words} {size(getattr(m, key))}") for kind, key, words in _MEMORY)


def _memory(study: Study) -> Safe:
    q, limit = study.question, study.size
    word = f"{size(limit)}: {study.machine.device.words}" if not q.memory else f"{size(limit)} a device"
    used = {key for row in study.rows.values() for m in (*row.memory, *row.training) for _, key, _ in _MEMORY if getattr(m, key)}
    out: list[Safe] = [legend(*((kind, words) for kind, key, words in _MEMORY if key in used))]

    def chart(pick: str, title: str) -> None:
        degrees = [(n, max(getattr(row, pick), key=lambda m: m.most)) for n, row in study.rows.items()]
        rows = [Bar(f"tp={n}", _stack(m), size(m.total) + ("" if m.fits(limit) else ", too much"), n == study.ranks) for n, m in degrees]
        alike: dict[Memory, list[int]] = {}
        for rank, m in enumerate(getattr(study.row, pick)):
            alike.setdefault(m, []).append(rank)
        each = [Bar(f"rank {runs(ranks)}", _stack(m), size(m.total)) for m, ranks in alike.items()]
        left = tag("div", tag("h3", f"{title}, largest rank by degree"), bars(rows, limit, word))
        right = tag("div", tag("h3", f"{title}, every rank at tp={study.ranks}"), bars(each, limit, word))
        out.append(tag("div", left, right, class_="two"))

    chart("memory", "Serving")
    if study.row.compact:
        words = "Where a rank has one thread, bfloat16 weights of linear layers are kept in 12 bits, the same to the bit; while it opens"
        opening = max(m.opening for m in study.row.memory)
        out.append(tag("p", f"{words}, a rank holds its parameters in 16: {size(opening)} at tp={study.ranks}.", class_="quiet"))
    if q.train:
        chart("training", "Training with AdamW in mixed precision")
    return tag("div", *out)


def _traffic(study: Study) -> Safe:
    plan, q = study.row.plan, study.question
    if plan.ranks == 1:
        return tag("p", "One rank: nothing is sent.", class_="quiet")
    phases = [
        ("decoded step", list(study.row.traffic)),
        ("prompt", cost.predict(plan, q.batch, q.context, "prefill", q.dtype_bytes, False)),
    ]
    forward, backward = (cost.predict(plan, q.batch, q.context, p, q.dtype_bytes) for p in cost.STEP)
    phases += [
        ("training, forward", forward),
        ("training, backward", backward),
        ("a step with FSDP instead", cost.fully_sharded(plan, q.dtype_bytes)),
    ]
    head = tag("tr", *(tag("th", t, class_=c) for t, c in _TRAFFIC_HEAD))
    lines_: list[Safe] = []
    last = ""
    for name, found in phases:
        for section in cost.SECTIONS:
            ring = cost.total(found, "ring", section)
            if not ring.calls:
                continue
            others = (cost.total(found, a, section).sent for a in ("one-shot", "two-shot", "tree"))
            numbers = (f"{ring.calls:,}", f"{ring.logical_bytes:,}", f"{ring.sent:,}", *(f"{o:,}" for o in others))
            first = not lines_ or name != last
            last = name
            lines_.append(
                tag("tr", tag("td", name if first else ""), tag("td", section), *(tag("td", n, class_="number") for n in numbers))
            )
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *lines_)), class_="scroll")
    rows = [
        Bar(f"tp={n}", (("kd", float(_sent(row)), f"{_sent(row):,} bytes"),), f"{size(_sent(row))} a token", n == study.ranks)
        for n, row in study.rows.items()
    ]
    words = "Sent by each rank for one decoded token, blocks only, with a ring. Latency, not these bytes, limits decoding on fast links."
    return tag(
        "div",
        tag("p", words),
        bars(rows),
        tag("p", "By formula; colrow's own transports count the same to the byte.", class_="quiet"),
        table,
    )


_TRAFFIC_HEAD = (
    ("pass", ""), ("where", ""), ("collectives", "number"), ("bytes of the tensors", "number"), ("ring: sent by a rank", "number"),
    ("one-shot", "number"), ("two-shot", "number"), ("tree, mean", "number"),
)  # fmt: skip


def _sent(row: Row) -> int:
    return cost.total(row.traffic, "ring", "blocks").sent // max(1, row.decode.tokens)


def _time(study: Study) -> Safe:
    times = [t for row in study.rows.values() for t in (row.decode, row.prefill, row.step) if t is not None]
    out = [legend(*((kind, words) for kind, key, words in _TIME if any(t.parts[key] for t in times)))]

    def chart(pick: str, title: str) -> Safe:
        rows = []
        for n, row in study.rows.items():
            t = getattr(row, pick)
            parts = tuple((kind, t.parts[key], f"{words} {duration(t.parts[key])}") for kind, key, words in _TIME)
            rows.append(Bar(f"tp={n}", parts, f"{duration(t.total)}, {short(t.tokens_per_second)}/s", n == study.ranks))
        return tag("div", tag("h3", title), bars(rows))

    q = study.question
    charts = [chart("decode", f"A decoded step, batch {q.batch}"), chart("prefill", f"A prompt of {q.batch} x {q.context:,} tokens")]
    if q.train:
        charts.append(chart("step", "A training step"))
    out.append(tag("div", *charts, class_="two"))
    curves = [
        Line(
            f"tp={n}",
            tuple((b, t.tokens_per_second / n) for b, t in zip(BATCHES, row.by_batch, strict=True)),
            f"l{i % 6}",
            n == study.ranks,
        )
        for i, (n, row) in enumerate(study.rows.items())
    ]
    speed = [
        Line(f"tp={n}", tuple((b, t.tokens_per_second) for b, t in zip(BATCHES, row.by_batch, strict=True)), f"l{i % 6}", n == study.ranks)
        for i, (n, row) in enumerate(study.rows.items())
    ]
    left = tag("div", tag("h3", "Decoding by batch: where curves cross is break-even"), lines(speed, "batch", "tokens/s"))
    right = tag(
        "div", tag("h3", "The same for each device: what a split costs in throughput"), lines(curves, "batch", "tokens/s and device")
    )
    return tag("div", *out, tag("div", left, right, class_="two"), *_ways(study))


def _ways(study: Study) -> list[Safe]:
    """The same devices used otherwise."""
    found = ways.ways(study)
    if len(found) < 2:
        return []
    head = ("", "one answer, tokens/s", "all together, tokens/s", "fullest device", "memory filled, tokens/s", "sequences each")
    rows = []
    for way in found:
        filled = (verdict.number(way.full), f"{way.batch:,}") if way.batch and way.fits else ("", "")
        cells = (verdict.number(way.one), verdict.number(way.every), size(way.largest) + ("" if way.fits else ", too much"), *filled)
        rows.append(tag("tr", tag("td", way.name), *(tag("td", c, class_="number") for c in cells)))
    heads = tag("tr", *(tag("th", h, class_="number" if h else "") for h in head))
    table = tag("div", tag("table", tag("thead", heads), tag("tbody", *rows)), class_="scroll")
    return [tag("h3", f"The same {study.ranks} devices used otherwise, batch {study.question.batch} each"), table]


def _parameters(study: Study) -> Safe:
    plan, rows = study.row.plan, []
    for label, entry in folded((t.name, t) for t in plan.tensors.values()):
        local = " ".join(dict.fromkeys("x".join(map(str, entry.partition.local_shape(entry.shape, r))) for r in range(plan.ranks)))
        alike = "" if label == entry.name else f" (shown for {entry.name})"
        more = tag("details", tag("summary", "why"), tag("pre", explain(plan, entry.name)))
        aliases = [tag("div", f"= {alias}", class_="quiet mono") for alias in entry.aliases]
        rows.append(
            tag(
                "tr",
                tag("td", tag("span", label, class_="mono"), *aliases),
                tag("td", tag("span", entry.role, class_=f"role {entry.role}")),
                tag("td", "x".join(map(str, entry.shape)), class_="number mono"),
                tag("td", local, class_="number mono"),
                tag("td", entry.reason.partition(": ")[2] or entry.reason, alike, more),
            )
        )
    head = tag(
        "tr",
        *(tag("th", t, class_=c) for t, c in (("name", ""), ("role", ""), ("whole", "number"), ("on a rank", "number"), ("reason", ""))),
    )
    box = tag("input", class_="search", type="search", placeholder="Search names, roles, reasons", aria_label="Search parameters")
    notes = [tag("p", join(tag("b", note.subject), f" {note.text}")) for note in plan.notes]
    return tag("div", box, tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="parameters"), class_="scroll"), *notes)


def _sources(study: Study) -> Safe:
    device, inside = study.machine.device, study.machine.link
    joined = dict.fromkeys((inside, study.machine.joins(max(study.rows))))
    read, products = (f"{100 * e:.0f} %" for e in device.efficiency)
    sheet = f"{device.words}: {size(device.read)}/s read, {device.flops / 1e12:,.4g} TFLOP/s. {device.source}."
    exact = "Times are a model of latency and bandwidth in which nothing overlaps; bytes and memory of parameters and cache are exact."
    return tag(
        "footer",
        tag("p", f"{sheet} Taken as reached: {read} and {products}."),
        *(tag("p", f"{link.words}: {size(link.bandwidth)}/s each way. {link.source}.") for link in joined),
        tag("p", exact),
    )
