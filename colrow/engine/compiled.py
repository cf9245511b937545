"""Compiled: a recorded step as instructions for the C interpreter of kernels/.

Every tensor of the step is one of three kinds. A *constant* depends on neither the token nor its position: weights, and what is made of
them. A *light* one depends on the token or its position, but has met no product, sum or attention yet (embedded tokens, the sines of rotary
positions): torch computes it anew in each step, with the recorded ops. All others are *live*: their ops become instructions on float32
memory. Whatever elementwise ops a model strings together, they are translated one by one, so there are no patterns to be recognised here.

Products of one input (q, k and v; gate and up) become one instruction that reads their weights where they are. An op that has no
instruction raises NotRecorded: then the modules run. Not here: running it (program.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.library import Op
from .lower import lower
from .recorded import Added, Attended, NotRecorded, Ran, Tape
from .steps import Matrix, Step, Steps, memory

_PRODUCTS = {"mm", "addmm", "linear"}
_SHAPES_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like", "new_empty"}


@dataclass(frozen=True)
class Compiled:
    """`inputs`: light tensors and the shadows that they are copied to in each step, made by `light` in order. `ids` and `positions` are the
    recorded tensors that the step's own take the place of."""

    steps: list[Step]
    light: list[Ran]
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor


def compile(tape: Tape) -> Compiled:
    """NotRecorded where the step has something that no instruction does."""
    made = Steps({id(tape.ids): frozenset({"token"}), id(tape.positions): frozenset({"position"})})
    light: list[Ran] = []
    for entry in tape.entries:
        if isinstance(entry, Added):
            _added(made, entry)
        elif isinstance(entry, Attended):
            sources = tuple(made.contiguous(made.shadow(x)) for x in (entry.q, entry.k, entry.v))
            made.steps.append(Step(Op.ATTEND, [made.new(entry.out)], sources, entry=entry))
        elif entry.name == "dequantized":
            made.int8[id(entry.outputs[0])] = Matrix(*entry.args[:2])
        elif entry.name == "t" and id(entry.args[0]) in made.int8:
            made.int8[id(entry.outputs[0])] = made.int8[id(entry.args[0])]
        elif _is_live(made, entry):
            _live(made, entry)
        elif _is_light(made, entry):
            light.append(entry)
    logits = made.contiguous(made.shadow(tape.logits))
    return Compiled(made.steps, _needed(light, made.inputs), made.inputs, tape.ids, tape.positions, logits)


def _is_live(made: Steps, op: Ran) -> bool:
    if op.name in _SHAPES_ONLY:
        return False  # a constant, whatever it takes its shape from
    tensors = list(_tensors((op.args, op.kwargs)))
    return any(made.is_live(x) for x in tensors) or (op.name in _PRODUCTS and any(id(x) in made.depends for x in tensors))


def _is_light(made: Steps, op: Ran) -> bool:
    """Whether torch has to run the op again in each step. It is noted what its results depend on."""
    depends = frozenset[str]().union(*(made.depends.get(id(x), frozenset()) for x in _tensors((op.args, op.kwargs))))
    if not depends or op.name in _SHAPES_ONLY:
        return False
    if op.name in ("_local_scalar_dense", "equal", "nonzero"):
        if "position" in depends:
            raise NotRecorded("its code looks at the position")
        return False  # a check of the token, or of the range that it lies in
    if op.name == "aminmax":  # who asks for both ends wants to know whether a table has these rows: not what comes of it
        depends = frozenset({"range"})
    if torch.Tag.nondeterministic_seeded in op.func.tags:
        raise NotRecorded(f"it draws random numbers ({op.name})")
    if op.func._schema.is_mutable and id(op.args[0]) not in made.depends:
        raise NotRecorded(f"it writes to a constant ({op.name})")
    made.depends.update((id(x), depends) for x in op.outputs)
    return True


def _needed(light: list[Ran], inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Ran]:
    """The light ops that some input depends on."""
    wanted, out = {id(x) for x, _ in inputs}, []
    for op in reversed(light):
        if any(id(x) in wanted for x in op.outputs):
            out.append(op)
            wanted |= {id(x) for x in _tensors((op.args, op.kwargs))}
    return out[::-1]


def _added(made: Steps, entry: Added) -> None:
    x = made.shadow(entry.x)
    if not x.is_contiguous():
        raise NotRecorded(f"the sum '{entry.name}' is of a view")
    made.steps.append(Step(Op.REDUCE, [made.name(entry.x, x)], (x,), entry=entry))


def _live(made: Steps, op: Ran) -> None:
    if op.name in _PRODUCTS:
        _product(made, op)
    elif op.name in ("view", "_unsafe_view", "_reshape_alias") or _is_view(op):
        made.view(op)
    else:
        lower(made, op)


def _product(made: Steps, op: Ran) -> None:
    """mm(x, W), addmm(bias, x, W) and linear(x, W, bias). W's rows are output features where it lies in memory."""
    if op.name == "linear":
        given, weight, bias = (*op.args, None)[:3]
    else:
        bias, given, weight = (None, *op.args) if op.name == "mm" else op.args
    if made.is_live(weight) or id(weight) in made.depends or op.kwargs:
        raise NotRecorded(f"it has a product of two results ({op.name})")
    x, out = made.contiguous(made.shadow(given)), made.new(op.outputs[0])
    matrix = made.int8.get(id(weight)) or Matrix(weight if op.name == "linear" else _by_rows(weight))
    _multiply(made.steps, out, x, matrix)
    if bias is not None:
        made.emit(Op.ADD, out, out, made.source(bias))


def _multiply(steps: list[Step], out: torch.Tensor, x: torch.Tensor, weight: Matrix) -> None:
    """Joins an earlier product of the same input, unless something has written to that since."""
    if not weight.values.is_contiguous():
        raise NotRecorded("it multiplies by a view of a weight")
    for step in reversed(steps):
        if step.op is Op.PRODUCT and _same(step.sources[0], x) and step.weights[0].values.dtype is weight.values.dtype:
            step.outs.append(out)
            step.weights.append(weight)
            return
        if any(memory(o) == memory(x) for o in step.outs):
            break
    steps.append(Step(Op.PRODUCT, [out], (x,), [weight]))


def _by_rows(weight: torch.Tensor) -> torch.Tensor:
    """[width, rows] as [rows, width] with each row in one piece. A parameter that is stored the other way (Conv1D) is laid out anew, in
    place: its shape and values stay, and the modules go on using it."""
    if isinstance(weight, torch.nn.Parameter) and not weight.t().is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    return weight.detach().t()


def _is_view(op: Ran) -> bool:
    """Whether all its results lie in its first argument's memory, unchanged."""
    returns = op.func._schema.returns
    return all(r.alias_info is not None and not r.alias_info.is_write for r in returns) and bool(returns)


def _same(a: Any, b: torch.Tensor) -> bool:
    """Two shadows of the same elements."""
    if not isinstance(a, torch.Tensor) or memory(a) != memory(b):
        return False
    return (a.storage_offset(), a.numel(), a.shape[-1]) == (b.storage_offset(), b.numel(), b.shape[-1])


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
