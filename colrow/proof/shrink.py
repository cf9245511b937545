"""A small model of the same architecture, found by search over the integers of its config; no architecture is known here by name.

The copy keeps what a plan depends on (head counts, whether a size divides by the ranks, one layer of each kind) and loses what it does not
(width, depth, vocabulary). It counts only if the plan derived for it has the same structure as the plan for the full model: the same roles,
cuts, regions, edits and heads in every distinct kind of layer. Not here: weights; the copy has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..errors import UserError
from ..planning.derive import derive
from ..planning.plan import Plan
from .integers import Integers, Path, candidates
from .probe import Shapes, runs, shapes
from .structure import layer_kinds, structure

FLOORS = (16, 64, 256)
"""Sizes are cut down to about this; where the small plan comes out otherwise (costs weigh differently in narrow models), the next is
tried."""

PROPORTION = 16
"""Last of all, sizes are divided by about this, so that they keep their order (the latents of DeepSeek against its hidden size)."""
KEPT = 128  # sizes up to this are left alone then

Floor = Callable[[int], int]  # what a size may be cut down to

SMALL_ENOUGH = 300_000
"""Parameters. A config that is below this already is its own small copy."""


@dataclass(frozen=True)
class Small:
    """`changes`: (field, value in the full config, value here)."""

    config: PreTrainedConfig
    plan: Plan
    changes: tuple[tuple[str, Any, Any], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in self.changes) or "the config as it is"


def shrink(config: PreTrainedConfig, ranks: int, weights: Sequence[float] | None = None, plan: Plan | None = None) -> Small:
    """The small copy of `config` for a split over `ranks`. `plan` is that of the full model, derived here if it is not given.

    UserError where no smaller config has a plan of the same structure and the config itself is not small.
    """
    plan = plan or derive(config, ranks, weights)
    full = shapes(config)
    if full.elements <= SMALL_ENOUGH:
        return Small(config, plan, ())
    wanted = structure(plan)
    integers = Integers(config)
    floors: list[Floor] = [*(functools.partial(_constant, floor) for floor in FLOORS), _share]
    for numbered in (False, True):
        few = _fewer_layers(integers, plan, full, numbered)
        for floor in floors:
            small, changes = _search(integers, few, plan, floor)
            derived = derive(small, ranks, weights)
            if structure(derived) == wanted:
                return Small(small, derived, changes)
        if structure(derive(integers.config(few), ranks, weights)) == wanted:
            break  # it was not for the layers
    raise UserError(
        "found no small copy of this config whose plan has the structure of the full one",
        config.model_type,
        "a plan derived for this config (no --plan), or colrow verify without --small",
    )


def _constant(floor: int, size: int) -> int:
    return floor


def _share(size: int) -> int:
    return size if size <= KEPT else min(max(size // PROPORTION, FLOORS[0]), 2 * FLOORS[-1])


def _search(
    integers: Integers, state: dict[str, Any], plan: Plan, floor: Floor
) -> tuple[PreTrainedConfig, tuple[tuple[str, Any, Any], ...]]:
    """From a state of few layers on, so that every try is cheap, one size after the other, the largest first."""
    heads = {size for a in plan.attention for size in (a.query.size, a.kv.size)}
    values = ((path, integers.value(state, path)) for path in integers.fields(state))
    sizes = [path for path, n in values if n > max(floor(n), plan.ranks) and _is_size(integers, state, path)]
    sizes.sort(key=lambda path: -integers.value(state, path))
    stuck: list[Path] = []
    for path in sizes:
        if integers.value(state, path) in heads:
            continue
        options = candidates(integers.value(state, path), floor(integers.value(state, path)), plan.ranks)
        state, moved = _first_that_runs(integers, state, [{path: n} for n in options], plan.inputs)
        if not moved:
            stuck.append(path)
    for path in stuck:  # a size that must stay in proportion to another one: both are divided alike
        state, _ = _first_that_runs(integers, state, _in_proportion(integers, state, path, sizes, floor), plan.inputs)
    small = integers.config(state)
    return small, integers.changes(state)


def _is_size(integers: Integers, state: dict[str, Any], path: Path) -> bool:
    """Whether this integer shapes parameters: the other integers are left alone."""
    before = shapes(integers.config(state))
    n = integers.value(state, path)
    for other in (n * 2, n // 2):
        changed = integers.try_config(integers.with_values(state, {path: other}))
        after = changed and _shapes_or_none(changed)
        if after:
            return after.sizes != before.sizes
    return True  # neither can be built: it takes part in a constraint, so it matters


def _shapes_or_none(config: PreTrainedConfig) -> Shapes | None:
    try:
        return shapes(config)
    except Exception:  # whatever a model raises for a size that it cannot have
        return None


def _first_that_runs(
    integers: Integers, state: dict[str, Any], tries: list[dict[Path, int]], inputs: tuple[str, ...]
) -> tuple[dict[str, Any], bool]:
    names = shapes(integers.config(state)).names
    for values in tries:
        changed = integers.with_values(state, values)
        config = integers.try_config(changed)
        found = config and _shapes_or_none(config)
        if config and found and found.names == names and runs(config, found, inputs):
            return changed, True
    return state, False


def _in_proportion(integers: Integers, state: dict[str, Any], path: Path, sizes: list[Path], floor: Floor) -> list[dict[Path, int]]:
    n = integers.value(state, path)
    tries = []
    for divisor in (d for d in range(n // floor(n), 1, -1) if n % d == 0):
        for other in sorted(sizes, key=lambda at: integers.value(state, at) != n):  # of equal size: the same width, said twice
            m = integers.value(state, other)
            if other != path and m % divisor == 0 and m > divisor:
                tries.append({path: n // divisor, other: m // divisor})
    return tries[:12]


def _fewer_layers(integers: Integers, plan: Plan, full: Shapes, numbered: bool = False) -> dict[str, Any]:
    """The config cut to a few layers, at least two, that still has each kind of layer.

    A number of layers is an integer whose value is the length of some list of modules and whose decrease takes parameters away. Kept are
    the first layers of each kind, by the plan and by what lists in the config say; where the kind follows from a layer's number, more are
    tried. With `numbered`, all layers up to the last of these first ones: each keeps its number, by which the config may speak of it too
    (Llama 4: the numbers of layers with experts).
    """
    state, kinds = integers.state, layer_kinds(plan)
    for path in integers.fields(state):
        depth = integers.value(state, path)
        if depth not in full.depths or depth < 3:
            continue
        names = shapes(integers.config(state)).names
        said = integers.per_layer(state, depth)
        firsts = {(said[i], kinds.get(i)): i for i in reversed(range(depth))}.values()
        order = list(range(depth)) if numbered else [*sorted(firsts), *(i for i in range(depth) if i not in firsts)]
        for few in range(max(2, max(firsts) + 1 if numbered else len(firsts)), depth):
            changed = integers.with_depth(state, path, depth, sorted(order[:few]))
            config = integers.try_config(changed)
            found = config and _shapes_or_none(config)
            if not config or not found:
                continue
            if found.names == names:
                break  # not a number of layers
            if found.kinds == full.kinds and runs(config, found, plan.inputs):
                state = changed
                break
    return state
