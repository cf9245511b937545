"""One architecture, measured: what the zoo knows of it. Runs in a process of its own (run.py), because it may crash or hang.

The tiny config is planned at each degree, split by the real applier with ranks as threads, and compared with the whole model in float64
(proof/gate.prove): logits, cached decoding, loss, every gradient, optimizer steps, every collective counted. Coverage is that of the plan
that was carried out. The config class's defaults are planned too, on meta, for their coverage at real sizes.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from math import prod
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from colrow.planning import cost
from colrow.planning.choose import choose
from colrow.planning.degrees import SHORT, shortened, stretch
from colrow.planning.derive import derive, digest
from colrow.planning.graph import Graph
from colrow.planning.plan import Plan
from colrow.planning.trace import TraceError, trace
from colrow.planning.words import plan_of
from colrow.proof.compare import Comparison
from colrow.proof.gate import GateRefused, prove
from colrow.proof.probe import shapes
from colrow.proof.shrink import Small

from . import sizes, tp_plan
from .odd import REAL

REAL_RANKS, MOST_LAYERS = 4, 8
KINDS = {"logits": ("logits", "outputs"), "decoding": ("decoding",), "gradients": ("gradients",)}
ATTENTION = re.compile(r"att|mixer|mamba|temporal_block|\bconv\b", re.IGNORECASE)

Row = dict[str, Any]


def measure(architecture: str, degrees: tuple[int, ...], tell: Any) -> None:
    """`tell(part)`: what is known so far, as dicts that add up to the row, so that a crash later loses nothing."""
    config = sizes.config(architecture)
    plans = plans_of(config, degrees)
    for ranks, plan in plans.items():
        tell({f"tp{ranks}": degree(config, plan)})
    tell({"tp_plan": tp_plan.compare(config, plans[degrees[0]])})
    try:
        tell({"real": real(architecture)})
    except Exception as error:  # a class whose defaults build no model
        tell({"real": {"error": f"{type(error).__name__}: {error}"[:200]}})


def plans_of(config: PreTrainedConfig, degrees: tuple[int, ...]) -> dict[int, Plan]:
    """As `derive` makes them, of one trace."""
    try:
        graph = Graph(trace(config))
    except TraceError:
        return {ranks: derive(config, ranks) for ranks in degrees}
    return {ranks: plan_of(choose(graph, ranks), digest(config), ()) for ranks in degrees}


def degree(config: PreTrainedConfig, plan: Plan) -> Row:
    row: Row = {
        "ranks": plan.ranks,
        "class": plan.architecture,
        **coverage(plan),
        **collectives(plan),
        "notes": [f"{n.subject}: {n.text}" for n in plan.notes],
    }
    try:
        comparison = prove(Small(config, plan, ()))
    except GateRefused as refused:
        return row | {"wrong": str(refused)[:600]}
    return row | errors(comparison)


def errors(comparison: Comparison) -> Row:
    """The largest relative difference of each kind; None where there is nothing of it to compare (an encoder decodes nothing)."""
    found = {key: [i.difference for kind in kinds for i in comparison.of(kind)] for key, kinds in KINDS.items()}
    return {key: max(values, default=None) for key, values in found.items()} | {"checks": len(comparison.items)}


def coverage(plan: Plan) -> Row:
    """Shares of parameter elements that are cut: of all, and of those in attention (or what a layer has in its place)."""
    sizes = [(t.name, prod(t.shape), not t.partition.is_whole) for t in plan.tensors.values()]

    def share(entries: list[tuple[str, int, bool]]) -> float | None:
        total = sum(n for _, n, _ in entries)
        return sum(n for _, n, cut in entries if cut) / total if total else None

    inner = [e for e in sizes if ATTENTION.search(e[0].rpartition(".")[0])]
    return {"elements": sum(n for _, n, _ in sizes), "coverage": share(sizes), "attention": share(inner)}


def collectives(plan: Plan) -> Row:
    """All-reduces per layer in training: of activations forward and backward, and of gradients of parameters that ranks have in common."""
    layers = {layer for name in plan.tensors if (layer := _layer(name))}
    found: Counter[str] = Counter()
    for phase in ("forward", "backward"):
        for p in cost.predict(plan, 2, 13, f"train_{phase}", 4):  # type: ignore[arg-type]
            if _layer(p.name):
                parameter = p.name.removesuffix(".copies.grad").removesuffix(".grad") in plan.tensors
                found["parameters" if parameter else phase] += p.calls
    return {key: found[key] / max(len(layers), 1) for key in ("forward", "backward", "parameters")}


def _layer(name: str) -> str:
    """The innermost numbered layer that a name lies in, numbers of experts and of parts of a layer aside."""
    found = re.match(r"(.*?(?:layers?|h|blocks?|layer_groups|transformer)\.\d+)\.", name)
    return found[1] if found else ""


def real(architecture: str) -> Row:
    """Coverage at the sizes of the config class's defaults (and odd.REAL): of a plan of two layers, stretched where that gives the same
    parameters; else of the first MOST_LAYERS layers."""
    start = time.perf_counter()
    config = CONFIG_MAPPING[architecture]()
    for path, value in REAL.get(architecture, {}).items():
        *inner, last = path.split(".")
        setattr(functools.reduce(getattr, inner, config), last, value)
    plan = _stretched(config) or derive(_first_layers(config), REAL_RANKS)
    notes = [f"{n.subject}: {n.text}" for n in plan.notes]
    return coverage(plan) | {"ranks": REAL_RANKS, "notes": notes, "seconds": time.perf_counter() - start}


def _stretched(config: PreTrainedConfig) -> Plan | None:
    layers = _layers(config)
    short = shortened(config) if layers > SHORT else None
    if short is None:
        return None
    plan = stretch(derive(short, REAL_RANKS), layers)
    return plan if {t.name: t.shape for t in plan.tensors.values()} == shapes(config).sizes else None


def _first_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    if _layers(config) <= MOST_LAYERS:
        return config
    return shortened(config, MOST_LAYERS) or config


def _layers(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_hidden_layers", 0) or 0)
