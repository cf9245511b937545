"""Products as instructions: by weights, by matrices that a router picked, by many matrices at once.

Products of one input (q, k and v; gate and up) become one instruction that reads their weights where they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.library import Op
from .steps import Constant, Matrix, Picked, Step, Steps, memory
from .tape import NotRecorded, Ran

PRODUCTS = {"mm", "addmm", "linear", "bmm", "few_product"}


def product(made: Steps, op: Ran) -> None:
    """mm(x, W), addmm(bias, x, W) and linear(x, W, bias). W's rows are output features where it lies in memory."""
    if op.name == "bmm":
        return _batched(made, op)
    if op.name == "few_product":
        given, values, beside, rows, bias = op.args
        kept = Matrix(values, (rows, given.shape[-1]), beside)
        return _product(made, op, given, kept, bias)
    if op.name == "linear":
        given, weight, bias = (*op.args, None)[:3]
    else:
        bias, given, weight = (None, *op.args) if op.name == "mm" else op.args
    if made.is_live(weight) or id(weight) in made.depends or op.kwargs:
        raise NotRecorded(f"it has a product of two results ({op.name})")
    _product(made, op, given, made.kept.get(id(weight)) or _matrix(weight if op.name == "linear" else _by_rows(weight)), bias)


def _product(made: Steps, op: Ran, given: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> None:
    x, out = made.contiguous(made.shadow(given)), made.new(op.outputs[0])
    _multiply(made.steps, out, x, matrix)
    if bias is not None:
        made.emit(Op.ADD, out, out, made.source(bias))


def _matrix(weight: torch.Tensor) -> Matrix:
    return Matrix(weight, weight.shape)


def _multiply(steps: list[Step], out: torch.Tensor, x: torch.Tensor, weight: Matrix) -> None:
    """Joins an earlier product of the same input, unless something has written to that since."""
    if not weight.values.is_contiguous():
        raise NotRecorded("it multiplies by a view of a weight")
    for step in reversed(steps):
        if step.op is Op.PRODUCT and _same(step.sources[0], x) and step.weights[0].values.dtype is weight.values.dtype:
            step.outs.append(out)
            step.weights.append(weight)
            return
        if any(memory(o) == memory(x) for o in step.outs):
            break
    steps.append(Step(Op.PRODUCT, [out], (x,), [weight]))


def _batched(made: Steps, op: Ran) -> None:
    """bmm(matrices, x) or bmm(x, matrices): slot by slot a column times a matrix of its own, a picked one or the next."""
    first, second = op.args
    left = _matrices(made, first)
    if (left is None) == (_matrices(made, second) is None):
        raise NotRecorded("it has a product of two results (bmm)")
    picked, given = (left, second) if left is not None else (_matrices(made, second), first)
    assert picked is not None
    slots, columns = given.shape[0], given.shape[2 if left is not None else 1]
    if columns != 1:
        raise NotRecorded(f"it multiplies {columns} columns by each of its matrices")
    many = _many_by_rows(picked.weight, flipped=left is None)
    places = made.contiguous(made.shadow(picked.places)) if made.is_live(picked.places) else Constant(picked.places.float())
    x = made.contiguous(made.shadow(given))
    made.steps.append(Step(Op.EXPERTS, [made.new(op.outputs[0])], (x, places), [_matrix(many)], entry=slots))


def _matrices(made: Steps, x: torch.Tensor) -> Picked | None:
    """What is known of the matrices of a batched product; None for a result."""
    if made.is_live(x) or id(x) in made.depends:
        return None
    return made.picked.get(id(x)) or Picked(x, torch.arange(x.shape[0]))


def pick(made: Steps, op: Ran) -> bool:
    """Whether the op picks whole matrices by a router's places: then they are read where they are (standins.py)."""
    if op.name != "index" or op.args[0].dim() != 3 or made.is_live(op.args[0]) or len(op.args[1]) != 1:
        return False
    made.picked[id(op.outputs[0])] = Picked(op.args[0], op.args[1][0])
    return True


def _by_rows(weight: torch.Tensor) -> torch.Tensor:
    """[width, rows] as [rows, width] with each row in one piece. A parameter that is stored the other way (Conv1D) is laid out anew, in
    place: its shape and values stay, and the modules go on using it."""
    if isinstance(weight, torch.nn.Parameter) and not weight.t().is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    return weight.detach().t()


def _many_by_rows(weight: torch.Tensor, flipped: bool) -> torch.Tensor:
    """[many, rows, width], of [many, width, rows] where `flipped`, with each row in one piece; as `_by_rows` lays a parameter out anew."""
    rows = weight.transpose(1, 2) if flipped else weight
    if not rows.is_contiguous():
        if not isinstance(weight, torch.nn.Parameter):
            raise NotRecorded("it multiplies by a view of matrices")
        weight.data = rows.data.contiguous().transpose(1, 2) if flipped else rows.data.contiguous()
        rows = weight.transpose(1, 2) if flipped else weight
    return rows.detach()


def _same(a: Any, b: torch.Tensor) -> bool:
    """Two shadows of the same elements."""
    if not isinstance(a, torch.Tensor) or memory(a) != memory(b):
        return False
    return (a.storage_offset(), a.numel(), a.shape[-1]) == (b.storage_offset(), b.numel(), b.shape[-1])
