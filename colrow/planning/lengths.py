"""Lengths: sizes that follow those of the inputs. "B" is the number of rows, "S" the sequence that decoding makes longer, "E" an encoder's.

Models make other lengths of them: a picture's places before the text ("S" + 17), a sequence padded to a multiple of a window. Such a length
is an expression, ("+", "S", 17), that gives the right size for any input. Where an int of the model's code made it, the expression is that
of the code (ints.py); a branch that the code takes for other lengths (none is padded where nothing is missing) is not seen. Not here: which
dims have one (rules.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, TypeAlias

from .ints import OPERATORS

Length: TypeAlias = int | str | tuple[Any, ...]
"""A number, a name, or (operator, Length, Length)."""

TRIED = (*range(1, 70), 127, 500, 1000)


def value(length: Length, sizes: Mapping[str, int]) -> int:
    """The size for inputs of `sizes`. ZeroDivisionError as in Python.

    >>> value(("+", "S", 17), {"S": 3})
    20
    """
    if isinstance(length, int):
        return length
    if isinstance(length, str):
        return sizes[length]
    operator, left, right = length
    return OPERATORS[operator](value(left, sizes), value(right, sizes))


def names(length: Length) -> frozenset[str]:
    """The names in it; none for a plain number."""
    if isinstance(length, tuple):
        return names(length[1]) | names(length[2])
    return frozenset((length,) if isinstance(length, str) else ())


def plain(length: Length) -> Length:
    """The name alone, where the expression is no other than that (padding that is cut off again).

    >>> plain(("-", ("+", "S", 5), 5)), plain(("+", "S", 5))
    ('S', ('+', 'S', 5))
    """
    found = names(length)
    if isinstance(length, tuple) and len(found) == 1:
        (name,) = found
        if all(value(length, {name: n}) == n for n in TRIED):
            return name
    return length


def step(length: Length) -> Length:
    """The length of what comes with new tokens alone: a factor stays, what is added is there already.

    >>> step(("+", "S", 17)), step(("*", "S", 4))
    ('S', ('*', 'S', 4))
    """
    if not isinstance(length, tuple) or "S" not in names(length):
        return length
    if length[0] == "*":
        return ("*", step(length[1]), step(length[2]))
    each = value(length, {"S": 1}) if names(length) == {"S"} else 0
    return length if each and all(value(length, {"S": n}) == n * each for n in TRIED) else "S"


def product(parts: Iterable[Length]) -> Length:
    """The number of elements of several dims together; numbers are multiplied out."""
    every = list(parts)
    number = prod(part for part in every if isinstance(part, int))
    named = [part for part in every if not isinstance(part, int)]
    return _joined("*", [*named, *([number] if number != 1 or not named else [])])


def total(parts: Iterable[Length]) -> Length:
    """The size of dims one after the other."""
    every = list(parts)
    number = sum(part for part in every if isinstance(part, int))
    named = [part for part in every if not isinstance(part, int)]
    return _joined("+", [*named, *([number] if number or not named else [])])


def _joined(operator: str, parts: list[Length]) -> Length:
    found, *rest = parts
    for part in rest:
        found = (operator, found, part)
    return found


def text(length: Length) -> str:
    """As one would write it.

    >>> text(("+", "S", 17))
    '(S + 17)'
    """
    return f"({text(length[1])} {length[0]} {text(length[2])})" if isinstance(length, tuple) else str(length)
