"""Plan: how one model is split, as data. Enough to split it without deriving anything again.

A plan has five parts, each entry with its reason in words:

* `tensors`    one per parameter: its partition, its role, and whether its gradient arrives whole or as a part to be summed;
* `regions`    where a tensor changes its state between ranks: f, g, a gather at a module's input or output, a mean or a row inside it;
* `edits`      integers of modules (head counts, split sizes) that differ on a rank;
* `attention`  for each attention call, the query and KV heads of every rank;
* `buffers`    buffers that are cut.

It is made by `choose.py`, checked by `replay.py`, applied by `parallel/build.py`, priced by `cost.py`. It knows no weights and no process
groups, and it is written to and read from JSON without loss. `Plan.check` refuses a plan that does not fit the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import UserError
from ..partition import Partition, lowest_alike
from .lengths import Length

T = TypeVar("T")

Role = Literal["column", "row", "vocab", "split", "entry", "whole"]
"""column: cut along output features. row: cut along input features, its output is a partial sum. vocab: an embedding cut along its rows.
split: any other cut tensor (per-head constants, norms over a split axis). entry: of a module in a list that stands for one index of a cut
axis (a norm for each head), all of it on the ranks that have the index. whole: every rank holds all of it."""

RegionOp = Literal["copy", "reduce", "gather", "slice", "hold", "mean", "row", "once"]
"""copy: Megatron's f (identity forward, all-reduce of the gradient backward). reduce: g (all-reduce forward, identity backward).
gather: slices put side by side along `dim` (all-gather forward, the rank's slice of the gradient backward).
slice: of a constant that the model's code makes for all heads, the rank's own part (no communication). `partition` then cuts a dim, or
stretches of its own size that the dim consists of (batch and heads in one dim).
hold: a partial sum that is added to others, or to what is whole, before all of it is reduced: it waits for the reduction that `shares`
names (no communication of its own).
mean: `arg` is the number of a mean, taken inside the module's forward, over a split dim: that of a norm. The ranks' sums are added and
divided by the whole size, forward and backward. `partition` cuts the dim, counted from the end.
row: the module's own code reads single rows of the table `arg` (a parameter's full name), which `partition` cuts along its rows; the ranks'
sum of them is whole (all-reduce forward, identity backward).
once: a whole value that is added to partial sums: from here on the first rank alone has it, and the others zeros (no communication)."""

VERSION = 1


@dataclass(frozen=True)
class TensorPlan:
    """One parameter. `shape` is that of the whole tensor. `aliases` are the other names of a tied parameter."""

    name: str
    shape: tuple[int, ...]
    partition: Partition
    role: Role
    reason: str
    grad: Literal["whole", "partial"] = "whole"
    """State of the gradient of what the rank holds. `partial`: every rank has a part of it and the parts are summed over all ranks as they
    arrive. Copies in a partition whose ranges overlap are summed over the ranks that hold them, whatever this field says."""
    aliases: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    """The ops the cut axis passes through, from where it is made to where it is summed away: `module: op`."""
    once: bool = False
    """It is added to partial sums (a bias inside experts), so the first rank alone uses it, and the others use zeros: what every rank adds
    counts once per rank. Its gradient is `partial`."""


@dataclass(frozen=True)
class Region:
    """A change of state at a module's border, or of a mean inside.

    `place` is "input" or "output"; `arg` names the input (a parameter name of the module's forward) or the output ("0" for a tensor or the
    first of a tuple, a field name such as "logits" for a dict). `shape` is the shape of the WHOLE tensor with "B" and "S" for batch and
    sequence length, "E" for that of an encoder with a decoder behind it, and what the model makes of them (lengths.py), so that bytes can
    be predicted. `dtype` "float32" means that, and "" the model's dtype.
    """

    module: str
    place: Literal["input", "output", "inside"]
    arg: str
    op: RegionOp
    shape: tuple[Length, ...]
    reason: str
    partition: Partition | None = None  # gather: the cut that is undone; slice, mean, row: that of the dim; else None
    ranks: tuple[tuple[int, ...], ...] = ()  # the groups that reduce separately; () = all ranks together
    dtype: str = ""
    shares: str = ""  # copy: the call site of an earlier f of the same tensor, which serves this border too. hold: that of the reduction
    calls: int = 1  # how often the module runs in one pass on a tensor of this shape (layers that share their weights)
    further: tuple[tuple[Length, ...], ...] = ()  # the shapes of its other runs (a layer's MLP for its tokens and for global ones)
    scored: bool = True
    """Whether a gradient of the logits comes here. False: of other outputs only (the last layer of a picture tower that nothing reads)."""
    trained: bool = True
    """Whether a gradient comes here at all. False: what changes its state is made of parameters that the model's code freezes."""
    kept: bool = True
    """copy: whether what comes behind may keep this very tensor for the backward pass. False: only multiples of it by numbers."""
    made: str = ""
    """gather: the module at whose output the slices first are what is gathered. "": none but the model itself."""
    steps: bool = True
    """Whether every step of decoding with the cache comes here. False: what changes its state is made of no token (an encoder's input, a
    picture), so it is made once."""

    @property
    def name(self) -> str:
        """The call site's name in counters, headers and traces."""
        name = f"{self.module or 'model'}.{self.op if self.op in ('mean', 'row') else self.place}"
        return name if self.arg in ("", "0") else f"{name}.{self.arg}"


@dataclass(frozen=True)
class Edit:
    """An integer of a module that differs on a rank: `attribute` may be dotted ("config.num_attention_heads": then the module gets a copy
    of its config). `values[rank]`; `whole` is the value in the unsplit model, checked before it is replaced."""

    module: str
    attribute: str
    whole: int
    values: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Attention:
    """The heads of one attention module. `query` and `kv` are partitions of head numbers (dim 0); query head h uses KV head `kv_of[h]`."""

    module: str
    query: Partition
    kv: Partition
    kv_of: tuple[int, ...]
    head_dim: int
    reason: str

    def local_map(self, rank: int) -> tuple[int, ...]:
        """For each local query head in order, the local index of its KV head."""
        heads = (h for start, stop in self.query.pieces[rank] for h in range(start, stop))
        local = tuple(self.kv.local_offset(rank, self.kv_of[h]) for h in heads)
        if any(i is None for i in local):
            raise ValueError(f"{self.module}: rank {rank} holds a query head without its KV head")
        return tuple(i for i in local if i is not None)


@dataclass(frozen=True)
class BufferPlan:
    """A buffer that is cut like a parameter, saved with the model (BART's bias of the logits) or not (multipliers that its code makes for
    features). All others are whole."""

    name: str
    shape: tuple[int, ...]
    partition: Partition
    reason: str


@dataclass(frozen=True)
class Note:
    """Something that stays whole or costs more than it could, and why: names the module and the op."""

    subject: str
    text: str


@dataclass(frozen=True)
class Plan:
    model_type: str
    architecture: str  # class name of the transformers model
    ranks: int
    tensors: dict[str, TensorPlan]
    regions: tuple[Region, ...] = ()
    edits: tuple[Edit, ...] = ()
    attention: tuple[Attention, ...] = ()
    buffers: tuple[BufferPlan, ...] = ()
    inputs: tuple[str, ...] = ()  # what the model was called with when the plan was derived
    tokens: int = 0  # a row has to have so many for all parts of the model to be reached; 0: any will do
    notes: tuple[Note, ...] = ()
    weights: tuple[float, ...] = ()  # of unequal devices; () = equal
    config_digest: str = ""  # of the config the plan was made for
    version: int = field(default=VERSION)

    def tensor(self, name: str) -> TensorPlan:
        """The entry of a parameter by its name or by an alias of a tied one. UserError where there is none."""
        if name in self.tensors:
            return self.tensors[name]
        for entry in self.tensors.values():
            if name in entry.aliases:
                return entry
        near = [n for n in self.tensors if name.split(".")[-2:] == n.split(".")[-2:]][:3]
        raise UserError("the model has no parameter of this name", name, ", ".join(near) or "colrow plan MODEL lists them")

    @functools.cached_property
    def like(self) -> tuple[int, ...]:
        """For each rank the lowest one that holds as much of every parameter and has as many heads as it has."""
        cuts = {t.partition for t in self.tensors.values()} | {cut for a in self.attention for cut in (a.query, a.kv)}
        sizes = [[cut.local_size(rank) for rank in range(self.ranks)] for cut in cuts if not cut.is_whole]
        return lowest_alike(zip(*sizes, strict=True)) if sizes else (0,) * self.ranks

    def each(self, of: Callable[[int], T]) -> list[T]:
        """`of` each rank, something that depends on how much it holds: asked once of ranks that hold as much."""
        found = {rank: of(rank) for rank in set(self.like)}
        return [found[rank] for rank in self.like]

    def names(self) -> Iterator[tuple[str, TensorPlan]]:
        """Every name, aliases included, with its entry."""
        for entry in self.tensors.values():
            for name in (entry.name, *entry.aliases):
                yield name, entry

    def to_json(self) -> str:
        data = asdict(self) | {"tensors": [_tensor_json(t) for t in self.tensors.values()]}
        for part in ("regions", "attention", "buffers"):
            data[part] = [_with_partitions(x) for x in getattr(self, part)]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """UserError where the text is not a plan of this version."""
        try:
            data: dict[str, Any] = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError(f"a {type(data).__name__} instead of an object")
            version = data.get("version")
            if version != VERSION:
                raise UserError("the plan was written in another format", f"version {version}", f"a plan of version {VERSION}")
            return _plan_from(data)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise UserError("the file is not a plan of colrow", f"{type(e).__name__}: {e}", "colrow plan MODEL --tp N --json F") from e

    def why(self, name: str) -> str:
        """The reason of one parameter in words (see why.py)."""
        from .why import explain

        return explain(self, name)

    def __str__(self) -> str:
        from .why import table

        return table(self)


def _with_partitions(entry: Any) -> dict[str, Any]:
    return {k: v.to_json() if isinstance(v, Partition) else v for k, v in vars(entry).items()}


def _tensor_json(entry: TensorPlan) -> dict[str, Any]:
    return _with_partitions(entry)


def _read(cls: type, data: dict[str, Any]) -> Any:
    """One dataclass from JSON: lists become tuples, partitions are read."""
    values = {}
    for key, value in data.items():
        if isinstance(value, dict) and "pieces" in value:
            value = Partition.from_json(value)
        values[key] = _tuples(value)
    return cls(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _plan_from(data: dict[str, Any]) -> Plan:
    tensors = [_read(TensorPlan, t) for t in data["tensors"]]
    return Plan(
        model_type=data["model_type"],
        architecture=data["architecture"],
        ranks=data["ranks"],
        tensors={t.name: t for t in tensors},
        regions=tuple(_read(Region, r) for r in data["regions"]),
        edits=tuple(_read(Edit, e) for e in data["edits"]),
        attention=tuple(_read(Attention, a) for a in data["attention"]),
        buffers=tuple(_read(BufferPlan, b) for b in data.get("buffers", ())),
        inputs=tuple(data.get("inputs", ())),
        tokens=data.get("tokens", 0),
        notes=tuple(_read(Note, n) for n in data["notes"]),
        weights=tuple(data["weights"]),
        config_digest=data["config_digest"],
    )
