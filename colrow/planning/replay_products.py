"""Products in a replay: matrices, and convolutions whose channels each have one of their own.

Each rank multiplies the indices that it has of both operands; an inner axis that is spread leaves partial sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .replay_tools import Inputs, as_sum, call, meeting, once, own, per_rank, same_precision
from .spread import ReplayError, Spread, common, counted_once, full
from .trace import Op


def _product(op: Op, a: Spread, b: Spread, bias: int | None, inputs: Inputs, where: str) -> Spread:
    """(..., M, K) @ (..., K, N), with a bias or an addend that counts once."""
    shape = (*a.shape[:-1], b.shape[-1])
    ranks = a.ranks
    inner = [common(a.held[r][-1], b.held[r][-2]) for r in range(ranks)]
    partial = counted_once(inner, a.shape[-1], where) or a.partial or b.partial
    if a.partial and b.partial:
        raise ReplayError(f"{where}: a product of two partial sums")
    boxes, data = [], []
    left, right = op.inputs()[-2:]
    for r in range(ranks):
        batch = tuple(common(x, y) for x, y in zip(a.held[r][:-2], b.held[r][:-2], strict=True))
        box = [*batch, a.held[r][-2], b.held[r][-1]]
        if bias is not None:
            addend = inputs[bias]
            box = [common(x, y) for x, y in zip(box, meeting([addend], shape, r), strict=True)]
        if partial and not len(inner[r]):  # a share of nothing: zeros, whatever it holds of the operands
            boxes.append(full(shape))
            nothing = torch.zeros(shape).double()
            data.append(nothing if bias is None else nothing + once(addend.narrow(r, own(boxes[r], addend.shape)), r))
            continue
        tensors = {
            left: a.narrow(r, (*batch, box[-2], inner[r])),
            right: b.narrow(r, (*batch, inner[r], box[-1])),
        }
        if bias is not None:
            piece = addend.narrow(r, own(tuple(box), addend.shape))
            tensors[bias] = once(piece, r) if partial and not addend.partial else piece
        data.append(call(op, same_precision(tensors)))
        boxes.append(tuple(box))
    return as_sum(Spread(shape, tuple(data), tuple(boxes)), partial, where)


def _plain_product(op: Op, inputs: Inputs, where: str) -> Spread:
    a, b = (inputs[i] for i in op.inputs())
    return _product(op, a, b, None, inputs, where)


def _added_product(op: Op, inputs: Inputs, where: str) -> Spread:
    bias, a, b = op.inputs()
    return _product(op, inputs[a], inputs[b], bias, inputs, where)


def _convolution(op: Op, inputs: Inputs, where: str) -> Spread:
    """Depthwise, x [B, C, ...] with w [C, 1, ...]: a rank has the channels of which it has input and weight. Any other needs all."""
    x, w = (inputs[i] for i in op.inputs()[:2])
    if all(s.is_whole for s in inputs.values()):
        return per_rank(op, inputs)[0]
    if x.partial or op.args[6] or not op.args[8] == x.shape[1] == w.shape[0]:
        raise ReplayError(f"{where} needs whole inputs, one is {x.state()}")
    data, boxes = [], []
    for r in range(x.ranks):
        box = (x.held[r][0], common(x.held[r][1], w.held[r][0]), *x.held[r][2:])
        pieces = {op.inputs()[0]: x.narrow(r, box), op.inputs()[1]: w.narrow(r, (box[1], *full(w.shape[1:])))}
        for bias in op.inputs()[2:]:
            pieces[bias] = inputs[bias].narrow(r, (box[1],))
        data.append(call(replace(op, args=(*op.args[:8], len(box[1]))), same_precision(pieces)))
        boxes.append((box[0], box[1], *full(data[-1].shape[2:])))
    return Spread((*x.shape[:2], *data[0].shape[2:]), tuple(data), tuple(boxes))


CONTRACT = {"mm": _plain_product, "bmm": _plain_product, "addmm": _added_product, "baddbmm": _added_product, "convolution": _convolution}
