"""A sum that waits: what is partial and what is whole in it are kept apart until it is due.

In a parallel block the model's code adds the attention's output, the MLP's and the residual, in whatever order. The first two are partial
sums, one all-reduce of both is enough, and the residual, like the bias of a row-parallel layer, must count once. So what leaves such a
layer is no tensor but a `Pending`: a partial and a whole part. Added to another one, or to a tensor, it is a Pending again, part by part.
Where the plan has its reduction, `settle` adds the partial part up over the ranks and the whole part to that.

It is safe because it is not a tensor: there is no storage in which a partial sum could be taken for a value. Whatever is done to it that is
neither an addition nor a look at its shape (an op, an index, dropout that drops) settles it first: right in any case, at the price of an
all-reduce that the plan did not foresee. It is settled once, whoever holds it. One that was made with gradients is refused where there are
none: its gradient would be lost (reentrant checkpointing of a part of a block).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..comm.group import Group
from ..errors import UserError

ADDS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}
ADDS_TO = {torch.Tensor.add_, torch.Tensor.__iadd__}  # which change their first argument, if that is a tensor
UNARY = ("neg", "abs", "invert")
BINARY = ("sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "getitem", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")
REFLECTED = ("sub", "mul", "truediv", "floordiv", "pow", "matmul")


@dataclass(frozen=True)
class Due:
    """The reduction that a pending sum waits for: `add_up` makes a partial sum whole, or, where `scattered`, the rank's slice of the whole
    along the sequence."""

    name: str
    group: Group
    add_up: Callable[[torch.Tensor], torch.Tensor]
    scattered: bool = False


class Pending:
    """`partial` is this rank's summand, `whole` what counts once (None: nothing)."""

    def __init__(self, partial: torch.Tensor, whole: torch.Tensor | None, due: Due) -> None:
        self.partial, self.whole, self.due = partial, whole, due
        self._settled: torch.Tensor | None = None

    def settle(self) -> torch.Tensor:
        """The sum, whole on every rank. A collective at the first call."""
        if self._settled is None:
            if self.partial.requires_grad and not torch.is_grad_enabled():
                works = "gradient_checkpointing_kwargs={'use_reentrant': False}"
                raise UserError(f"a sum that waits for {self.due.name} came into code without gradients", works=works)
            total = self.due.add_up(self.partial)
            self._settled = total if self.whole is None else total + self.whole
        return self._settled

    def summand(self) -> torch.Tensor:
        """This rank's share of the value, the whole part counted on the first rank: for those who compare trails of modules."""
        return self.partial if self.whole is None or self.due.group.rank else self.partial + self.whole

    def __add__(self, other: Any) -> Any:
        if self._settled is not None or not isinstance(other, torch.Tensor | Pending):
            return self.settle() + other
        if isinstance(other, torch.Tensor):
            return Pending(self.partial, other if self.whole is None else self.whole + other, self.due)
        if other._settled is not None:
            return self + other._settled
        wholes = [w for w in (self.whole, other.whole) if w is not None]
        return Pending(self.partial + other.partial, sum(wholes[1:], wholes[0]) if wholes else None, self.due)

    __radd__ = __iadd__ = __add__  # in place too: the name is given to the new sum, and nobody else changes with it

    def __repr__(self) -> str:  # a debugger on one rank must not wait for the others
        return f"Pending({tuple(self.partial.shape)} until {self.due.name})"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where it is there already, on that device and of that dtype."""
        parts = [p for p in (self.partial, self.whole) if p is not None]
        return self if all(p.to(*args, **kwargs) is p for p in parts) else self.settle().to(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return self.partial.device

    @property
    def dtype(self) -> torch.dtype:
        return self.partial.dtype if self.whole is None else torch.promote_types(self.partial.dtype, self.whole.dtype)

    @property
    def shape(self) -> torch.Size:
        if self.due.scattered:
            return self.settle().shape
        return self.partial.shape if self.whole is None else torch.broadcast_shapes(self.partial.shape, self.whole.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.settle(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and len(args) == 2 and not kwargs:
            one, other = args
            return one + other if isinstance(one, Pending) else other + one
        if func in ADDS_TO and len(args) == 2 and not kwargs and isinstance(args[0], Pending):
            return args[0] + args[1]
        if func is F.dropout and not _drops(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        return func(*(settled(a) for a in args), **{k: settled(v) for k, v in kwargs.items()})


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


def settled(x: Any) -> Any:
    """A pending sum is settled, anything else (in lists and tuples too) stays as it is."""
    if isinstance(x, list | tuple) and any(isinstance(e, Pending) for e in x):
        return type(x)(settled(e) for e in x)
    return x.settle() if isinstance(x, Pending) else x


def _forwarded(name: str) -> Callable[..., Any]:
    """Settles, then does what the operator of this name does."""
    function = getattr(operator, name)
    return lambda self, *args: function(self.settle(), *(settled(a) for a in args))


def _reflected(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self, other: function(other, self.settle())


for _name in (*UNARY, *BINARY):
    setattr(Pending, f"__{_name.strip('_')}__", _forwarded(_name))
for _name in REFLECTED:
    setattr(Pending, f"__r{_name}__", _reflected(_name))
for _name in ("len", "iter", "bool", "float", "int"):
    setattr(Pending, f"__{_name}__", lambda self, _f=f"__{_name}__": getattr(self.settle(), _f)())
