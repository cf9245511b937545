"""Steps: instructions in the making, on shadows.

A shadow stands for a tensor that the recorded step computed: a small float32 tensor of the same shape (of complex numbers, with their two
parts as a last dim), whose memory is one place in a row's arena. Views of it are made by torch itself, so where an element lies is never
worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kernels.library import Op
from .tape import NotRecorded, Ran

CONSTANT_ROOM = 1 << 22  # elements of one constant that is copied to float32


@dataclass(frozen=True)
class Constant:
    """A tensor in float32 that is the same in every step."""

    value: torch.Tensor


Source = torch.Tensor | Constant | float
"""An operand: a shadow, a constant, or a number."""


@dataclass(frozen=True)
class Matrix:
    """A weight of `shape` [rows, width], each row in one piece; or int8 panels (kernels/panels.py) with their scales, or compact rows
    (kernels/compact.py) and what lies beside them. Or many of them, one after the other."""

    values: torch.Tensor
    shape: Sequence[int]
    beside: torch.Tensor | None = None


@dataclass(frozen=True)
class Picked:
    """Matrices of `weight` [many, a, b] that a router picked; `places`: the recorded tensor that says which."""

    weight: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Heads:
    """Attention of one position as ATTEND does it (kernels/attend.h says what the fields are). `bias` [heads, reach]."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int
    latent: int
    kv_of: tuple[int, ...]
    scale: float
    softcap: float
    sinks: torch.Tensor | None = None
    slopes: tuple[float, ...] = ()
    bias: torch.Tensor | None = None
    source: bool = False


@dataclass(frozen=True)
class Choice:
    """The `k` largest of `n`. `routes`: their places matter, as a router's do."""

    n: int
    k: int
    routes: bool


@dataclass(frozen=True)
class Step:
    """One instruction. `weights` (of a product): one for each of `outs`. `entry`: Heads of attention, a Choice, what was recorded of a sum,
    the slots of experts, the shape of what is taken from or scattered to."""

    op: Op
    outs: list[torch.Tensor]
    sources: tuple[Source, ...] = ()
    weights: list[Matrix] = field(default_factory=list)
    entry: Any = None


class Steps:
    """`light`: ids of recorded tensors that torch computes in each step, with what they depend on; they become `inputs` where used."""

    def __init__(self, light: dict[int, frozenset[str]]) -> None:
        self.steps: list[Step] = []
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.depends = light
        self.compares = False  # its code asks whether a position lies beyond some bound
        self.kept: dict[int, Matrix] = {}  # what the modules made weights of (parallel/kept.py), by recorded tensor
        self.picked: dict[int, Picked] = {}  # by recorded tensor, too
        self.views: dict[int, Ran] = {}  # of light tensors: what made them
        self.fresh: dict[int, Callable[[], torch.Tensor]] = {}  # what makes constants anew that a step may write to, by recorded tensor
        self.symbols: dict[int, Any] = {}  # what attended.py knows of recorded tensors that no shadow stands for
        self._shadows: dict[int, torch.Tensor] = {}
        self._constants: dict[int, Constant] = {}

    def is_live(self, recorded: torch.Tensor) -> bool:
        return id(recorded) in self._shadows

    def shadow(self, recorded: torch.Tensor) -> torch.Tensor:
        """Of a live tensor; a light one becomes an input, a constant is copied into the arena."""
        is_view = id(recorded) in self.views and not recorded.is_complex()
        if is_view and id(recorded) not in self._shadows:  # a view of an input is no input of its own
            self.view(self.views[id(recorded)])
        found = self._shadows.get(id(recorded))
        if found is None:
            found = torch.empty(*recorded.shape, *([2] if recorded.is_complex() else []))
            if id(recorded) in self.depends:
                self.inputs.append((recorded, found))
                self._shadows[id(recorded)] = found
            else:
                self.emit(Op.COPY, found, self.source(recorded))
        return found

    def new(self, recorded: torch.Tensor) -> torch.Tensor:
        """A shadow for what an op gave."""
        return self.name(recorded, torch.empty(recorded.shape))

    def name(self, recorded: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
        self._shadows[id(recorded)] = shadow
        return shadow

    def contiguous(self, shadow: torch.Tensor) -> torch.Tensor:
        return shadow if shadow.is_contiguous() else self.emit(Op.COPY, torch.empty(shadow.shape), shadow)

    def emit(self, op: Op, out: torch.Tensor, *sources: Source) -> torch.Tensor:
        self.steps.append(Step(op, [out], sources))
        return out

    def source(self, x: Any) -> Source:
        """A recorded argument as an operand."""
        if not isinstance(x, torch.Tensor):
            return float(x)
        if id(x) in self._shadows or id(x) in self.depends:
            return self.shadow(x)
        if id(x) not in self._constants:
            if x.numel() > CONSTANT_ROOM:
                raise NotRecorded(f"it has a constant of {x.numel()} elements")
            made = self.fresh.get(id(x))
            value = x if made is None else made()
            self._constants[id(x)] = Constant(value.detach().float().contiguous())
        return self._constants[id(x)]

    def view(self, op: Ran) -> None:
        """The same view of the shadow, a copy first where its memory is laid out otherwise than the recorded tensor's was."""
        func = torch.ops.aten.reshape.default if op.name in ("_unsafe_view", "_reshape_alias") else op.func
        base, rest = self.shadow(op.args[0]), op.args[1 : 2 if op.name == "_reshape_alias" else None]
        try:
            outs = func(base, *rest, **op.kwargs)
            first = outs if isinstance(outs, torch.Tensor) else outs[0]
            if memory(first) != memory(base):
                raise RuntimeError
        except RuntimeError:
            outs = func(self.contiguous(base), *rest, **op.kwargs)
        for recorded, shadow in zip(op.outputs, [outs] if isinstance(outs, torch.Tensor) else outs, strict=True):
            self.name(recorded, shadow)


def memory(x: torch.Tensor) -> int:
    """What shadows that overlap have in common."""
    return x.untyped_storage()._cdata
