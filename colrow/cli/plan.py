"""`colrow plan`: the plan, what it costs in memory, traffic and time, and whether it pays."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..api import plan as make_plan
from ..api import the_dtype
from ..engine import exchange
from ..engine.settings import Sampling
from ..errors import UserError
from ..planning import cost, memory, price, sequence, verdict, ways
from ..planning.derive import check_made_for
from ..planning.links import Machine
from ..planning.models import generates, require_text
from ..planning.plan import Plan
from ..planning.study import Question, Study
from ..planning.study import Sampling as Sampler
from ..planning.verdict import amount
from ..planning.why import runs
from .options import Asked
from .screen import say, write

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


def make(config: PreTrainedConfig, ranks: int, split: Sequence[float], given: Plan | None, json_file: Path | None, block: int = 1) -> Plan:
    """The plan, derived or given, and written where that is wanted."""
    plan = check_made_for(given, config) if given else make_plan(config, ranks, split, block=block)
    if json_file is not None:
        write(json_file, plan.to_json() + "\n", "--json plan.json")
    return plan


def explain(plan: Plan, name: str, tokens: int, dtype_bytes: int) -> None:
    """The reason of one parameter, and what the other ways to split it would move for so many tokens."""
    say(plan.why(name))
    others = price.alternatives(plan, name, tokens, dtype_bytes)
    for line in ["  the other ways:", *others] if others else []:
        say(line if line.endswith(":") else textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="      "))


def show(
    name: str, config: PreTrainedConfig, plan: Plan, dtype: str, machine: Machine, asked: Asked, html_file: Path | None, full: bool = False
) -> None:
    """The verdict and what it rests on; with `full` also every parameter, what a rank holds, and what moves."""
    kind = the_dtype(dtype, config)
    size = kind.itemsize
    machine = machine if str(kind) == "torch.bfloat16" else machine.plain
    if asked.train:
        require_text(config, "plan --train")
    if not generates(config):
        if html_file is not None:
            raise UserError(
                "the page of a plan is about decoding, which this model does not", config.model_type, "colrow plan without --html"
            )
        for line in (f"{plan}\n", *pass_lines(plan, asked, size)):
            say(line)
        return
    question = Question(asked.batch, asked.seq, asked.train, size, asked.memory)
    study = Study.of(config, plan, machine, question, sampling(config), lambda p: _kept(config, p, asked, kind))
    if full:
        say(f"{plan}\n")
        for line in (*memory_lines(study), "", *traffic_lines(study)):
            say(line)
    for line in (*head_lines(study), "", *time_lines(study), *way_lines(study), "", *verdict_lines(study)):
        say(line)
    if not full:
        say("")
        say("more: --full (every parameter, memory and traffic of each rank), --why NAME (the reason of one), --html F (all as a page)")
    if html_file is not None:
        from ..report.page import page

        write(html_file, page(name, study), "--html plan.html")


def head_lines(study: Study) -> list[str]:
    """What was asked, what a rank holds and what a token moves, in three lines."""
    plan, row, q = study.row.plan, study.row, study.question
    whole = memory.parameters_of(plan)
    count = f"{whole / 1e9:,.1f} billion" if whole >= 1e9 else f"{verdict.number(whole / 1e6)} million"
    device = study.machine.device
    count_of = "" if plan.ranks == 1 else f"{plan.ranks} ranks of " if device.shared else f"{plan.ranks} x "
    devices, joined = count_of + device.words, f", {study.machine.joins(plan.ranks).words}" if plan.ranks > 1 else ""
    work = "training on" if q.train else "serving"
    first = f"{plan.architecture}, {count} parameters, on {devices}{joined}: {work} {q.batch} x {q.context:,} tokens"
    sizes = cost.parameter_bytes(plan, q.dtype_bytes)
    each = f"{amount(min(sizes))} to {amount(max(sizes))}" if min(sizes) != max(sizes) else amount(max(sizes))
    who = "each rank holds" if plan.ranks > 1 else "it holds"
    of = f" of {amount(whole * q.dtype_bytes)}" if plan.ranks > 1 else ""
    lines = [
        first,
        f"  {who} {each}{of} of weights at {q.dtype_bytes} bytes, {amount(max(row.cache_per_token))} of {_keeps(study)} a token",
    ]
    if row.compact and not q.train:
        held = amount(max(m.parameters for m in row.memory))
        lines.append(f"  so much while it opens; then, with weights of linear layers in 12 bits, {held} while it serves")
    blocks = cost.total(row.traffic, "ring", "blocks")
    if blocks.calls:
        text = f"  a decoded token makes {blocks.calls} collectives in the blocks, {amount(blocks.logical_bytes)}; a ring sends"
        lines.append(f"{text} {amount(blocks.sent)} from each rank")
    return lines


def way_lines(study: Study) -> list[str]:
    """The same devices used otherwise."""
    found = ways.ways(study)
    if len(found) < 2 or study.question.train:
        return []
    head = ("", "one answer", "all together", "fullest device", "", "memory filled", "sequences each")
    rows = [head]
    for way in found:
        rates = (f"{verdict.number(way.one)}/s", f"{verdict.number(way.every)}/s")
        filled = (f"{verdict.number(way.full)}/s", f"{way.batch:,}") if way.batch and way.fits else ("", "")
        rows.append((way.name, *rates, amount(way.largest), "" if way.fits else "too much", *filled))
    return [
        "",
        f"the same {study.ranks} devices used otherwise: decoded tokens a second, batch {study.question.batch} each",
        *_columns(rows),
    ]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _kept(config: PreTrainedConfig, plan: Plan, asked: Asked, dtype: torch.dtype) -> list[int]:
    """Activations of a training step; imported late, since only --train needs it."""
    from ..parallel.saved import activations

    return activations(config, plan, asked.batch, asked.seq, dtype)


def sampling(config: PreTrainedConfig) -> Sampler:
    """How ranks agree on the next tokens when they take the likeliest one: what the engine says of itself."""
    vocab = int(getattr(config, "vocab_size", 0) or 0)

    def of(rows: int, ranks: int) -> list[cost.Predicted]:
        found = exchange.predicted(Sampling(0.0), rows, ranks, vocab)
        return [cost.Predicted(op, site, calls, size, tuple(range(ranks)), unit=8) for op, site, calls, size in found]

    return of


def pass_lines(plan: Plan, asked: Asked, size: int) -> list[str]:
    """Of a model that decodes nothing: what the ranks hold, and what one forward pass moves."""
    each: dict[int, list[int]] = {}
    for rank, held in enumerate(cost.parameter_bytes(plan, size)):
        each.setdefault(held, []).append(rank)
    lines = [f"parameters, at {size} bytes an element"]
    lines += [f"  rank{'s' * (len(ranks) > 1)} {runs(ranks)}: {amount(held)}" for held, ranks in each.items()]
    found = cost.total(cost.predict(plan, asked.batch, asked.seq, "prefill", size))
    what = f"a forward pass over {asked.batch} x {asked.seq:,} tokens, or {asked.batch} pictures"
    return [*lines, f"between ranks, {what}: {found.calls} collectives of {amount(found.logical_bytes)}"]


def _keeps(study: Study) -> str:
    """What the cache holds, in words."""
    cut = {h.cut for h in study.model.heads}
    return "KV cache" if cut <= {True} else "latents" if cut == {False} else "KV cache and latents"


def memory_lines(study: Study) -> list[str]:
    """Of each rank of the plan; alike ranks on one line."""
    row, q = study.row, study.question
    each: dict[str, list[int]] = {}
    for rank, held in enumerate(row.memory):
        cache = f"{amount(row.cache_per_token[rank])} of {_keeps(study)} a token"
        opening = f" ({amount(held.opening)} while it opens)" if held.opening else ""
        text = f"{amount(held.parameters)} of parameters{opening}, {cache}, {amount(held.total)} in all"
        each.setdefault(text, []).append(rank)
    kept = ", weights of linear layers in 12 bits" if row.compact else ""
    lines = [f"in memory, at {q.dtype_bytes} bytes an element{kept}, {q.batch} x {q.context:,} tokens"]
    lines += [f"  rank{'s' * (len(ranks) > 1)} {runs(ranks)}: {text}" for text, ranks in each.items()]
    if row.training:
        held = max(row.training, key=lambda m: m.total)
        parts = f"gradients {amount(held.gradients)}, AdamW {amount(held.optimizer)}, activations {amount(held.activations)}"
        lines.append(f"  training: {amount(held.total)} a rank: {parts}")
        sizes = [getattr(study.config, key, 0) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
        if all(sizes):
            layers, hidden, heads = sizes
            at = (q.context, q.batch, hidden, heads, row.ranks)
            plain, parallel = (layers * memory.activations_of_layer(*at, sp, "selective") for sp in (False, True))
            words = f"{amount(plain)}, with sequence parallelism {amount(parallel)}"
            lines.append(f"  activations of a GPT of this size by Korthikanti's formulas, scores not kept: {words}")
    return lines


def traffic_lines(study: Study) -> list[str]:
    """Of one decoded step, of a prompt and of a training step; nothing on one rank."""
    q, plan = study.question, study.row.plan
    if plan.ranks == 1:
        return []
    phases: list[tuple[str, Sequence[cost.Predicted]]] = [
        ("a decoded token" if q.batch == 1 else f"a step of {q.batch}", study.row.traffic)
    ]
    at = (plan, q.batch, q.context)
    phases.append((f"a prompt of {q.batch} x {q.context:,}", cost.predict(*at, "prefill", q.dtype_bytes, whole_logits=False)))
    if q.train:
        forward, backward = (cost.predict(*at, phase, q.dtype_bytes) for phase in cost.STEP)
        phases += [("training, forward", forward), ("training, backward", backward)]
        phases.append(("full recomputation adds", cost.recomputed(*at, q.dtype_bytes)))
        cut = sequence.cut(plan)
        if cut is not None:
            with_it = (sequence.assumed(plan, cut), cut, q.batch, q.context)
            parallel = [p for phase in cost.STEP for p in sequence.predict(*with_it, phase, q.dtype_bytes)]
            phases.append(("the step with sequence parallelism", parallel))
        phases.append(("the step with FSDP instead", cost.fully_sharded(plan, q.dtype_bytes)))
    lines = ["between ranks: collectives, bytes of their tensors, bytes that each rank sends with a ring (by formula)"]
    for name, found in phases:
        parts = []
        for section in cost.SECTIONS:
            total = cost.total(found, "ring", section)
            if total.calls:
                parts.append(f"{section} {total.calls} x, {total.logical_bytes:,} B, sent {total.sent:,} B")
        lines.append(f"  {name}: {'; '.join(parts)}")
    return [*lines, f"collectives a token: {len(study.row.traffic)}", ""]


def time_lines(study: Study) -> list[str]:
    device, link, q = study.machine.device, study.machine.link, study.question
    reached = f"{100 * device.efficiency[0]:.0f} % of its {amount(device.read)}/s and {100 * device.efficiency[1]:.0f} % of its products"
    taken = "as measured" if device.efficiency == (1.0, 1.0) else f"{reached} taken as reached"
    those = ", ".join(f"tp={n}" for n, row in study.rows.items() if row.compact)
    kept = f"; decoding reads weights of linear layers in 12 bits at {those} (one thread a rank)" if those else ""
    said = f"by degree, predicted for {device.words} ({taken}) and {link.words}; in brackets what takes longest{kept}"
    lines = textwrap.wrap(said, 110, subsequent_indent="  ")
    head = ("tp", "decode tokens/s", "prefill tokens/s", "fullest rank", "context that fits")
    rows: list[tuple[str, ...]] = [head + (("a step",) if q.train else ())]
    for n, row in study.rows.items():
        largest = max(m.most for m in row.training or row.memory)
        room = "any" if row.largest_context == memory.LONGEST else f"{row.largest_context:,}" if row.largest_context else "none"
        times = (f"{verdict.number(t.tokens_per_second)} ({t.rules})" for t in (row.decode, row.prefill))
        cells: tuple[str, ...] = (f"{n}{'  <' if n == study.ranks else ''}", *times)
        cells += (amount(largest) + ("" if row.fits(study.size) else ", too much"), room)
        rows.append(cells + ((f"{verdict.number(row.step.total)} s ({row.step.rules})",) if row.step else ()))
    return [*lines, *_columns(rows)]


def verdict_lines(study: Study) -> list[str]:
    lines = ["verdict"]
    for said in verdict.verdict(study):
        lines += textwrap.wrap(f"{said.about}: {said.text}", 110, initial_indent="  ", subsequent_indent="    ")
    return lines
