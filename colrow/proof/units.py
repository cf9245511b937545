"""The units in which a model is proven piece by piece, and the whole model's units read from files one at a time.

A unit is a layer, or a module outside of the layers that has parameters of its own. Not here: the comparison (stream.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig

from ..checkpoint import names
from ..checkpoint.source import Source
from ..parallel import load
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


class WholeUnits:
    """The whole model on the meta device; within `loaded` one of its units has its weights, in `dtype`."""

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
            key = self._matched.keys[self._plan.tensor(f"{name}.{path}").name]
            with as_written():
                value = self._matched.source.read(key, None, (), self._dtype)
            _set(unit, path, nn.Parameter(value.to(self._device)))
        try:
            yield unit
        finally:
            for path, parameter in empty.items():
                _set(unit, path, parameter)


def _set(unit: nn.Module, path: str, parameter: nn.Parameter) -> None:
    module, _, key = path.rpartition(".")
    unit.get_submodule(module)._parameters[key] = parameter


class Run:
    """One call of a unit with detached inputs. `input` is the first floating tensor it is given (None for an embedding), `output` the
    first it returns; after `backward` there are `input.grad` and `gradients` by the parameters' names within the unit."""

    def __init__(self, unit: nn.Module, args: Any, kwargs: Any, train: bool) -> None:
        self._unit, self.gradients = unit, dict[str, torch.Tensor]()
        args, kwargs = tree_map(_detached, (args, kwargs))
        self.input = next(_floating((args, kwargs)), None)
        with torch.set_grad_enabled(train):
            if train and self.input is not None:
                self.input.requires_grad_()
            self.output = next(_floating(unit(*args, **kwargs)))

    def backward(self, gradient: torch.Tensor) -> None:
        self.output.backward(gradient)
        for path, parameter in self._unit.named_parameters():
            if parameter.grad is not None:
                self.gradients[path], parameter.grad = parameter.grad, None


def doubled(tree: Any) -> Any:
    """Floating tensors in float64."""
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def _detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point())
