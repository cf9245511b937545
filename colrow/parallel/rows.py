"""Single rows of a table that is cut along its rows, read by code outside of the embedding: `table.weight[pad, :]` (Gemma 4, which puts the
padding's vector in the places of pictures).

The rank that has the row gives it, the others zeros, and the sum is what the code gets: one small all-reduce, none backward. The parameter
gets a class whose indexing by a number does that; it is put on at each run of the module that reads, since loading may replace a parameter.
All else that is done with the parameter (lookups, products, copies, optimizers) is torch's own. Not here: lookups (embedding.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning.plan import Plan, Region


@dataclass(frozen=True)
class Reading:
    """`partition` cuts the table along dim 0."""

    name: str
    partition: Partition
    group: Group

    def row(self, table: nn.Parameter, index: int) -> torch.Tensor:
        """Row `index` of the whole table, [columns], on every rank. A collective. IndexError outside the table."""
        size = self.partition.size
        if not -size <= index < size:
            raise IndexError(f"row {index} is outside the table of {size}")
        at = self.partition.local_offset(self.group.rank, index % size)
        own = table.new_zeros(table.shape[1:]) if at is None else torch.Tensor.select(table, 0, at)
        return regions.reduce_from(own, self.group, self.name)


class Table(nn.Parameter):
    """The rank's rows. A number as an index means a row of the whole table."""

    reading: Reading

    def __getitem__(self, key: Any) -> torch.Tensor:
        first, *rest = key if isinstance(key, tuple) else (key,)
        if type(first) is not int:
            return super().__getitem__(key)
        row = self.reading.row(self, first)
        return row[tuple(rest)] if rest else row

    def select(self, dim: int, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.reading.row(self, index) if dim == 0 else super().select(dim, index)


def install(model: nn.Module, plan: Plan, group: Group) -> None:
    """The modules that read rows find them on all ranks."""
    for region in plan.regions:
        if region.op == "row" and group.size > 1:
            assert region.partition is not None  # check has seen to it
            _watch(model, region, Reading(region.name, region.partition, group))


def _watch(model: nn.Module, region: Region, reading: Reading) -> None:
    path, _, leaf = region.arg.rpartition(".")
    table = model.get_submodule(path)

    def before(*_: Any) -> None:
        parameter: Any = getattr(table, leaf)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = Table
        parameter.reading = reading

    model.get_submodule(region.module).register_forward_pre_hook(before)


def check(region: Region, plan: Plan) -> None:
    """UserError where the rows of a plan cannot be read."""
    entry = plan.tensors.get(region.arg)
    if region.place != "inside" or entry is None or entry.role != "vocab" or entry.partition != region.partition or region.ranks:
        found = f"{region.arg!r} {region.place}"
        raise UserError(f"the region {region.name} cannot be carried out", found, "a table that is cut along its rows, inside a module")
