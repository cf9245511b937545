"""Vocabulary-parallel embedding: each rank holds some rows of the table, and looks up those of the ids that are its own.

Rows of other ranks come out as zeros, so the sum over ranks (g) is the whole model's embedding, exactly: all but one addend are 0. One
all-reduce forward, none backward (Shoeybi et al., arXiv:1909.08053, section 3). Any vocabulary size; a rank may have no row at all.

An id outside the vocabulary is an error on every rank, as in the unsplit model: without that check it would silently become a zero vector.
An embedding cut along its features (`make_column`) looks up a slice of every row and needs no collective.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition


class VocabParallelEmbedding(nn.Embedding):
    """`weight` has the rank's rows, `padding` is the padding row's place among them (None on ranks without it). `num_embeddings` and
    `padding_idx` are those of the whole table, of which models' code makes its positions (Whisper, ProphetNet)."""

    group: Group
    partition: Partition
    padding: int | None
    name: str | None  # the call site of g; None: the partial sums are added elsewhere, with others
    deferred: bool = False  # forward leaves partial sums: whoever calls adds its own and then calls add_up (lora.py)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, partition: Partition, group: Group, *, name: str = "embedding"
    ) -> VocabParallelEmbedding:
        """The rank's rows of `embedding`, which is not changed. `partition` cuts dim 0 of its weight."""
        check_vocab(embedding, partition, name)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.__dict__.update({k: v for k, v in vars(embedding).items() if k not in layer.__dict__})
        piece = partition.split(embedding.weight.detach(), group.rank).clone()
        layer.weight = nn.Parameter(piece, embedding.weight.requires_grad)
        layer.train(embedding.training)
        make_vocab(layer, partition, group, name)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Ids [...] to rows [..., dim]. IndexError on every rank where an id is outside the whole vocabulary."""
        check_ids(input, self.partition.size)
        rows = self.lookup(input, self.weight)
        return rows if self.deferred else self.add_up(rows)

    def add_up(self, rows: torch.Tensor) -> torch.Tensor:
        """g, in place: the rows have no other reader."""
        return rows if self.name is None else regions.reduce_from(rows, self.group, self.name, inplace=True)

    def lookup(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Those of the ids that are the rank's own, in a table of its rows; zeros for the others."""
        local, held = local_ids(ids, self.partition, self.group.rank)
        if len(table) == 0:  # the empty sum keeps the table in the graph, so that all ranks build the same one
            return table.new_zeros(*ids.shape, table.shape[1]) + table.sum()
        rows = F.embedding(local, table, self.padding, sparse=self.sparse)
        return rows.masked_fill(~held.unsqueeze(-1), 0)


def make_vocab(layer: nn.Embedding, partition: Partition, group: Group, name: str | None) -> None:
    """Turns an embedding whose weight is the rank's rows already into a vocabulary-parallel one, in place."""
    padding = layer.padding_idx
    layer.__class__ = _vocab_class(type(layer))  # type: ignore[arg-type]
    layer.padding = None if padding is None else partition.local_offset(group.rank, padding)  # type: ignore[assignment]
    layer.partition, layer.group, layer.name = partition, group, name  # type: ignore[assignment]


@functools.cache
def _vocab_class(cls: type) -> type:
    """A class of a model's own keeps what it does before and after the lookup: its `super().forward` finds the parallel one."""
    if cls is nn.Embedding or issubclass(cls, VocabParallelEmbedding):
        return VocabParallelEmbedding
    return type(f"VocabParallel{cls.__name__}", (cls, VocabParallelEmbedding), {})


def make_column(layer: nn.Embedding) -> None:
    """An embedding whose weight is the rank's columns already: only its size changes."""
    layer.embedding_dim = layer.weight.shape[1]


def check_vocab(layer: nn.Embedding, partition: Partition, name: str) -> None:
    """UserError where the rows cannot be divided without changing what the layer does."""
    if partition.dim != 0 or partition.size != layer.num_embeddings or partition.shared():
        works = f"a cut of {layer.num_embeddings} rows"
        raise UserError(f"{name}: the rows must be cut along dim 0, each held by one rank", partition.pieces, works)
    for option in ("max_norm", "scale_grad_by_freq"):  # both would count the ids that other ranks hold
        if getattr(layer, option):
            raise UserError(f"{name}: an embedding with {option} cannot be cut along its rows", getattr(layer, option), "leave it whole")


def check_ids(ids: torch.Tensor, size: int) -> None:
    """IndexError where an id is outside [0, size), with the id. On a GPU an assertion that does not wait for the device."""
    if ids.is_meta or ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if ids.is_cpu:
        if low < 0 or high >= size:
            raise IndexError(f"token id {int(low if low < 0 else high)} is outside the vocabulary of {size}")
    else:
        torch._assert_async((low >= 0) & (high < size), f"a token id is outside the vocabulary of {size}")


def local_ids(ids: torch.Tensor, partition: Partition, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each id its place among the rank's indices (0 where it has none), and whether the rank holds it."""
    local, held, at = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool), 0
    for start, stop in partition.pieces[rank]:
        inside = (ids >= start) & (ids < stop)
        local = torch.where(inside, ids - start + at, local)
        held, at = held | inside, at + stop - start
    return local, held
