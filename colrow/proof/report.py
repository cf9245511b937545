"""The proof in words: a table of what was compared, then one line that says `equal` or where the first difference is and of what kind.

Plain text of 100 columns for a terminal, more where a name needs them; colours where the terminal has them are rich's. Not here: HTML
(colrow/report).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .compare import Comparison, Item
from .trail import Parting

WIDTH = 100
UNITS = ("outputs", "decoding", "gradients of inputs", "gradients")  # what is compared layer by layer
FORWARD = ("logits", "loss", "decoding", "tokens")
COARSE = 0.01  # of the largest element: where more than this is allowed, "equal" says little and a line says so


@dataclass(frozen=True)
class Report:
    """`title`: what was compared. `finding` is empty where all is equal. `notes`: memory, time, what was not measured. `finer`: a dtype
    that would show more."""

    title: str
    comparison: Comparison
    finding: str
    notes: tuple[str, ...] = ()
    finer: str = "float32"

    @property
    def equal(self) -> bool:
        return self.comparison.ok and not self.finding

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def text(self, color: bool = False) -> str:
        out = io.StringIO()
        table = _table(self.comparison)
        width = max(WIDTH, Console(width=10 * WIDTH).measure(table).maximum)
        console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False)
        console.print(self.title)
        console.print(table)
        for note in self.notes:
            console.print(note)
        if self.equal and (hidden := _hidden(self.comparison)) > COARSE:
            console.print(f"coarse: {hidden:.0%} of the largest element would pass for rounding here; --dtype {self.finer} sees more")
        console.print(f"[green]equal[/]: {_summary(self.comparison)}" if self.equal else f"[red]different[/]: {self.finding}")
        return out.getvalue()


def _table(comparison: Comparison) -> Table:
    """A row a kind: its largest difference, and of the item that comes closest to what it is allowed, how close, and its name."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("compared", "largest difference", "of allowed", "", ""):
        table.add_column(column, justify="right" if column in ("largest difference", "of allowed") else "left", overflow="fold")
    for kind in comparison.kinds():
        items, worst = comparison.of(kind), comparison.worst(kind)
        table.add_row(
            kind if len(items) == 1 else f"{kind} ({len(items)})",
            _largest(items),
            "" if worst.tolerance == 0 else f"{min(worst.difference / worst.tolerance, 9.99):.0%}",
            "[green]ok[/]" if all(i.ok for i in items) else f"[red]{worst.verdict}[/]",
            _what(worst, items),
        )
    # Names are not broken: people search for them.
    table.columns[-1].max_width = max(WIDTH - 60, *(len(comparison.worst(kind).name) for kind in comparison.kinds()), 0)
    return table


def _hidden(comparison: Comparison) -> float:
    """The largest difference of logits or gradients that would have passed."""
    return max((i.tolerance for i in comparison.items if i.kind in ("logits", *UNITS)), default=0.0)


def _largest(items: tuple[Item, ...]) -> str:
    largest = max(i.difference for i in items)
    if all(i.tolerance == 0 for i in items):
        return "none" if largest == 0 else f"{largest:g}"
    return _number(largest)


def _what(worst: Item, items: tuple[Item, ...]) -> str:
    if worst.kind == "collectives" and all(i.ok for i in items):
        return "; ".join(f"{i.name.replace('_', ' ')} {i.detail.split(',')[0]}" for i in items) + ": as predicted, to the byte"
    named = worst.name not in (worst.kind, "bits", "logits") and not (worst.ok and worst.tolerance == 0)
    return ": ".join(filter(None, (worst.name if named else "", worst.detail)))


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.1e}"


def _summary(comparison: Comparison) -> str:
    kinds = (k for k in ("logits", "outputs", "loss", "gradients", "SGD", "AdamW") if comparison.of(k))
    return "largest differences " + ", ".join(f"{k} {_largest(comparison.of(k))}" for k in kinds)


def describe(comparison: Comparison, find: Callable[[], Parting | None]) -> str:
    """What is wrong first, and whether it looks like rounding or like a bug. `find` looks for the place, where the forward pass is
    wrong."""
    bad = comparison.bad()
    kind = "looks like a bug" if any(i.verdict == "bug" for i in bad) else "looks like rounding"
    if bad[0].verdict == "nothing":
        kind = "nothing can be proven beside it"
    weights = [i for i in bad if i.kind == "weights"]
    if weights:
        return f"the loaded weights: {weights[0].detail}"
    if comparison.of(UNITS[0]) and bad[0].kind in UNITS:  # layer by layer: the units are independent of each other, in order
        return f"first in {bad[0].name}, the {bad[0].kind}: {_how_far(bad[0])}; {kind}"
    if any(i.kind in FORWARD for i in bad):
        place = find()
        if place:
            return f"first {place}; {kind}"
    gradients = [i for i in bad if i.kind == "gradients"]
    forward = [i for i in bad if i.kind in FORWARD]
    if gradients and not forward:
        first = gradients[-1]  # parameters are named from the input on, the backward pass goes the other way
        return f"the forward pass is right; first on the way back, the gradient of {first.name}: {_how_far(first)}; {kind}"
    return f"{bad[0].kind}, {_how_far(bad[0])}; {kind}"


def _how_far(item: Item) -> str:
    if item.tolerance == 0 or math.isinf(item.difference):
        return item.detail or f"{item.difference:g} differ"
    text = f"{item.difference:.1e} of the largest element, {item.tolerance:.1e} is allowed"
    if item.own_error is not None:
        text += f", the whole model's own rounding is {item.own_error:.1e}"
    return text + (f" ({item.detail})" if item.detail else "")
