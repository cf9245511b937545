"""Which integers of modules must become local for a choice of cuts, and whether that is enough.

The trace recorded every int of the model's code that fixes the size of a result, with its origin (`ints.py`). On a rank the result has its
local size; where the int's expression does not give that number by itself, one attribute in it must take another value. An attribute gets
one value per rank; all its uses must agree, those of uncut sizes included. A literal that would have to change makes the cut impossible.

Ints inside attention functions do not count (the applier replaces the function), nor those of layers that the applier replaces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .constants import whole_constants
from .cuts import Cuts
from .factors import Node
from .flow import Flow, Problem
from .graph import Graph
from .ints import Expr, attributes, evaluate
from .plan import Edit
from .trace import IntUse

Attribute = tuple[str, str]
TRIED = 1024  # values up to which every one is tried (head counts)


class Uses:
    """The int uses of a trace, found by leaf and by attribute."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.whole: set[int] = set()  # values that stay whole although they have cut axes
        self.by_leaf: dict[Node, list[IntUse]] = defaultdict(list)
        self.by_attribute: dict[Attribute, list[IntUse]] = defaultdict(list)
        inside = [(call.first, call.last) for call in graph.trace.attention]
        at = 0
        for use in graph.trace.int_uses:
            while at < len(inside) and use.op >= inside[at][1]:
                at += 1
            in_attention = at < len(inside) and inside[at][0] <= use.op
            if in_attention or graph.is_product(graph.trace.calls[use.call].module):
                continue
            for leaf in graph.leaves[use.value]:
                self.by_leaf[leaf].append(use)
            for attribute in attributes(use.expr):
                self.by_attribute[attribute].append(use)

    def solve(self, cuts: Cuts, flow: Flow) -> tuple[list[Edit], list[Problem]]:
        """The edits that make every int right on every rank, or the first problem."""
        self.whole = whole_constants(self.graph, flow)
        found: dict[Attribute, tuple[int, ...]] = {}
        first = {use for leaf in cuts.alone for use in self.by_leaf[leaf]}
        todo = sorted(first, key=lambda use: (use.op, use.value, use.dim))
        for use in todo:
            if self._agrees(use, cuts, found):
                continue
            solution = self._solve(use, cuts, found)
            if solution is None:
                return [], [self._problem(use)]
            found.update(solution)
            todo.extend(u for attribute in solution for u in self.by_attribute[attribute])  # which may need others to change along
        return [self._edit(attribute, values) for attribute, values in found.items()], []

    def _needed(self, use: IntUse, cuts: Cuts, rank: int) -> int:
        return self._local(use.value, use.dim, cuts, rank)

    def _local(self, value: int, dim: int, cuts: Cuts, rank: int) -> int:
        return self.graph.trace.values[value].shape[dim] if value in self.whole else cuts.local(self.graph.axes.dims[value][dim], rank)

    def _given(self, use: IntUse, cuts: Cuts, found: dict[Attribute, tuple[int, ...]], rank: int) -> int | None:
        whole = self.graph.trace.attributes

        def attribute(module: str, name: str) -> int:
            return found[module, name][rank] if (module, name) in found else whole[module, name]

        def size(value: int, dim: int) -> int:
            return self._local(value, dim, cuts, rank)

        try:
            return evaluate(use.expr, attribute, size)
        except ZeroDivisionError:
            return None

    def _agrees(self, use: IntUse, cuts: Cuts, found: dict[Attribute, tuple[int, ...]]) -> bool:
        return all(self._given(use, cuts, found, r) == self._needed(use, cuts, r) for r in set(cuts.like))

    def _solve(self, use: IntUse, cuts: Cuts, found: dict[Attribute, tuple[int, ...]]) -> dict[Attribute, tuple[int, ...]] | None:
        """Change one attribute of the expression, on every rank to what the use needs, so that all its uses agree."""
        for attribute in dict.fromkeys(attributes(use.expr)):
            if attribute in found:
                continue
            value = {rank: self._value(attribute, use, cuts, found, rank) for rank in set(cuts.like)}
            values = tuple(value[rank] for rank in cuts.like)
            trial = found | {attribute: values}
            if all(self._agrees(u, cuts, trial) for u in (use, *self._alone(attribute))):
                return {attribute: values}
        return None

    def _value(self, attribute: Attribute, use: IntUse, cuts: Cuts, found: dict[Attribute, tuple[int, ...]], rank: int) -> int:
        """What the attribute must be on the rank: the size it is used as, else in proportion, else less by what is missing, else (small
        ones) found by trying. Where an expression leaves a choice (it is divided by), the uses that depend on nothing else decide."""
        whole = self.graph.trace.attributes[attribute]
        given, needed = self._given(use, cuts, found, rank), self._needed(use, cuts, rank)
        guesses = [whole * needed // given if given else 0, whole - (given or 0) + needed]
        nearest = sorted(range(1, whole), key=lambda n: abs(n - whole // cuts.ranks)) if whole <= TRIED else []
        every = (use, *self._alone(attribute))
        itself = (self._needed(u, cuts, rank) for u in every if u.expr == ("attribute", *attribute))
        for guess in (*itself, *guesses, *nearest):
            trial = found | {attribute: (guess,) * cuts.ranks}
            if guess >= 0 and all(self._given(u, cuts, trial, rank) == self._needed(u, cuts, rank) for u in every):
                return guess
        return guesses[0]

    def _alone(self, attribute: Attribute) -> Iterable[IntUse]:
        """Uses that depend on this attribute only, so that they tell at once whether its value is right."""
        return (u for u in self.by_attribute[attribute] if set(attributes(u.expr)) == {attribute})

    def _edit(self, attribute: Attribute, values: tuple[int, ...]) -> Edit:
        functions = dict.fromkeys(use.function for use in self.by_attribute[attribute])
        module, name = attribute
        reason = f"{', '.join(functions)} in {module} {'use' if len(functions) > 1 else 'uses'} it as the size of a cut axis"
        return Edit(module, name, self.graph.trace.attributes[attribute], values, reason)

    def _problem(self, use: IntUse) -> Problem:
        module = self.graph.trace.calls[use.call].module
        return Problem(module, use.function, f"uses {text(use.expr)} as a size, which cannot be made local")


def text(expr: Expr) -> str:
    """An expression as the model's author might write it."""
    match expr:
        case ("int", value):
            return str(value)
        case ("attribute", module, name):
            return f"{module.rpartition('.')[2]}.{name}"
        case ("size", _, dim):
            return f"shape[{dim}]"
    symbol, left, right = expr
    return f"({text(left)} {symbol} {text(right)})"
