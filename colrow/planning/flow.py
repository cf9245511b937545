"""Flow: what a choice of cuts means for every value of a trace.

`sums.py` finds it, `adjoint.py` continues it backward, `words.py` puts it into a plan. Nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .factors import Node
from .graph import Border, Graph

COLLECTIVE = 0.5
"""Price of starting a collective, in hidden vectors per token. Without it, routers and other small things would be cut."""


@dataclass(frozen=True)
class Problem:
    """Why axes cannot be cut: names the op and its module."""

    module: str
    op: str
    text: str

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the model'} {self.text}"


@dataclass
class Flow:
    """The state of values for one choice.

    `partial`: sums still to be added. `mixed`: those of them to which something whole was added, which counts once. `reduced`: the borders
    where they are added up. `held`: for a value that is reduced, the borders where its summands, plain partial sums, begin to wait for it.
    `gathered`: outputs of the model that every rank has a slice of. `sources`: ops that leave partial sums, with the cut leaves they sum
    over. `alone`: whole values that are added to partial sums, with the border from which on the first rank alone has them and the others
    zeros. `means`: ops that take a mean over cut leaves, whose ranks' sums are added inside them. `once`: parameters that are added to
    partial sums as they are, and therefore used by one rank only. `sliced`: constants of the model's code that enter a module for all
    heads, of which a rank needs its own. `buffers`: the model's buffers, cut like parameters. `rows`: ops that read one row of a cut table,
    which are whole after an all-reduce of their own.
    """

    chosen: frozenset[Node]
    partial: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    reduced: dict[int, Border] = field(default_factory=dict)
    held: dict[int, frozenset[Border]] = field(default_factory=dict)
    gathered: list[Border] = field(default_factory=list)
    sources: dict[int, frozenset[Node]] = field(default_factory=dict)
    means: set[int] = field(default_factory=set)
    alone: dict[int, Border] = field(default_factory=dict)
    once: set[str] = field(default_factory=set)
    sliced: dict[tuple[int, str], Border] = field(default_factory=dict)
    buffers: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def is_partial(self, value: int) -> bool:
        return value in self.partial and value not in self.reduced

    def cost(self, graph: Graph) -> float:
        """Elements per token on the wire, a fixed price per collective included, in the forward pass."""
        inside = [s.value for i in self.means for s in graph.statistics[i]] + [graph.op(i).outputs[0] for i in self.rows]
        reduced = sum(graph.per_token(v) + COLLECTIVE * graph.width(border) for v, border in self.reduced.items())
        return reduced + sum(price(graph, v) for v in inside)

    def width(self, graph: Graph) -> int:
        """The width of the streams that are reduced."""
        return max((graph.width(border) for border in self.reduced.values()), default=graph.hidden)


def price(graph: Graph, value: int) -> float:
    """Of one collective over a value, in elements per token."""
    return graph.per_token(value) + COLLECTIVE * graph.hidden
