"""Rules of ops that only rearrange: views, slices, concatenation, expansion. See `rules.py` for what a rule is."""

from __future__ import annotations

from math import prod
from typing import Any

from .factors import Dim, length, resolve
from .factors import size as dim_size
from .lengths import names
from .rules import Arguments, Axes, Effect, opaque, refs, rule, same
from .trace import Op

Result = tuple[Effect, list[list[Dim]]]


def _out_shape(axes: Axes, op: Op) -> tuple[int, ...]:
    return axes.trace.values[op.outputs[0]].shape


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "flatten", "unflatten", "_reshape_copy")
def view(axes: Axes, op: Op, args: Arguments) -> Result:
    first = op.args[0]
    if axes.shape(first) == _out_shape(axes, op):
        return Effect("linear"), [same(axes, first)]
    if prod(axes.shape(first)) != prod(_out_shape(axes, op)) or 0 in axes.shape(first):
        return opaque(axes, op, args)  # view(dtype), or nothing in it
    return Effect("linear"), [list(axes.factors.regroup(axes.of(first), _out_shape(axes, op)))]


@rule("t", "transpose", "transpose_", "permute", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "movedim", "swapaxes", "numpy_T", "mT")
def rearrange(axes: Axes, op: Op, args: Arguments) -> Result:
    dims = same(axes, op.args[0])
    n = len(dims)
    match op.name.rstrip("_"):
        case "t":
            dims.reverse()
        case "transpose" | "swapaxes":
            a, b = (args[d if d in args else d.replace("dim", "axis")] % n for d in ("dim0", "dim1"))
            dims[a], dims[b] = dims[b], dims[a]
        case "permute":
            dims = [dims[d] for d in args["dims"]]
        case "squeeze":
            which = args.get("dim")
            drop = range(n) if which is None else [d % n for d in (which if isinstance(which, list | tuple) else [which])]
            shape = axes.shape(op.args[0])
            dims = [d for at, d in enumerate(dims) if at not in drop or shape[at] != 1]
        case "unsqueeze":
            dims.insert(args["dim"] % (n + 1), [])
        case _:
            return opaque(axes, op, args)
    return Effect("linear"), [dims]


@rule("expand", "broadcast_to", "expand_copy")
def expand(axes: Axes, op: Op, args: Arguments) -> Result:
    """A dim of size 1 becomes a new axis along which all entries are equal (the repetitions of grouped KV heads)."""
    dims, shape, shape_in = same(axes, op.args[0]), _out_shape(axes, op), axes.shape(op.args[0])
    dims = [[]] * (len(shape) - len(dims)) + dims
    shape_in = (1,) * (len(shape) - len(shape_in)) + shape_in
    return Effect("linear"), [[axes.factors.fresh(n) if n != m else d for d, n, m in zip(dims, shape, shape_in, strict=True)]]


@rule("repeat", "tile")
def repeat(axes: Axes, op: Op, args: Arguments) -> Result:
    times = list(args["repeats"] if "repeats" in args else args["dims"])
    dims = same(axes, op.args[0])
    dims = [[]] * (len(times) - len(dims)) + dims
    times = [1] * (len(dims) - len(times)) + times
    return Effect("linear"), [[[*axes.factors.fresh(r), *d] for r, d in zip(times, dims, strict=True)]]


@rule("repeat_interleave")
def repeat_interleave(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, times, dim = same(axes, op.args[0]), args.get("repeats"), args.get("dim")
    if not isinstance(times, int) or dim is None:
        return opaque(axes, op, args)
    dims[dim % len(dims)] = [*dims[dim % len(dims)], *axes.factors.fresh(times)]
    return Effect("linear"), [dims]


@rule("slice")
def slice_(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, dim = same(axes, op.args[0]), args["dim"]
    n, step = axes.shape(op.args[0])[dim], args["step"]
    start, stop = (_bound(args["start"], n, 0), _bound(args["end"], n, n))
    if step != 1:
        dims[dim] = _strided(axes, dims[dim], n, start, stop, step)
    elif stop - start < n and names(length(dims[dim])) and (shorter := axes.length(op.outputs[0], dim)):
        dims[dim] = axes.factors.fresh(stop - start, flagged=True, symbol=shorter)  # a sequence, which is never cut
    else:
        dims[dim] = axes.factors.slice(dims[dim], start, max(start, stop))
        nodes = resolve(dims[dim])
        if len(nodes) == 1 and not nodes[0].segs and not nodes[0].symbol and stop - start < n:
            nodes[0].symbol = axes.length(op.outputs[0], dim)
    return Effect("linear"), [dims]


def _bound(x: Any, n: int, default: int) -> int:
    if x is None:
        return default
    return min(max(x + n if x < 0 else x, 0), n)


def _strided(axes: Axes, dim: Dim, n: int, start: int, stop: int, step: int) -> Dim:
    """x[a::k] of n = m*k entries: a product of m blocks of k, of which one place is kept."""
    if n % step == 0 and start < step and stop > n - step:
        pair = axes.factors.split(dim, step)
        if pair is not None:
            axes.factors.flag(pair[1])
            return pair[0]
    axes.factors.flag(dim)
    return axes.factors.fresh(len(range(start, stop, step)), flagged=True)


@rule("select", "select_copy")
def select(axes: Axes, op: Op, args: Arguments) -> Result:
    dims = same(axes, op.args[0])
    gone = dims.pop(args["dim"])
    if axes.trace.values[op.args[0].id].kind == "parameter":  # a row of a table
        return Effect("index", con=[gone]), [dims]
    axes.factors.flag(gone)
    return Effect("linear"), [dims]


@rule("unbind", "unbind_copy")
def unbind(axes: Axes, op: Op, args: Arguments) -> Result:
    dims = same(axes, op.args[0])
    axes.factors.flag(dims.pop(args["dim"]))
    return Effect("linear"), [list(dims) for _ in op.outputs]


@rule("split", "split_with_sizes", "chunk", "split_copy", "split_with_sizes_copy", "unsafe_split", "unsafe_chunk", "tensor_split")
def split(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, dim = same(axes, op.args[0]), args["dim"]
    outs, at = [], 0
    for o in op.outputs:
        n = axes.trace.values[o].shape[dim]
        piece = list(dims)
        piece[dim] = axes.factors.slice(dims[dim], at, at + n)
        outs.append(piece)
        at += n
    return Effect("linear"), outs


@rule("new_empty", "new_zeros", "new_ones", "new_full", "zeros", "ones", "full", "empty")
def create(axes: Axes, op: Op, args: Arguments) -> Result:
    """A new tensor of any size: of its input it takes no more than dtype and device."""
    return Effect("constant"), [axes.fresh(_out_shape(axes, op))]


@rule("narrow", "narrow_copy")
def narrow(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, dim = same(axes, op.args[0]), args["dim"]
    dims[dim] = axes.factors.slice(dims[dim], args["start"], args["start"] + args["length"])
    return Effect("linear"), [dims]


@rule("cat", "concat", "concatenate")
def cat(axes: Axes, op: Op, args: Arguments) -> Result:
    tensors = refs(args["tensors"])
    pieces = [same(axes, r) for r in tensors if axes.shape(r) != (0,)] or [same(axes, tensors[0])]  # torch skips those of shape [0]
    dim = args["dim"] % len(pieces[0])
    out: list[Dim] = []
    for d in range(len(pieces[0])):
        if d == dim:
            out.append(axes.factors.concatenate([p[d] for p in pieces]))
            continue
        for p in pieces[1:]:
            axes.factors.unify(pieces[0][d], p[d])
        out.append(pieces[0][d])
    return Effect("linear"), [out]


@rule("stack")
def stack(axes: Axes, op: Op, args: Arguments) -> Result:
    pieces = [same(axes, r) for r in refs(args["tensors"])]
    for p in pieces[1:]:
        axes.unify(pieces[0], p)
    out = pieces[0]
    out.insert(args["dim"] % (len(out) + 1), axes.factors.fresh(len(pieces), flagged=True))
    return Effect("linear"), [out]


@rule(
    "constant_pad_nd",
    "pad",
    "roll",
    "flip",
    "tril",
    "triu",
    "tril_",
    "triu_",
    "unfold",
    "im2col",
    "slice_scatter",
    "select_scatter",
    "diagonal",
)
def positions_matter(axes: Axes, op: Op, args: Arguments) -> Result:
    """Dims whose size changes, or whose order matters to the op, must not be cut; the others carry."""
    dims, shape = same(axes, op.args[0]), _out_shape(axes, op)
    if len(shape) != len(dims):
        return opaque(axes, op, args)
    if op.name.startswith(("roll", "flip")):
        named = args.get("dims") or range(len(dims))
        touched = {d % len(dims) for d in named}
    elif op.name.startswith("tri"):
        touched = {len(dims) - 2, len(dims) - 1}
    else:
        touched = {d for d, n in enumerate(shape) if n != dim_size(dims[d])}
    cross = [dims[d] for d in sorted(touched)]
    for d in sorted(touched):
        axes.factors.flag(dims[d])
        if dim_size(dims[d]) != shape[d]:
            dims[d] = axes.factors.fresh(shape[d], flagged=True, symbol=axes.length(op.outputs[0], d))
    return Effect("nonlinear", cross=cross), [dims]


@rule("view_as_complex", "view_as_real", "_view_as_complex")
def complex_pairs(axes: Axes, op: Op, args: Arguments) -> Result:
    """The pair (real, imaginary) is one number."""
    dims = same(axes, op.args[0])
    if op.name.endswith("real"):
        return Effect("linear"), [[*dims, axes.factors.fresh(2, flagged=True)]]
    axes.factors.flag(dims[-1])
    return Effect("linear"), [dims[:-1]]
