"""The sum of an input's gradients beside the weight gradients of the products that were given the input.

Autograd computes both gradients of a product in one node, so f's all-reduce, which needs only the inputs', would wait for the weights'.
Here the products behind an f leave their weight gradients to it: f's node begins the all-reduce, computes them meanwhile and hands them to
autograd as its own. (Megatron-LM does this inside one layer; here q, k and v, or gate and up, share one f and one all-reduce.)

Under sequence parallelism the gather of the sequence is f, and a reduce-scatter the sum. Where the input is not kept but gathered again,
the first of its products begins that, and it runs beside the products' input gradients, since only weight gradients need the input.

Which layers stand behind an f is seen when they run: what the last pass saw is what the next one leaves to f. Only over transports that
gain by it (comm/background.py). Not here: layers under autocast, experts, the head (fused.py); and what was measured not to pay
(bench/overlap.py): the own rows multiplied while those of others are gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..comm import regions
from ..comm.group import Group

ATTRIBUTE = "colrow_deferred"  # of a tensor that an f has made
Source = Callable[[], torch.Tensor]


class Deferred:
    """The weight gradients that one f computes: of `layers`. `asked`: all layers that were given its tensor."""

    def __init__(self, layers: tuple[nn.Module, ...]) -> None:
        weights = ((layer, layer._parameters.get("weight")) for layer in layers)  # int8 layers have no such parameter
        self.layers = tuple(layer for layer, weight in weights if weight is not None and weight.requires_grad)
        self.asked: list[nn.Module] = []
        self._products: dict[int, tuple[torch.Tensor, Source]] = {}  # index of the layer -> its output's gradient, its input

    def place(self, layer: nn.Module) -> int | None:
        """The layer's index, where its weight gradient is f's: at its first use of the tensor."""
        again = any(known is layer for known in self.asked)
        self.asked.append(layer)
        return None if again else next((at for at, known in enumerate(self.layers) if known is layer), None)

    def weights(self) -> list[torch.Tensor]:
        return [layer.get_parameter("weight") for layer in self.layers]

    def leave(self, at: int, grad: torch.Tensor, x: Source) -> None:
        self._products[at] = grad, x

    def gradients(self) -> list[torch.Tensor | None]:
        """Of each layer's weight; None for one that was not used."""
        out: list[torch.Tensor | None] = []
        for at, layer in enumerate(self.layers):
            found = self._products.pop(at, None)
            out.append(None if found is None else _of_weight(isinstance(layer, nn.Linear), found[0], found[1]()))
        return out


def copy_to(x: torch.Tensor, group: Group, name: str, last: Deferred | None) -> tuple[torch.Tensor, Deferred]:
    """f(x), and what the products behind it leave to it. `last`: the same of the last pass."""
    deferred = Deferred(tuple(last.asked) if last is not None else ())
    copied = regions.copy_beside(x, group, name, deferred.gradients, deferred.weights())
    belongs(copied, deferred)
    return copied, deferred


def gather(
    x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int], last: Deferred | None
) -> tuple[torch.Tensor, Deferred]:
    """The same of a gather of the sequence. The caller says whose the result is, once it has its final shape: `belongs`."""
    deferred = Deferred(tuple(last.asked) if last is not None else ())
    return regions.gather_sequence_beside(x, group, name, dim, sizes, deferred.gradients, deferred.weights()), deferred


def belongs(x: torch.Tensor, deferred: Deferred) -> None:
    setattr(x, ATTRIBUTE, deferred)


class _Later(threading.local):
    found: list[Source] | None = None


_later = _Later()


@contextmanager
def later() -> Iterator[list[Source]]:
    """Within, saved tensors that have to be gathered again are begun, and what waits for each is put into the list; something else is
    unpacked in their place."""
    before, _later.found = _later.found, []
    try:
        yield _later.found
    finally:
        _later.found = before


def postponed(begin: Callable[[], None], whole: Source) -> bool:
    """For who unpacks: whether the reader asks for the tensor `later`. It is then begun."""
    if _later.found is None:
        return False
    begin()
    _later.found.append(whole)
    return True


def product(layer: Any, x: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `plain(x)` is, a column-parallel layer's product; its weight gradient is left to the f that made `x`, where it can be."""
    deferred: Deferred | None = getattr(x, ATTRIBUTE, None)
    if deferred is None or x.dim() < 2 or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return plain(x)
    at = deferred.place(layer)
    weight = layer.weight if at is None else layer.weight.detach()
    return _Product.apply(x, weight, layer.bias, isinstance(layer, nn.Linear), deferred, at, layer.weight.requires_grad)


class _Product(torch.autograd.Function):
    """x Wᵀ + b (of Conv1D x W + b). Backward: the gradients of x and b; of W where f does not compute it (`at` None). It saves the same in
    both cases, since a layer that is computed again may be known to f by then, and was not before: x where W is `learned`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: bool,
        deferred: Deferred,
        at: int | None,
        learned: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if learned else None, weight)
        ctx.rest = linear, deferred, at
        return F.linear(x, weight if linear else weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        linear, deferred, at = ctx.rest
        if at is None:
            x, weight = ctx.saved_tensors
        else:
            with later() as found:
                x, weight = ctx.saved_tensors
            deferred.leave(at, grad, found[0] if found else lambda: x)
        of_weight = _of_weight(linear, grad, x) if ctx.needs_input_grad[1] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ (weight if linear else weight.T), of_weight, of_bias, None, None, None, None


def _of_weight(linear: bool, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    return grad.T @ x if linear else x.T @ grad
