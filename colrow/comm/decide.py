"""Decisions of one rank: rank 0 computes something, all ranks get the result, or all raise its error.

Without this, a mistake that only rank 0 sees (a wrong prompt, a refused plan) would leave the others waiting for a collective that never
comes. Values must be small and picklable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import ColrowError
from .collectives import broadcast_object
from .group import Group

T = TypeVar("T")


def on_rank_0(make: Callable[[], T], group: Group, name: str) -> T:
    """`make()`, called on rank 0 only. A ColrowError that it raises is raised on every rank; other errors are rank 0's alone."""
    made: tuple[T | None, ColrowError | None] = (None, None)
    if group.rank == 0:
        try:
            made = make(), None
        except ColrowError as error:
            made = None, error
    value, problem = broadcast_object(made, group, name)
    if problem is not None:
        raise problem
    return value
