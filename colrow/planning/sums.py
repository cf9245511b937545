"""Where partial sums arise when axes are cut, and at which module borders they are added: the forward half of the communication.

`forward(graph, chosen)` walks the ops that the chosen axes touch. Summing over a cut axis leaves a PARTIAL value; views, products with
whole values and sums of partial values stay partial; anything else needs the value WHOLE, so it is reduced at a module border before. Of
the borders that lie on the way the cheapest set is taken, the earliest among equals. What cannot be done becomes a `Problem` that names
module and op.

The walk is local: only touched ops and consumers of partial values are visited, so a candidate in an 80-layer model costs as much as in a
2-layer one. Gradients are in `adjoint.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from .factors import Dim, Node, leaves, resolve
from .graph import Border, Graph
from .rules import COPIES, FOLLOWED
from .trace import Op

COLLECTIVE = 0.5
"""Price of starting a collective, in hidden vectors per token. Without it, routers and other small things would be cut."""


FACTORIES = ("zeros", "ones", "full", "empty")  # the same number everywhere


@dataclass(frozen=True)
class Capabilities:
    """What the applier (parallel/) can carry out beyond slices, linear layers, embedding tables, attention and integers of modules.

    The deriver may know more than the applier does: an axis that needs something absent here stays whole, and a note says so.
    """

    experts: bool = False  # parameters with three or more dims, one matrix per expert; and biases of experts, which count on one rank
    own_layers: bool = False  # matrices of modules that are not exactly nn.Linear, Conv1D or nn.Embedding
    mean_square: bool = False  # statistics of a norm over a cut axis
    constants: bool = False  # tensors made by the model's code with one entry per cut index
    reduce_anywhere: bool = False  # reductions at modules that own no cut parameter


APPLIER = Capabilities(experts=True, own_layers=True, constants=True, reduce_anywhere=True)


@dataclass(frozen=True)
class Problem:
    """Why axes cannot be cut: names the op and its module."""

    module: str
    op: str
    text: str

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the model'} {self.text}"


@dataclass
class Flow:
    """The state of values for one choice. `partial`: sums still to be added. `reduced`: the borders where they are. `gathered`: outputs of
    the model that every rank has a slice of. `sources`: ops that leave partial sums, with the cut leaves they sum over. `once`: parameters
    that are added to partial sums as they are, and therefore used by one rank only. `sliced`: constants of the model's code that enter a
    module for all heads, of which a rank needs its own. `buffers`: buffers saved with the model, cut like parameters."""

    chosen: frozenset[Node]
    partial: set[int] = field(default_factory=set)
    reduced: dict[int, Border] = field(default_factory=dict)
    gathered: list[Border] = field(default_factory=list)
    sources: dict[int, frozenset[Node]] = field(default_factory=dict)
    once: set[str] = field(default_factory=set)
    sliced: dict[tuple[int, str], Border] = field(default_factory=dict)
    buffers: set[int] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def is_partial(self, value: int) -> bool:
        return value in self.partial and value not in self.reduced

    def cost(self, graph: Graph) -> float:
        """Elements per token on the wire, a fixed price per collective included, in the forward pass."""
        return sum(graph.per_token(v) + COLLECTIVE * graph.hidden for v in self.reduced)


def forward(graph: Graph, chosen: frozenset[Node], can: Capabilities = APPLIER) -> Flow:
    """Walk the touched ops in order. Stops at the first problem."""
    return _Walk(graph, Flow(chosen), can).run()


class _Walk:
    def __init__(self, graph: Graph, flow: Flow, can: Capabilities) -> None:
        self.graph, self.flow, self.can = graph, flow, can
        self.heap = sorted({i for leaf in flow.chosen for i in graph.ops_of[leaf]})
        self.queued = set(self.heap)

    def push(self, op: int) -> None:
        if op not in self.queued:
            self.queued.add(op)
            heapq.heappush(self.heap, op)

    def run(self) -> Flow:
        self._parameters()
        while self.heap and not self.flow.problems:
            at = heapq.heappop(self.heap)
            self.queued.discard(at)
            self._visit(self.graph.op(at))
        for name, v in self.graph.trace.outputs.items():
            if self.flow.problems:
                break
            if self.flow.is_partial(v):
                self._reduce(v, None)
                return self.run()
            if self.graph.leaves[v] & self.flow.chosen and not self.graph.is_scores(name, v):
                self.problem(None, f"{name} would be a slice, which only scores of a vocabulary may be")
            elif self.graph.leaves[v] & self.flow.chosen:
                self.flow.gathered.append(Border(0, "output", name, v))
        return self.flow

    def problem(self, op: Op | None, text: str) -> None:
        module = self.graph.trace.module_of(op) if op else ""
        self.flow.problems.append(Problem(module, op.name if op else "the output", text))

    def _parameters(self) -> None:
        for name in (n for leaf in self.flow.chosen for n in self.graph.parameters_with[leaf]):
            where, _, last = name.rpartition(".")
            dims = len(self.graph.trace.values[self.graph.trace.parameters[name]].shape)
            known = self.graph.is_product(where) or self.graph.is_table(where)
            lends = where not in self.graph.calls_of  # the module never runs: others take its weight (the convolution of Mamba2)
            if dims > 2 and not (self.can.experts and (self.graph.is_bare(where) or lends)):
                text = "has three or more dims, which cannot be cut yet"
            elif dims == 2 and not known and not self.can.own_layers:
                text = f"belongs to a {self.graph.trace.modules[where].__name__}, which cannot be cut yet"
            else:
                continue
            self.flow.problems.append(Problem(where, last, text))
            return

    def _visit(self, op: Op) -> None:
        graph, flow = self.graph, self.flow
        effect, inputs = graph.axes.effects[op.index], graph.inputs[op.index]
        if effect.kind == "constant":
            return
        if self._refused(op):
            return
        summed = graph.con[op.index] & flow.chosen
        held = [v for v in inputs if flow.is_partial(v)]
        if summed:
            if held:
                self._reduce_all(held, op)
            elif self._may_sum(op, summed):
                flow.sources[op.index] = summed
                self._set(op, True)
            return
        if not held:
            flow.sources.pop(op.index, None)
            self._set(op, False)
        elif self._passes(op, held):
            self._set(op, True)
        else:
            self._reduce_all(held, op)

    def _set(self, op: Op, partial: bool) -> None:
        if partial and any(w not in op.outputs for w in self.graph.results[op.index]):
            self.problem(op, "writes partial sums into memory that is read elsewhere")
            return
        for o in op.outputs:
            if o < 0 or (o in self.flow.partial) == partial:
                continue
            (self.flow.partial.add if partial else self.flow.partial.discard)(o)
            for consumer in self.graph.consumers[o]:
                self.push(consumer)

    def _refused(self, op: Op) -> bool:
        """Whether the op does not work on slices at all."""
        graph, flow = self.graph, self.flow
        crossed = graph.cross[op.index] & flow.chosen
        if crossed:
            self.problem(op, "mixes it")
            return True
        inside = graph.op_leaves[op.index] & flow.chosen
        if op.attention is not None and not inside <= graph.heads[op.attention]:
            self.problem(op, "is part of an attention function, which can be cut between heads only")
            return True
        for v in graph.inputs[op.index]:
            if not graph.leaves[v] & flow.chosen:
                continue
            value = graph.trace.values[v]
            if value.constant and self._buffer(v):
                continue
            if value.constant and not alike(self.graph, self.flow.chosen, v) and not (self.can.constants and self._sliced(v, op)):
                self.problem(op, "takes a constant of the model's code with one entry per index of it")
                return True
        return False

    def _buffer(self, value: int) -> bool:
        """A buffer saved with the model, used on the cut axes only (a bias of the logits): a rank holds its part."""
        graph, cut = self.graph, self.flow.chosen
        if graph.trace.values[value].name not in graph.trace.saved:
            return False
        users = [graph.op(i) for i in graph.consumers[value]]
        if not all(any(graph.leaves[o] & cut for o in user.outputs if o >= 0) for user in users):
            return False
        self.flow.buffers.add(value)
        return True

    def _sliced(self, value: int, op: Op) -> bool:
        """A constant that enters a module in which it is used on the cut axes only: a slice of it enters instead (ALiBi's slopes)."""
        graph, at = self.graph, value
        cut = self.flow.chosen
        while True:
            calls = [b for b in graph.entering[at] if graph.inside(op.index, graph.trace.calls[b.call])]
            for border in sorted(calls, key=lambda b: -graph.trace.calls[b.call].first):
                call = graph.trace.calls[border.call]
                users = (graph.op(i) for i in graph.consumers[at] if graph.inside(i, call))
                if all(any(graph.leaves[o] & cut for o in user.outputs if o >= 0) for user in users):
                    self.flow.sliced[border.call, border.arg] = border
                    return True
            made = graph.producer[at]
            sources = [v for v in graph.inputs[made] if graph.leaves[v] & cut] if made is not None else []
            if len(sources) != 1 or not graph.trace.values[sources[0]].constant:
                return False
            at = sources[0]

    def _may_sum(self, op: Op, summed: frozenset[Node]) -> bool:
        graph = self.graph
        effect, module = graph.axes.effects[op.index], graph.trace.module_of(op)
        if any(_mixed(dim, self.flow.chosen) for dim in effect.con):
            self.problem(op, "sums over it together with what cannot be cut")
        elif effect.kind == "mean":
            self.problem(op, "takes a mean over it")
        elif effect.kind == "index" and not graph.is_table(module):
            self.problem(op, "looks up along it outside an embedding module")
        elif effect.kind == "contract" and op.name.startswith(("addmm", "baddbmm")) and not graph.is_product(module):
            self.problem(op, "adds its bias before the partial sums are added")
        elif any(graph.leaves[o] & self.flow.chosen for o in op.outputs if o >= 0):
            self.problem(op, "would be partial and cut at once")
        else:
            return True
        return False

    def _passes(self, op: Op, held: list[int]) -> bool:
        """Whether an op on partial values gives a partial value: it is linear in them, and adds nothing that each rank would add again."""
        graph, flow = self.graph, self.flow
        inputs = graph.inputs[op.index]
        others = [v for v in inputs if v not in held]
        if any(graph.leaves[o] & flow.chosen for o in op.outputs if o >= 0):
            return False  # never partial and cut at once
        match graph.axes.effects[op.index].kind:
            case "linear":
                return not others
            case "add":
                bias = all(v in graph.parameter_of for v in others) and graph.is_product(graph.trace.module_of(op))
                return not others or bias or (self.can.experts and all(self._count_once(v, op) for v in others))
            case "mul":
                return len(held) == 1 and len(op.inputs()) == 2 and op.inputs()[0] != op.inputs()[1]
            case "div" | "index" | "sum":
                return held == inputs[:1]
        return False

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

    def _reduce_all(self, values: list[int], op: Op) -> None:
        for v in values:
            if self.flow.is_partial(v):
                self._reduce(v, op)
        self.push(op.index)

    def _reduce(self, value: int, op: Op | None) -> None:
        """Make a partial value whole: choose the borders for it, and look at what follows them again."""
        found = self._cut(value, {})
        if found is None:
            self.problem(op, f"needs the whole of a partial sum made by {self._source(value)}, and no module border lies between")
            return
        for border in found:
            self.flow.reduced[border.value] = border
            for consumer in self.graph.consumers[border.value]:
                self.push(consumer)

    def _cut(self, value: int, seen: dict[int, frozenset[Border] | None]) -> frozenset[Border] | None:
        """The cheapest set of borders that makes a partial value whole."""
        if value in seen:
            return seen[value]
        seen[value] = None
        graph = self.graph
        made = graph.producer[value]
        if made is None:  # a parameter that counts once: no border lies before it
            return None
        options: list[frozenset[Border]] = []
        if made not in self.flow.sources:
            parts = [self._cut(v, seen) for v in graph.inputs[made] if self.flow.is_partial(v)]
            if parts and all(p is not None for p in parts):
                options.append(frozenset().union(*(p for p in parts if p)))
        here = self._border(value)
        if here:
            options.append(frozenset([here]))
        seen[value] = min(options, key=self._price, default=None)
        return seen[value]

    def _price(self, borders: frozenset[Border]) -> float:
        return sum(self.graph.per_token(b.value) + COLLECTIVE * self.graph.hidden for b in borders)

    def _border(self, value: int) -> Border | None:
        for border in self.graph.leaving[value]:
            call = self.graph.trace.calls[border.call]
            if any(self.graph.inside(c, call) for c in self.graph.consumers[value]):
                continue  # the module itself uses the value before it leaves
            cut = (self.graph.leaves[self.graph.trace.parameters[p]] & self.flow.chosen for p in self.graph.owned[call.module])
            if any(cut) or (self.can.reduce_anywhere and not self._has_bias(value)):
                return border
        return None

    def _has_bias(self, value: int) -> bool:
        """On the way to this partial value a linear layer adds its bias, which it can only do after the sum at its own output."""
        graph, made = self.graph, self.graph.producer[value]
        if made is None:
            return False
        op = graph.op(made)
        if graph.is_product(graph.trace.module_of(op)) and any(v in graph.parameter_of for v in self._addends(op)):
            return True
        return made not in self.flow.sources and any(self._has_bias(v) for v in graph.inputs[made] if self.flow.is_partial(v))

    def _addends(self, op: Op) -> list[int]:
        """Inputs of an op that are added, not multiplied."""
        if self.graph.axes.effects[op.index].kind == "add":
            return op.inputs()
        return op.inputs()[:1] if op.name.startswith(("addmm", "baddbmm")) else []

    def _source(self, value: int) -> str:
        while (made := self.graph.producer[value]) is not None and made not in self.flow.sources:
            value = next(v for v in self.graph.inputs[made] if self.flow.is_partial(v))
        return self.graph.trace.where(self.graph.op(made)) if made is not None else "the model"


def _mixed(dim: Dim, chosen: frozenset[Node]) -> bool:
    """A concatenation of which some segments are cut and others are whole: a sum over it would count the whole ones once per rank."""
    for node in resolve(dim):
        if node.segs:
            cut = [bool(chosen.intersection(leaves([s]))) for s in node.segs]
            if any(cut) and (not all(cut) or any(_mixed([s], chosen) for s in node.segs)):
                return True
    return False


def alike(graph: Graph, chosen: frozenset[Node], value: int) -> bool:
    """A constant that is the same at every index of the cut axes: made of a size, so a slice of it is made by a smaller size."""
    if not graph.leaves[value] & chosen:
        return True
    made = graph.producer[value]
    if made is None:
        return False
    op = graph.op(made)
    if op.name in (*COPIES, *FOLLOWED, "slice"):  # what an expansion adds is the same all along
        return alike(graph, chosen, graph.inputs[made][0])
    return op.name in FACTORIES or (torch.Tag.pointwise in op.func.tags and all(alike(graph, chosen, v) for v in graph.inputs[made]))


def whole_constants(graph: Graph, flow: Flow) -> set[int]:
    """Constants with cut axes that every rank makes whole all the same: slices of them are taken where they enter a module."""
    inside = [graph.trace.calls[call] for call, _ in flow.sliced]
    found = {v for leaf in flow.chosen for v in graph.values_with(leaf) if graph.trace.values[v].constant} if inside else set()
    made = {v: graph.producer[v] for v in found}
    return {
        v
        for v, op in made.items()
        if not alike(graph, flow.chosen, v) and not any(op is not None and graph.inside(op, call) for call in inside)
    }
