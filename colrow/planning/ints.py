"""Integers that remember where they come from: how the deriver learns which integers of a module must become local.

While a model is traced, the integers of its modules (`split_size`, `num_heads`, ...) and the entries of tensor shapes are `Tracked`: an int
that carries an expression over module attributes and sizes. Where such an int fixes the size of an output (`view`, `split`, ...), the trace
keeps the expression, and `edits.py` asks later whether it still gives the right number on a rank. Not here: any solving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Expr: TypeAlias = tuple[Any, ...]
"""("int", n) | ("attribute", module, name) | ("size", value id, dim) | ("+" "-" "*" "//" "%", Expr, Expr)."""

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


class Tracked(int):
    """An int with its origin. Arithmetic that is not listed below gives a plain int, which counts as a literal."""

    expr: Expr

    @staticmethod
    def of(value: int, expr: Expr) -> Tracked:
        out = Tracked(value)
        out.expr = expr
        return out


class Told(Tracked):
    """An entry of a shape. Where the code compares it, `tell("lt", other)` is called (or "le", "gt", "ge", "eq", "ne"): on a rank the entry
    may be smaller, and the answer must be the same."""

    tell: Callable[[str, Any], None]
    __hash__ = int.__hash__

    @staticmethod
    def about(value: int, expr: Expr, tell: Callable[[str, Any], None]) -> Told:
        out = Told(value)
        out.expr, out.tell = expr, tell
        return out


def expression(value: int) -> Expr:
    """The expression of any int; a plain one is a literal."""
    return value.expr if isinstance(value, Tracked) else ("int", int(value))


def evaluate(expr: Expr, attribute: Callable[[str, str], int], size: Callable[[int, int], int]) -> int:
    """The value of an expression where attributes and sizes are looked up with the given functions. ZeroDivisionError as in Python."""
    match expr:
        case ("int", value):
            return int(value)
        case ("attribute", module, name):
            return attribute(module, name)
        case ("size", value, dim):
            return size(value, dim)
    symbol, left, right = expr
    return OPERATORS[symbol](evaluate(left, attribute, size), evaluate(right, attribute, size))


def attributes(expr: Expr) -> list[tuple[str, str]]:
    """The module attributes that occur in an expression."""
    if expr[0] == "attribute":
        return [(expr[1], expr[2])]
    return [] if expr[0] in ("int", "size") else attributes(expr[1]) + attributes(expr[2])


def _operator(symbol: str, name: str, reverse: bool) -> Callable[[Tracked, Any], Any]:
    def method(self: Tracked, other: Any) -> Any:
        plain = getattr(int, name)(self, other)
        if plain is NotImplemented or not isinstance(other, int) or isinstance(other, bool):
            return plain
        left, right = (other, self) if reverse else (self, other)
        return Tracked.of(plain, (symbol, expression(left), expression(right)))

    return method


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _comparison(name: str) -> Callable[[Told, Any], Any]:
    def method(self: Told, other: Any) -> Any:
        self.tell(name, other)
        if isinstance(other, Told):
            other.tell(_MIRRORED[name], self)
        return getattr(int, f"__{name}__")(self, other)

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Told, f"__{_name}__", _comparison(_name))

for _symbol, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv"), ("%", "mod")):
    setattr(Tracked, f"__{_name}__", _operator(_symbol, f"__{_name}__", reverse=False))
    setattr(Tracked, f"__r{_name}__", _operator(_symbol, f"__r{_name}__", reverse=True))
