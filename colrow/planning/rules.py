"""What ops do to axes: `follow(trace)` gives every dim of every value its factors, and every op its `Effect`.

An op's rule says which dims of inputs and outputs are the same axis, which are summed away linearly (`con`: cutting them leaves partial
sums) and which are mixed in a way that cannot be cut (`cross`). There is one table, `RULES`, from aten op names to rules; pointwise ops
need no entry, torch tags them. An op without a rule flags every axis it touches: it costs coverage, never correctness. Rules for views are
in `rules_views.py`, for products, reductions, norms and lookups in `rules_math.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import entries, lengths
from .entries import Entries
from .factors import Dim, Factors, length, resolve
from .inputs import DECODED, TOKENS
from .ints import Expr
from .lengths import Length
from .trace import BATCH, Op, Ref, Trace

Kind = Literal["constant", "contract", "sum", "mean", "index", "linear", "add", "scatter", "mul", "div", "norm", "nonlinear", "opaque"]
"""How the outputs depend on the inputs, which decides whether partial sums may pass:
contract: a product summed over `con`, linear in each of its operands, plus a bias. sum, mean: over `con`. index: rows of the first input
picked along `con`. linear: each output is a linear function of the inputs without a constant term (views, casts, neg, cat). add, mul, div:
as named. scatter: rows are added to some rows of the first input. norm: means over `cross` are taken inside it; it works on slices where
these are the means of all ranks. nonlinear: no partial sum may enter. opaque: likewise, and no axis may be cut. constant: depends on no
parameter and no input."""


@dataclass
class Effect:
    kind: Kind
    con: list[Dim] = field(default_factory=list)
    cross: list[Dim] = field(default_factory=list)


@dataclass
class Axes:
    """The axes of a trace. `dims[value][d]` is the dim d of a value as a list of factor nodes (`factors.resolve` it before reading)."""

    trace: Trace
    factors: Factors
    dims: list[list[Dim]]
    effects: list[Effect]
    given: dict[tuple[int, int], Expr] = field(default_factory=dict)
    """(value, dim) -> the int of the model's code that made it longer or shorter."""
    entries: dict[int, tuple[Dim, int]] = field(default_factory=dict)  # value -> (axis, number) of the one entry to which it belongs

    def of(self, ref: Any) -> list[Dim]:
        """Dims of a tensor argument of an op."""
        return self.dims[ref.id]

    def shape(self, ref: Any) -> tuple[int, ...]:
        return self.trace.values[ref.id].shape

    def length(self, value: int, dim: int) -> Length:
        """How a dim that was padded or cut off follows from the lengths of the inputs; "" where it does not."""
        try:
            found = lengths.plain(self._length(self.given[value, dim]))
        except (KeyError, ZeroDivisionError):
            return ""
        return found if lengths.names(found) else ""

    def _length(self, expr: Expr) -> Length:
        match expr:
            case ("int", number):
                return int(number)
            case ("attribute", module, name):
                return self.trace.attributes[module, name]
            case ("size", value, dim):
                return length(self.dims[value][dim])
        return (expr[0], self._length(expr[1]), self._length(expr[2]))

    def name(self, value: int) -> None:
        """Give the dims of a value that the code makes the lengths that the code gives them."""
        for d, dim in enumerate(self.dims[value]):
            nodes = resolve(dim)
            if len(nodes) == 1 and not nodes[0].symbol and not nodes[0].segs:
                nodes[0].symbol = self.length(value, d)

    def fresh(self, shape: tuple[int, ...], flagged: bool = False) -> list[Dim]:
        return [self.factors.fresh(n, flagged) for n in shape]

    def unify(self, one: list[Dim], other: list[Dim]) -> None:
        for a, b in zip(one, other, strict=True):
            self.factors.unify(a, b)


Arguments = dict[str, Any]
Rule = Callable[[Axes, Op, Arguments], tuple[Effect, list[list[Dim]]]]
"""Returns the effect and the dims of each tensor output."""

RULES: dict[str, Rule] = {}
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("add", "sub", "rsub", "add_", "sub_"), "add"),
    **dict.fromkeys(("mul", "mul_"), "mul"),
    **dict.fromkeys(("div", "div_"), "div"),
    **dict.fromkeys(("neg", "neg_", "clone", "_to_copy", "detach", "alias", "positive", "lift_fresh", "lift_fresh_copy"), "linear"),
}
SAME_SHAPE = (
    *("_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "copy_", "fill_", "zero_", "native_dropout", "dropout", "bernoulli"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros_like", "log_sigmoid_forward", "_conj"),
    *("polar", "normal_", "uniform_", "bernoulli_", "nan_to_num", "isin", "contiguous", "polygamma", "conj", "resolve_conj"),
    *("masked_fill", "masked_fill_"),
)
"""Coordinate by coordinate like the ops that torch tags as pointwise, but not tagged."""


COPIES = ("_to_copy", "clone", "detach", "alias")
FOLLOWED = ("view", "_unsafe_view", "unsqueeze", "expand", "transpose", "permute")
"""Through which axes are followed in constants too."""

MADE = ("pad", "__getitem__", "narrow", "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full")
"""Functions that make a size which no input has."""

MISFIT = "its rule does not fit this call"
"""An op in a form that its rule was not written for counts as one without a rule. Tests see to it that none is met in known models."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten ops, by name without overload."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def bind(op: Op) -> Arguments:
    """The op's arguments by the names of its schema, defaults filled in."""
    out = dict(op.kwargs)
    for at, argument in enumerate(op.func._schema.arguments):
        if at < len(op.args):
            out[argument.name] = op.args[at]
        elif argument.name not in out:
            out[argument.name] = argument.default_value
    return out


def follow(trace: Trace) -> Axes:
    """Give all values of a trace their axes."""
    from . import rules_math, rules_views  # noqa: F401 (they register their rules)

    given = {(use.value, use.dim): use.expr for use in trace.int_uses if use.function in MADE}
    axes = Axes(trace, Factors(), [[] for _ in trace.values], [], given)
    for value in trace.values:
        if value.kind != "result":
            axes.dims[value.id] = axes.fresh(value.shape)
    _mark_inputs(axes)
    loops = {op: found for found in entries.find(trace) for op in (found.split, found.join)}
    for op in trace.ops:
        axes.factors.why = f"{op.name} in {trace.module_of(op) or 'the model'}"
        axes.effects.append(_one_by_one(axes, op, loops[op.index]) if op.index in loops else _apply(axes, op))
    return axes


def _one_by_one(axes: Axes, op: Op, loop: Entries) -> Effect:
    """The two ends of an axis whose entries go through modules of their own: it is not taken apart, so it stays one axis."""
    source = axes.of(axes.trace.ops[loop.split].args[0])
    pair = axes.factors.split(source[loop.dim], loop.width)
    if pair is None:
        return _apply(axes, op)
    outer, inner = pair
    if op.index == loop.split:
        axes.entries.update((value, (outer, number)) for value, number in loop.members.items())
        for o in op.outputs:
            axes.dims[o] = [*source[: loop.dim], inner, *source[loop.dim + 1 :]]
        return Effect("linear")
    pieces = [axes.dims[v] for v in op.inputs()]
    for piece in pieces[1:]:
        axes.unify(pieces[0], piece)
    at = bind(op)["dim"] % len(pieces[0])
    dims = [*pieces[0][:at], [*outer, *pieces[0][at]], *pieces[0][at + 1 :]]
    if [_size(dim) for dim in dims] != list(axes.trace.values[op.outputs[0]].shape):
        return _apply(axes, op)
    axes.dims[op.outputs[0]] = dims
    return Effect("linear")


def _mark_inputs(axes: Axes) -> None:
    """Batch and sequences of the inputs carry symbols, so that costs can be told for realistic sizes: "S" is the sequence that decoding
    makes longer, "E" an encoder's. A picture's or a sound's own sizes are the model's, and plain numbers."""
    values, inputs = axes.trace.values, axes.trace.inputs
    rows, sequence = axes.factors.fresh(BATCH, symbol="B"), next((n for n in (DECODED, TOKENS) if n in inputs), "")
    named = {TOKENS: "E", sequence: "S"}
    symbols = {name: axes.factors.fresh(values[inputs[name]].shape[1], symbol=s) for name, s in named.items() if name in inputs}
    for at in inputs.values():
        shape, dims = values[at].shape, axes.dims[at]
        if not shape or shape[0] % BATCH:
            continue
        dims[0] = [*rows, *axes.factors.fresh(shape[0] // BATCH)]
        if len(shape) > 1 and not values[at].dtype.is_floating_point:
            dims[1] = next((s for s in symbols.values() if s and s[0].size == shape[1]), dims[1])
    for name, dim in symbols.items():
        axes.dims[inputs[name]][1] = dim


def _apply(axes: Axes, op: Op) -> Effect:
    values = axes.trace.values
    outputs = [o for o in op.outputs if o >= 0]
    if all(values[o].constant for o in outputs):
        inputs = [axes.dims[v] for v in op.inputs()]
        for o in outputs:  # how a constant was put together (cat, index) does not matter, how it is looked at does
            if op.mutates is not None:
                axes.dims[o] = axes.dims[op.mutates]
            else:
                axes.dims[o] = axes.fresh(values[o].shape)
                if inputs and (torch.Tag.pointwise in op.func.tags or op.name in COPIES):
                    axes.dims[o] = broadcast(axes, inputs, values[o].shape)
                elif op.name in FOLLOWED:
                    (axes.dims[o],) = RULES[op.name](axes, op, bind(op))[1]
                elif op.name == "slice":  # not the axis that is sliced: a piece of a long table would cut what it is used on
                    kept = zip(inputs[0], axes.dims[o], strict=True)
                    axes.dims[o] = [old if _size(old) == _size(new) else new for old, new in kept]
                axes.name(o)
        return Effect("constant")
    function = RULES.get(op.name)
    if function is None:
        function = pointwise if torch.Tag.pointwise in op.func.tags or op.name in SAME_SHAPE else opaque
    try:
        effect, dims = function(axes, op, bind(op))
    except (LookupError, TypeError, ValueError):
        effect, dims = opaque(axes, op, {}, MISFIT)
    if [[_size(x) for x in d] for d in dims] != [list(values[o].shape) for o in outputs]:
        effect, dims = opaque(axes, op, {}, MISFIT)
    for o, d in zip(outputs, dims, strict=True):
        axes.dims[o] = d
        if effect.kind == "constant":
            axes.name(o)
    return effect


def _size(dim: Dim) -> int:
    out = 1
    for n in dim:
        out *= n.size
    return out


def opaque(axes: Axes, op: Op, args: Arguments, why: str = "no rule for this op") -> tuple[Effect, list[list[Dim]]]:
    """No rule: nothing that this op touches may be cut."""
    axes.factors.why += f" ({why})"
    every: list[Dim] = [d for v in op.inputs() for d in axes.dims[v]]
    for d in every:
        axes.factors.flag(d)
    outputs = [axes.fresh(axes.trace.values[o].shape, flagged=True) for o in op.outputs if o >= 0]
    return Effect("opaque", cross=every), outputs


def broadcast(axes: Axes, inputs: list[list[Dim]], shape: tuple[int, ...]) -> list[Dim]:
    """Dims of a result of `shape` made coordinate by coordinate from inputs that broadcast to it."""
    out: list[Dim] = []
    for d in range(len(shape)):
        at = d - len(shape)
        found: list[Dim] = [dims[at] for dims in inputs if len(dims) >= -at and _size(dims[at]) == shape[d] and shape[d] != 1]
        for other in found[1:]:
            axes.factors.unify(found[0], other)
        out.append(found[0] if found else axes.factors.fresh(shape[d]))
    return out


def pointwise(axes: Axes, op: Op, args: Arguments) -> tuple[Effect, list[list[Dim]]]:
    kind: Kind = KINDS.get(op.name, "nonlinear")
    inputs = [axes.dims[v] for v in op.inputs()]
    outs = [o for o in op.outputs if o >= 0]
    shapes = [axes.trace.values[o].shape for o in outs]
    if op.name == "_to_copy" and not _keeps_precision(axes, op):
        kind = "nonlinear"  # partial sums are not added after a cast that loses bits
    if kind == "add" and len(inputs) == 1:
        kind = "nonlinear"  # a number added once per rank
    if kind == "div" and args.get("rounding_mode"):
        kind = "nonlinear"
    if kind in ("mul", "div") and len(inputs) == 1:
        kind = "linear"
    return Effect(kind), [broadcast(axes, inputs, s) for s in shapes]


def _keeps_precision(axes: Axes, op: Op) -> bool:
    before, after = (axes.trace.values[v].dtype for v in (op.inputs()[0], op.outputs[0]))
    return after.is_floating_point and (not before.is_floating_point or after.itemsize >= before.itemsize)


def refs(tree: Any) -> list[Ref]:
    """The tensors in an argument that may be one, a list of them, or contain None."""
    if isinstance(tree, Ref):
        return [tree]
    return [r for r in tree or () if isinstance(r, Ref)] if isinstance(tree, list | tuple) else []


def same(axes: Axes, value: Any) -> list[Dim]:
    return list(axes.of(value))
