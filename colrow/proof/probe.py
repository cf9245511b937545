"""Looking at a config by building its model: parameter shapes on meta tensors, and whether a forward pass runs at all. No weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedConfig

from ..planning.inputs import fitting, moved
from ..planning.trace import trace
from .exercise import call
from .whole import build

RUN_FOR_REAL = 2_000_000
"""Parameters. Smaller models are run on real tensors, which is quicker; larger ones on fake tensors, which need no memory."""

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.*)$")


def numbered(name: str) -> tuple[str, int, str]:
    """(list of layers, number, rest) of a parameter's name; ("", -1, name) outside of layers."""
    found = _NUMBERED.match(name)
    return (found[1], int(found[2]), found[3]) if found else ("", -1, name)


@dataclass(frozen=True)
class Shapes:
    """`sizes`: shape of every parameter. `depths`: lengths of the lists of modules. `kinds`: the different kinds of layers, each as the
    names and ranks (number of dims) of its parameters."""

    sizes: dict[str, tuple[int, ...]]
    depths: frozenset[int]
    kinds: frozenset[tuple[str, frozenset[tuple[str, int]]]]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.sizes)

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.sizes.values())


_KNOWN: dict[tuple[type, str], Shapes] = {}
ENOUGH = 1024  # configs whose shapes are kept: a search comes back to many of them


def shapes(config: PreTrainedConfig) -> Shapes:
    """Builds the model on meta, once for each config; raises what the model raises for sizes that it cannot have."""
    key = (type(config), json.dumps(config.to_dict(), sort_keys=True, default=str))
    if key not in _KNOWN:
        if len(_KNOWN) >= ENOUGH:
            _KNOWN.clear()
        _KNOWN[key] = _shapes(config)
    return _KNOWN[key]


def _shapes(config: PreTrainedConfig) -> Shapes:
    with torch.device("meta"):
        model = build(config, torch.float32)
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layers: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for name, shape in sizes.items():
        stem, number, rest = numbered(name)
        layers.setdefault((stem, number), set()).add((rest, len(shape)))
    depths = frozenset(len(m) for m in model.modules() if isinstance(m, nn.ModuleList))
    return Shapes(sizes, depths, frozenset((stem, frozenset(entries)) for (stem, _), entries in layers.items()))


def runs(config: PreTrainedConfig, found: Shapes, inputs: tuple[str, ...] = (), length: int = 7) -> bool:
    """Whether a forward pass over `length` tokens ends without an exception; of a model of several towers, one with the same `inputs`, so
    that no tower is left out."""
    if config.sub_configs:
        return _traced(config) == set(inputs)
    try:
        if found.elements <= RUN_FOR_REAL:
            _forward(build(config, torch.float32), length)
        else:
            with FakeTensorMode(), _quiet("torch._subclasses.fake_tensor"):
                _forward(_fake(config), length)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True  # reached code that looks at values (routing to experts): sizes fitted up to there
    except Exception:  # a model may refuse a size with an error of any kind; which one does not matter here
        return False
    return True


def _traced(config: PreTrainedConfig) -> set[str]:
    """What a trace called the model with; where the towers meet, numbers decide, which fake tensors do not have."""
    try:
        return set(trace(config).inputs)
    except Exception:  # as above
        return set()


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Fake tensors log an error, with a traceback, for every op that refuses its sizes; here that is an expected answer."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _fake(config: PreTrainedConfig) -> nn.Module:
    """The model on fake tensors, in bfloat16, in which grouped products of experts exist. One that converts parts of itself while it is
    built (DeepSeek-V4) cannot be built on them, or only by chance: on meta first then."""
    try:
        return build(config, torch.bfloat16)
    except RuntimeError as error:
        if "swap" not in str(error):
            raise
    with unset_fake_temporarily(), torch.device("meta"):
        model = build(config, torch.bfloat16)
    return _filled(model)


def _filled(model: nn.Module) -> nn.Module:
    """The model on the CPU, with tensors of the mode that it is called in for those that it has on meta; tied ones stay one."""
    made: dict[int, Any] = {}
    for module in model.modules():
        places: list[dict[str, Any]] = [module._parameters, module._buffers]
        for held in places:
            for name, old in held.items():
                if old is not None and id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    made[id(old)] = nn.Parameter(new, False) if held is module._parameters else new
                held[name] = made[id(old)] if old is not None else None
    return model


def _forward(model: nn.Module, length: int) -> None:
    with torch.no_grad():
        call(model, moved(fitting(model, 2, length), torch.device("cpu"), model))
