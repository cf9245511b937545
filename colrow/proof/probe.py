"""Looking at a config by building its model: parameter shapes on meta tensors, and whether a forward pass runs at all. No weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
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


def shapes(config: PreTrainedConfig) -> Shapes:
    """Builds the model on meta; raises what the model raises for sizes that it cannot have."""
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
            _forward(config, length, torch.float32)
        else:
            with FakeTensorMode(), _quiet("torch._subclasses.fake_tensor"):
                _forward(config, length, torch.bfloat16)  # in which grouped products of experts exist
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


def _forward(config: PreTrainedConfig, length: int, dtype: torch.dtype) -> None:
    with torch.no_grad():
        model = build(config, dtype)
        call(model, moved(fitting(model, 2, length), torch.device("cpu"), model))
