"""Attended: attention as one instruction, also of models that write it out themselves.

Those multiply a query by the keys of all positions, add constants to the scores, take a softmax and multiply by the values. Scores are
followed as scale · (query · keys) + bias: whatever a model does to them on the way, the recorded ops are done to the bias, a tensor of
numbers over the positions that there were. Whose keys a query met, and whose values, is found by comparing numbers. In the end the bias
must be a straight line along the positions (ALiBi; Press et al., arXiv:2108.12409, section 3), or nothing. A mask that hides a position
is none, so it is refused: what a window hides is not in the cache. What a T5 adds to scores (arXiv:1910.10683, section 2.1) is taken as a
table by distance, which must have come to its end where it was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kernels.library import Op
from ..planning.trace import leaves
from .steps import Heads, Step, Steps
from .tape import Attended, Cached, NotRecorded, Ran


@dataclass(frozen=True)
class _Held:
    """Keys or values of all positions, seen in some way."""

    cached: Cached


@dataclass(frozen=True)
class _Scores:
    """`q`: the query's shadow [heads, d]. `bias`: as the scores are shaped, [..., positions]. `done`: softmax has been taken."""

    cached: Cached
    q: torch.Tensor
    kv_of: tuple[int, ...]
    scale: float
    bias: torch.Tensor
    done: bool = False


_KEEP = {"clone", "_to_copy", "contiguous", "expand", "view", "_unsafe_view", "_reshape_alias", "reshape", "detach", "alias"}
_SCALE = {"mul", "div"}
_SHIFT = {"add", "sub", "masked_fill"}


def cached(made: Steps, entry: Cached) -> None:
    """Notes what the model got from its cache, where that is more than the new position's."""
    if entry.keys is not entry.k or entry.source:
        made.symbols[id(entry.keys)] = made.symbols[id(entry.values)] = _Held(entry)


def attend(made: Steps, entry: Attended, windows: tuple[int, ...]) -> None:
    """ATTEND, with q, k and v as they come out of the model."""
    if entry.layer is None:
        raise NotRecorded("its attention gets other keys than those that are cached")
    sources = tuple(made.contiguous(made.shadow(x)) for x in ((entry.q,) if entry.source else (entry.q, entry.k, entry.v)))
    heads, kv_heads, window = (entry.q.shape[1], 0, 0) if entry.source else (entry.q.shape[1], entry.k.shape[1], windows[entry.layer])
    sinks = None if entry.sinks is None else entry.sinks.detach().float().contiguous()
    sizes = (heads, kv_heads, entry.k.shape[3], entry.v.shape[3], window, 0)
    added = (entry.scale, entry.softcap, sinks, entry.slopes, None if entry.bias is None else _by_distance(entry.bias), entry.source)
    made.steps.append(Step(Op.ATTEND, [made.new(entry.out)], sources, entry=Heads(entry.layer, *sizes, entry.kv_of, *added)))


def _by_distance(bias: torch.Tensor) -> torch.Tensor:
    """[heads, positions] as [heads, distances], without those at the end that are like the last."""
    table = bias.detach().float().flip(1)
    others = (table != table[:, -1:]).any(0).nonzero()
    reach = int(others[-1]) + 2 if len(others) else 1
    if reach > table.shape[1] * 3 // 4:
        raise NotRecorded(f"what it adds to scores still changes {table.shape[1]} positions back")
    return table[:, :reach].contiguous()


def follow(made: Steps, op: Ran, windows: tuple[int, ...]) -> bool:
    """Whether the op is part of a model's own attention; then it has been followed."""
    of = [made.symbols[id(x)] for x in leaves(op.args, torch.Tensor) if id(x) in made.symbols]
    if not of:
        return False
    name = op.name.rstrip("_") if op.func._schema.is_mutable else op.name
    first = made.symbols.get(id(op.args[0])) if op.args else None
    if name in ("bmm", "baddbmm"):
        _multiplied(made, op, windows)
    elif name.startswith("_scaled_dot_product") and len(of) == 2:
        _fused(made, op, windows)
    elif len(of) > 1 or first is None:
        raise NotRecorded(f"its attention does {op.name} with its keys, values or scores")
    elif isinstance(first, _Held) and (name in _KEEP or op.is_view):
        made.symbols.update((id(out), first) for out in op.outputs)
    elif isinstance(first, _Scores):
        made.symbols[id(op.outputs[0])] = _scored(name, op, first)
    else:
        raise NotRecorded(f"its attention does {op.name} with its keys or values")
    return True


def _scored(name: str, op: Ran, given: _Scores) -> _Scores:
    """Scores, or what softmax made of them, after one more op."""
    if name in _KEEP or op.is_view:
        return replace(given, bias=_run(op, given.bias))
    if given.done:
        raise NotRecorded(f"its attention does {op.name} after softmax")
    if name == "_softmax" and op.args[1] % given.bias.dim() == given.bias.dim() - 1:
        return replace(given, done=True)
    if name in _SCALE and isinstance(op.args[1], int | float) and not op.kwargs:
        by = float(op.args[1]) if name == "mul" else 1 / op.args[1]
        return replace(given, scale=given.scale * by, bias=_run(op, given.bias))
    if name in _SHIFT:
        return replace(given, bias=_run(op, given.bias))
    raise NotRecorded(f"its attention does {op.name} with its scores")


def _run(op: Ran, bias: torch.Tensor) -> torch.Tensor:
    return op.func(bias.clone(), *op.args[1:], **op.kwargs)


def _multiplied(made: Steps, op: Ran, windows: tuple[int, ...]) -> None:
    """query · keys, with a bias in baddbmm; or softmax · values."""
    left, right = op.args[-2:]
    a, held = made.symbols.get(id(left)), made.symbols.get(id(right))
    if not isinstance(held, _Held):
        raise NotRecorded("its attention multiplies by something else than its cache")
    if a is None and made.is_live(left):
        kv_of = _kv_of(right.transpose(1, 2), held.cached.keys[0])
        alpha, beta = op.kwargs.get("alpha", 1), op.kwargs.get("beta", 1)
        bias = torch.zeros_like(op.outputs[0])
        if op.name == "baddbmm":
            bias = bias + beta * op.args[0]
        q = made.contiguous(made.shadow(left))
        made.symbols[id(op.outputs[0])] = _Scores(held.cached, q, kv_of, float(alpha), bias)
    elif isinstance(a, _Scores) and a.done and op.name == "bmm" and a.cached is held.cached:
        if _kv_of(right, held.cached.values[0]) != a.kv_of:
            raise NotRecorded("its heads look at one head's keys and another's values")
        _attend(made, op, a, windows)
    else:
        raise NotRecorded(f"its attention does {op.name} with its keys or values")


def _fused(made: Steps, op: Ran, windows: tuple[int, ...]) -> None:
    """torch's own attention, of one query."""
    q, k, v = op.args[:3]
    held, others, mask = made.symbols.get(id(k)), made.symbols.get(id(v)), op.kwargs.get("attn_mask")
    if not isinstance(held, _Held) or not isinstance(others, _Held) or held.cached is not others.cached or not made.is_live(q):
        raise NotRecorded(f"its attention does {op.name} with its keys or values")
    settings = [*op.args[3:], *(x for key, x in op.kwargs.items() if key not in ("attn_mask", "scale"))]  # dropout, and a mask of its own
    if any(settings) or (mask is not None and mask.dtype is torch.bool):
        raise NotRecorded(f"its attention does {op.name} with a mask or dropout")
    kv_of = _kv_of(k[0], held.cached.keys[0])
    if _kv_of(v[0], held.cached.values[0]) != kv_of:
        raise NotRecorded("its heads look at one head's keys and another's values")
    scale, shape = op.kwargs.get("scale"), (1, len(kv_of), 1, k.shape[2])
    bias = torch.zeros(shape) if mask is None else mask.expand(shape)
    scores = _Scores(held.cached, made.contiguous(made.shadow(q)), kv_of, q.shape[3] ** -0.5 if scale is None else float(scale), bias)
    _attend(made, op, scores, windows)


def _attend(made: Steps, op: Ran, a: _Scores, windows: tuple[int, ...]) -> None:
    """What scores and values give."""
    layer, k, v, source, slopes = a.cached.layer, a.cached.k, a.cached.v, a.cached.source, _slopes(a)
    if source and slopes:
        raise NotRecorded("its attention adds to scores of an encoder's positions")
    new = () if source else (made.contiguous(made.shadow(x)) for x in (k, v))
    kv_heads, window = (0, 0) if source else (k.shape[1], windows[layer])
    facts = (len(a.kv_of), kv_heads, k.shape[3], v.shape[3], window, 0, a.kv_of, a.scale, 0.0, None, slopes, None, source)
    made.steps.append(Step(Op.ATTEND, [made.new(op.outputs[0])], (a.q, *new), entry=Heads(layer, *facts)))


def _kv_of(seen: torch.Tensor, held: torch.Tensor) -> tuple[int, ...]:
    """For each head of `seen` [heads, positions, d], whose of `held` [KV heads, positions, d] it is."""
    if seen.shape[1:] != held.shape[1:]:
        raise NotRecorded("its attention looks at a part of its cache")
    found = [next((at for at, x in enumerate(held) if torch.equal(x, head)), None) for head in seen]
    if any(at is None for at in found):
        raise NotRecorded("its attention looks at other keys or values than its cache's")
    return tuple(at for at in found if at is not None)


def _slopes(scores: _Scores) -> tuple[float, ...]:
    """Of each head; empty where nothing was added."""
    bias = scores.bias.float().reshape(len(scores.kv_of), -1)
    ends = bias[:, :2] if bool((bias[:, 0].abs() <= bias[:, -1].abs()).all()) else bias[:, -2:]  # where it is rounded least
    slope = ends[:, 1] - ends[:, 0]
    line = bias[:, :1] + slope[:, None] * torch.arange(bias.shape[1])
    if float((bias - line).abs().max()) > 4 * torch.finfo(scores.bias.dtype).eps * max(1.0, float(bias.abs().max())):
        raise NotRecorded("its attention hides positions, or adds what is no straight line along them")
    return tuple(slope.tolist()) if bool((slope != 0).any()) else ()
