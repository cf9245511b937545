"""Rules of products, reductions, norms, lookups and attention kernels. See `rules.py` for what a rule is."""

from __future__ import annotations

from typing import Any

import torch

from .factors import Dim, resolve, size
from .rules import Arguments, Axes, Effect, Kind, broadcast, opaque, refs, rule, same
from .trace import Op, Ref

Result = tuple[Effect, list[list[Dim]]]


def _out_shape(axes: Axes, op: Op, at: int = 0) -> tuple[int, ...]:
    return axes.trace.values[op.outputs[at]].shape


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "matmul", "linear", "addmm_", "baddbmm_")
def product(axes: Axes, op: Op, args: Arguments) -> Result:
    """A[..., m, k] B[..., k, n]: k is summed away, the rest carries; a bias has the axes of the result."""
    tensors = op.inputs()
    bias = axes.dims[tensors.pop(0)] if op.name.startswith(("addmm", "baddbmm")) else None
    a, b = axes.dims[tensors[0]], axes.dims[tensors[1]]
    if op.name == "linear":
        axes.factors.unify(a[-1], b[-1])
        con, out = a[-1], [*a[:-1], b[0]]
        bias = axes.dims[tensors[2]] if len(tensors) > 2 else None
    elif len(b) == 1:
        axes.factors.unify(a[-1], b[0])
        con, out = a[-1], list(a[:-1])
    elif len(a) != len(b) or len(a) > 3:
        return opaque(axes, op, args)
    else:
        if len(a) == 3:
            axes.factors.unify(a[0], b[0])
        axes.factors.unify(a[-1], b[-2])
        con, out = a[-1], [*a[:-1], b[-1]]
    if bias is not None:
        out = broadcast(axes, [out, bias], _out_shape(axes, op))
    return Effect("contract", con=[con]), [out]


@rule("_grouped_mm")
def grouped(axes: Axes, op: Op, args: Arguments) -> Result:
    """Rows sorted by expert, x[T, k] times w[E, k, n]: which rows meet which expert is data, so T and E stay whole."""
    x, w = axes.of(op.args[0]), axes.of(op.args[1])
    if len(x) != 2 or len(w) != 3:
        return opaque(axes, op, args)
    axes.factors.unify(x[1], w[1])
    axes.factors.flag(w[0])
    return Effect("contract", con=[x[1]]), [[x[0], w[2]]]


@rule("convolution")
def convolution(axes: Axes, op: Op, args: Arguments) -> Result:
    """Channels as in a product; positions must not be cut. Grouped: groups carry where each has one input channel (depthwise)."""
    x, w = axes.of(args["input"]), axes.of(args["weight"])
    groups, out_shape = args["groups"], _out_shape(axes, op)
    if args["transposed"]:
        return opaque(axes, op, args)
    for d in [*x[2:], *w[2:]]:
        axes.factors.flag(d)
    space = axes.fresh(out_shape[2:], flagged=True)
    if groups == 1:
        axes.factors.unify(x[1], w[1])
        channels, effect = w[0], Effect("contract", con=[x[1]], cross=list(x[2:]))
    elif groups == axes.shape(args["input"])[1] == out_shape[1]:
        axes.factors.unify(x[1], w[0])
        channels, effect = w[0], Effect("nonlinear", cross=list(x[2:]))
    else:
        return opaque(axes, op, args)
    if isinstance(args["bias"], Ref):
        axes.factors.unify(channels, axes.of(args["bias"])[0])
    return effect, [[x[0], channels, *space]]


def _chosen(args: Arguments, n: int) -> list[int]:
    which = args.get("dim")
    if which is None or which == []:
        return list(range(n))
    return sorted(d % n for d in (which if isinstance(which, list | tuple) else [which])) if n else []


def _reduced(axes: Axes, op: Op, args: Arguments) -> tuple[list[Dim], list[Dim]]:
    """(the dims that are reduced, the dims of the result)."""
    dims = same(axes, op.args[0])
    gone = _chosen(args, len(dims))
    keep = bool(args.get("keepdim"))
    rest: list[Dim] = [[] if d in gone else dim for d, dim in enumerate(dims) if keep or d not in gone]
    return [dims[d] for d in gone], rest


@rule("sum", "mean")
def linear_reduction(axes: Axes, op: Op, args: Arguments) -> Result:
    gone, rest = _reduced(axes, op, args)
    return Effect("sum" if op.name == "sum" else "mean", con=gone), [rest]


_REDUCTIONS = "amax amin max min argmax argmin var_mean std_mean logsumexp linalg_vector_norm norm any all prod median nansum"


@rule(*_REDUCTIONS.split())
def other_reduction(axes: Axes, op: Op, args: Arguments) -> Result:
    gone, rest = _reduced(axes, op, args)
    return Effect("nonlinear", cross=gone), [list(rest) for o in op.outputs if o >= 0]


@rule("std", "var")
def spread(axes: Axes, op: Op, args: Arguments) -> Result:
    gone, rest = _reduced(axes, op, args)
    return Effect("norm", cross=gone), [rest]


@rule(
    "_softmax",
    "_log_softmax",
    "softmax",
    "log_softmax",
    "_safe_softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "sort",
    "cummax",
    "cumsum_",
    "argsort",
)
def along(axes: Axes, op: Op, args: Arguments) -> Result:
    dims = same(axes, op.args[0])
    dim = args["dim"] % len(dims) if dims else 0
    return Effect("nonlinear", cross=[dims[dim]] if dims else []), [list(dims) for _ in op.outputs]


@rule("topk", "kthvalue")
def topk(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, shape = same(axes, op.args[0]), _out_shape(axes, op)
    dim = args["dim"] % len(dims)
    gone, dims[dim] = dims[dim], axes.factors.fresh(shape[dim], flagged=True)
    return Effect("nonlinear", cross=[gone]), [list(dims) for _ in op.outputs]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def norm(axes: Axes, op: Op, args: Arguments) -> Result:
    dims = same(axes, args["input"])
    n = len(args["normalized_shape"])
    for name in ("weight", "bias"):
        if isinstance(args.get(name), Ref):
            axes.unify(axes.of(args[name]), list(dims[-n:]))
    statistics: list[Dim] = [*dims[:-n], *([[]] * n)]
    outs = [dims if axes.trace.values[o].shape == axes.shape(args["input"]) else statistics for o in op.outputs]
    return Effect("norm", cross=list(dims[-n:])), [list(o) for o in outs]


@rule("embedding")
def embedding(axes: Axes, op: Op, args: Arguments) -> Result:
    """Rows of a table: cut along rows, a masked lookup gives partial sums (zeros where the row is elsewhere)."""
    table = axes.of(args["weight"])
    return Effect("index", con=[table[0]]), [[*axes.of(args["indices"]), table[1]]]


@rule("index_select")
def index_select(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, dim = same(axes, op.args[0]), args["dim"]
    gone, dims[dim] = dims[dim], axes.of(args["index"])[0]
    return Effect("index", con=[gone]), [dims]


@rule("index", "_unsafe_index")
def index(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, indices = same(axes, op.args[0]), list(args["indices"])
    indices += [None] * (len(dims) - len(indices))
    tensors = refs(indices)
    if any(axes.trace.values[r.id].dtype in (torch.bool, torch.uint8) for r in tensors):
        return _masked(axes, op, dims, indices) if len(tensors) == 1 else opaque(axes, op, args)
    at = [d for d, r in enumerate(indices) if isinstance(r, Ref)]
    if len(at) == 1 and _reorders(axes, tensors[0], dims[at[0]]):
        return Effect("index", con=[dims[at[0]]]), [[*dims[: at[0]], _in_another_order(axes, dims[at[0]]), *dims[at[0] + 1 :]]]
    shape = torch.broadcast_shapes(*(axes.shape(r) for r in tensors))
    spliced = broadcast(axes, [same(axes, r) for r in tensors], tuple(shape))
    adjacent = at == list(range(at[0], at[-1] + 1))
    rest = [d for i, d in enumerate(dims) if i not in at]
    place = at[0] if adjacent else 0
    return Effect("index", con=[dims[d] for d in at]), [[*rest[:place], *spliced, *rest[place:]]]


def _reorders(axes: Axes, index: Ref, dim: Dim) -> bool:
    """The index is known to take every place of the dim once (patches sorted into windows)."""
    data = axes.trace.values[index.id].data
    return data is not None and data.dim() == 1 and torch.equal(data.sort().values, torch.arange(size(dim)))


def _in_another_order(axes: Axes, dim: Dim) -> Dim:
    """As many places for as many reasons, of which none may be cut."""
    axes.factors.flag(dim)
    return [n for node in resolve(dim) for n in axes.factors.fresh(node.size, flagged=True, symbol=node.symbol)]


def _masked(axes: Axes, op: Op, dims: list[Dim], indices: list[Any]) -> Result:
    """x[mask]: some of the indices along the mask's dims, in order. Where it is known to be all of them, they are the same axes."""
    (at,) = (d for d, r in enumerate(indices) if isinstance(r, Ref))
    mask = axes.trace.values[indices[at].id]
    gone = dims[at : at + len(mask.shape)]
    for dim in gone:
        axes.factors.flag(dim)
    every = mask.data is not None and bool(mask.data.all())
    kept = [n for d in gone for n in d] if every else axes.factors.fresh(_out_shape(axes, op)[at], flagged=True)
    return Effect("index", con=list(gone)), [[*dims[:at], kept, *dims[at + len(gone) :]]]


@rule("avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices", "upsample_bilinear2d", "upsample_bicubic2d")
def pooled(axes: Axes, op: Op, args: Arguments) -> Result:
    """[..., channels, height, width]: places are mixed, channels carry."""
    dims = same(axes, op.args[0])
    for dim in dims[-2:]:
        axes.factors.flag(dim)
    outs = [[*dims[:-2], *axes.fresh(axes.trace.values[o].shape[-2:], flagged=True)] for o in op.outputs if o >= 0]
    return Effect("nonlinear", cross=dims[-2:]), outs


@rule("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def pick(axes: Axes, op: Op, args: Arguments) -> Result:
    dims, dim = same(axes, op.args[0]), args["dim"] % len(axes.of(op.args[0]))
    others = [args[k] for k in ("index", "src") if isinstance(args.get(k), Ref)]
    for other in others:
        for d, (mine, its) in enumerate(zip(dims, axes.of(other), strict=True)):
            same_size = axes.shape(other)[d] == axes.shape(op.args[0])[d]
            if d != dim and same_size:
                axes.factors.unify(mine, its)
            elif d != dim:
                axes.factors.flag(mine)
                axes.factors.flag(its)
    cross = [dims[dim], *(axes.of(o)[dim] for o in others)]
    if op.name == "gather":
        dims = [axes.of(args["index"])[d] for d in range(len(dims))]
    return Effect("nonlinear", cross=cross), [dims]


@rule(
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "masked_scatter",
    "masked_scatter_",
)
def write(axes: Axes, op: Op, args: Arguments) -> Result:
    """The dims along which places are chosen must not be cut, nor anything of what is written."""
    dims = same(axes, op.args[0])
    if op.name.startswith(("index_add", "index_copy")):
        at = args["dim"] % len(dims)
        source = axes.of(args["source"])
        for d, (mine, its) in enumerate(zip(dims, source, strict=True)):
            if d == at:
                axes.factors.flag(mine)
                axes.factors.flag(its)
            else:
                axes.factors.unify(mine, its)
        kind: Kind = "scatter" if op.name.startswith("index_add") and args.get("alpha", 1) == 1 else "nonlinear"
        return Effect(kind, cross=[dims[at]]), [dims]
    for v in op.inputs():
        for dim in axes.dims[v]:
            axes.factors.flag(dim)
    return Effect("opaque", cross=list(dims)), [dims]


@rule(
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_attention_math", "scaled_dot_product_attention", "_scaled_dot_product_fused_attention_overrideable"),
    *("_scaled_dot_product_cudnn_attention",),
)
def sdpa(axes: Axes, op: Op, args: Arguments) -> Result:
    """q [B, H, S, d], k and v [B, KV, T, d]: heads carry (H = KV x repetitions), keys and head_dim are mixed; a mask has the axes of the
    scores."""
    q, k, v = (same(axes, args[n]) for n in ("query", "key", "value"))
    axes.factors.unify(q[0], k[0])
    axes.factors.unify(k[0], v[0])
    axes.factors.unify(k[1], v[1])
    axes.factors.unify(k[2], v[2])
    axes.factors.unify(q[3], k[3])
    heads, kv = axes.shape(args["query"])[1], axes.shape(args["key"])[1]
    pair = axes.factors.split(q[1], heads // kv)
    if pair is None:
        return opaque(axes, op, args)
    axes.factors.unify(pair[0], k[1])
    mask: Any = args.get("attn_mask", args.get("attn_bias"))
    if isinstance(mask, Ref):
        shape = (*axes.shape(args["query"])[:3], axes.shape(args["key"])[2])
        broadcast(axes, [[q[0], q[1], q[2], k[2]], same(axes, mask)], shape)
    outs: list[list[Dim]] = [[q[0], q[1], q[2], v[3]]]
    for o in op.outputs[1:]:
        if o >= 0:
            shape = axes.trace.values[o].shape
            outs.append([q[0], q[1], q[2]] if shape == axes.shape(args["query"])[:3] else axes.fresh(shape, flagged=True))
    return Effect("nonlinear", cross=[k[2], q[3]]), outs


@rule("linalg_solve_triangular")
def solve(axes: Axes, op: Op, args: Arguments) -> Result:
    """Batch dims pass, the matrices' own dims are mixed."""
    a, b = same(axes, op.args[0]), same(axes, op.args[1])
    axes.unify(a[:-2], b[:-2])
    for d in [*a[-2:], *b[-2:]]:
        axes.factors.flag(d)
    return Effect("nonlinear", cross=[*a[-2:], *b[-2:]]), [b]
