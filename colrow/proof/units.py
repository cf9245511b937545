"""The units in which a model is proven piece by piece, and the whole model's units read from files one at a time.

A unit is a layer, or a module outside of the layers that has parameters of its own. A whole one in its own dtype fits beside the split
model; in a wider one it may not, so there parameters are read one by one, as ops ask for them. Not here: the comparison (stream.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig

from ..checkpoint import names
from ..checkpoint.source import Source
from ..parallel import load
from ..parallel.pending import Pending
from ..planning.plan import Plan
from . import whole
from .precision import as_written


def units(model: nn.Module) -> dict[str, nn.Module]:
    """By name, in the order of the model: each module of the outermost lists of modules (the layers), and outside of these each module that
    has parameters of its own."""
    found: dict[str, nn.Module] = {}

    def walk(prefix: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(module, nn.ModuleList) or next(child.parameters(recurse=False), None) is not None:
                found[name] = child
            else:
                walk(name, child)

    walk("", model)
    return {name: unit for name, unit in found.items() if next(unit.parameters(), None) is not None}


ROWS = 1 << 24  # elements that are widened at once


class WholeUnits:
    """The whole model on the meta device; within `loaded` one of its units has its weights, in `dtype`; within `wide` a copy of it
    computes with the same values in another dtype, holding one parameter at a time (no gradients)."""

    def __init__(
        self, config: PreTrainedConfig, attention: str, dtype: torch.dtype, plan: Plan, source: Source, device: torch.device
    ) -> None:
        """`attention`: the implementation that the split model uses, whose units hand over the mask that it needs."""
        with torch.device("meta"):
            self._model = whole.build(config, dtype, attention)
        load.remake_buffers(self._model, device)
        entries = plan.tensors.values()
        shapes, aliases = {t.name: t.shape for t in entries}, {t.name: t.aliases for t in entries}
        self._matched = names.match(self._model, source, shapes, aliases)
        self._plan, self._dtype, self._device = plan, dtype, device

    @contextmanager
    def loaded(self, name: str) -> Iterator[nn.Module]:
        unit = self._model.get_submodule(name)
        empty = dict(unit.named_parameters(remove_duplicate=False))
        for path in empty:
            _set(unit, path, nn.Parameter(self.read(f"{name}.{path}")))
        try:
            yield unit
        finally:
            for path, parameter in empty.items():
                _set(unit, path, parameter)

    @contextmanager
    def wide(self, name: str, dtype: torch.dtype) -> Iterator[nn.Module]:
        unit = copy.deepcopy(self._model.get_submodule(name)).to(dtype)
        found = {}
        for path, p in dict(unit.named_parameters(remove_duplicate=False)).items():
            nothing = torch.empty((), dtype=dtype, device=self._device).expand(p.shape)  # of the right shape, without its memory
            _set(unit, path, nn.Parameter(nothing, requires_grad=False))
            found[id(unit.get_parameter(path))] = f"{name}.{path}"
        with torch.no_grad(), _Reading(found, lambda path: self.read(path, dtype)):
            yield unit

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """transformers' own, as the whole model computes it."""
        return self._model.loss_function(logits=logits, labels=labels, vocab_size=self._model.config.get_text_config().vocab_size)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole parameter, rounded to the units' dtype, then in `dtype`. Only slices are in memory twice."""
        entry = self._plan.tensor(name)
        key, read = self._matched.keys[entry.name], self._matched.source.read
        with as_written():
            if dtype is None or dtype == self._dtype or not entry.shape:
                return read(key, None, (), self._dtype).to(self._device, dtype)
            value = torch.empty(entry.shape, dtype=dtype, device=self._device)
            step = max(ROWS * entry.shape[0] // max(value.numel(), 1), 1)
            for start in range(0, entry.shape[0], step):
                stop = min(start + step, entry.shape[0])
                value[start:stop] = read(key, 0, ((start, stop),), self._dtype)
            return value


class _Reading(TorchDispatchMode):
    """Inside it, ops that are given a parameter which holds nothing are given what `read(its name)` returns, and nobody keeps that."""

    def __init__(self, empty: Mapping[int, str], read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._empty, self._read = empty, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(self._value, args), **tree_map(self._value, kwargs or {}))

    def _value(self, x: Any) -> Any:
        return self._read(self._empty[id(x)]) if id(x) in self._empty else x


def _set(unit: nn.Module, path: str, parameter: nn.Parameter) -> None:
    module, _, key = path.rpartition(".")
    unit.get_submodule(module)._parameters[key] = parameter


class Run:
    """One call of a unit with detached inputs. `input` is the first floating tensor it is given (None for an embedding), `output` the
    first it returns; after `backward` there are `input.grad` and `gradients` by the parameters' names within the unit."""

    def __init__(self, unit: nn.Module, args: Any, kwargs: Any, train: bool) -> None:
        self._unit, self.gradients = unit, dict[str, torch.Tensor]()
        args, kwargs = tree_map(_detached, (args, kwargs))
        self.input = next(floating((args, kwargs)), None)
        with torch.set_grad_enabled(train):
            if train and self.input is not None:
                self.input.requires_grad_()
            self.output = next(floating(unit(*args, **kwargs)))

    def backward(self, gradient: torch.Tensor) -> None:
        self.output.backward(gradient)
        for path, parameter in self._unit.named_parameters():
            if parameter.grad is not None:
                self.gradients[path], parameter.grad = parameter.grad, None


def widened(tree: Any, dtype: torch.dtype) -> Any:
    """With floating tensors in `dtype`."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def _detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def floating(tree: Any) -> Iterator[torch.Tensor]:
    """The floating tensors in it, in order; of a sum that waits, the rank's summand."""
    leaves = (x.summand() if isinstance(x, Pending) else x for x in tree_leaves(tree))
    return (x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())
