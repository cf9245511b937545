"""Graph: a trace with everything that choosing a cut looks up again and again, computed once.

Which ops read a value, which axes it has, where it crosses a module's border, whether it takes part in the backward pass, how large it is
for realistic inputs. Nothing here depends on which axes are cut.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from . import lengths
from .factors import Node, leaves, length, resolve
from .inputs import vocabulary
from .lengths import Length
from .means import TAKEN, Mean, numbered
from .measured import Measured
from .models import is_table
from .rules import Axes, follow
from .trace import Call, Op, Ref, Trace, TraceError, collecting_later

REALISTIC = {"B": 4, "S": 1024, "E": 1024}
"""Sizes that stand for the traced ones in costs: with the traced ones, attention scores look smaller than a hidden vector."""

PRODUCTS = (nn.Linear, Conv1D)  # exactly these: a class of a model's own may do more
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Border:
    """A place where a region can stand: a value entering (`place` "input") or leaving a module call under a name, or a mean in it."""

    call: int
    place: Literal["input", "output", "inside"]
    arg: str
    value: int


class Graph:
    """See the module docstring. Leaves are compared by identity."""

    @collecting_later()
    def __init__(self, trace: Trace) -> None:
        if not trace.ops:
            raise TraceError("the forward pass runs no op")
        self.trace = trace
        self.axes: Axes = follow(trace)
        self._same_repetitions()
        self.leaves: list[frozenset[Node]] = [frozenset(n for d in dims for n in leaves(d)) for dims in self.axes.dims]
        for at, (axis, _) in self.axes.entries.items():  # it is there on the ranks that have this entry
            self.leaves[at] |= frozenset(leaves(axis))
        self.producer: list[int | None] = [None] * len(trace.values)
        self.consumers: list[list[int]] = [[] for _ in trace.values]
        self.inputs: list[list[int]] = [list(dict.fromkeys(op.inputs())) for op in trace.ops]
        self.op_leaves: list[frozenset[Node]] = []
        self.ops_of: dict[Node, list[int]] = defaultdict(list)
        for op in trace.ops:
            for v in self.inputs[op.index]:
                self.consumers[v].append(op.index)
            outs = [o for o in op.outputs if o >= 0]
            for o in outs:
                self.producer[o] = op.index
            found = frozenset().union(*(self.leaves[v] for v in (*self.inputs[op.index], *outs)))
            self.op_leaves.append(found)
            for leaf in found:
                self.ops_of[leaf].append(op.index)
        self.parameter_of: dict[int, str] = {at: name for name, at in trace.parameters.items()}
        self.parameters_with: dict[Node, list[str]] = defaultdict(list)
        for name, at in trace.parameters.items():
            for leaf in self.leaves[at]:
                self.parameters_with[leaf].append(name)

    def _same_repetitions(self) -> None:
        """Layers that use the KV heads of an earlier one are cut with it, where they repeat them as often."""
        of: dict[Node, Node] = {}
        for call in self.trace.attention:
            q, k = (resolve(self.axes.dims[v][1]) for v in (call.q, call.k))
            if len(q) == 2 and k == q[:1] and of.setdefault(q[0], q[1]).size == q[1].size:
                self.axes.factors.unify([of[q[0]]], [q[1]])

    @cached_property
    def results(self) -> list[list[int]]:
        """What each op makes: its outputs, and values in the memory it writes to in place, where something reads those afterwards."""
        last = [max(c, default=-1) for c in self.consumers]
        for v in self.trace.outputs.values():
            last[v] = len(self.trace.ops)
        return [[o for o in op.outputs if o >= 0] + [w for w in op.writes if last[w] > op.index] for op in self.trace.ops]

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """Value -> ops that wrote into its memory after it was made."""
        out: dict[int, list[int]] = defaultdict(list)
        for op in self.trace.ops:
            for w in self.results[op.index]:
                if w not in op.outputs:
                    out[w].append(op.index)
        return out

    @cached_property
    def con(self) -> list[frozenset[Node]]:
        """Leaves that each op sums away."""
        return [frozenset(n for d in e.con for n in leaves(d)) for e in self.axes.effects]

    @cached_property
    def cross(self) -> list[frozenset[Node]]:
        return [frozenset(n for d in e.cross for n in leaves(d)) for e in self.axes.effects]

    @cached_property
    def live(self) -> list[bool]:
        """Whether a gradient can come back to a value: it reaches an output of the model, and not through integers only (which experts)."""
        floating = [v.dtype.is_floating_point or v.dtype.is_complex for v in self.trace.values]
        out = [False] * len(self.trace.values)
        for v in self.trace.outputs.values():
            out[v] = floating[v]
        for op in reversed(self.trace.ops):
            if any(out[o] and floating[o] for o in self.results[op.index]):
                for v in self.inputs[op.index]:
                    out[v] = True
        return out

    @cached_property
    def scored(self) -> list[bool]:
        """Whether a value reaches the logits, or its op does (the mean that a norm gives beside its result, and nobody reads); True for
        every value of a model without them."""
        if "logits" not in self.trace.outputs:
            return [True] * len(self.trace.values)
        out = [v.id == self.trace.outputs["logits"] for v in self.trace.values]
        for op in reversed(self.trace.ops):
            if any(out[o] for o in self.results[op.index]):
                for v in (*self.inputs[op.index], *(o for o in op.outputs if o >= 0)):
                    out[v] = True
        return out

    @cached_property
    def trained(self) -> list[bool]:
        """Whether a value depends on a parameter that the model's code does not freeze."""
        return self.trace.dependent({at for name, at in self.trace.parameters.items() if name not in self.trace.frozen})

    @cached_property
    def differentiable(self) -> list[bool]:
        """Whether a gradient arrives at a value: it is floating, depends on a parameter and reaches an output."""
        out = [v.kind == "parameter" for v in self.trace.values]
        for op in self.trace.ops:
            if any(out[v] for v in self.inputs[op.index]) and not op.name.startswith("new_") and not op.name.endswith("_like"):
                for o in self.results[op.index]:
                    out[o] = self.trace.values[o].dtype.is_floating_point or self.trace.values[o].dtype.is_complex
        return [d and live for d, live in zip(out, self.live, strict=True)]

    @cached_property
    def from_input(self) -> list[bool]:
        """Whether a value depends on the model's inputs."""
        return self.trace.dependent(set(self.trace.inputs.values()))

    @cached_property
    def in_steps(self) -> list[bool]:
        """Whether a value is made in every step of decoding with the cache: it depends on the sequence that becomes longer, or on no input
        and is used for what does. True for every value of a model without such a sequence."""
        if not self.trace.growing:
            return [True] * len(self.trace.values)
        out = [begun and used for begun, used in zip(self.trace.dependent(self.trace.growing), self._used, strict=True)]
        for op in reversed(self.trace.ops):
            needed = any(out[o] for o in self.results[op.index])
            for v in self.inputs[op.index]:
                out[v] |= needed and not self.from_input[v]
        return out

    @cached_property
    def _used(self) -> list[bool]:
        """Whether a value reaches the logits (an output, where there are none) otherwise than as what is put in the places of a picture or
        a sound: there are none in later steps."""
        ends = {v for name, v in self.trace.outputs.items() if name == "logits" or "logits" not in self.trace.outputs}
        out = [v.id in ends for v in self.trace.values]
        for op in reversed(self.trace.ops):
            if any(out[o] for o in self.results[op.index]):
                put_in = op.args[2] if op.name in ("masked_scatter", "masked_scatter_") else None
                for v in self.inputs[op.index]:
                    out[v] |= put_in != Ref(v)
        return out

    @cached_property
    def heads(self) -> list[frozenset[Node]]:
        """For each attention call, the leaves of its query heads."""
        return [frozenset(leaves(self.axes.dims[call.q][1])) for call in self.trace.attention]

    def values_with(self, leaf: Node) -> set[int]:
        ops = (self.trace.ops[i] for i in self.ops_of[leaf])
        return {v for op in ops for v in (*self.inputs[op.index], *op.outputs) if v >= 0 and leaf in self.leaves[v]}

    @cached_property
    def leaving(self) -> dict[int, list[Border]]:
        """Values at outputs of the calls that make them, innermost call first."""
        out: dict[int, list[Border]] = defaultdict(list)
        for call in self.trace.calls:
            for name, v in call.outputs.items():
                made = self.producer[v]
                if made is not None and call.first <= made < call.last and not self.leaves[v] & self.uncounted:
                    out[v].append(Border(call.index, "output", name, v))
        for borders in out.values():
            borders.sort(key=lambda b: self.trace.calls[b.call].last - self.trace.calls[b.call].first)
        return out

    @cached_property
    def entering(self) -> dict[int, list[Border]]:
        out: dict[int, list[Border]] = defaultdict(list)
        for call in self.trace.calls:
            for name, v in call.inputs.items():
                if not self.leaves[v] & self.uncounted:
                    out[v].append(Border(call.index, "input", name, v))
        return out

    @cached_property
    def handed_on(self) -> dict[int, Border]:
        """Values that a module is given and gives back as they are (nn.Identity), without using them: nobody reads them before it."""
        out: dict[int, Border] = {}
        for call in self.trace.calls:
            for name, v in call.inputs.items():
                if v in call.outputs.values() and all(i >= call.last for i in self.consumers[v]):
                    out.setdefault(v, Border(call.index, "input", name, v))
        return out

    @cached_property
    def uncounted(self) -> frozenset[Node]:
        """Axes as long as the numbers in a tensor say (the tokens of an expert). Nothing is sent of them: nobody knows how much it is."""
        found = (op.outputs[0] for op in self.trace.ops if op.name == "nonzero")
        unknown = (v for v in found if self.trace.values[v].data is None)
        return frozenset(leaf for v in unknown for leaf in leaves(self.axes.dims[v][0]))

    @cached_property
    def calls_of(self) -> dict[str, list[int]]:
        out: dict[str, list[int]] = defaultdict(list)
        for call in self.trace.calls:
            out[call.module].append(call.index)
        return out

    @cached_property
    def statistics(self) -> dict[int, tuple[Mean, ...]]:
        """Op -> the means that it takes, numbered in the call it runs in."""
        calls = {op.call for op in self.trace.ops if op.name in TAKEN}
        found = (numbered(self.trace, self.trace.calls[c]) for c in calls)
        return {i: means for each in found for i, means in each.items() if means[0].call == self.trace.ops[i].call}

    @cached_property
    def owned(self) -> dict[str, list[str]]:
        """Module path -> its own parameters, aliases under their own path too."""
        out: dict[str, list[str]] = defaultdict(list)
        for name in self.trace.parameters:
            for each in (name, *self.trace.aliases[name]):
                out[each.rpartition(".")[0]].append(name)
        return out

    def op(self, index: int) -> Op:
        return self.trace.ops[index]

    def inside(self, op: int, call: Call) -> bool:
        return call.first <= op < call.last

    def ancestors(self, op: int) -> list[int]:
        """The calls an op runs in, innermost first."""
        out: list[int] = []
        at: int | None = self.trace.ops[op].call
        while at is not None:
            out.append(at)
            at = self.trace.calls[at].parent
        return out

    def is_product(self, module: str) -> bool:
        """The module is an ordinary linear layer, whose bias the applier adds after the reduction."""
        return self.trace.modules.get(module) in PRODUCTS

    def is_convolution(self, module: str) -> bool:
        """The module is an ordinary convolution, which runs on the rank's own channels where each goes through by itself."""
        return self.trace.modules.get(module) in CONVOLUTIONS

    def is_bare(self, module: str) -> bool:
        """The module is a class of the model's own, which works on its parameters with torch functions (experts)."""
        return not self.trace.modules[module].__module__.startswith("torch.")

    def is_table(self, module: str) -> bool:
        """The module looks up in its table through nn.Embedding, whatever it does before and after."""
        return is_table(self.trace.modules.get(module, object))

    def is_row(self, op: Op) -> bool:
        """The op reads one row of a table, outside of the module that looks up in it."""
        name = self.parameter_of.get(op.inputs()[0], "") if op.name == "select" else ""
        return bool(name) and op.args[1] == 0 and self.is_table(name.rpartition(".")[0])

    def width(self, border: Border) -> int:
        """The unit of cost for a collective at a border: the width of the residual stream, or of a picture tower's own."""
        layers = re.match(r"(.*?)\.\d+(\.|$)", self.trace.calls[border.call].module)
        if self.in_steps[border.value] or layers is None:
            return self.hidden
        if layers[1] not in self._widths:
            self._widths[layers[1]] = self._common_width(f"{layers[1]}.")
        return self._widths[layers[1]]

    @cached_property
    def _widths(self) -> dict[str, int]:
        return {}

    def is_scores(self, output: str, value: int) -> bool:
        """The output is the logits of a vocabulary, of which loss and sampling take slices."""
        sizes = {vocabulary(self.trace.config), vocabulary(self.trace.config, decoder=True)}
        return output == "logits" and self.trace.values[value].shape[-1] in sizes

    def per_token(self, value: int) -> float:
        """Elements of a value per token, for realistic batch and sequence lengths."""
        elements = prod(lengths.value(length(dim), REALISTIC) for dim in self.axes.dims[value])
        return elements / (REALISTIC["B"] * REALISTIC["S"])

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream: the largest last dim shared by the most module outputs; the unit of cost for one collective."""
        return self._common_width("")

    def _common_width(self, within: str) -> int:
        widths: dict[int, int] = defaultdict(int)
        for call in self.trace.calls:
            for v in call.outputs.values() if call.module.startswith(within) else ():
                if self.differentiable[v] and self.trace.values[v].shape:
                    widths[self.trace.values[v].shape[-1]] += 1
        return max(widths, key=lambda w: (widths[w], w), default=1)

    def symbols(self, value: int) -> tuple[Length, ...]:
        """The shape of a value with "B", "S" and "E" for the axes of the inputs, and what is made of them. A flattened B*S is two dims, and
        so are the patches of all pictures of a batch."""
        out: list[Length] = []
        for dim in self.axes.dims[value]:
            parts = [length([node]) for node in resolve(dim)]
            named = [part for part in parts if lengths.names(part)]
            number = prod(part for part in parts if isinstance(part, int))
            out += [*named, *([number] if number > 1 or not named else [])]
        places = [*self.leaving.get(value, ()), *self.entering.get(value, ())]
        return self._measured.completed(value, tuple(out), places[0]) if places else tuple(out)

    @cached_property
    def _measured(self) -> Measured:
        return Measured(self.trace)
