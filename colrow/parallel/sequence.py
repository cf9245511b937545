"""Sequence parallelism: between its split parts a block works on a slice of the sequence, not on all of it on every rank.

Tensor parallelism keeps the residual stream whole: each rank does the same norms, dropout and additions and keeps the same activations. But
they treat each position by itself, and an all-reduce is a reduce-scatter and an all-gather: so the sum behind a row-parallel layer is left
scattered along the sequence, and gathered again before the next split work (Korthikanti et al., arXiv:2205.05198, section 4.2.2). The same
bytes on a ring, activations of norms and residuals divided by the ranks. It is not context parallelism: attention sees every position.

It is derived from the plan, no model is known by name. Of the regions of the residual stream's shape inside the blocks, each `reduce`
becomes a reduce-scatter and each `copy` an all-gather. The stream is cut where it enters the first block, and whole again where the plan's
copy behind the last block stands, or at the last block's output. Parameters that then meet slices (norms, row biases) have parts of their
gradient on each rank: which ones is seen by running the split model once on meta tensors, with and without; that run also refuses models in
which something else looks along the sequence. Slices may be uneven or empty. Without gradients nothing is cut: decoding stays as it was.

`again`: what is gathered is not kept for the backward pass but gathered once more there (per block: 4 all-gathers and 2 reduce-scatters
backward instead of 2 and 2), and so no activation of the block outside attention and MLP is whole in memory. Not here: attention over
slices, expert parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..comm import background, collectives, regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import balance
from ..planning import sequence as planning
from ..planning.models import routed
from ..planning.plan import Plan
from ..planning.sequence import Cut
from . import overlap
from .borders import on_input, on_output

Mode = Literal["off", "again", "keep"]
DIM = 1  # of [B, S, hidden]
REMEMBERED = 4  # gathered tensors that are looked for among those saved for the backward pass


@dataclass(eq=False)
class Sequence:
    """How a model's stream is cut."""

    group: Group
    cut: Cut
    shared: frozenset[str] = frozenset()  # gathers whose result other modules are given too, although nothing keeps it for them
    routed: bool = False  # experts get no gradient, not even 0, on a rank without tokens: its sums would be out of step
    always: bool = False  # also where no gradient is wanted: for the run on meta tensors
    batch: int = 0  # sequences, and
    sizes: list[int] = field(default_factory=list)  # of the slices, in the pass that runs now
    _known: list[_Gathered] = field(default_factory=list)
    _deferred: dict[str, overlap.Deferred] = field(default_factory=dict)  # of the last pass

    @property
    def mode(self) -> Mode:
        return "again" if self.cut.again else "keep"

    @property
    def active(self) -> bool:
        return self.always or torch.is_grad_enabled()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Whole -> the rank's slice. Backward: all-gather."""
        if not self.active:
            return x
        self.batch = x.shape[0]
        self.sizes = [stop - start for start, stop in balance(x.shape[DIM], self.group.size)]
        if self.routed and min(self.sizes) == 0:
            what = f"a sequence of {sum(self.sizes)} positions leaves one of {self.group.size} ranks without any, and experts need some"
            raise UserError(what, works=f"at least {self.group.size} positions")
        return regions.scatter_to(x, self.group, f"{self.cut.first}.input.sequence", DIM, self.sizes)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Slice -> whole, for work that every rank does alike. Backward: the own slice."""
        return regions.gather_from(x, self.group, f"{self.cut.last}.output.sequence", DIM, self.sizes) if self.active else x

    def scatter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Partial sums -> the slice of their sum. Backward: all-gather."""
        if not self.active:
            return regions.reduce_from(x, self.group, name)
        mine = regions.reduce_scatter_sequence(self._apart(x), self.group, name, DIM, self.sizes)
        return mine if x.dim() > 2 else mine.flatten(0, 1)

    def gather(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Slice -> whole, for split work. Backward: reduce-scatter. One for all consumers that are given the same tensor."""
        if not self.active:
            return x
        for known in self._known:
            whole = known.whole()
            if known.slice() is x and whole is not None and known.version == x._version:
                return whole
        whole = self._gathered(x, name)
        kept = (lambda: whole) if name in self.shared else weakref.ref(whole)
        made = _Gathered(weakref.ref(x), self._apart(x.detach()), kept, x._version, whole._version, name, list(self.sizes))
        self._known = [*self._known[1 - REMEMBERED :], made]
        return whole

    def _gathered(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Its backward pass runs beside products where that gains time."""
        apart = self._apart(x)
        if self.group.transport.worker is None or not (x.requires_grad and torch.is_grad_enabled()):
            whole = regions.gather_sequence(apart, self.group, name, DIM, self.sizes)
            return whole if x.dim() > 2 else whole.flatten(0, 1)
        whole, self._deferred[name] = overlap.gather(apart, self.group, name, DIM, self.sizes, self._deferred.get(name))
        whole = whole if x.dim() > 2 else whole.flatten(0, 1)
        overlap.belongs(whole, self._deferred[name])
        return whole

    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, hidden], also where the model's code has put the rows of all sequences together (OPT)."""
        return x if x.dim() > 2 else x.unflatten(0, (self.batch, x.shape[0] // self.batch))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within, gathered tensors are saved for the backward pass as their slices."""
        if not self.cut.again:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        for known in self._known:
            whole = known.whole()
            if whole is not None and _same_memory(whole, tensor) and whole._version == known.gathered:
                return known.promise(self.group), tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def forget(self) -> None:
        self._known.clear()


@dataclass(eq=False)
class _Gathered:
    """A gathered tensor of the pass that runs now."""

    slice: Callable[[], torch.Tensor | None]
    mine: torch.Tensor  # the slice's numbers
    whole: Callable[[], torch.Tensor | None]
    version: int  # of the slice
    gathered: int  # version of the whole
    name: str
    sizes: list[int]
    promised: _Promise | None = None

    def promise(self, group: Group) -> _Promise:
        if self.promised is None:
            self.promised = _Promise(self.mine, group, f"{self.name}.again", self.sizes)
        self.promised.uses += 1
        return self.promised


@dataclass(eq=False)
class _Promise:
    """The slice of what was gathered; it is gathered again at the first use in the backward pass, at once (`whole`) or beside what is
    computed (`begin`), and let go of after the last."""

    mine: torch.Tensor
    group: Group
    name: str
    sizes: list[int]
    uses: int = 0
    used: int = 0
    found: Callable[[], torch.Tensor] | None = None

    def begin(self) -> Callable[[], torch.Tensor]:
        """What waits for it."""
        if self.found is None:
            self.found = background.begin(lambda: collectives.all_gather(self.mine, self.group, self.name, DIM, self.sizes), self.group)
        return self.found

    def whole(self) -> torch.Tensor:
        whole, self.used = self.begin()(), self.used + 1
        if self.used == self.uses:
            self.found, self.used = None, 0
        return whole


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return b.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata  # also on meta, where every address is 0


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    promise, *view = saved
    if overlap.postponed(promise.begin, lambda: promise.whole().as_strided(*view)):
        return promise.mine  # in place of it
    return promise.whole().as_strided(*view)


def make(model: nn.Module, plan: Plan, group: Group, mode: Mode) -> Sequence | None:
    """How the plan's stream is cut; None for "off" or one rank. UserError where it cannot be."""
    if mode not in ("off", "again", "keep"):
        raise UserError("no such mode of sequence parallelism", mode, "again, keep or off")
    if mode == "off" or group.size == 1:
        return None
    name = type(model).__name__
    works = "training without sequence parallelism"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UserError("sequence parallelism is for decoders and encoders alone", name, works)
    cut = planning.cut(plan, mode == "again")
    if cut is None:
        raise UserError("sequence parallelism needs blocks whose attention and MLP are split", name, works)
    shared = frozenset(region.shares for region in plan.regions if region.op == "copy" and region.shares)
    return Sequence(group, cut, shared, bool(routed(model)))


def install(model: nn.Module, sequence: Sequence) -> None:
    """The borders of the stream, and of each pass."""
    first = model.get_submodule(sequence.cut.first)
    first.register_forward_pre_hook(on_input(first, "", sequence.enter), with_kwargs=True)
    if sequence.cut.last:
        model.get_submodule(sequence.cut.last).register_forward_hook(on_output("", sequence.leave))
    running: list[Any] = []

    def before(*_: Any) -> None:
        sequence.forget()
        if torch.is_grad_enabled():
            running.append(sequence.saving())
            running[-1].__enter__()

    def after(*_: Any) -> None:
        sequence.forget()
        while running:
            running.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)
