"""Where a partial sum is made whole: the cheapest set of module borders, and where summands wait for others.

A partial sum may be added up over the ranks at any border on its way: where it leaves a module, or where what was made of it leaves or
enters one. Two summands that the model's code adds together cost one all-reduce behind the addition and two before it. Something whole may
be added too, in any order (a bias, the residual): it counts once. Then the summands, and their sum, are no plain tensors between the border
where each of them leaves its layer and the border where the sum is due: they are HELD there, which the applier does with an object that
keeps what is partial and what is whole apart (parallel/pending.py). It can be added to, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from .flow import Flow, price
from .graph import Border, Graph
from .trace import Op

Borders = frozenset[Border]


def adds(op: Op) -> bool:
    """Plain addition of two tensors."""
    return op.name in ("add", "add_") and len(op.inputs()) == 2 and op.kwargs.get("alpha", 1) == 1


class Places:
    def __init__(self, graph: Graph, flow: Flow) -> None:
        self.graph, self.flow = graph, flow

    def cheapest(self, value: int) -> Borders | None:
        """The borders that make a partial value whole at the lowest price, the earliest among equals; None where there are none."""
        found: dict[int, Borders | None] = {}
        for v in sorted(self._before(value)):  # values are numbered as they are made
            found[v] = self._cheapest(v, found)
        return found[value]

    def _before(self, value: int) -> set[int]:
        """The value, and the partial values that it is made of (of hundreds of experts: no recursion)."""
        out, todo = {value}, [value]
        while todo:
            new = set(self._parts(todo.pop())) - out
            out |= new
            todo.extend(new)
        return out

    def _parts(self, value: int) -> list[int]:
        made = self.graph.producer[value]
        if made is None or made in self.flow.sources or value in self.flow.alone:
            return []
        return [v for v in self.graph.inputs[made] if self.flow.is_partial(v)]

    def _cheapest(self, value: int, found: dict[int, Borders | None]) -> Borders | None:
        """The choice between this value and what it is made of, which is in `found`."""
        made, parts = self.graph.producer[value], self._parts(value)
        if made is None or value in self.flow.alone:  # it counts once: no border lies before it
            return None
        if made not in self.flow.sources and not parts:  # made whole meanwhile, for another's sake
            return frozenset()
        options = _union(found[v] for v in parts) if parts else []
        here = self.leaving(value) or self.entering(value)
        if here:
            options.append(frozenset([here]))
        return min(options, key=lambda borders: sum(price(self.graph, b.value) for b in borders), default=None)

    def leaving(self, value: int) -> Border | None:
        """The innermost output at which the value can be added up."""
        for border in self._outputs(value):
            if self.is_plain(border) or self.summands(value) is not None:
                return border
        return None

    def entering(self, value: int) -> Border | None:
        """The first input at which a sum of held values can be added up: nobody uses it before."""
        if value in self.graph.trace.outputs.values():
            return None
        for border in self.graph.entering[value]:
            first = self.graph.trace.calls[border.call].first
            if all(i >= first for i in self.graph.consumers[value]) and self.summands(value) is not None:
                return border
        return None

    def _outputs(self, value: int) -> list[Border]:
        """Where the value leaves a module that does not itself use it before."""
        calls = self.graph.trace.calls
        return [b for b in self.graph.leaving[value] if not any(self.graph.inside(c, calls[b.call]) for c in self.graph.consumers[value])]

    def is_plain(self, border: Border) -> bool:
        """What leaves here is a partial sum and nothing else; a linear layer keeps its bias apart until after the sum."""
        return border.value not in self.flow.mixed or self.graph.is_product(self.graph.trace.calls[border.call].module)

    def summands(self, value: int) -> Borders | None:
        """The borders at which everything that is partial in a sum can be held until the sum is due; None where that cannot be."""
        made = self.graph.producer[value]
        if made is None or made in self.flow.sources or not adds(self.graph.op(made)):
            return None
        return next(iter(_union(self._hold(v) for v in self.graph.inputs[made] if self.flow.is_partial(v))), None)

    def _hold(self, value: int) -> Borders | None:
        if not all(adds(self.graph.op(i)) for i in self.graph.consumers[value]):
            return None
        border = next((b for b in self._outputs(value) if self.is_plain(b)), None)
        return frozenset([border]) if border else self.summands(value)


def _union(parts: Iterable[Borders | None]) -> list[Borders]:
    """All the sets together, if each is one; as a list of none or one."""
    found = list(parts)
    return [frozenset().union(*(p for p in found if p))] if found and None not in found else []
