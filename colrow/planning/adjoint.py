"""Where gradients arrive as parts and must be added: the backward half of the communication, Megatron's f.

A value that is whole on every rank has a gradient that is whole (every consumer computed it whole and alike) or PARTIAL (some consumer
worked on a slice, so each rank knows only its share). Partial gradients of one tensor add up locally; one all-reduce then serves all its
split consumers. Going backwards through whole ops a partial gradient stays partial, until it must be whole: where another consumer's
gradient is whole, or at the output of a forward reduction, whose backward is the identity. Then f is placed, by the cheapest set of module
borders, the LATEST among equals (so a norm before split consumers keeps its gradient whole).

Whole parameters that meet a partial gradient are reported: the trainer sums their gradients over ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from .flow import Flow, Problem, price
from .graph import Border, Graph
from .trace import Op


@dataclass
class Gradients:
    """`copies`: where f stands (several borders of one value share one all-reduce). `parameters`: whole ones with partial gradients."""

    copies: dict[int, tuple[Border, ...]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def backward(graph: Graph, flow: Flow) -> Gradients:
    """Walk back from the ops that work on slices, as far as their partial gradients reach."""
    return _Walk(graph, flow).run()


class _Walk:
    def __init__(self, graph: Graph, flow: Flow) -> None:
        self.graph, self.flow = graph, flow
        self.out = Gradients()
        self.partial: set[int] = set()  # values whose gradient, as it leaves them towards their producer, is partial
        touched = {i for leaf in flow.chosen for i in graph.ops_of[leaf]}
        touched |= {c for v in flow.partial for c in graph.consumers[v]} | set(flow.sources)
        touched |= {made for v in flow.alone if (made := graph.producer[v]) is not None}
        self.heap: list[tuple[int, int]] = []
        self.queued: set[int] = set()
        for i in touched:
            self.push_inputs(graph.op(i))

    def push(self, value: int) -> None:
        if value not in self.queued:
            self.queued.add(value)
            heapq.heappush(self.heap, (-self._made(value), value))

    def _made(self, value: int) -> int:
        """Index of the op that made a value, or last wrote into it; -1 for what was there before."""
        made = self.graph.producer[value]
        return max([-1 if made is None else made, *self.graph.writers[value]])

    def push_inputs(self, op: Op) -> None:
        for v in self.graph.inputs[op.index]:
            self.push(v)

    def run(self) -> Gradients:
        patience = 20 * len(self.partial | self.queued) + 20 * len(self.graph.trace.values)
        while self.heap and not self.out.problems:
            value = heapq.heappop(self.heap)[1]
            self.queued.discard(value)
            patience -= 1
            if patience < 0:
                self.out.problems.append(Problem("", "the backward pass", "does not settle on places for f"))
            elif self.whole(value):
                self._visit(value)
        self._check_means()
        return self.out

    def whole(self, value: int) -> bool:
        """The value is whole on every rank and has a gradient."""
        return self.graph.differentiable[value] and not self.graph.leaves[value] & self.flow.chosen and not self.flow.is_partial(value)

    def splits(self, op: Op, value: int) -> bool:
        """Whether the gradient that this op sends to a whole input is only the rank's share."""
        if any(self.flow.is_partial(v) for v in (*self.graph.inputs[op.index], *(o for o in op.outputs if o >= 0))):
            return not self._is_bias(op, value)
        # a reduced output is still the result of summing over slices
        return bool(self.graph.op_leaves[op.index] & self.flow.chosen)

    def uses(self, value: int) -> tuple[list[Op], list[Op]]:
        """(consumers that send partial gradients, consumers that send whole ones)."""
        partial, whole = [], []
        for i in self.graph.consumers[value]:
            op = self.graph.op(i)
            outs = [o for o in self.graph.results[i] if self.graph.differentiable[o]]
            if not outs or self._fixed(value, op):
                if outs:
                    whole.append(op)
                continue
            if op.index in self.flow.sources and self._is_bias(op, value):
                whole.append(op)
            elif self.splits(op, value) or any(o in self.partial for o in outs):
                partial.append(op)
            else:
                whole.append(op)
        return partial, whole

    def _is_bias(self, op: Op, value: int) -> bool:
        """The value is added to partial sums, which the applier does once, after the reduction: its gradient is whole."""
        return self.graph.axes.effects[op.index].kind == "add" or (op.name.startswith(("addmm", "baddbmm")) and op.inputs()[0] == value)

    def _fixed(self, value: int, op: Op) -> bool:
        """An f on this value covers this consumer."""
        for border in self.out.copies.get(value, ()):
            call = self.graph.trace.calls[border.call]
            if self.graph.inside(op.index, call) == (border.place == "input"):
                return True
        return False

    def _visit(self, value: int) -> None:
        self._drop_needless(value)
        partial, whole = self.uses(value)
        before = value in self.partial
        if value in self.graph.trace.outputs.values():
            whole = whole or [self.graph.op(-1)]
        if not partial:
            self.partial.discard(value)
            self.out.parameters.discard(self.graph.parameter_of.get(value, ""))
        elif value in self.graph.parameter_of:
            self._parameter(value, whole)
            return
        elif self._is_mean(value):
            self.partial.discard(value)  # f is part of it
        elif whole or value in self.flow.reduced or self.graph.producer[value] in self.flow.rows or self._is_start(value):
            self._place(value, partial)
            return
        else:
            self.partial.add(value)
        if before != (value in self.partial):
            made = self.graph.producer[value]
            for i in (*([] if made is None else [made]), *self.graph.writers[value]):
                self.push_inputs(self.graph.op(i))

    def _drop_needless(self, value: int) -> None:
        """An f that was placed here before later ones made gradients whole would add them a second time."""
        borders = self.out.copies.pop(value, None)
        if borders is None:
            return
        partial, _ = self.uses(value)
        self.out.copies[value] = borders
        covered = [self.graph.op(i) for i in self.graph.consumers[value] if self._fixed(value, self.graph.op(i)) and self._counts(i)]
        if any(op not in partial for op in covered):
            del self.out.copies[value]

    def _counts(self, op: int) -> bool:
        """A gradient comes back through this op."""
        return any(self.graph.differentiable[o] for o in self.graph.results[op])

    def _is_mean(self, value: int) -> bool:
        """The mean over a cut axis, as its op gives it."""
        return self.graph.producer[value] in self.flow.means and not self.graph.leaves[value] & self.flow.chosen

    def _check_means(self) -> None:
        """The f that is part of a mean is right where all that use the mean work on slices."""
        for i in self.flow.means:
            for o in self.graph.op(i).outputs:
                whole = self.uses(o)[1] if o >= 0 and self._is_mean(o) and self.graph.differentiable[o] else []
                for op in whole:
                    self.out.problems.append(Problem(self.graph.trace.module_of(op), op.name, "uses a mean over a cut axis whole"))

    def _is_start(self, value: int) -> bool:
        """Looked up from a table by the model's inputs: where activations begin, and a partial gradient has come too far."""
        made = self.graph.producer[value]
        if made is None or self.graph.axes.effects[made].kind != "index":
            return False
        return self.graph.from_input[value] and not self.graph.from_input[self.graph.inputs[made][0]]

    def _parameter(self, value: int, whole: list[Op]) -> None:
        name = self.graph.parameter_of[value]
        if whole:
            where = self.graph.trace.module_of(whole[0])
            self.out.problems.append(Problem(where, whole[0].name, f"uses {name} whole, which also meets split work"))
        self.out.parameters.add(name)

    def _place(self, value: int, partial: list[Op]) -> None:
        found = self._cut(value)
        if found is None:
            op = partial[0]
            self.out.problems.append(
                Problem(
                    self.graph.trace.module_of(op),
                    op.name,
                    "works on a slice of what others use whole, with no module border between",
                )
            )
            return
        for border in found:
            self.out.copies[border.value] = tuple(dict.fromkeys((*self.out.copies.get(border.value, ()), border)))
        for v in {b.value for b in found} | {value}:
            self.push(v)

    def _cut(self, value: int) -> frozenset[Border] | None:
        """The cheapest set of borders after which no partial gradient reaches this value; the latest among equals."""
        reach, stack = {value}, [value]  # values that partial gradients come through on their way here
        while stack:
            new = self._next(self.uses(stack.pop())[0]) - reach
            reach |= new
            stack.extend(new)
        best: dict[int, frozenset[Border] | None] = {}
        for v in sorted(reach, key=self._made, reverse=True):
            best[v] = self._cheapest(v, best)
        return best[value]

    def _next(self, ops: list[Op]) -> set[int]:
        """The whole values with partial gradients that these ops make."""
        made = {o for op in ops for o in self.graph.results[op.index] if o in self.partial}
        return {o for o in made if not self.graph.leaves[o] & self.flow.chosen}

    def _cheapest(self, value: int, best: dict[int, frozenset[Border] | None]) -> frozenset[Border] | None:
        """The choice between f on this value and f on what its consumers make of it, which is in `best`."""
        partial, whole = self.uses(value)
        options: list[frozenset[Border]] = []
        if not any(self.splits(op, value) for op in partial):
            parts = [best.get(o) for o in self._next(partial)]
            if parts and all(p is not None for p in parts):
                options.append(frozenset().union(*(p for p in parts if p)))
        here = self._here(value, partial, whole)
        if here:
            views = bool(options) and all(self._base(b.value) == self._base(value) for b in options[0])
            options.insert(0 if views else len(options), here)  # of a value and its views, the value itself
        return min(options, key=self._price) if options else self._partly(value, partial, whole, best)

    def _partly(
        self, value: int, partial: list[Op], whole: list[Op], best: dict[int, frozenset[Border] | None]
    ) -> frozenset[Border] | None:
        """f on this value at the modules that take it, and on what its other consumers make of it (a view of it, for a third module)."""
        entered = [op for op in partial if self._here(value, [op], whole)]
        rest = [op for op in partial if op not in entered]
        here = self._here(value, entered, [*whole, *rest]) if entered else None
        parts = [best.get(o) for o in self._next(rest)]
        if here is None or any(self.splits(op, value) for op in rest) or not all(p is not None for p in parts):
            return None
        return here.union(*(p for p in parts if p))

    def _base(self, value: int) -> int:
        """The value that this one is a view of."""
        while (made := self.graph.producer[value]) is not None and self.graph.axes.effects[made].kind == "linear":
            if len(self.graph.inputs[made]) != 1:
                break
            value = self.graph.inputs[made][0]
        return value

    def _price(self, borders: frozenset[Border]) -> tuple[float, int, int]:
        """What the set costs; among equals, modules that run once are preferred, and outputs."""
        values, again = {b.value for b in borders}, sum(not self._runs_once(b) for b in borders)
        return sum(price(self.graph, v) for v in values), again, sum(b.place == "input" for b in borders)

    def _here(self, value: int, partial: list[Op], whole: list[Op]) -> frozenset[Border] | None:
        """Borders at which f on this very value covers its partial uses and no others."""
        graph = self.graph
        if value in self.graph.parameter_of:
            return None
        free = not whole and value not in graph.trace.outputs.values()
        calls = graph.trace.calls
        leaving = [b for b in graph.leaving[value] if free and not any(graph.inside(op.index, calls[b.call]) for op in partial)][:1]
        if leaving and self._runs_once(leaving[0]):
            return frozenset(leaving)
        entered = self._entering(value, partial, whole)
        if leaving and not (entered and all(map(self._runs_once, entered))):
            return frozenset(leaving)
        return entered or None

    def _runs_once(self, border: Border) -> bool:
        """A module that runs several times has one set of hooks for all its runs (a norm used twice)."""
        return len(self.graph.calls_of[self.graph.trace.calls[border.call].module]) == 1

    def _entering(self, value: int, partial: list[Op], whole: list[Op]) -> frozenset[Border]:
        """Where the value enters the modules of its partial uses and of no others; empty where that is not so."""
        graph = self.graph
        entering: dict[int, list[Border]] = {}  # a module may be given it under several names (key and value)
        for border in graph.entering[value]:
            entering.setdefault(border.call, []).append(border)
        clean = {c for c in entering if not any(graph.inside(op.index, graph.trace.calls[c]) for op in whole)}
        paths = [[c for c in graph.ancestors(op.index) if c in clean] for op in partial]
        if not all(paths):
            return frozenset()
        common = [c for c in paths[0] if all(c in p for p in paths)]
        calls = {common[0]} if common else {p[-1] for p in paths}
        return frozenset(border for c in calls for border in entering[c])
