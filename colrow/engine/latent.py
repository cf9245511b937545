"""Latent: attention over a cache of latents as one instruction (DeepSeek's MLA; arXiv:2405.04434, section 2.1.2).

Such a model keeps a latent for each position and a few rotated numbers. Keys and values are a matrix's products of the latent, keys with
the rotated numbers beside. Instead of making them of all positions in every step, a query is multiplied by its head's part of the matrix
first, and what attention gives by the other part: both once a step.

Where the numbers of keys and values come from is not read off the model's code. They are numbered, each number of the cache and each row of
the matrix, and the recorded ops that only move numbers are done to the numbers' numbers. Not here: any other way to make keys of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kernels.library import Op
from ..planning.trace import leaves
from .steps import Constant, Heads, Matrix, Step, Steps
from .tape import Attended, Cached, Entry, NotRecorded, Ran

_MOVE = {"clone", "contiguous", "cat", "copy_", "_to_copy", "expand", "view", "_unsafe_view", "_reshape_alias", "reshape"}
_ROOM = {"new_empty", "empty_like", "new_zeros", "zeros_like"}
NOWHERE = -1


@dataclass(frozen=True)
class Latent:
    """`weight` [rows, latent], as it was recorded. The first row of each head's keys and values; `made`: numbers of a key that are rows'
    products, before the rotated ones."""

    cached: Cached
    weight: torch.Tensor
    keys: tuple[int, ...]
    values: tuple[int, ...]
    made: int


@dataclass
class Found:
    """`of`: by the attention's id. `inside`: ids of the ops that made keys and values of a cache, which need no instructions."""

    of: dict[int, Latent] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)


@dataclass
class _Layer:
    """What is seen of one layer's cache. `escaped`: something else is made of it."""

    cached: Cached
    weight: torch.Tensor | None = None
    ops: list[Ran] = field(default_factory=list)
    escaped: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.cached.k.numel(), self.cached.v.numel()


def find(entries: Iterable[Entry]) -> Found:
    """The attention calls that look at what a matrix makes of a cache."""
    out, at, seen = Found(), dict[int, _Layer](), dict[int, torch.Tensor]()
    for entry in entries:
        if isinstance(entry, Cached) and entry.keys is entry.k and not entry.source:
            layer = _Layer(entry)
            first, second = layer.sizes
            for x, numbers in ((entry.k, torch.arange(first)), (entry.v, first + torch.arange(second))):
                at[id(x)], seen[id(x)] = layer, numbers.view(x.shape)
        elif isinstance(entry, Ran):
            known = [id(x) for x in leaves((entry.args, entry.kwargs), torch.Tensor) if id(x) in seen]
            if known and not _moved(entry, at, seen):
                for number in known:
                    at[number].escaped = True
        elif isinstance(entry, Attended) and entry.layer is None and {id(entry.k), id(entry.v)} <= seen.keys():
            layer = at[id(entry.k)]
            latent = _matched(entry, layer, seen)
            if latent is not None and at[id(entry.v)] is layer and not layer.escaped:
                out.of[id(entry)] = latent
                out.inside |= {id(op) for op in layer.ops}
    return out


def _moved(op: Ran, at: dict[int, _Layer], seen: dict[int, torch.Tensor]) -> bool:
    """Whether it is known where the op's numbers come from; it is noted then."""
    tensors = list(leaves((op.args, op.kwargs), torch.Tensor))
    layer = at[next(id(x) for x in tensors if id(x) in seen)]
    if op.name in ("mm", "linear"):
        given, weight, *more = op.args
        first, second = layer.sizes
        latent = id(given) in seen and torch.equal(seen[id(given)].flatten(), torch.arange(first))
        if not latent or layer.weight is not None or any(x is not None for x in more):
            return False
        layer.weight = weight if op.name == "linear" else weight.t()
        results = [first + second + torch.arange(len(layer.weight)).view(op.outputs[0].shape)]
    elif op.name in _ROOM:
        results = [torch.full(op.outputs[0].shape, NOWHERE)]
    elif op.is_view or op.name in _MOVE:
        if any(id(x) not in seen or at[id(x)] is not layer for x in tensors):
            return False
        if op.name == "_to_copy":
            results = [seen[id(op.args[0])].clone()]
        else:
            made = op.func(*_numbers(op.args, seen), **op.kwargs)
            results = [made] if isinstance(made, torch.Tensor) else list(made)
    else:
        return False
    for x, numbers in zip(op.outputs, results, strict=True):
        at[id(x)], seen[id(x)] = layer, numbers
    layer.ops.append(op)
    return True


def _numbers(tree: Any, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return seen[id(tree)]
    return [_numbers(x, seen) for x in tree] if isinstance(tree, list | tuple) else tree


def _matched(entry: Attended, layer: _Layer, seen: dict[int, torch.Tensor]) -> Latent | None:
    """None where heads do not take rows that follow each other, or keys have something else than the rotated numbers behind them."""
    first, second = layer.sizes
    keys, values = (seen[id(x)].reshape(x.shape[1], x.shape[3]) for x in (entry.k, entry.v))
    made = keys.shape[1] - second
    rotated = first + torch.arange(second)
    if layer.weight is None or made < 0 or not bool((keys[:, made:] == rotated).all()):
        return None
    starts: list[tuple[int, ...]] = []
    for rows in (keys[:, :made], values):
        begins = rows[:, :1]
        if not bool((rows == begins + torch.arange(rows.shape[1])).all()) or bool((rows < first + second).any()):
            return None
        starts.append(tuple((begins.flatten() - first - second).tolist()))
    return Latent(layer.cached, layer.weight, starts[0], starts[1], made)


def attend(made: Steps, entry: Attended, found: Latent, windows: tuple[int, ...]) -> None:
    """Queries times their keys' rows, ATTEND on latents, what comes of it times the values' rows."""
    if made.is_live(found.weight) or id(found.weight) in made.depends:
        raise NotRecorded("its keys are made by a result")
    cached, weight, heads = found.cached, found.weight.detach(), entry.q.shape[1]
    latent, rotated = cached.k.numel(), cached.v.numel()
    q = made.contiguous(made.shadow(entry.q)).view(heads, entry.q.shape[3])
    whole, seen = torch.empty(heads, latent + rotated), torch.empty(heads, latent)
    by_keys = [weight[at : at + found.made].t() for at in found.keys]
    _each(made, whole[:, :latent], q[:, : found.made], by_keys)
    made.emit(Op.COPY, whole[:, latent:], q[:, found.made :])
    sources = (whole, *(made.contiguous(made.shadow(x)) for x in (cached.k, cached.v)))
    facts = (heads, 1, latent + rotated, latent, windows[cached.layer], latent, (0,) * heads, entry.scale, entry.softcap, entry.sinks)
    made.steps.append(Step(Op.ATTEND, [seen], sources, entry=Heads(cached.layer, *facts)))
    out = made.new(entry.out).view(heads, entry.v.shape[3])
    _each(made, out, seen, [weight[at : at + out.shape[1]] for at in found.values])


def _each(made: Steps, out: torch.Tensor, x: torch.Tensor, matrices: list[torch.Tensor]) -> None:
    """Each line of x times a matrix [rows, width] of its own."""
    if not matrices:
        return
    many, result = _together(matrices), torch.empty(out.shape)
    places = Constant(torch.arange(len(many)).float())
    made.steps.append(Step(Op.EXPERTS, [result], (made.contiguous(x), places), [Matrix(many, many.shape)], entry=len(many)))
    made.emit(Op.COPY, out, result)


def _together(matrices: list[torch.Tensor]) -> torch.Tensor:
    """[many, rows, width], where they lie if their rows are in one piece and equally far from each other."""
    first = matrices[0]
    step = matrices[1].storage_offset() - first.storage_offset() if len(matrices) > 1 else 0
    even = all(m.storage_offset() == first.storage_offset() + at * step for at, m in enumerate(matrices))
    if first.is_contiguous() and even and step >= 0:
        return first.as_strided((len(matrices), *first.shape), (step, *first.stride()), first.storage_offset())
    return torch.stack(matrices).contiguous()
