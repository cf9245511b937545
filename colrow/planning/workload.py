"""What time depends on beside the plan: what attention keeps, what is only looked up, what lies between products.

    model = of(trace)           # of the whole model
    model = of_config(config)   # the same, quickly: equal layers are traced once

Read from the trace of the whole model once; timing.py makes seconds of it for any plan. Not here: sizes on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from transformers import PreTrainedConfig

from . import degrees
from .kept import Heads, heads
from .trace import BATCH, AttentionCall, Op, Trace, trace

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm")
_MADE = {"native_layer_norm": 9, "_fused_rms_norm": 6, "addmm": 1, "baddbmm": 1}
_EXPERTS = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class Attending:
    """One attention module: query heads times (key + value) elements, for each of the last `window` positions (0: all). `latent`: the same
    where heads look at latents as they are kept, as programs do (engine/latent.py); 0 where heads are kept."""

    module: str
    width: int
    window: int
    latent: int = 0


@dataclass(frozen=True)
class Model:
    """`head`: parameters that make logits only, `lookups`: those that only rows are taken of. `active_experts`: that a token uses, 0 if
    there are none. `ops`: that a forward pass starts. `touched`: elements for each token that ops between products read and write, outside
    the modules that hold matrices and inside, where they are cut. `instructions`: between products, of a program."""

    heads: tuple[Heads, ...]
    attention: tuple[Attending, ...]
    lookups: frozenset[str]
    active_experts: int
    ops: int = 0
    touched: tuple[float, float] = (0.0, 0.0)
    head: frozenset[str] = frozenset()
    instructions: int = 0


def of(found: Trace) -> Model:
    tables = {op.inputs()[0] for op in found.ops if op.name == "embedding"}
    products = {i for op in found.ops if op.name != "embedding" for i in op.inputs()}
    lookups = frozenset(name for name, i in found.parameters.items() if i in tables and i not in products)
    kept = heads(found)
    latents = {h.module: 2 * h.key + h.value for h in kept if not h.cut}  # keys with what is rotated beside, and once more as values
    attention = {c.module: _attending(found, c, latents.get(c.module, 0)) for c in found.attention}
    experts = next((n for key in _EXPERTS if (n := getattr(found.config, key, 0))), 0)
    counted = (len(found.ops), _touched(found), _head(found), _instructions(found))
    return Model(kept, tuple(attention.values()), lookups, int(experts), *counted)


def of_config(config: PreTrainedConfig) -> Model:
    """From a trace of few layers where all are of one type."""
    alike = len(set(getattr(config, "layer_types", None) or ())) < 2
    found = trace((degrees.shortened(config) if alike else None) or config)
    return longer(of(found), found, config)


def longer(model: Model, trace: Trace, config: PreTrainedConfig) -> Model:
    """The model of a trace with few equal layers, with as many as `config` has: the last one again and again."""
    short, layers = (int(getattr(c, "num_hidden_layers", 0) or 0) for c in (trace.config, config))
    if layers <= short or {len(model.heads), len(model.attention)} - {0} != {short}:
        return model
    number = f".{short - 1}."
    heads, attention = (
        (*found, *(replace(found[-1], module=f"{found[-1].module}.".replace(number, f".{n}.")[:-1]) for n in range(short, layers)))
        for found in (model.heads, model.attention)
    )
    inside = [op for op in trace.ops if number in f".{trace.module_of(op)}."]
    whole, cut = _touched(trace, inside)
    times = layers - short
    return replace(
        model,
        heads=heads,
        attention=attention,
        ops=model.ops + len(inside) * times,
        instructions=model.instructions + _instructions(trace, inside) * times,
        touched=(model.touched[0] + whole * times, model.touched[1] + cut * times),
    )


def _attending(trace: Trace, call: AttentionCall, latent: int) -> Attending:
    """`latent`: numbers that a head looks at of a position whose latent is kept."""
    _, heads, _, key = trace.values[call.q].shape
    return Attending(call.module, int(heads * (key + trace.values[call.v].shape[3])), call.window, int(heads * latent))


def _instructions(trace: Trace, ops: list[Op] | None = None) -> int:
    """About as many as engine/lower.py makes of the ops: one of each that computes, more of norms, one of a product's bias."""
    found = 0
    for op in trace.ops if ops is None else ops:
        constant = any(trace.values[at].constant for at in op.outputs if at >= 0)
        if constant or op.func.is_view or op.name in ("_unsafe_view", "embedding") or op.attention is not None:
            continue
        found += _MADE.get(op.name, 0 if op.name in PRODUCTS else 1)
    return found


def _touched(trace: Trace, ops: list[Op] | None = None) -> tuple[float, float]:
    """Elements a token, outside and inside the modules of the layers that hold matrices. Views touch nothing; products and attention are
    counted by their operations."""
    of_matrices = {name.rpartition(".")[0] for name, at in trace.parameters.items() if len(trace.values[at].shape) > 1}
    areas = {area for area in (name.rpartition(".")[0] for name in of_matrices) if any(part.isdigit() for part in area.split("."))}
    found = [0, 0]
    for op in trace.ops if ops is None else ops:
        if op.func.is_view or op.name in ("_unsafe_view", "embedding", *PRODUCTS) or op.attention is not None:
            continue
        values = [trace.values[i] for i in (*op.inputs(), *(o for o in op.outputs if o >= 0))]
        if any(v.constant for v in values if v.kind == "result" and v.id in op.outputs):
            continue
        module = trace.module_of(op)
        inside = any(module == area or module.startswith(f"{area}.") for area in areas)
        found[inside] += sum(prod(v.shape) for v in values if v.kind not in ("parameter", "buffer"))
    return found[0] / (BATCH * trace.length), found[1] / (BATCH * trace.length)


def _head(trace: Trace) -> frozenset[str]:
    """Parameters of the product that makes the logits, where nothing is computed of it but scales and caps."""
    makers = {out: op for op in trace.ops for out in op.outputs if out >= 0}
    at = trace.outputs.get("logits")
    while at is not None and at in makers and makers[at].name not in PRODUCTS:
        at = next((i for i in makers[at].inputs() if not trace.values[i].constant), None)
    if at is None or at not in makers:
        return frozenset()
    named, found = {i: name for name, i in trace.parameters.items()}, set()
    for i in makers[at].inputs():
        while i in makers and makers[i].func.is_view:
            i = makers[i].inputs()[0]
        found |= {named[i]} & set(named.values()) if i in named else set()
    return frozenset(found)
