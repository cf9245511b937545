"""Column- and row-parallel linear layers, for nn.Linear and for transformers' Conv1D (the same with its weight transposed).

    layer     weight of nn.Linear     weight of Conv1D       input     output                            all-reduces forward / backward
    column    [out/R, in]  dim 0      [in, out/R]  dim 1     whole     slice of the features             0 / 1 (f, of the input's gradient)
    row       [out, in/R]  dim 1      [in/R, out]  dim 0     slice     whole (partial sums, added by g)  1 / 0

A column-parallel layer feeds a row-parallel one with the same cut, and between them only work that treats each feature by itself
(Shoeybi et al., arXiv:1909.08053, section 3). The row-parallel bias belongs to the sum, so it is added once, after g: added on each rank
before it, it would count R times; divided by R, the output would be right and its gradient 1/R of what it should be.

Parameters keep the names of the unsplit layers; `in_features` and `out_features` are the rank's own. Cuts may be uneven, and a rank may
hold nothing. Not here: which layer is cut how (the plan), and how gradients of copied ranges are summed (gradients.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm import collectives, regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition, whole
from . import overlap
from .gradients import sum_copies
from .pending import Due, Pending
from .prompt_products import Linear, linear

if TYPE_CHECKING:
    from .sequence import Sequence

OUTPUT_DIM: dict[type, int] = {nn.Linear: 0, Linear: 0, Conv1D: 1}
"""The layers that can be cut, and the dim of their weight that is the output features."""


class ColumnParallelLinear(nn.Linear):
    """Y_r = f(X) W_rᵀ + b_r: rank r makes its own output features. X is whole, Y_r the rank's slice.

    Made from the whole sizes (rank 0 gives the seed, so that the layer starts the same at any number of ranks) or by `from_linear`. With
    `copy_input=False` there is no f: the caller places one for all the layers that share X. Copied ranges get the sum of their gradients.
    """

    group: Group
    name: str
    copy_input: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        partition: Partition,
        group: Group,
        bias: bool = True,
        *,
        copy_input: bool = True,
        name: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = _draw(in_features, out_features, bias, group, name, device, dtype)
        _init_from(self, layer, partition, group, name, 0, partition)
        self.copy_input = copy_input
        _sum_copies(self, partition)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, partition: Partition, group: Group, *, copy_input: bool = True, name: str = "linear"
    ) -> ColumnParallelLinear:
        """The rank's slice of `linear`, which is not changed. `partition` cuts its output features, dim 0 of the weight."""
        layer = cls.__new__(cls)
        _init_from(layer, linear, partition, group, name, 0, partition)
        layer.copy_input = copy_input
        _sum_copies(layer, partition)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = regions.copy_to(input, self.group, self.name) if self.copy_input else input
        return overlap.product(self, x, lambda x: linear(self, x, self.bias))


class RowParallelLinear(nn.Linear):
    """Y = g(X_r W_rᵀ) + b: rank r multiplies its own input features and g adds the products. X_r is the rank's slice, Y whole."""

    group: Group
    name: str | None
    sequence: Sequence | None = None  # where the sum stays scattered along the sequence
    due: Due | None = None  # where it waits for others
    deferred: bool = False  # forward leaves partial sums: whoever calls adds its own and then calls add_up (lora.py)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        partition: Partition,
        group: Group,
        bias: bool = True,
        *,
        name: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = _draw(in_features, out_features, bias, group, name, device, dtype)
        _init_from(self, layer, partition, group, name, 1, whole(group.size))

    @classmethod
    def from_linear(cls, linear: nn.Linear, partition: Partition, group: Group, *, name: str = "linear") -> RowParallelLinear:
        """The rank's slice of `linear`, which is not changed. `partition` cuts its input features, dim 1 of the weight."""
        layer = cls.__new__(cls)
        _init_from(layer, linear, partition, group, name, 1, whole(group.size))
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        partial = linear(self, taken(self, input), None)
        return partial if self.deferred else self.add_up(partial)

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The layer's output from the ranks' partial sums, which may be changed in place."""
        return _add_up(self, partial)


class ColumnParallelConv1D(Conv1D):
    """ColumnParallelLinear with the weight stored [in, out]; only in split models, whose plan places f."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return overlap.product(self, x, super().forward)


class RowParallelConv1D(Conv1D):
    """RowParallelLinear with the weight stored [in, out]."""

    group: Group
    name: str | None
    sequence: Sequence | None = None
    due: Due | None = None
    deferred: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = taken(self, x) @ self.weight
        return partial if self.deferred else self.add_up(partial)

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """As RowParallelLinear's."""
        return _add_up(self, partial)


def taken(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """What a row-parallel layer takes of its input: nothing where it has no features of its own. A rank without heads then has a copy of
    another's, which counts there."""
    weight = layer._parameters.get("weight")  # None: int8 numbers, of which there are some (int8.py)
    return input if weight is None or weight.numel() else input[..., :0]


def _add_up(layer: RowParallelLinear | RowParallelConv1D, partial: torch.Tensor) -> torch.Tensor:
    """g, then the bias once. Both in place: the product has no other reader, and its backward pass does not need it."""
    bias, name, sequence = layer.bias, layer.name, layer.sequence
    if layer.due is not None:
        return Pending(partial, bias, layer.due)  # type: ignore[return-value]
    if name is None:
        return partial
    if sequence is not None and sequence.active:
        return _scatter_then_bias(partial, bias, sequence, name)
    y = regions.reduce_from(partial, layer.group, name, inplace=True)
    return y if bias is None else y.add_(bias)


def _scatter_then_bias(partial: torch.Tensor, bias: torch.Tensor | None, sequence: Sequence, name: str) -> torch.Tensor:
    """The rank's slice of the sequence of the sum, then the bias: each rank sees its own positions, so the bias's gradient is a part."""
    y = sequence.scatter(partial, name)
    return y if bias is None else y + bias


def make_column(layer: nn.Module, group: Group, name: str) -> None:
    """Turns a layer whose parameters are the rank's already into a column-parallel one, in place, without an f of its own."""
    become(layer, ColumnParallelLinear if isinstance(layer, nn.Linear) else ColumnParallelConv1D, group, name, copy_input=False)


def make_row(layer: nn.Module, group: Group, name: str | None, sequence: Sequence | None = None, due: Due | None = None) -> None:
    """Turns a layer whose parameters are the rank's already into a row-parallel one, in place. `name` is the call site of g.

    None: its partial sums are added elsewhere, with others; with `due` its bias too, or what else is whole."""
    become(layer, RowParallelLinear if isinstance(layer, nn.Linear) else RowParallelConv1D, group, name, sequence=sequence, due=due)


def become(layer: nn.Module, cls: type[nn.Module], group: Group, name: str | None, **attributes: Any) -> None:
    """A layer changes its class and sizes, and keeps its parameters, hooks and places in the model."""
    sizes = ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("nx", "nf")
    attributes |= dict(zip(sizes, layer.get_parameter("weight").shape, strict=True))
    layer.__class__ = cls
    for key, value in {**attributes, "group": group, "name": name}.items():
        setattr(layer, key, value)


def _draw(
    in_features: int,
    out_features: int,
    bias: bool,
    group: Group,
    name: str,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """The whole layer with nn.Linear's distribution, U(-1/√in, 1/√in), the same on every rank."""
    layer = nn.Linear(in_features, out_features, bias, "meta", dtype).to_empty(device=device or group.device)
    seed = int(torch.randint(2**31, ())) if group.rank == 0 else None
    seed = collectives.broadcast_object(seed, group, f"{name}.seed")
    if layer.weight.is_meta:
        return layer
    draw, bound = torch.Generator(layer.weight.device).manual_seed(seed), max(in_features, 1) ** -0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=draw)
    return layer


def _init_from(layer: Any, linear: nn.Linear, partition: Partition, group: Group, name: str, dim: int, bias: Partition) -> None:
    """Makes `layer` the rank's slice of `linear`: its weight cut along `dim` by `partition`, its bias by `bias`."""
    size = linear.weight.shape[dim]
    if (partition.dim, partition.size, partition.ranks) != (dim, size, group.size):
        found = f"{partition.size} indices of dim {partition.dim} for {partition.ranks} ranks"
        raise UserError(f"{name}: the partition does not fit", found, f"{size} indices of dim {dim} for {group.size} ranks")
    nn.Module.__init__(layer)
    layer.weight = _slice(linear.weight, partition, group)
    layer.bias = None if linear.bias is None else _slice(linear.bias, bias, group)
    layer.out_features, layer.in_features = layer.weight.shape
    layer.group, layer.name = group, name
    layer.train(linear.training)


def _sum_copies(layer: ColumnParallelLinear, partition: Partition) -> None:
    for key, parameter in layer.named_parameters():
        sum_copies(parameter, partition, layer.group, f"{layer.name}.{key}")


def _slice(parameter: torch.Tensor, partition: Partition, group: Group) -> nn.Parameter:
    piece = partition.split(parameter.detach(), group.rank).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(piece, parameter.requires_grad)
