"""LoRA layers of PEFT beside the layers of a split model: how their two matrices are cut, and where their sum is added.

    y = W x + s·B (A x)          W [out, in], A [r, in], B [out, r]      (Hu et al., arXiv:2106.09685, section 4.1)

    W             A                         B                         gradients that are parts
    column        whole                     cut as W's outputs        A: B's rows of this rank alone lead back to it
    row           cut as W's inputs         whole                     B: A x is a partial sum
    vocab         cut as the table's rows   whole                     B: likewise (a table's rows are its inputs)
    whole         whole                     whole                     both, where W's is

PEFT computes all of it: its layer finds the rank's sizes on the split layer and needs no change for column-parallel and whole ones. Behind
a row-parallel layer its product is one more partial sum, so it is added before g, which then costs what it cost without an adapter.

Importing this imports peft, which takes seconds: only adapters.py does, where there is an adapter. Not here: adding, loading, saving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import UserError
from ..partition import Partition, whole
from ..planning.plan import Plan, TensorPlan
from .adapter_files import NAME
from .embedding import VocabParallelEmbedding
from .linear import RowParallelConv1D, RowParallelLinear, taken

ROW = (RowParallelLinear, RowParallelConv1D)


class RowLinear(Linear):
    """PEFT's layer around a row-parallel one: the adapter's part is added to the partial sum, and both are reduced together."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _deferred(self) as base:
            partial = super().forward(taken(base, x), *args, **kwargs)
        return base.add_up(partial)


class VocabEmbedding(Embedding):
    """PEFT's layer around a vocabulary-parallel embedding: a rank looks up its own ids, in A as in the table."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with _deferred(self) as base:
            partial = super().forward(x, *args, **kwargs)
        return base.add_up(partial)

    def _embed(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        base: Any = self.get_base_layer()
        return base.lookup(input, weight)


@contextmanager
def _deferred(layer: LoraLayer) -> Iterator[Any]:
    base: Any = layer.get_base_layer()
    base.deferred = True
    try:
        yield base
    finally:
        base.deferred = False


@dataclass(frozen=True, eq=False)
class Part:
    """One matrix of an adapter, beside the layer `under`: `module` and `key` hold it, `entry` is its place in the plan."""

    under: nn.Module
    module: nn.Module
    key: str
    entry: TensorPlan
    first: Literal["zeros", "uniform", "normal"]  # values
    scale: float = 0.0  # the bound of "uniform", the deviation of "normal"

    @property
    def held(self) -> nn.Parameter:
        found = self.module._parameters[self.key]
        assert found is not None
        return found

    def put(self, piece: torch.Tensor, trainable: bool) -> None:
        """The rank's piece, on the device and in the dtype of the layer's weight, but in float32 for one of 16 bits, as PEFT does."""
        weight = self.under.get_parameter("weight")
        piece = piece.to(weight.device, torch.promote_types(weight.dtype, torch.float32)).contiguous()
        self.module._parameters[self.key] = nn.Parameter(piece, requires_grad=trainable)

    def drawn(self, seed: int, rank: int) -> torch.Tensor:
        """The rank's piece of its first values, which are drawn whole, in float32: the same at any number of ranks."""
        whole = torch.zeros(self.entry.shape)
        generator = torch.Generator().manual_seed(_number(f"{seed}/{self.entry.name}"))
        if self.first == "uniform":
            whole.uniform_(-self.scale, self.scale, generator=generator)
        elif self.first == "normal":
            whole.normal_(0, self.scale, generator=generator)
        return self.entry.partition.split(whole, rank).clone()


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def parts(path: str, layer: nn.Module, plan: Plan, init: bool | str) -> tuple[Part, Part]:
    """A and B of PEFT's `layer` at `path`, around a layer of a split model. UserError where it cannot be split right."""
    under = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
    if type(layer) not in (Linear, Embedding) or not isinstance(under, nn.Linear | Conv1D | nn.Embedding):
        found = f"{type(under).__name__} ({type(layer).__name__})"
        raise UserError(f"an adapter of {path} cannot be split", found, "target modules that are linear layers or embeddings")
    base = plan.tensor(f"{path}.weight")
    cut, out = base.partition, 0 if isinstance(under, nn.Linear) else 1  # the dim of W that is its output features
    assert isinstance(layer, LoraLayer)
    rank, uncut = layer.r[NAME], whole(cut.ranks)
    inputs, outputs = base.shape[1 - out], base.shape[out]
    of_a, of_b = uncut, uncut
    partial_a = partial_b = base.grad == "partial"
    if cut.dim == out:
        of_b, partial_a = Partition(0, cut.pieces), True
    elif cut.dim is not None:
        of_a, partial_b = Partition(1, cut.pieces), True
    table = isinstance(under, nn.Embedding)
    stems = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A", "lora_B")

    def part(stem: str, shape: tuple[int, int], cut: Partition, partial: bool, **first: Any) -> Part:
        name = f"{path}.{stem}.{NAME}" if table else f"{path}.{stem}.{NAME}.weight"
        module: Any = getattr(layer, stem) if table else getattr(layer, stem)[NAME]
        role: Any = "whole" if cut.is_whole else "column" if cut.dim == 0 else "row"
        reason = f"an adapter of {base.name}, cut with it"
        entry = TensorPlan(name, shape, cut, role, reason, "partial" if partial else "whole")
        return Part(under, module, NAME if table else "weight", entry, **first)

    starts = _starts(table, init, inputs, rank)
    return (
        part(stems[0], (rank, inputs), of_a, partial_a, **starts[0]),
        part(stems[1], (outputs, rank), of_b, partial_b, **starts[1]),
    )


def _starts(table: bool, init: bool | str, inputs: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """How PEFT draws A and B: together they are 0, so that training starts at the model (but for `init` False)."""
    zeros, normal = {"first": "zeros"}, {"first": "normal", "scale": 1.0}
    uniform = {"first": "uniform", "scale": max(inputs, 1) ** -0.5}
    if table:
        return (zeros if init else normal), normal
    if init == "gaussian":
        return {"first": "normal", "scale": 1 / rank}, zeros
    return uniform, zeros if init else {"first": "uniform", "scale": rank**-0.5}


def become_split(layer: Any) -> None:
    """Gives PEFT's layer the class that fits what lies underneath, in place."""
    base = layer.get_base_layer()
    if isinstance(base, ROW):
        layer.__class__ = RowLinear
    elif isinstance(base, VocabParallelEmbedding):
        layer.__class__ = VocabEmbedding
