"""Layer by layer, for models that fit on no single device: the split model runs, and beside each of its units the whole one on the same
input.

Every rank holds its part of the split model and, one at a time, one whole unit (in a wider dtype too, which says how far the whole unit
itself is from exact). At each unit the split model comes to, the whole one is read from the files and compared: weights, output, what was
decoded with the cache (cached.py), and, for one and the same gradient of the output, the gradients of the input and of every parameter.
Errors do not add up from layer to layer. The loss is compared on the split model's own logits. Not here: optimizer steps, which a small
copy covers (gate, verify --small).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..comm import collectives
from ..comm.group import Group
from ..parallel.head import sharded_logits
from ..parallel.inline_loss import computes_own
from ..parallel.state import state_of
from ..partition import Partition
from ..planning.inputs import TOKENS
from ..planning.plan import Plan
from . import cached, compare
from .compare import Comparison, Item
from .counts import count_items, counted, predicted
from .evidence import Copies, Evidence
from .exercise import Questions, call
from .precision import Float64, computing_in, tolerance
from .reference import SMALL_GRADIENT, digest
from .sliced import Sliced
from .trail import plan_cuts, slices
from .units import Run, WholeUnits, units, widened

INPUTS = "inputs of units"


def examine(model: PreTrainedModel, group: Group, plan: Plan, asked: Questions, wholes: WholeUnits) -> Evidence:
    """One forward pass of the split model over `asked.inputs`, with all of it compared on the way. A collective: all ranks must call it."""
    pass_ = _Pass(model, group, plan, wholes, asked.train)
    return pass_.run(asked)


@dataclass
class _Pass:
    model: PreTrainedModel
    group: Group
    plan: Plan
    wholes: WholeUnits
    train: bool
    items: list[Item] = field(default_factory=list)
    copies: Copies = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    decoded: dict[str, cached.Passed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = next(self.model.parameters()).dtype
        self.wide = torch.float32 if self.dtype.itemsize < 4 else torch.float64  # exact enough to say how far self.dtype is from exact
        self.cuts = plan_cuts(self.plan)
        self.sliced = Sliced(self.model, self.group)

    def run(self, asked: Questions) -> Evidence:
        asked = asked.to(self.model)
        ids = asked.inputs[TOKENS] if asked.inputs.keys() == {TOKENS} and asked.labels is not None else None
        counters = self.group.counters
        counters.reset()
        if ids is not None:  # the tokens that it decodes are the ones that it is asked about
            with computing_in(self.dtype):
                self.decoded = cached.decode(self.model, ids, self._phase)
        found = units(self.model)
        self.waiting = set(found)
        with ExitStack() as hooks, torch.no_grad(), computing_in(self.dtype):
            for name, unit in found.items():
                hooks.callback(unit.register_forward_hook(self._hook(name), with_kwargs=True).remove)
            hooks.callback(self._phase, "")
            self._phase("prefill")
            out = call(self.model, asked.inputs)
        never = Item("units", "bits", float(len(self.waiting)), 0.0, detail=f"{len(found)} compared one by one")
        if self.waiting:
            never = Item("units", "bits", float(len(self.waiting)), 0.0, detail=f"{min(self.waiting)} was never called by itself")
        if ids is not None and not computes_own(self.model):
            self._loss(out.logits, asked)
        if ids is not None:
            asked = replace(asked, prompt={TOKENS: ids[:, : -cached.NEW]})
        steps = 1 + cached.NEW if self.decoded else 0
        expected = predicted(self.plan, replace(asked, steps=steps, train=False), self.group, self.dtype.itemsize)
        self.items += [never, *count_items(expected, counted(self.group), self.group)]
        return Evidence(Comparison(tuple(self.items)), self.copies)

    def _phase(self, name: str) -> None:
        self.group.counters.phase = name

    def _loss(self, logits: torch.Tensor, asked: Questions) -> None:
        """The loss that the ranks compute from their slices, against transformers' own from the same logits in one piece."""
        assert asked.labels is not None
        with torch.no_grad(), computing_in(self.dtype), sharded_logits(self.model):
            mine = call(self.model, asked.inputs, labels=asked.labels).loss
        with computing_in(self.dtype):
            whole = self.wholes.loss(logits, asked.labels)
        with Float64():
            exact = self.wholes.loss(logits.double(), asked.labels)
        error, allowed = self._allowed(exact, whole)
        self.items.append(compare.item("loss", "loss", whole, mine, allowed, error))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(unit: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if name in self.waiting:  # not in the calls that the comparison itself makes
                self.waiting.discard(name)
                self.group.counters.phase = ""
                self._unit(name, unit, args, kwargs)
                self.group.counters.phase = "prefill"

        return hook

    def _unit(self, name: str, split: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        passed = self.decoded.get(name)
        at_once = passed.at_once(args, kwargs) if passed is not None else None
        with ExitStack() as loaded:
            unit = loaded.enter_context(self.wholes.loaded(name))
            self._weights(name, unit, split)
            whole = Run(unit, args, kwargs, self.train)
            decoded = Run(unit, at_once[0], at_once[1], False).output if at_once else None
            gradient = torch.randn(whole.output.shape, generator=torch.Generator().manual_seed(1)).to(whole.output)
            if self.train:
                whole.backward(gradient)
                double = copy.deepcopy(unit).to(self.wide)
            else:  # the unit itself goes first: both together may be too much
                loaded.close()
                double = loaded.enter_context(self.wholes.wide(name, self.wide))
            loaded.enter_context(Float64() if self.wide is torch.float64 else nullcontext())
            exact = Run(double, widened(args, self.wide), widened(kwargs, self.wide), self.train)
            truth = Run(double, widened(at_once[0], self.wide), widened(at_once[1], self.wide), False).output if at_once else None
            if self.train:
                exact.backward(gradient.to(self.wide))
        if whole.input is not None:
            self.copies[INPUTS, name, 0] = digest(whole.input)
        sliced = self.sliced
        mine = Run(split, *sliced.enter(name, args, kwargs), self.train)
        entered, left = (self.train and name in names for names in (sliced.inputs, sliced.outputs))
        cut = self._activation("outputs", name, whole.output, sliced.whole(mine.output, left), exact.output)
        if passed is not None and decoded is not None and truth is not None:
            self._activation("decoding", name, decoded[:, -cached.NEW :], passed.decoded, truth[:, -cached.NEW :])
        if not self.train:
            return
        mine.backward(sliced.own(gradient) if left else self._gradient(name, gradient, cut))
        state_of(self.model).copies.forget()
        sliced.forget()
        if whole.input is not None and mine.input is not None and exact.input is not None:
            found = sliced.whole(mine.input.grad, entered)
            self._activation("gradients of inputs", name, whole.input.grad, found, exact.input.grad)
        self._parameters(name, whole.gradients, mine.gradients, exact.gradients)

    def _weights(self, name: str, whole: nn.Module, split: nn.Module) -> None:
        def piece(path: str) -> torch.Tensor:
            return self.plan.tensor(f"{name}.{path}").partition.split(whole.get_parameter(path).detach(), self.group.rank)

        wrong = [path for path, p in split.named_parameters() if digest(p) != digest(piece(path))]
        self.items.append(
            Item("weights", name, float(len(wrong)), 0.0, detail=f"{name}.{wrong[0]} is not the whole model's" if wrong else "")
        )

    def _gradient(self, name: str, gradient: torch.Tensor, cut: Partition | None) -> torch.Tensor:
        """What this rank's part of the unit is sent back. Where f stands at its output, it adds up what all ranks send: one sends
        everything."""
        if cut is not None:
            return cut.split(gradient, self.group.rank)
        return torch.zeros_like(gradient) if self.group.rank and self._region(name, "output", "copy") else gradient

    def _region(self, name: str, place: str, op: str) -> bool:
        """Whether the plan has such a region at the unit's own border."""
        return any((r.module, r.place, r.op) == (name, place, op) for r in self.plan.regions)

    def _activation(
        self, kind: str, name: str, whole: torch.Tensor | None, mine: torch.Tensor | None, exact: torch.Tensor | None
    ) -> Partition | None:
        """Compares what lies between units: a whole tensor, a slice, or a partial sum that a later module adds up (here it is done for
        the comparison; that it is done in the model, the next unit's input shows). Returns the cut of a slice."""
        if whole is None or mine is None or exact is None:
            far = 0.0 if whole is mine is None else math.inf
            self.items.append(Item(kind, name, far, 0.0, detail="is missing on one side" if far else ""))
            return None
        error, allowed = self._allowed(exact, whole)
        if whole.shape != mine.shape:
            found, cut = self._slice(kind, name, whole, mine, allowed, error)
            self.items.append(found)
            return cut
        item = compare.item(kind, name, whole, mine, allowed, error)
        reduced = self._region(name, "input", "copy") if kind == "gradients of inputs" else self._region(name, "output", "reduce")
        if not reduced and any(not ok for ok in collectives.gather_objects(item.ok, self.group, "stream.equal")):
            total = collectives.all_reduce(mine.detach(), self.group, "stream.sum")
            added = compare.item(kind, name, whole, total, allowed, error)
            item = added if added.ok else item
        self.items.append(item)
        return None

    def _allowed(self, exact: torch.Tensor, whole: torch.Tensor, scale: float | None = None) -> tuple[float, float]:
        """(the whole unit's own error, the tolerance)."""
        error = compare.difference(exact, whole, scale)[0]
        return error, tolerance(self.dtype, None if self.dtype is torch.float64 else error)

    def _slice(
        self, kind: str, name: str, whole: torch.Tensor, mine: torch.Tensor, allowed: float, error: float
    ) -> tuple[Item, Partition | None]:
        best, found = Item(kind, name, math.inf, allowed, detail=f"shape {tuple(mine.shape)}, a cut that the plan does not have"), None
        for cut in self.cuts:
            for dim in range(whole.dim()):
                pieces = slices(whole, dim, cut)
                if pieces and pieces[self.group.rank].shape == mine.shape:
                    item = compare.item(kind, name, pieces[self.group.rank], mine, allowed, error, compare.largest(whole))
                    if found is None or item.difference < best.difference:
                        best, found = item, Partition(dim, cut.pieces)
        return best, found

    def _parameters(self, name: str, whole: dict, mine: dict, exact: dict) -> None:
        floor = SMALL_GRADIENT * max(map(compare.largest, whole.values()), default=0.0)
        for path in dict.fromkeys((*whole, *mine)):
            full = f"{name}.{path}"
            if path not in mine or path not in whole:
                self.items.append(Item("gradients", full, math.inf, 0.0, detail="is missing on one side"))
                continue
            scale = max(floor, compare.largest(whole[path]))
            error, allowed = self._allowed(exact[path], whole[path], scale)
            piece = self.plan.tensor(full).partition.split(whole[path], self.group.rank)
            self.items.append(compare.item("gradients", full, piece, mine[path], allowed, error, scale))
