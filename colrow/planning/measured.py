"""Lengths that no rule tells (pooling, strides), found by measuring: the model is traced at several lengths of its inputs, and what a size
becomes there is fitted by (a * S + b) // c. Only for values that follow the tokens and of whose dims none says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Protocol

from . import lengths
from .inputs import DECODED, TOKENS
from .lengths import Length
from .trace import Trace, TraceError, of_length

SAMPLES = (8, 9, 12, 13, 16, 18)
AHEAD = 4  # tokens that an encoder gets more than its decoder


class Place(Protocol):
    """Where a value enters or leaves a module call (graph.Border)."""

    @property
    def call(self) -> int: ...
    @property
    def place(self) -> str: ...
    @property
    def arg(self) -> str: ...


class Measured:
    """The lengths in one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def completed(self, value: int, shape: tuple[Length, ...], at: Place) -> tuple[Length, ...]:
        """A value's shape with the lengths that it lacks; `at` is a place where the value goes by."""
        free = [d for d in range(1, len(shape) - 1) if isinstance(shape[d], int) and shape[d] != 1]
        if not free or any(lengths.names(n) & {"S", "E"} for n in shape) or len(shape) != len(self.trace.values[value].shape):
            return shape
        name = next((name for name, reached in self._sequences.items() if reached[value]), "")
        if not name:
            return shape
        return tuple(self._fitted(name, at, d) if d in free else n for d, n in enumerate(shape))

    def _fitted(self, name: str, at: Place, dim: int) -> Length:
        sizes = {}
        for trace in (self.trace, *self._others):
            call = trace.calls[at.call]
            found = (call.inputs if at.place == "input" else call.outputs)[at.arg]
            sizes[_tokens(trace, name)] = trace.values[found].shape[dim]
        return fitted(name, sizes)

    @cached_property
    def _sequences(self) -> dict[str, list[bool]]:
        """ "S" and "E" -> whether a value depends on it."""
        sources = {name: {self.trace.inputs[key]} for name, key in _inputs(self.trace).items()}
        return {name: self.trace.dependent(self.trace.growing if name == "S" else at) for name, at in sources.items()}

    @cached_property
    def _others(self) -> list[Trace]:
        """The same model at other lengths, those at which it takes the same course."""
        found = []
        for n in SAMPLES:
            try:
                found.append(of_length(self.trace.config, n, n + AHEAD))
            except TraceError:
                continue
        return [t for t in found if [c.module for c in t.calls] == [c.module for c in self.trace.calls]]


def _inputs(trace: Trace) -> dict[str, str]:
    sequence = next((key for key in (DECODED, TOKENS) if key in trace.inputs), None)
    found = {} if sequence is None else {"S": sequence}
    return found | ({"E": TOKENS} if sequence == DECODED and TOKENS in trace.inputs else {})


def _tokens(trace: Trace, name: str) -> int:
    return trace.values[trace.inputs[_inputs(trace)[name]]].shape[1]


def fitted(name: str, sizes: Mapping[int, int]) -> Length:
    """The length that has these sizes where `name` has the keys' values; the first of them where none is found.

    >>> fitted("S", {7: 4, 8: 4, 9: 5, 12: 6})
    ('//', ('+', ('*', 'S', 1), 1), 2)
    >>> fitted("S", {7: 10, 8: 10, 9: 12, 12: 14})[0]
    '*'
    """
    first = next(iter(sizes.values()))
    if all(size == first for size in sizes.values()):
        return first
    for c, a, b in product(range(1, 9), range(1, 9), range(-8, 9)):
        found: Length = ("//", ("+", ("*", name, a), b), c)
        if all(lengths.value(found, {name: n}) == size for n, size in sizes.items()):
            return found
    for times in range(2, 9):
        if all(size % times == 0 for size in sizes.values()):
            each = fitted(name, {n: size // times for n, size in sizes.items()})
            if not isinstance(each, int):
                return ("*", each, times)
    return first
