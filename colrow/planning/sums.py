"""Where partial sums arise when axes are cut, and at which module borders they are added: the forward half of the communication.

`forward(graph, chosen)` walks the ops that the chosen axes touch. Summing over a cut axis leaves a PARTIAL value; views, products with
whole values, sums of partial values and sums with whole ones stay partial; anything else needs the value WHOLE, so it is reduced at a
module border before (places.py). What cannot be done becomes a `Problem` that names module and op.

The walk is local: only touched ops and consumers of partial values are visited, so a candidate in an 80-layer model costs as much as in a
2-layer one. Gradients are in `adjoint.py`.
"""

from __future__ import annotations

import heapq

from .constants import alike, buffers, entrance
from .factors import Dim, Node, leaves, resolve
from .flow import Flow, Problem
from .graph import Border, Graph
from .places import Places
from .rules import COPIES
from .trace import Op

ZEROS = ("zeros", "zeros_like", "new_zeros")


def forward(graph: Graph, chosen: frozenset[Node]) -> Flow:
    """Walk the touched ops in order. Stops at the first problem."""
    return _Walk(graph, Flow(chosen)).run()


class _Walk:
    def __init__(self, graph: Graph, flow: Flow) -> None:
        self.graph, self.flow = graph, flow
        self.places = Places(graph, flow)
        self.heap = sorted({i for leaf in flow.chosen for i in graph.ops_of[leaf]})
        self.queued = set(self.heap)

    def push(self, op: int) -> None:
        if op not in self.queued:
            self.queued.add(op)
            heapq.heappush(self.heap, op)

    def run(self) -> Flow:
        graph, flow = self.graph, self.flow
        self._parameters()
        self._walk()
        for v in graph.trace.outputs.values():
            if flow.is_partial(v) and not flow.problems:
                self._reduce(v, None)
                self._walk()
        if not flow.problems:
            self._outputs()
            self._hold()
        return flow

    def _outputs(self) -> None:
        """What leaves the model as a slice is gathered."""
        for name, v in self.graph.trace.outputs.items():
            if self.graph.leaves[v] & self.flow.chosen and not self.graph.is_scores(name, v):
                self.problem(None, f"{name} would be a slice, which only scores of a vocabulary may be")
            elif self.graph.leaves[v] & self.flow.chosen:
                self.flow.gathered.append(Border(0, "output", name, v))

    def _walk(self) -> None:
        while self.heap and not self.flow.problems:
            at = heapq.heappop(self.heap)
            self.queued.discard(at)
            self._visit(self.graph.op(at))

    def problem(self, op: Op | None, text: str) -> None:
        module = self.graph.trace.module_of(op) if op else ""
        self.flow.problems.append(Problem(module, op.name if op else "the output", text))

    def _parameters(self) -> None:
        for name in (n for leaf in self.flow.chosen for n in self.graph.parameters_with[leaf]):
            where, _, last = name.rpartition(".")
            dims = self.graph.axes.dims[self.graph.trace.parameters[name]]
            lends = where not in self.graph.calls_of  # the module never runs: others take its weight (the convolution of Mamba2)
            if len(dims) <= 2 or self.graph.is_bare(where) or lends:
                continue
            if not self.graph.is_convolution(where) or leaves(dims[1]) or not self.flow.chosen & set(leaves(dims[0])):
                self.flow.problems.append(Problem(where, last, "has three or more dims, and its channels do not go through by themselves"))
                return

    def _visit(self, op: Op) -> None:
        graph, flow = self.graph, self.flow
        effect = graph.axes.effects[op.index]
        if effect.kind == "constant" or self._refused(op):
            return
        summed = graph.con[op.index] & flow.chosen
        held = [v for v in graph.inputs[op.index] if flow.is_partial(v)]
        if summed and held:
            self._reduce_all(held, op)
        elif summed and effect.kind == "mean":
            self._mean(op, effect.con)
        elif summed and graph.is_row(op):
            flow.rows.add(op.index)
        elif summed:
            if self._may_sum(op):
                flow.sources[op.index] = summed
                self._set(op, True, mixed=effect.kind == "contract" and len(op.inputs()) > 2)  # with a bias
        elif not held:
            flow.sources.pop(op.index, None)
            self._set(op, False)
        elif (mixed := self._passes(op, held)) is not None:
            self._set(op, True, mixed)
        elif effect.kind == "scatter" and self._alone(op):
            self.push(op.index)
        elif effect.kind == "scatter":
            self.problem(op, "adds partial sums to rows to which what is whole is added too")
        else:
            self._reduce_all(held, op)

    def _set(self, op: Op, partial: bool, mixed: bool = False) -> None:
        flow = self.flow
        if partial and any(w not in op.outputs for w in self.graph.results[op.index]):
            self.problem(op, "writes partial sums into memory that is read elsewhere")
            return
        for o in op.outputs:
            if o < 0 or o in flow.alone or ((o in flow.partial), (o in flow.mixed)) == (partial, mixed):
                continue
            (flow.partial.add if partial else flow.partial.discard)(o)
            (flow.mixed.add if mixed else flow.mixed.discard)(o)
            for consumer in self.graph.consumers[o]:
                self.push(consumer)

    def _refused(self, op: Op) -> bool:
        """Whether the op does not work on slices at all."""
        graph, flow = self.graph, self.flow
        crossed = graph.cross[op.index] & flow.chosen
        if crossed and graph.axes.effects[op.index].kind == "norm":
            self._mean(op, graph.axes.effects[op.index].cross)
        elif crossed:
            self.problem(op, "mixes it")
        inside = graph.op_leaves[op.index] & flow.chosen
        if op.attention is not None and not inside <= graph.heads[op.attention]:
            self.problem(op, "is part of an attention function, which can be cut between heads only")
        for v in graph.inputs[op.index]:
            if flow.problems or not graph.trace.values[v].constant or alike(graph, flow.chosen, v):
                continue
            if (held := buffers(graph, flow.chosen, v)) is not None:
                flow.buffers |= held
                continue
            border = entrance(graph, flow.chosen, v, op)
            if border is None:
                self.problem(op, "takes a constant of the model's code with one entry per index of it")
            else:
                flow.sliced[border.call, border.arg] = border
        return bool(flow.problems)

    def _mean(self, op: Op, over: list[Dim]) -> None:
        """A mean over a cut axis, or a norm with its means inside: each rank has a part of the sum, added where the mean is taken."""
        if sum(bool(self.flow.chosen.intersection(leaves(dim))) for dim in over) > 1 or any(_mixed(d, self.flow.chosen) for d in over):
            self.problem(op, "takes a mean over it together with what cannot be cut")
        elif self.graph.axes.effects[op.index].kind == "norm" and len(over) > 1:
            self.problem(op, "is a norm over several dims")
        else:
            self.flow.means.add(op.index)

    def _may_sum(self, op: Op) -> bool:
        graph = self.graph
        effect, module = graph.axes.effects[op.index], graph.trace.module_of(op)
        if any(_mixed(dim, self.flow.chosen) for dim in effect.con):
            self.problem(op, "sums over it together with what cannot be cut")
        elif effect.kind == "index" and not graph.is_table(module):
            self.problem(op, "looks up along it outside an embedding module")
        elif effect.kind == "contract" and op.name.startswith(("addmm", "baddbmm")) and not graph.is_product(module):
            self.problem(op, "adds its bias before the partial sums are added")
        elif any(graph.leaves[o] & self.flow.chosen for o in op.outputs if o >= 0):
            self.problem(op, "would be partial and cut at once")
        else:
            return True
        return False

    def _passes(self, op: Op, held: list[int]) -> bool | None:
        """Whether an op on partial values gives a partial value, linear in them, and then whether it is mixed; None where it is not."""
        graph, flow = self.graph, self.flow
        inputs = graph.inputs[op.index]
        if any(graph.leaves[o] & flow.chosen for o in op.outputs if o >= 0):
            return None  # never partial and cut at once
        mixed = any(v in flow.mixed for v in held)
        kind = graph.axes.effects[op.index].kind
        if kind == "add":
            return self._added(op, [v for v in inputs if v not in held], mixed)
        if mixed and not graph.is_product(graph.trace.module_of(op)):
            return None  # a sum that waits can be added to, and nothing else
        if kind == "scatter":
            return mixed if all(v in held or self._is_zero(v) for v in (op.inputs()[0], op.inputs()[-1])) else None
        linear = {
            "linear": len(held) == len(inputs),
            "mul": len(held) == 1 and len(op.inputs()) == 2 and op.inputs()[0] != op.inputs()[1],
            **dict.fromkeys(("div", "index", "sum"), held == inputs[:1]),
        }
        return mixed if linear.get(kind, False) else None

    def _is_zero(self, value: int) -> bool:
        """Made as zeros, and nothing written into it since."""
        made = self.graph.producer[value]
        if made is None or self.graph.writers[value]:
            return False
        op = self.graph.op(made)
        return op.name in ZEROS or (op.name in COPIES and self._is_zero(op.inputs()[0]))

    def _added(self, op: Op, others: list[int], mixed: bool) -> bool | None:
        """The same for a sum: what it adds that is whole must count once."""
        if not mixed and all(self._count_once(v, op) for v in others):
            return False
        if self.graph.is_product(self.graph.trace.module_of(op)) and all(v in self.graph.parameter_of for v in others):
            return True  # a bias
        return True if all(self.places.summands(o) is not None for o in op.outputs if o >= 0) else None

    def _count_once(self, value: int, op: Op) -> bool:
        """A parameter of the adding module, or rows of it, used for nothing else than this sum (the biases of experts): it becomes a
        partial value itself, all of it on one rank and zeros on the others."""
        graph, at = self.graph, value
        while at not in graph.parameter_of:
            made = graph.producer[at]
            if made is None or len(graph.consumers[at]) != 1 or graph.axes.effects[made].kind not in ("index", "linear"):
                return False
            at = graph.op(made).inputs()[0]
        name, module = graph.parameter_of[at], graph.trace.module_of(op)
        if name.rpartition(".")[0] != module or not graph.is_bare(module) or graph.leaves[at] & self.flow.chosen:
            return False
        if len(graph.consumers[at]) != 1 or graph.trace.aliases[name]:
            return False
        self.flow.once.add(name)
        self.flow.partial.add(at)
        for consumer in graph.consumers[at]:
            self.push(consumer)
        return True

    def _alone(self, op: Op) -> bool:
        """Rows that are added to partial sums are whole, but what they are made of passes through a module that only hands it on (the
        identity among LongCat's experts): from there on the first rank alone has it, so that it counts once."""
        into, value = op.inputs()[0], op.inputs()[-1]
        if self.flow.is_partial(value) or not (self.flow.is_partial(into) or self._is_zero(into)):
            return False
        while value not in self.graph.handed_on:
            made = self.graph.producer[value]
            if made is None or self.graph.consumers[value] != [op.index]:
                return False
            op = self.graph.op(made)
            if self.graph.axes.effects[made].kind not in ("linear", "mul"):
                return False
            value = op.inputs()[0]
        if self.graph.consumers[value] != [op.index] or self.graph.leaves[value] & self.flow.chosen:
            return False
        self.flow.alone[value] = self.graph.handed_on[value]
        self.flow.partial.add(value)
        self.push(op.index)
        return True

    def _reduce_all(self, values: list[int], op: Op) -> None:
        for v in values:
            if self.flow.is_partial(v):
                self._reduce(v, op)
        self.push(op.index)

    def _reduce(self, value: int, op: Op | None) -> None:
        """Make a partial value whole: choose the borders for it, and look at what follows them again."""
        found = self.places.cheapest(value)
        if found is None:
            self.problem(op, f"needs the whole of a partial sum made by {self._source(value)}, and no module border lies between")
            return
        for border in found:
            self.flow.reduced[border.value] = border
            for consumer in self.graph.consumers[border.value]:
                self.push(consumer)

    def _hold(self) -> None:
        """Where the summands of each reduced value wait for it, if they must. What was found to be whole meanwhile is not reduced."""
        flow = self.flow
        flow.reduced = {v: border for v, border in flow.reduced.items() if v in flow.partial}
        for v, border in flow.reduced.items():
            if border.place == "input" or not self.places.is_plain(border):
                found = self.places.summands(v)
                if found is None:
                    self.problem(self.graph.op(self.graph.producer[v] or 0), "adds what is whole to partial sums that cannot wait")
                    return
                flow.held[v] = found

    def _source(self, value: int) -> str:
        while (made := self.graph.producer[value]) is not None and made not in self.flow.sources:
            value = next((v for v in self.graph.inputs[made] if self.flow.is_partial(v)), -1)
            if value < 0:  # made whole meanwhile
                break
        return self.graph.trace.where(self.graph.op(made)) if made is not None else "the model"


def _mixed(dim: Dim, chosen: frozenset[Node]) -> bool:
    """A concatenation of which some segments are cut and others are whole: a sum over it would count the whole ones once per rank."""
    for node in resolve(dim):
        if node.segs:
            cut = [bool(chosen.intersection(leaves([s]))) for s in node.segs]
            if any(cut) and (not all(cut) or any(_mixed([s], chosen) for s in node.segs)):
                return True
    return False
