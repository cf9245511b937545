"""Comparing two results of one computation: the largest difference, what is allowed, and what kind of difference it is.

Differences are relative to the largest element of the whole model's result, never to each element: an element near zero carries the
rounding of its neighbours. What comes out is data (`Item`, `Comparison`); the words are in report.py, the search for the place in trail.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from .precision import SUSPICION


@dataclass(frozen=True)
class Item:
    """One compared thing. `kind` groups items for the reader ("logits", "gradients", ...); `name` is the tensor.

    `difference` and `tolerance` are relative to `scale`, the largest absolute element of the whole model's tensor. `own_error` is the whole
    model's own relative error against float64, None where it was not measured. `detail` says in words what numbers cannot.
    """

    kind: str
    name: str
    difference: float
    tolerance: float
    scale: float = 1.0
    own_error: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance < math.inf  # False for NaN

    @property
    def verdict(self) -> str:
        """ "equal", "rounding" or "bug": beyond the tolerance, but of the size that the whole model's own rounding has, or not; "nothing"
        where the whole model's side has no numbers, so that nothing can be said."""
        if self.ok:
            return "equal"
        if self.detail.startswith(NO_NUMBERS):
            return "nothing"
        if self.own_error and self.difference <= SUSPICION * self.own_error:
            return "rounding"
        return "bug"


@dataclass(frozen=True)
class Comparison:
    """All items in the order in which they were compared."""

    items: tuple[Item, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return bool(self.items) and all(i.ok for i in self.items)

    def bad(self, kind: str | None = None) -> tuple[Item, ...]:
        return tuple(i for i in self.items if not i.ok and kind in (None, i.kind))

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(i.kind for i in self.items))

    def of(self, kind: str) -> tuple[Item, ...]:
        return tuple(i for i in self.items if i.kind == kind)

    def worst(self, kind: str | None = None) -> Item:
        """The item that comes closest to its tolerance or is furthest beyond it."""
        return max((i for i in self.items if kind in (None, i.kind)), key=lambda i: _excess(i))


def _excess(item: Item) -> float:
    if math.isnan(item.difference):
        return math.inf
    if item.tolerance == 0:
        return math.inf if item.difference else 0.0
    return item.difference / item.tolerance


def difference(whole: torch.Tensor, split: torch.Tensor, scale: float | None = None) -> tuple[float, float]:
    """(largest difference relative to the scale, scale). The scale is the largest element of `whole`, and at least `scale`.

    Infinite where shapes differ, and where one of the two has a NaN or an infinity that the other has not. Where both have the same there
    is no distance between them; whether that says anything is not asked here (`unfit`).
    """
    if whole.shape != split.shape:
        return math.inf, 1.0
    a, b = whole.detach(), split.detach().to(whole.device)
    gap, size = largest(a - b), largest(a)
    if not math.isfinite(gap + size):
        same = (a == b) | (a.isnan() & b.isnan())
        gap, size = largest(torch.where(same, 0, a - b)), largest(a[a.isfinite()])
    size = max(size, scale or 0.0) or 1.0
    return (gap / size if math.isfinite(gap) else math.inf), size


def largest(x: torch.Tensor) -> float:
    """The largest absolute element; 0 where there is none. NaN where one is NaN."""
    if x.numel() == 0:
        return 0.0
    low, high = x.detach().aminmax()
    return max(abs(float(low)), abs(float(high)))


def item(
    kind: str,
    name: str,
    whole: torch.Tensor,
    split: torch.Tensor,
    tolerance: float,
    own_error: float | None = None,
    scale: float | None = None,
) -> Item:
    """Compares two tensors. `scale` is a lower bound for the scale, for tensors whose right value is zero (the gradient of a key's
    bias). What is no number on either side is refused, also where it is none on both (`unfit`)."""
    far, size = difference(whole, split, scale)
    if whole.shape != split.shape:
        return Item(kind, name, far, tolerance, size, own_error, f"shape {tuple(split.shape)} instead of {tuple(whole.shape)}")
    if said := unfit(whole, split, masked=kind in MASKED):
        return Item(kind, name, math.inf, tolerance, size, own_error, said)
    return Item(kind, name, far, tolerance, size, own_error)


NO_NUMBERS = "the whole model gives"
MASKED = ("logits", "outputs", "decoding")  # what a model may rule out by -inf


def unfit(whole: torch.Tensor, split: torch.Tensor | None = None, masked: bool = False) -> str:
    """In words, what of a result is no number; "" where it can be compared. Equal NaN or infinities prove nothing: whatever went wrong
    before them is hidden. `masked`: -inf stands for what is ruled out, and is compared by its places, where something finite is left."""
    bad = [_strange(x.detach(), masked) for x in (whole, split) if x is not None]
    for side, found in zip((NO_NUMBERS, "the split model gives"), bad, strict=False):
        if found.any():
            return f"{side} {int(found.sum())} of {found.numel()} entries that are no finite number"
    return ""


def _strange(x: torch.Tensor, masked: bool) -> torch.Tensor:
    """Entries that are NaN or infinite; -inf counts only where `masked` is not set, or nothing else is there."""
    if masked and bool(x.isfinite().any()):
        return ~(x.isfinite() | x.isneginf())
    return ~x.isfinite()


def tokens(whole: tuple[int, ...], split: tuple[int, ...], logits: torch.Tensor, gap: float) -> Item:
    """Greedy tokens. `logits` (steps, V) are the whole model's, `gap` the absolute difference of logits that counts as equal.

    Where the two differ first, the margin between the whole model's best two decides: two logits that can each be off by `gap` may change
    places when they lie within 2 * gap of each other; then it is a tie, else a bug.
    """
    at = next((i for i, (a, b) in enumerate(zip(whole, split, strict=False)) if a != b), None)
    name = f"{len(whole)} greedy tokens"
    if at is None and len(whole) == len(split):
        return Item("tokens", name, 0.0, 0.0, detail=name)
    if at is None:
        return Item("tokens", name, math.inf, 0.0, detail=f"{len(split)} tokens instead of {len(whole)}")
    best = logits[at].double().topk(2).values
    margin = float(best[0] - best[1])
    tie = ": a tie within rounding" if margin <= 2 * gap else ""
    text = f"token {at}: {split[at]} instead of {whole[at]}, the whole model's best two are {margin:.2g} apart{tie}"
    return Item("tokens", name, margin, 2 * gap, detail=text)


def merge(per_rank: Iterable[Comparison]) -> Comparison:
    """One comparison from those of all ranks: of each item the worst, with the rank named where they disagree."""
    found: dict[tuple[str, str], Item] = {}
    for rank, comparison in enumerate(per_rank):
        for one in comparison.items:
            key = (one.kind, one.name)
            if key not in found or _excess(one) > _excess(found[key]):
                found[key] = one if one.ok else _named(one, rank)
    return Comparison(tuple(found.values()))


def _named(one: Item, rank: int) -> Item:
    return replace(one, detail="; ".join(filter(None, (one.detail, f"on rank {rank}"))))
