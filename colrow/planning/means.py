"""Means over an axis, the statistics of norms: which ops of a module's forward take them, numbered as they come.

RMSNorm takes one, LayerNorm two (the mean, then the mean square of what is left), whether they are written out in the model's code or
fused into one op; a variance or a standard deviation takes the same two. Cut along the axis, each rank has a part of the sum, and the
ranks' parts are added where the mean is taken, inside the module's forward. The number says which mean that is, to the applier too, which
sees the same calls come by (parallel/norm.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .trace import Call, Op, Trace

TAKEN = {"mean": 1, "rms_norm": 1, "_fused_rms_norm": 1, "layer_norm": 2, "native_layer_norm": 2, "std": 2, "var": 2}
"""How many means an op takes."""

SPREADS = ("std", "var")


@dataclass(frozen=True)
class Mean:
    """The `number`th mean taken in a call of a module; `value` has one entry for each mean that is taken."""

    call: int
    number: int
    value: int


def numbered(trace: Trace, call: Call) -> dict[int, tuple[Mean, ...]]:
    """The means that each op of a call takes."""
    found: dict[int, tuple[Mean, ...]] = {}
    number = 0
    for op in trace.ops[call.first : call.last]:
        if taken := TAKEN.get(op.name, 0):
            found[op.index] = tuple(Mean(call.index, number + i, statistic(op)) for i in range(taken))
            number += taken
    return found


def statistic(op: Op) -> int:
    """The value that is a mean, or one of its shape."""
    others = [o for o in op.outputs[1:] if o >= 0]
    return others[0] if others else op.outputs[0]


def averaged(op: Op, dims: int) -> tuple[int, ...]:
    """The dims of its first input that an op takes means over, counted from the end."""
    if op.name not in ("mean", *SPREADS):
        shape = op.args[1]
        return tuple(range(-len(shape), 0))
    given = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    every = given if isinstance(given, list | tuple) and given else [given] if isinstance(given, int) else range(dims)
    return tuple(sorted(d % dims - dims for d in every))


def unbiased(op: Op, n: int) -> float:
    """What a mean of n squares is multiplied by in a variance that divides by n - correction (by default 1)."""
    correction = op.kwargs.get("correction")
    return n / (n - (1 if correction is None else correction))
