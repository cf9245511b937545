"""derive: from a transformers config to a Plan. The public entry of the deriver.

    plan = derive(config, ranks=2)

Trace the model on meta (trace.py), follow its axes (rules.py), choose cuts (choose.py), and put the result into a plan: partitions,
regions, edits, heads, each with its reason. No weights, no processes, and no architecture is known by name. A model that cannot be followed
gets a plan in which everything stays whole, with a note that says where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedConfig

from ..errors import UserError
from ..partition import whole
from .choose import Choice, choose
from .graph import Graph
from .plan import Note, Plan, TensorPlan
from .trace import Trace, TraceError, empty_model, trace
from .words import plan_of

IGNORED = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")
"""Entries of a config that change nothing about a plan."""


def derive(config: PreTrainedConfig, ranks: int, weights: Sequence[float] | None = None, block: int = 1) -> Plan:
    """The plan for `ranks` ranks; `weights` in proportion to what each rank should hold (None: equal). UserError for impossible numbers.

    `block`: weights lie in blocks of so many elements along their innermost dim (32 to 256 in quantized files): cuts fall between them,
    unevenly where needed; an axis with fewer blocks than ranks is cut as if there were none."""
    _check(ranks, weights)
    if block < 1 or block & (block - 1):
        raise UserError("a block must be a power of two", block, "--block 32")
    try:
        graph = Graph(trace(config))
    except TraceError as e:
        return _unfollowed(config, ranks, weights, str(e))
    if ranks == 1:
        return _whole(config, graph.trace, ranks, weights, "whole: there is one rank", ())
    return plan_of(choose(graph, ranks, weights, block=block), digest(config), tuple(weights or ()))


def choice(config: PreTrainedConfig, ranks: int, weights: Sequence[float] | None = None) -> Choice:
    """What `derive` puts into words: axes, cuts, states of values. For tests and studies; TraceError where the model cannot be followed."""
    _check(ranks, weights)
    return choose(Graph(trace(config)), ranks, weights)


def digest(config: PreTrainedConfig) -> str:
    """Identifies what a plan depends on in a config."""
    data = {k: v for k, v in config.to_dict().items() if k not in IGNORED}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_made_for(plan: Plan, config: PreTrainedConfig) -> Plan:
    """`plan`, or UserError where it was made for a model of another type, or of other sizes. Where configs differ it is the parameters that
    count: a config may say more in another release. All else shows when the plan is carried out (parallel/check.py)."""
    if plan.model_type != config.model_type:
        works = f"a plan that colrow plan wrote for this {config.model_type} model"
        raise UserError("the plan was made for another model", f"a plan for {plan.model_type}", works)
    if plan.config_digest not in ("", digest(config)):
        shapes = {name: tuple(p.shape) for name, p in empty_model(config, "eager").named_parameters(remove_duplicate=False)}
        planned = {name: tuple(entry.shape) for name, entry in plan.names()}
        for name in {**shapes, **planned}:
            if planned.get(name) != shapes.get(name):
                found = f"{name} {_size(planned.get(name))}, here {_size(shapes.get(name))}"
                raise UserError("the plan was made for a model of other sizes", found, "a plan that colrow plan wrote for this one")
    return plan


def _size(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _check(ranks: int, weights: Sequence[float] | None) -> None:
    if ranks < 1:
        raise UserError("the number of ranks must be at least 1", ranks, "--tp 2")
    if weights is not None and (len(weights) != ranks or min(weights) <= 0):
        works = ",".join("1" * ranks)
        raise UserError(f"a split over {ranks} ranks needs {ranks} numbers above 0", ",".join(map(str, weights)), f"--split {works}")


def _whole(config: PreTrainedConfig, t: Trace, ranks: int, weights: Sequence[float] | None, reason: str, notes: tuple[Note, ...]) -> Plan:
    tensors = {
        name: TensorPlan(name, t.values[at].shape, whole(ranks), "whole", reason, aliases=t.aliases[name])
        for name, at in t.parameters.items()
    }
    return Plan(config.model_type, t.architecture, ranks, tensors, notes=notes, weights=tuple(weights or ()), config_digest=digest(config))


def _unfollowed(config: PreTrainedConfig, ranks: int, weights: Sequence[float] | None, why: str) -> Plan:
    """Everything whole: correct, and of no use but to say why. UserError where transformers cannot even build the model."""
    try:
        model = empty_model(config, "eager")
    except Exception as e:
        detail = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise UserError(f"transformers cannot build a {config.model_type} model from the config", detail, "a config AutoModel takes") from e
    names: dict[int, list[str]] = {}
    shapes = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
        shapes[id(p)] = tuple(p.shape)
    tensors = {
        n[0]: TensorPlan(n[0], shapes[i], whole(ranks), "whole", "whole: the forward pass could not be followed", aliases=tuple(n[1:]))
        for i, n in names.items()
    }
    notes = (Note("the model", f"stays whole, because its forward pass cannot be followed without weights: {why}"),)
    return Plan(
        config.model_type, type(model).__name__, ranks, tensors, notes=notes, weights=tuple(weights or ()), config_digest=digest(config)
    )
