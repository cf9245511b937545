"""Choosing: ops that choose, those of routers first, as instructions: the largest, what lies at given places, softmax, masks.

Places are tensors of whole numbers; in an arena they are floats, as everything is. Masks are 0 or 1.
"""

from __future__ import annotations

import torch

from ..kernels.library import Op
from .steps import Choice, Constant, Step, Steps
from .tape import NotRecorded, Ran


def _topk(made: Steps, op: Ran) -> None:
    given, k, dim, largest = (*op.args, *(-1, True)[len(op.args) - 2 :])[:4]
    if not (op.kwargs.get("largest", largest) and _is_last(op.kwargs.get("dim", dim), given)):
        raise NotRecorded("it chooses the smallest, or along another dim than the last")
    _choose(made, op, k, True)


def _max(made: Steps, op: Ran) -> None:
    """max.dim: the largest and its place."""
    if len(op.args) < 2 or not isinstance(op.args[1], int) or not _is_last(op.args[1], op.args[0]):
        raise NotRecorded("it takes a maximum along another dim than the last")
    _choose(made, op, 1, False)


def _choose(made: Steps, op: Ran, k: int, routes: bool) -> None:
    x = made.contiguous(made.shadow(op.args[0]))
    made.steps.append(Step(Op.TOPK, [made.new(out) for out in op.outputs], (x,), entry=Choice(x.shape[-1], k, routes)))


def _index(made: Steps, op: Ran) -> None:
    """x[..., places, ...] along one dim: by live places rows of a table, by constant ones copies."""
    given, places = op.args
    dims = [dim for dim, at in enumerate(places) if at is not None]
    if len(dims) != 1 or places[dims[0]].dtype is not torch.int64 or places[dims[0]].dim() != 1:
        raise NotRecorded("it picks elements of several dims, or by a mask")
    _pick(made, op, given, dims[0], places[dims[0]])


def _index_select(made: Steps, op: Ran) -> None:
    _pick(made, op, *op.args)


def _pick(made: Steps, op: Ran, given: torch.Tensor, dim: int, places: torch.Tensor) -> None:
    if made.is_live(places):
        if dim != 0 or given.dim() not in (1, 2):
            raise NotRecorded("it picks by a result along another dim than the first")
        table, rows = made.source(given), given.shape[0]
        table = made.contiguous(table) if isinstance(table, torch.Tensor) else table
        shape = (1, rows, given.numel() // rows, places.numel())
        made.steps.append(Step(Op.TAKE, [made.new(op.outputs[0])], (table, made.contiguous(made.shadow(places))), entry=shape))
        return
    if id(places) in made.depends:
        raise NotRecorded("it picks by the token or its position")
    x, out = made.shadow(given), made.new(op.outputs[0])
    for to, at in enumerate(places.tolist()):
        made.emit(Op.COPY, out.select(dim, to), x.select(dim, at))


def _gather(made: Steps, op: Ran) -> None:
    given, dim, places = op.args
    if not _is_last(dim, given) or places.shape[:-1] != given.shape[:-1]:
        raise NotRecorded("it gathers along another dim than the last")
    x, at = made.contiguous(made.shadow(given)), made.contiguous(made.shadow(places))
    shape = (x.numel() // x.shape[-1], x.shape[-1], 1, at.shape[-1])
    made.steps.append(Step(Op.TAKE, [made.new(op.outputs[0])], (x, at), entry=shape))


def _scatter(made: Steps, op: Ran) -> None:
    given, dim, places, value = op.args
    if not _is_last(dim, given) or isinstance(value, torch.Tensor) or op.kwargs or places.shape[:-1] != given.shape[:-1]:
        raise NotRecorded("it scatters a tensor, or along another dim than the last")
    out = torch.empty(given.shape)
    made.emit(Op.COPY, out, made.source(given))
    at = made.contiguous(made.shadow(places))
    shape = (out.numel() // out.shape[-1], 1, out.shape[-1], at.shape[-1])
    made.steps.append(Step(Op.SCATTER, [out], (out, at, float(value)), entry=shape))
    for recorded in (op.outputs[0], *([given] if op.func._schema.is_mutable else [])):
        made.name(recorded, out)


def _masked_fill(made: Steps, op: Ran) -> None:
    given, mask, value = op.args
    if op.func._schema.is_mutable:
        raise NotRecorded(f"it has an op without an instruction: {op.name}")
    made.emit(Op.FILL, made.new(op.outputs[0]), made.source(given), made.source(mask), float(value))


def _isinf(made: Steps, op: Ran) -> None:
    """1 where a number is beyond what the recorded dtype holds: in an arena it would not have become infinite."""
    x, out = made.shadow(op.args[0]), made.new(op.outputs[0])
    made.emit(Op.ABS, out, x)
    made.emit(Op.SUB, out, out, torch.finfo(op.args[0].dtype).max)
    made.emit(Op.MAXIMUM, out, out, 0.0)
    made.emit(Op.TRUTH, out, out)


def _any(made: Steps, op: Ran) -> None:
    if len(op.args) > 1:
        raise NotRecorded("it asks for any along a dim")
    x = made.contiguous(made.shadow(op.args[0])).view(-1)
    out = made.new(op.outputs[0])
    made.steps.append(Step(Op.MAX, [out.view(1)], (x,)))
    made.emit(Op.TRUTH, out, out)


def _where(made: Steps, op: Ran) -> None:
    """Of a condition and one number for each answer."""
    condition, yes, no = op.args
    if any(isinstance(x, torch.Tensor) and (x.numel() > 1 or made.is_live(x) or id(x) in made.depends) for x in (yes, no)):
        raise NotRecorded("it chooses between two tensors")
    otherwise = Constant(torch.full(op.outputs[0].shape, float(no)))
    made.emit(Op.FILL, made.new(op.outputs[0]), otherwise, made.source(condition), float(yes))


def _softmax(made: Steps, op: Ran) -> None:
    if not _is_last(op.args[1], op.args[0]):
        raise NotRecorded("it has a softmax along another dim than the last")
    x, out = made.shadow(op.args[0]), made.new(op.outputs[0])
    one = torch.empty(*x.shape[:-1], 1)
    made.steps.append(Step(Op.MAX, [one], (x,)))
    made.emit(Op.SUB, out, x, one)
    made.emit(Op.EXP, out, out)
    made.steps.append(Step(Op.SUM, [one], (out,)))
    made.emit(Op.DIV, out, out, one)


def _is_last(dim: int, x: torch.Tensor) -> bool:
    return dim % x.dim() == x.dim() - 1


CHOOSING = {
    "topk": _topk,
    "max": _max,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "masked_fill": _masked_fill,
    "isinf": _isinf,
    "any": _any,
    "where": _where,
    "_softmax": _softmax,
}
"""By the op's name, without the underscore of those that work in place."""
