"""A choice of cuts put into a plan: tensors with roles and reasons, regions, heads, notes. The sentences are made here, and nothing is
decided.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ..partition import Partition, whole
from .choose import Accepted, Choice, Rejected
from .factors import Node, resolve
from .graph import Border
from .means import averaged
from .plan import Attention, BufferPlan, Note, Plan, Region, RegionOp, Role, TensorPlan
from .trace import LONGER

LISTED = 3  # names in a sentence before "and N more"


def plan_of(choice: Choice, digest: str, weights: tuple[float, ...]) -> Plan:
    """The plan of a choice."""
    return _Words(choice).plan(digest, weights)


def fold(name: str) -> str:
    """A name with its numbers taken out: what is alike in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def listed(names: Iterable[str]) -> str:
    """ "a, b, c and 4 more"."""
    every = list(dict.fromkeys(names))
    return ", ".join(every[:LISTED]) + (f" and {len(every) - LISTED} more" if len(every) > LISTED else "")


def _of_all(first: Region, *more: Region) -> Region:
    """One region for all runs of its module in a pass."""
    return replace(
        first, calls=1 + sum(r.shape == first.shape for r in more), further=tuple(r.shape for r in more if r.shape != first.shape)
    )


class _Words:
    def __init__(self, choice: Choice) -> None:
        self.choice, self.graph, self.trace = choice, choice.graph, choice.graph.trace
        self.accepted: dict[Node, Accepted] = {leaf: a for a in choice.accepted for leaf in a.cut.leaves}
        self.ranks = choice.cuts.ranks
        self.refusals: dict[str, list[Rejected]] = defaultdict(list)
        for r in choice.rejected:
            for name in r.parameters:
                self.refusals[name].append(r)
        self.rows = {self.trace.module_of(self.graph.op(i)) for i in choice.flow.sources}
        self.paths: dict[int, tuple[str, ...]] = {}

    def plan(self, digest: str, weights: tuple[float, ...]) -> Plan:
        tensors = {name: self.tensor(name) for name in self.trace.parameters}
        return Plan(
            model_type=self.trace.config.model_type,
            architecture=self.trace.architecture,
            ranks=self.ranks,
            tensors=tensors,
            regions=self.regions(),
            edits=tuple(self.choice.edits),
            attention=tuple(self.heads()),
            buffers=tuple(self.buffer(v) for v in sorted(self.choice.flow.buffers)),
            inputs=tuple(self.trace.inputs),
            tokens=self.trace.length if self.trace.length >= LONGER else 0,
            notes=tuple(self.notes(tensors)),
            weights=weights,
            config_digest=digest,
        )

    # tensors

    def tensor(self, name: str) -> TensorPlan:
        at = self.trace.parameters[name]
        shape, aliases = self.trace.values[at].shape, self.trace.aliases[name]
        found = next((self.accepted[leaf] for leaf in self.graph.leaves[at] if leaf in self.accepted), None)
        if found is None:
            once = name in self.choice.flow.once
            partial = once or name in self.choice.gradients.parameters
            why = self.why_whole(name, partial) if not once else "whole: added to partial sums, so one rank uses it and the others zeros"
            return TensorPlan(name, shape, whole(self.ranks), "whole", why, "partial" if partial else "whole", aliases, once=once)
        if at in self.graph.axes.entries:
            axis, number = self.graph.axes.entries[at]
            why = f"entry: belongs to number {number} of {self.noun(found)}, so it lies where that is"
            return TensorPlan(name, shape, self.choice.cuts.entry(axis, number, shape[0]), "entry", why, aliases=aliases)
        partition = self.choice.cuts.partition(self.graph.axes.dims[at])
        role = self.role(name, at)
        if role == "row":
            partition = self.choice.cuts.counted.partition(self.graph.axes.dims[at])
        return TensorPlan(name, shape, partition, role, self.why_cut(role, found), aliases=aliases, path=self.path(found))

    def role(self, name: str, at: int) -> Role:
        """By what the module does with the cut dim: makes it, sums it away, looks it up."""
        cut = self.choice.flow.chosen & self.graph.leaves[at]
        users = self._users(at)
        if any(self.graph.axes.effects[i].kind == "index" and self.graph.con[i] & cut for i in users):
            return "vocab"
        if any(self.graph.axes.effects[i].kind == "contract" and self.graph.con[i] & cut for i in users):
            return "row"
        module = name.rpartition(".")[0]
        if len(self.trace.values[at].shape) > 2 and any(self.graph.axes.effects[i].kind == "contract" for i in users):
            return "column"  # of experts
        if self.graph.is_product(module) or self.graph.is_table(module):
            return "column"
        return "split"

    def _users(self, at: int) -> list[int]:
        """Ops that read a parameter, views of it followed, and picks of its rows (of experts)."""
        out: list[int] = []
        for i in self.graph.consumers[at]:
            effect = self.graph.axes.effects[i]
            if effect.kind == "linear" or (effect.kind == "index" and not self.graph.con[i] & self.choice.flow.chosen):
                out.extend(u for o in self.graph.op(i).outputs for u in self._users(o))
            else:
                out.append(i)
        return out

    def noun(self, found: Accepted) -> str:
        """The cut axis in words."""
        n = [leaf.size for leaf in found.candidate.leaves]
        if found.candidate.heads:
            return f"{n[0]} heads" if len(n) == 1 else f"{n[0] * n[1]} query heads ({n[0]} KV heads)"
        if any(self.graph.axes.effects[i].kind == "index" for i in found.flow.sources):
            return f"{n[0]} rows"
        return f"{n[0]} output features" if found.flow.gathered else f"{n[0]} features"

    def why_cut(self, role: Role, found: Accepted) -> str:
        noun = self.noun(found)
        sums = list(found.flow.sources)
        ends = listed(self.trace.module_of(self.graph.op(i)) for i in sums)
        after = self.after(found)
        if role == "vocab":
            head = "; the same rows make the logits, a slice on each rank" if found.flow.gathered else ""
            return f"vocab: of {noun} each rank looks up its own and gives zeros for the others; all-reduced before {after}{head}"
        if role == "row":
            makers = listed(m for p in self.graph.parameters_with[found.cut.leaves[0]] if (m := p.rpartition(".")[0]) not in ends)
            return f"row: {noun} made in {makers} are summed away here; the partial sums are all-reduced before {after}"
        if not sums:
            return f"{role}: {noun} are made here and stay apart up to the model's output"
        return f"{role}: {noun} are made here and summed away in {ends}, whose result is all-reduced before {after}"

    def after(self, found: Accepted) -> str:
        """The first op that needs the reduced value."""
        for v in found.flow.reduced:
            for i in self.graph.consumers[v]:
                return f"{self.graph.op(i).name} in {self.trace.module_of(self.graph.op(i)) or 'the model'}"
        return "the output"

    def path(self, found: Accepted) -> tuple[str, ...]:
        key = id(found)
        if key not in self.paths:
            ops = sorted({i for leaf in found.cut.leaves for i in self.graph.ops_of[leaf]})
            steps = (self.graph.op(i) for i in ops if self.graph.axes.effects[i].kind not in ("linear", "constant"))
            self.paths[key] = tuple(dict.fromkeys(self.trace.where(op) for op in steps))
        return self.paths[key]

    def refusal(self, name: str) -> Rejected | None:
        """The reason that matters: of the axis that would have saved most, the one that all layers share left aside."""
        found = sorted(self.refusals[name], key=lambda r: len(r.parameters))
        own = [r for r in found if len(r.parameters) < len(self.trace.parameters) // 2] or found
        return max(own, key=lambda r: r.gain, default=None)

    def why_whole(self, name: str, partial: bool) -> str:
        module = name.rpartition(".")[0]
        refusal = self.refusal(name)
        if not self.graph.consumers[self.trace.parameters[name]]:
            why = "the traced forward pass does not use it"
        elif module in self.rows and len(self.trace.values[self.trace.parameters[name]].shape) == 1:
            why = "added once, after the partial sums of its module are all-reduced"
        else:
            why = f"its axis of {_size(refusal)} is not cut: {refusal.text}" if refusal else "it has no axis to cut"
        return f"whole: {why}" + ("; it meets split work, so its gradient is summed over ranks" if partial else "")

    def buffer(self, value: int) -> BufferPlan:
        found = next(self.accepted[leaf] for leaf in self.graph.leaves[value] if leaf in self.accepted)
        reason = f"split: one entry for each of {self.noun(found)}"
        buffer, partition = self.trace.values[value], self.choice.cuts.partition(self.graph.axes.dims[value])
        return BufferPlan(buffer.name, buffer.shape, partition, reason)

    # regions

    def regions(self) -> tuple[Region, ...]:
        flow = self.choice.flow
        out = [(b, self.region(b, "reduce", self.why_reduce(b))) for b in flow.reduced.values()]
        for v, places in flow.held.items():
            due = self.region(flow.reduced[v], "reduce", "").name
            out += [(b, replace(self.region(b, "hold", f"waits, to be added up with others at {due}"), shares=due)) for b in places]
        out += [pair for i in flow.means for pair in self.means(i)]
        out += [self.row(i) for i in flow.rows]
        out += [
            (b, self.region(b, "once", "added to partial sums as it is, so one rank has it and the others zeros"))
            for b in flow.alone.values()
        ]
        for borders in self.choice.gradients.copies.values():
            first, *others = sorted(borders, key=lambda b: (*self._position(b), b.arg))
            made = replace(self.region(first, "copy", self.why_copy(first)), kept=not self._only_multiples(first.value))
            out.append((first, made))
            out.extend((b, replace(self.region(b, "copy", made.reason), shares=made.name)) for b in others)
        for b in flow.sliced.values():
            out.append((b, self.region(b, "slice", "a constant for all heads, of which the rank needs its own", self.stretch(b.value))))
        for b in flow.gathered:
            cut = self.choice.cuts.partition(self.graph.axes.dims[b.value])
            last = Partition((cut.dim or 0) - len(self.graph.axes.dims[b.value]), cut.pieces)  # counted from the end
            maker = next((self.trace.calls[a.call].module for a in self.graph.leaving[b.value] if a.arg == "0"), "")
            gather = self.region(b, "gather", "every rank makes its own slice; whole for callers", last)
            out.append((b, replace(gather, made=maker)))
        out.sort(key=lambda pair: (*self._position(pair[0]), pair[1].name))
        runs: dict[tuple[str, ...], list[Region]] = {}  # one for all runs of a module
        for _, r in out:
            runs.setdefault((r.module, r.place, r.arg, r.op), []).append(r)
        return tuple(_of_all(*same) for same in runs.values())

    def _only_multiples(self, value: int) -> bool:
        """Whether it is used as nothing but a factor of numbers (Falcon-H1's multipliers), of which autograd keeps the numbers alone."""
        users = [self.graph.op(i) for i in self.graph.consumers[value]]
        return all(op.name in ("mul", "div") and op.inputs() == [value] for op in users)

    def means(self, at: int) -> Iterable[tuple[Border, Region]]:
        """The means over a cut axis that an op takes."""
        op = self.graph.op(at)
        dims = self.graph.axes.dims[op.inputs()[0]]
        (dim,) = (d for d in averaged(op, len(dims)) if self.choice.cuts.touches(dims[d]))
        cut = Partition(dim, self.choice.cuts.partition(dims).pieces)
        for mean in self.graph.statistics[at]:
            border = Border(mean.call, "inside", str(mean.number), mean.value)
            yield border, self.region(border, "mean", "each rank has a part of what the mean is taken of", cut)

    def row(self, at: int) -> tuple[Border, Region]:
        """The reading of one row of a cut table."""
        op = self.graph.op(at)
        name = self.graph.parameter_of[op.inputs()[0]]
        border = Border(op.call, "inside", name, op.outputs[0])
        cut = self.choice.cuts.partition(self.graph.axes.dims[op.inputs()[0]])
        region = self.region(border, "row", "one rank has the row, the module's own code needs it", cut)
        runs = any(self.graph.in_steps[v] for v in self.trace.calls[op.call].outputs.values())  # whatever becomes of the row (Gemma 4)
        return border, replace(region, steps=runs)

    def stretch(self, value: int) -> Partition:
        """The cut of a dim from its first cut factor on: what lies before it (a batch in the same dim) repeats it."""
        cuts, dims = self.choice.cuts, self.graph.axes.dims[value]
        (at,) = (d for d, dim in enumerate(dims) if cuts.touches(dim))
        nodes = resolve(dims[at])
        first = next(i for i, node in enumerate(nodes) if cuts.touches([node]))
        return cuts.of_dim(at - len(dims), nodes[first:])

    def _position(self, border: Border) -> tuple[int, int]:
        call = self.trace.calls[border.call]
        return (call.first, 1) if border.place == "input" else (call.last, 0)

    def region(self, border: Border, op: RegionOp, reason: str, partition: Partition | None = None) -> Region:
        module = self.trace.calls[border.call].module
        shape, v = self.graph.symbols(border.value), border.value
        scored, trained, steps = self.graph.scored[v], self.graph.trained[v], self.graph.in_steps[v]
        return Region(module, border.place, border.arg, op, shape, reason, partition, scored=scored, trained=trained, steps=steps)

    def why_reduce(self, border: Border) -> str:
        first = next(iter(self.graph.consumers[border.value]), None)
        user = "the output" if first is None else self.trace.where(self.graph.op(first))
        return f"each rank has a partial sum, {user} needs the whole"

    def why_copy(self, border: Border) -> str:
        users = dict.fromkeys(self.trace.module_of(self.graph.op(i)).rpartition(".")[2] for i in self._split_users(border.value))
        return f"{listed(users)} {'work' if len(users) > 1 else 'works'} on slices, so each rank has a part of this gradient"

    def _split_users(self, value: int) -> list[int]:
        """The first ops on slices that a whole value leads to, nearest first."""
        out: list[int] = []
        seen, ahead = {value}, [value]
        for v in ahead:  # grows while it is gone through
            for i in self.graph.consumers[v]:
                if self.graph.op_leaves[i] & self.choice.flow.chosen:
                    out.append(i)
                else:
                    new = [o for o in self.graph.op(i).outputs if o >= 0 and o not in seen]
                    seen.update(new)
                    ahead.extend(new)
            if len(out) > 2 * LISTED:
                break
        return out

    # heads

    def heads(self) -> Iterable[Attention]:
        seen: set[str] = set()
        for call in self.trace.attention:
            dims = self.graph.axes.dims
            q, k = dims[call.q][1], dims[call.k][1]
            if call.module in seen or not self.choice.cuts.touches(q):
                continue
            seen.add(call.module)
            query, kv = (self.choice.cuts.of_dim(0, d) for d in (q, k))
            head_dim = self.trace.values[call.q].shape[3]
            found = next(self.accepted[leaf] for leaf in resolve(q) if leaf in self.accepted)
            counts = ", ".join(str(query.local_size(r)) for r in range(self.ranks))
            reason = f"{self.noun(found)} as {counts}; each rank holds the KV heads of its query heads"
            if found.cut.counted:
                reason += "; ranks that are more than heads hold a copy of the last, which counts once"
            yield Attention(call.module, query, kv, self.kv_of(resolve(q), resolve(k)), head_dim, reason)

    @staticmethod
    def kv_of(q: list[Node], k: list[Node]) -> tuple[int, ...]:
        """The KV head of each query head: the part of its number that counts KV heads."""
        out = [0]
        for node in q:
            out = [h * node.size + i if node in k else h for h in out for i in range(node.size)]
        return tuple(out)

    # notes

    def notes(self, tensors: dict[str, TensorPlan]) -> Iterable[Note]:
        """For each group of matrices that stay whole, why."""
        if self.trace.left_out:
            why = f"could not be followed, so what they alone go through stays whole: {self.trace.left_out}"
            yield Note("inputs other than tokens", why)
        groups: dict[tuple[str, str], None] = {}
        for name, entry in tensors.items():
            refusal = self.refusal(name)
            if entry.role == "whole" and len(entry.shape) > 1 and refusal is not None:
                groups[fold(name), fold(f"its axis of {_size(refusal)} is not cut: {refusal.text}.").removesuffix(".")] = None
        for name, text in groups:
            yield Note(name, f"stays whole, {text}")
        if not self.trace.attention and any("softmax" in op.name for op in self.trace.ops):
            yield Note("attention", "does not go through transformers' AttentionInterface, so heads are not cut freely")


def _size(refusal: Rejected) -> int:
    out = 1
    for leaf in refusal.candidate.leaves:
        out *= leaf.size
    return out
