"""Which axes are cut: candidates, what each saves and costs, and the greedy choice among those that the applier can carry out.

A candidate is a leaf that occurs in a parameter, or the heads of an attention (KV heads with their repetitions). It saves the parameter
elements that contain it, and costs what `sums.forward` finds. Candidates are taken by saving per cost, where they do not meet an axis that
is cut already in the same tensor. What is left out is kept with its reason, for the plan's notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from .adjoint import Gradients, backward
from .covered import count, covered, is_alone
from .cuts import Cut, CutError, Cuts, cut_axis, cut_blocks, cut_fewer, cut_heads
from .edits import Uses
from .factors import COUNTS, Node, leaves, resolve, size
from .flow import Flow, Problem
from .graph import Border, Graph
from .lengths import names
from .plan import Edit
from .sums import forward

WORTH = 2.0
"""A cut is made where cost (elements per token) times hidden size is at most this many times the parameter elements it saves."""

WORTH_OF_TABLE = 32.0
"""The same for tables that are looked up once per pass, not once per layer."""

EXPERT_UNIT = 16
"""Indices by which an axis of expert weights is cut where it can be: 16 bytes, even where an element has one."""

SEQUENCES = frozenset(("S", "E"))


@dataclass(frozen=True)
class Candidate:
    """`leaves` are cut together. `heads`: they are attention heads, of which every rank needs one."""

    leaves: tuple[Node, ...]
    heads: bool = False


@dataclass(frozen=True)
class Accepted:
    candidate: Candidate
    cut: Cut
    gain: float
    cost: float
    flow: Flow = field(repr=False)


@dataclass(frozen=True)
class Rejected:
    """`parameters` stay whole as far as this axis goes, because of `text`."""

    candidate: Candidate
    parameters: tuple[str, ...]
    gain: float
    text: str


@dataclass
class Choice:
    """Everything that a plan is made of, before it is put into words."""

    graph: Graph
    cuts: Cuts
    flow: Flow
    gradients: Gradients
    edits: list[Edit]
    accepted: list[Accepted]
    rejected: list[Rejected]


def choose(graph: Graph, ranks: int, weights: Sequence[float] | None = None, block: int = 1) -> Choice:
    """The choice for a number of ranks (at least 2). `block`: of the innermost dim of weights, which no cut should go through."""
    return _Chooser(graph, ranks, weights, block).run()


class _Chooser:
    def __init__(self, graph: Graph, ranks: int, weights: Sequence[float] | None, block: int) -> None:
        self.graph, self.ranks, self.weights, self.block = graph, ranks, weights, block
        self.uses = Uses(graph)
        self.rejected: list[Rejected] = []

    def run(self) -> Choice:
        possible = [found for c in self._candidates() if (found := self._judge(c))]
        possible = self._drop_lonely_lookups(possible)
        # heads first: caches shrink with them; what leaves ranks idle only where nothing else was found for the same tensors
        possible.sort(key=lambda a: (not a.candidate.heads, bool(a.cut.counted), -a.gain / max(a.cost, 1e-9)))
        accepted: list[Accepted] = []
        taken: dict[Node, Accepted] = {}
        for found in possible:
            rival = self._rival(found.cut.leaves, taken)
            if rival is None:
                accepted.append(found)
                taken.update((leaf, found) for leaf in found.cut.leaves)
            elif not set(found.candidate.leaves) & set(rival.candidate.leaves):
                self._reject(found.candidate, f"it meets an axis of {prod(n.size for n in rival.cut.leaves)} that is cut")
        return self._together(accepted)

    def _candidates(self) -> list[Candidate]:
        """Heads first; then every other leaf that occurs in a parameter."""
        found: dict[tuple[Node, ...], Candidate] = {}
        for call in self.graph.trace.attention:
            q, k = (resolve(self.graph.axes.dims[v][1]) for v in (call.q, call.k))
            if len(q) == 1 and k in (q, []):
                found[q[0],] = Candidate((q[0],), heads=True)
            elif len(q) == 2 and k == q[:1]:
                found[q[0], q[1]] = Candidate((q[0], q[1]), heads=True)
        taken = {leaf for c in found.values() for leaf in c.leaves}
        of_inputs = {leaf for v in self.graph.trace.inputs.values() for leaf in self.graph.leaves[v]}
        used = (leaf for leaf in self.graph.parameters_with if leaf in self.graph.ops_of)  # not all take part in a pass
        singles = [leaf for leaf in used if leaf not in taken and leaf not in of_inputs]
        return [*found.values(), *(Candidate((leaf,)) for leaf in singles)]

    def _reject(self, candidate: Candidate, text: str) -> None:
        names = dict.fromkeys(n for leaf in candidate.leaves for n in self.graph.parameters_with[leaf])
        self.rejected.append(Rejected(candidate, tuple(names), self._gain(candidate.leaves), text))

    def _judge(self, candidate: Candidate) -> Accepted | None:
        """A candidate with its cut and price; None, with a reason kept, where it cannot or should not be cut."""
        trouble = next((leaf.flag for leaf in candidate.leaves if leaf.flag), "")
        if trouble:
            self._reject(candidate, f"it {trouble}" if trouble == COUNTS else f"mixed by {trouble}")
            return None
        if any(self._twice(leaf) for leaf in candidate.leaves):
            self._reject(candidate, "it occurs twice in one tensor")
            return None
        options, text = self._options(candidate)
        for cut in options:
            flow = forward(self.graph, frozenset(cut.leaves))
            trouble = self._trouble(cut, flow)
            gain, cost = self._gain(cut.leaves), flow.cost(self.graph)
            worth = WORTH_OF_TABLE if self._is_lookup(flow) else WORTH
            if not trouble and cost * flow.width(self.graph) <= worth * gain:
                return Accepted(candidate, cut, gain, cost, flow)
            trouble = trouble or f"{gain:.0f} elements saved are too few for {cost:.0f} elements per token on the wire"
            text = f"{text}, and {trouble}" if cut.counted else text or trouble
        self._reject(candidate, text)
        return None

    def _options(self, candidate: Candidate) -> tuple[list[Cut], str]:
        """Ways to cut a candidate, the best balanced one first; or why there is none."""
        total = prod(leaf.size for leaf in candidate.leaves)
        first = candidate.leaves[0]
        if candidate.heads and total < self.ranks:
            return self._fewer(candidate, f"{total} heads are fewer than {self.ranks} ranks")
        if self.block > 1 and (on_borders := self._in_blocks(candidate)) is not None:
            return [on_borders], ""
        if len(candidate.leaves) == 2:
            flat = cut_heads(candidate.leaves[0], candidate.leaves[1], self.ranks, self.weights)
            plain = [cut_axis(first, self.ranks, self.weights, least=1)] if flat.flat and first.size >= self.ranks else []
            return [flat, *plain], ""
        least = 1 if candidate.heads or not self._stands_alone(first) else 0
        if least * self.ranks > first.size:
            return self._fewer(candidate, f"{first.size} indices are fewer than {self.ranks} ranks")
        return [cut_axis(first, self.ranks, self.weights, least, self._unit(first))], ""

    def _fewer(self, candidate: Candidate, text: str) -> tuple[list[Cut], str]:
        return ([cut_fewer(candidate.leaves, self.ranks)] if candidate.leaves[0].size > 1 else []), text

    def _in_blocks(self, candidate: Candidate) -> Cut | None:
        """The cut in the smallest multiples of indices that goes through no block of a weight, and leaves no rank empty."""
        first, total, unit = candidate.leaves[0], prod(leaf.size for leaf in candidate.leaves), 1
        while unit <= self.block and -(-total // unit) >= self.ranks:
            if len(candidate.leaves) == 2:
                cut = cut_heads(first, candidate.leaves[1], self.ranks, self.weights, unit)
            else:
                cut = cut_blocks(first, self.ranks, self.weights, 1, unit)
            if self._on_borders(cut):
                return cut
            unit *= 2
        return None

    def _on_borders(self, cut: Cut) -> bool:
        cuts, trace = Cuts(self.ranks, [cut]), self.graph.trace
        names = {name for leaf in cut.leaves for name in self.graph.parameters_with[leaf]}
        inner = [self.graph.axes.dims[trace.parameters[name]][-1] for name in names if len(trace.values[trace.parameters[name]].shape) > 1]
        try:
            touched = [cuts.of_dim(0, dim) for dim in inner if cuts.touches(dim)]
        except CutError:
            return False
        return all(partition.granularity % self.block == 0 for partition in touched)

    def _unit(self, leaf: Node) -> int:
        """Grouped products over experts want rows of whole 16 bytes."""
        shapes = (self.graph.trace.values[self.graph.trace.parameters[n]].shape for n in self.graph.parameters_with[leaf])
        return EXPERT_UNIT if any(len(s) > 2 and min(s[1:]) > 1 for s in shapes) else 1

    def _trouble(self, cut: Cut, flow: Flow) -> str:
        """Why a cut cannot be made, or ""."""
        if flow.problems:
            return str(flow.problems[0])
        if not flow.sources and not flow.gathered:  # a part of the model for inputs of another length
            return "the traced forward pass makes nothing of it"
        if any(sum(bool(SEQUENCES & names(n)) for n in self.graph.symbols(v)) > 1 for v in flow.reduced):
            return "its partial sums would have an entry for each pair of tokens"
        if cut.overlaps:
            alone = next((i for i, summed in flow.sources.items() if not summed >= set(cut.leaves)), None)
            if alone is not None:
                return f"{self.graph.trace.where(self.graph.op(alone))} sums over KV heads of which some lie on two ranks"
        if cut.counted and (other := next((i for i in flow.sources if not self._is_layer(i)), None)) is not None:
            return f"there are fewer indices than ranks, and {self.graph.trace.where(self.graph.op(other))} cannot leave out copies"
        gradients = backward(self.graph, flow)
        problems = gradients.problems or self._differing(flow, gradients)
        if problems:
            return str(problems[0])
        cuts = Cuts(self.ranks, [cut])
        try:
            for v in {v for leaf in cut.leaves for v in self.graph.values_with(leaf)}:
                if not self._in_attention_only(v):
                    cuts.partition(self.graph.axes.dims[v])
            problems = self.uses.solve(cuts, flow)[1]
        except CutError as e:
            return str(e)
        return str(problems[0]) if problems else ""

    def _differing(self, flow: Flow, gradients: Gradients) -> list[Problem]:
        """A module that runs several times has one set of hooks: what happens at its borders must be the same in every run."""
        borders = [("g", b) for b in flow.reduced.values()] + [("f", b) for bs in gradients.copies.values() for b in bs]
        borders += [("a summand that waits", b) for bs in flow.held.values() for b in bs]
        borders += [("a value that counts once", b) for b in flow.alone.values()]
        borders += [("a mean", Border(m.call, "inside", str(m.number), m.value)) for i in flow.means for m in self.graph.statistics[i]]
        calls = self.graph.trace.calls
        present = {(op, b.call, b.place, b.arg) for op, b in borders}
        for op, b in borders:
            module = calls[b.call].module
            if any((op, c, b.place, b.arg) not in present for c in self.graph.calls_of[module]):
                return [Problem(module, op, "would be needed in some of the runs of this module only")]
        return []

    def _is_layer(self, op: int) -> bool:
        return self.graph.is_product(self.graph.trace.module_of(self.graph.op(op)))

    def _in_attention_only(self, value: int) -> bool:
        """Made inside an attention function, whose axes the applier's own function handles."""
        made = self.graph.producer[value]
        return made is not None and self.graph.op(made).attention is not None

    def _stands_alone(self, leaf: Node) -> bool:
        """The leaf is a whole dim wherever it occurs (or a whole segment of one), so a rank may have none of it: views stay possible. There
        is no convolution without channels."""
        if any(self.graph.op(i).name == "convolution" for i in self.graph.ops_of[leaf]):
            return False
        for v in self.graph.values_with(leaf):
            for dim in self.graph.axes.dims[v]:
                if leaf in leaves(dim) and not is_alone(dim, leaf):
                    return False
        return True

    def _twice(self, leaf: Node) -> bool:
        return any(count(self.graph.axes.dims[v], {leaf}) > 1 for v in self.graph.values_with(leaf))

    def _rival(self, mine: tuple[Node, ...], taken: dict[Node, Accepted]) -> Accepted | None:
        """The accepted cut that meets these leaves in one tensor, other than in different segments of it."""
        for v in {v for leaf in mine for v in self.graph.values_with(leaf)}:
            for leaf in self.graph.leaves[v]:
                if leaf not in taken:
                    continue
                other, dims = set(taken[leaf].cut.leaves), self.graph.axes.dims[v]
                if count(dims, other | set(mine)) > max(count(dims, set(mine)), count(dims, other)):
                    return taken[leaf]
        return None

    def _gain(self, nodes: Sequence[Node]) -> float:
        """Parameter elements that contain one of the leaves."""
        total = 0.0
        for name in dict.fromkeys(n for leaf in nodes for n in self.graph.parameters_with[leaf]):
            at = self.graph.trace.parameters[name]
            shares = [covered(dim, set(nodes)) / size(dim) for dim in self.graph.axes.dims[at] if size(dim)]
            total += prod(self.graph.trace.values[at].shape) * max(shares, default=0.0)
        return total

    def _drop_lonely_lookups(self, found: list[Accepted]) -> list[Accepted]:
        """Tables whose rows are only looked up and then added to each other (tokens and positions) should share one all-reduce. Where no
        module border lies after the sum, only the largest table is cut: the others save no arithmetic and would each cost a collective of
        their own."""
        groups: dict[int, list[Accepted]] = {}
        for a in found:
            landing = self._landing(a)
            if landing is not None:
                groups.setdefault(landing, []).append(a)
        dropped: list[Accepted] = []
        for group in groups.values():
            if len(forward(self.graph, frozenset(leaf for a in group for leaf in a.cut.leaves)).reduced) == 1:
                continue
            best = max(group, key=lambda a: a.gain)
            table = self.graph.parameters_with[best.cut.leaves[0]][0]
            for a in group:
                if a is best:
                    continue
                dropped.append(a)
                self._reject(a.candidate, f"only looked up, its sum would need an all-reduce of its own beside that of {table}")
        return [a for a in found if a not in dropped]

    def _is_lookup(self, flow: Flow) -> bool:
        return all(self.graph.axes.effects[i].kind == "index" for i in flow.sources)

    def _landing(self, found: Accepted) -> int | None:
        """The last op of the chain of additions that a looked-up value goes through, where every source of the candidate is a lookup."""
        if len(found.flow.sources) != 1 or not self._is_lookup(found.flow):
            return None
        value, last = self.graph.op(next(iter(found.flow.sources))).outputs[0], None
        while len(consumers := self.graph.consumers[value]) == 1 and self.graph.axes.effects[consumers[0]].kind in ("linear", "add"):
            if self.graph.axes.effects[consumers[0]].kind == "add":
                last = consumers[0]
            value = self.graph.op(consumers[0]).outputs[0]
        return last

    def _together(self, accepted: list[Accepted]) -> Choice:
        """All accepted cuts at once. Where they do not go together, the least worthwhile is given up."""
        while True:
            cuts = Cuts(self.ranks, [a.cut for a in accepted])
            flow = forward(self.graph, cuts.leaves)
            gradients = backward(self.graph, flow) if not flow.problems else Gradients()
            edits, problems = self.uses.solve(cuts, flow) if not flow.problems else ([], [])
            trouble = [*flow.problems, *gradients.problems, *self._differing(flow, gradients), *problems]
            if not trouble:
                return Choice(self.graph, cuts, flow, gradients, edits, accepted, self.rejected)
            self._reject(accepted.pop().candidate, str(trouble[0]))
