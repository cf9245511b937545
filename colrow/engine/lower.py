"""Lower: aten ops on live tensors as instructions, one op after the other.

Elementwise arithmetic, means along the last dim, norms (as the arithmetic they are), and tensors put side by side. An op that is not here
raises NotRecorded. Not here: views (steps.py), products, attention and sums (compiled.py).
"""

from __future__ import annotations

import torch

from ..kernels.library import Op
from .choosing import CHOOSING
from .steps import Source, Step, Steps
from .tape import NotRecorded, Ran

_UNARY = {
    "neg": Op.NEG,
    "exp": Op.EXP,
    "rsqrt": Op.RSQRT,
    "sqrt": Op.SQRT,
    "reciprocal": Op.RECIPROCAL,
    "sigmoid": Op.SIGMOID,
    "silu": Op.SILU,
    "tanh": Op.TANH,
    "relu": Op.RELU,
    "abs": Op.ABS,
    "clone": Op.COPY,
    "_to_copy": Op.COPY,
    "contiguous": Op.COPY,
    "bitwise_not": Op.NOT,
    "logical_not": Op.NOT,
}
_REDUCTIONS = {"mean": Op.MEAN, "sum": Op.SUM, "amax": Op.MAX}
FEW = 64  # rows that are added one by one
_BINARY = {"add": Op.ADD, "sub": Op.SUB, "mul": Op.MUL, "div": Op.DIV, "maximum": Op.MAXIMUM, "minimum": Op.MINIMUM, "rsub": Op.SUB}


def lower(made: Steps, op: Ran) -> None:
    """Adds what the op does. In-place ops write to their shadow."""
    name = op.name.rstrip("_") if op.func._schema.is_mutable else op.name
    if name in CHOOSING:
        CHOOSING[name](made, op)
    elif name in ("cat", "stack"):
        _cat(made, op, name == "stack")
    elif name in _REDUCTIONS:
        _along_one(made, op, _REDUCTIONS[name])
    elif name == "native_layer_norm":
        _layer_norm(made, op)
    elif name == "_fused_rms_norm":
        _rms_norm(made, op)
    else:
        _elementwise(made, name, op)


def rotate(made: Steps, op: Ran) -> None:
    """A product of complex numbers, as rotary positions are written by some."""
    if op.name != "mul" or not all(isinstance(x, torch.Tensor) and x.is_complex() for x in op.args):
        raise NotRecorded(f"it does {op.name} with complex numbers")
    a, b = (made.shadow(x) for x in op.args)
    out = made.name(op.outputs[0], torch.empty(*op.outputs[0].shape, 2))
    other = torch.empty(op.outputs[0].shape)
    for part, (first, second, sign) in enumerate(((a[..., 0], a[..., 1], Op.SUB), (a[..., 1], a[..., 0], Op.ADD))):
        made.emit(Op.MUL, other, second, b[..., 1])
        made.emit(Op.MUL, out[..., part], first, b[..., 0])
        made.emit(sign, out[..., part], out[..., part], other)


def _elementwise(made: Steps, name: str, op: Ran) -> None:
    in_place = op.func._schema.is_mutable
    out = made.shadow(op.args[0]) if in_place else made.new(op.outputs[0])
    if any(isinstance(x, list | tuple) for x in op.args):
        raise NotRecorded(f"it has an op without an instruction: {op.name}")
    a, b = ([*map(made.source, op.args), 0.0])[:2] if op.args[1:2] != (None,) else (made.source(op.args[0]), 0.0)
    if name == "copy":
        made.emit(Op.COPY, out, b)
    elif name == "_to_copy" and (becomes := op.outputs[0].dtype) != op.args[0].dtype and not becomes.is_floating_point:
        if becomes is not torch.bool:
            raise NotRecorded(f"it makes {becomes} of {op.args[0].dtype}")
        made.emit(Op.TRUTH, out, a)
    elif name in _UNARY:
        made.emit(_UNARY[name], out, a)
    elif name == "gelu":
        made.emit(Op.GELU_TANH if op.kwargs.get("approximate", "none") == "tanh" else Op.GELU, out, a)
    elif name == "pow" and isinstance(b, float):
        _power(made, out, a, b)
    elif name in ("clamp", "clamp_min", "clamp_max"):
        _clamp(made, name, out, a, op)
    elif name in _BINARY and op.kwargs.get("alpha", 1) == 1 and "rounding_mode" not in op.kwargs and len(op.args) == 2:
        made.emit(_BINARY[name], out, *((b, a) if name == "rsub" else (a, b)))
    else:
        raise NotRecorded(f"it has an op without an instruction: {op.name}")
    if in_place:
        made.name(op.outputs[0], out)


def _clamp(made: Steps, name: str, out: torch.Tensor, x: Source, op: Ran) -> None:
    given = dict(zip(("min", "max") if name == "clamp" else (name[-3:],), op.args[1:], strict=False)) | op.kwargs
    made.emit(Op.COPY, out, x)
    for which, bound in given.items():
        if bound is not None:
            made.emit(Op.MAXIMUM if which == "min" else Op.MINIMUM, out, out, made.source(bound))


def _power(made: Steps, out: torch.Tensor, x: Source, exponent: float) -> None:
    if exponent in (2, 3):
        made.emit(Op.SQUARE, out, x)
        if exponent == 3:
            made.emit(Op.MUL, out, out, x)
    elif exponent in (0.5, -0.5):
        made.emit(Op.SQRT if exponent > 0 else Op.RSQRT, out, x)
    else:
        raise NotRecorded(f"it raises to the power of {exponent}")


def _cat(made: Steps, op: Ran, stack: bool) -> None:
    parts, dim, at = op.args[0], op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0), 0
    out = made.new(op.outputs[0])
    for part in parts:
        size = 1 if stack else part.shape[dim]
        place = out.select(dim, at) if stack else out.narrow(dim, at, size)
        made.emit(Op.COPY, place, made.source(part))
        at += size


def _along_one(made: Steps, op: Ran, which: Op) -> None:
    x, out = made.shadow(op.args[0]), made.new(op.outputs[0])
    dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    if dims is None or len(dims) != 1:
        raise NotRecorded(f"it has a {op.name} along dims {dims}")
    dim = dims[0] % x.dim()
    out = out if (op.args[2] if len(op.args) > 2 else op.kwargs.get("keepdim", False)) else out.unsqueeze(dim)
    if dim == x.dim() - 1:
        made.steps.append(Step(which, [out], (x,)))
    elif which is Op.SUM and 0 < x.shape[dim] <= FEW:  # whole rows at a time
        made.emit(Op.COPY, out, x.narrow(dim, 0, 1))
        for at in range(1, x.shape[dim]):
            made.emit(Op.ADD, out, out, x.narrow(dim, at, 1))
    else:
        made.steps.append(Step(which, [out.transpose(dim, -1)], (x.transpose(dim, -1),)))


def _mean(made: Steps, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*x.shape[:-1], 1)
    made.steps.append(Step(Op.MEAN, [out], (x,)))
    return out


def _layer_norm(made: Steps, op: Ran) -> None:
    given, shape, weight, bias, eps = op.args
    x, out = made.shadow(given), made.new(op.outputs[0])
    if len(shape) != 1:
        raise NotRecorded("it has a norm over several dims")
    made.emit(Op.SUB, out, x, _mean(made, x))
    _scaled(made, out, out, weight, eps)
    if bias is not None:
        made.emit(Op.ADD, out, out, made.source(bias))


def _rms_norm(made: Steps, op: Ran) -> None:
    given, shape, weight, eps = op.args
    if len(shape) != 1 or eps is None:
        raise NotRecorded("it has a norm over several dims")
    _scaled(made, made.new(op.outputs[0]), made.shadow(given), weight, eps)


def _scaled(made: Steps, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight"""
    square = torch.empty(x.shape)
    made.emit(Op.SQUARE, square, x)
    scale = _mean(made, square)
    made.emit(Op.ADD, scale, scale, eps)
    made.emit(Op.RSQRT, scale, scale)
    made.emit(Op.MUL, out, x, scale)
    if weight is not None:
        made.emit(Op.MUL, out, out, made.source(weight))
