"""Compiled: a recorded step as instructions for the C interpreter of kernels/.

Every tensor of the step is one of three kinds. A *constant* depends on neither the token nor its position: weights, and what is made of
them. A *light* one depends on the token or its position, but has met no product, sum or attention yet (embedded tokens, the sines of rotary
positions): torch computes it anew in each step, with the recorded ops. All others are *live*: their ops become instructions on float32
memory. Whatever elementwise ops a model strings together, they are translated one by one, so there are no patterns to be recognised here.

An op that has no instruction raises NotRecorded: then the modules run. Not here: the ops themselves (lower.py, choosing.py, products.py,
attended.py), running it (program.py).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels.library import Op
from ..planning.trace import leaves
from . import latent
from .attended import attend, cached, follow
from .lower import lower, rotate
from .products import PRODUCTS, pick, product
from .steps import Constant, Heads, Matrix, Step, Steps
from .tape import Added, Attended, Cached, NotRecorded, Ran, Tape

KEPT = {"dequantized", "uncompacted"}  # what makes weights of something else (parallel/kept.py)
_COMPARES = {"gt", "ge", "lt", "le"}
_SHAPES_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like", "new_empty"}


@dataclass(frozen=True)
class Compiled:
    """`inputs`: light tensors and the shadows that they are copied to in each step, made by `light` in order. `ids` and `positions` are the
    recorded tensors that the step's own take the place of. `compares`: the code asked whether the position lies beyond a bound, so the step
    is known to be the same only up to where it was recorded too. `rewritten`: buffers to which it writes what follows from the position
    (frequencies that depend on the length), and so do the light ops. Whether a cache's keys are still right then, continuing.py says."""

    steps: list[Step]
    light: list[Ran]
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    compares: bool = False
    rewritten: tuple[torch.Tensor, ...] = ()


def compile(tape: Tape) -> Compiled:
    """NotRecorded where the step has something that no instruction does."""
    made = Steps({id(tape.ids): frozenset({"token"}), id(tape.positions): frozenset({"position"})})
    light: list[Ran] = []
    latents = latent.find(tape.entries)
    seen, rewritten = set[int](), list[torch.Tensor]()  # tensors that were used so far
    for entry in tape.entries:
        if id(entry) in latents.inside:
            pass
        elif isinstance(entry, Added):
            _added(made, entry)
        elif id(entry) in latents.of:
            latent.attend(made, entry, latents.of[id(entry)], tape.windows)  # type: ignore[arg-type]
        elif isinstance(entry, Attended):
            attend(made, entry, tape.windows)
        elif isinstance(entry, Cached):
            cached(made, entry)
        elif follow(made, entry, tape.windows):
            pass
        elif entry.name in KEPT:
            made.kept[id(entry.outputs[0])] = Matrix(entry.args[0], entry.outputs[0].shape, entry.args[1])
        elif entry.name == "t" and id(entry.args[0]) in made.kept:
            made.kept[id(entry.outputs[0])] = made.kept[id(entry.args[0])]
        elif _is_live(made, entry):
            _live(made, entry)
        elif _is_light(made, entry, tape.anywhere, seen):
            light.append(entry)
            rewritten += [entry.args[0]] if _rewrites(entry, seen) else []
        if isinstance(entry, Ran):
            seen.update(map(id, leaves((entry.args, entry.kwargs), torch.Tensor)))
    logits = made.contiguous(made.shadow(tape.logits))
    return Compiled(made.steps, needed(light, made.inputs), made.inputs, tape.ids, tape.positions, logits, made.compares, tuple(rewritten))


def same(a: Compiled, b: Compiled) -> bool:
    """Whether two recordings of one model gave the same instructions, constants included."""

    def facts(step: Step) -> Any:
        numbers = [x for x in step.sources if isinstance(x, float)]
        heads = step.entry if isinstance(step.entry, Heads) else None
        return step.op, [x.shape for x in step.outs], numbers, replace(heads, slopes=(), sinks=None, bias=None) if heads else None

    def values(step: Step) -> list[torch.Tensor]:
        heads = step.entry if isinstance(step.entry, Heads) else None
        added = [torch.tensor(heads.slopes), torch.zeros(0) if heads.bias is None else heads.bias] if heads else []
        return added + [x.value for x in step.sources if isinstance(x, Constant)]

    if [facts(x) for x in a.steps] != [facts(x) for x in b.steps] or [op.func for op in a.light] != [op.func for op in b.light]:
        return False
    if a.compares and not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(_given(a), _given(b), strict=True)):
        return False
    pairs = [pair for x, y in zip(a.steps, b.steps, strict=True) for pair in zip(values(x), values(y), strict=True)]
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, atol=0) for x, y in pairs)


def _given(made: Compiled) -> list[torch.Tensor]:
    """What the model itself gives to the light ops: tables of positions, frequencies."""
    known = {id(x) for x in (made.ids, made.positions, *(out for op in made.light for out in op.outputs))}
    return [x for op in made.light for x in leaves((op.args, op.kwargs), torch.Tensor) if id(x) not in known]


def _is_live(made: Steps, op: Ran) -> bool:
    if op.name in _SHAPES_ONLY:
        made.fresh[id(op.outputs[0])] = lambda: op.func(*op.args, **op.kwargs)
        return False  # a constant, whatever it takes its shape from
    if op.name == "detach" and (before := made.fresh.get(id(op.args[0]))) is not None:
        made.fresh[id(op.outputs[0])] = before
    tensors = list(leaves((op.args, op.kwargs), torch.Tensor))
    if op.name in PRODUCTS and any(id(x) in made.depends for x in tensors):
        return op.name != "bmm" or any(id(x) in made.picked for x in tensors)  # of rotary angles, which have no weight
    return any(made.is_live(x) for x in tensors)


def _rewrites(op: Ran, seen: Container[int]) -> bool:
    """Whether the op gives all of a tensor that nothing was made of before, a constant so far, other numbers."""
    return op.name == "copy_" and id(op.args[0]) not in seen and op.args[0]._base is None


def _is_light(made: Steps, op: Ran, anywhere: bool, seen: Container[int]) -> bool:
    """Whether torch has to run the op again in each step. It is noted what its results depend on. `anywhere`: as Tape's. `seen`: tensors
    that were used before."""
    depends = frozenset[str]().union(*(made.depends.get(id(x), frozenset()) for x in leaves((op.args, op.kwargs), torch.Tensor)))
    if not depends or op.name in _SHAPES_ONLY:
        return False
    if op.name in ("_local_scalar_dense", "equal", "nonzero"):
        if "bound" in depends:
            made.compares = True
        if "position" in depends:
            raise NotRecorded("its code looks at the position")
        return False  # a check of the token, or of the range that it lies in
    if anywhere and op.name in _COMPARES and depends == {"position"} and not isinstance(op.args[1], torch.Tensor):
        depends = frozenset({"bound"})
    if op.name == "aminmax":  # who asks for both ends wants to know whether a table has these rows: not what comes of it
        depends = frozenset({"range"})
    if torch.Tag.nondeterministic_seeded in op.func.tags:
        raise NotRecorded(f"it draws random numbers ({op.name})")
    if op.func._schema.is_mutable and id(op.args[0]) not in made.depends and not _rewrites(op, seen):
        raise NotRecorded(f"it writes to a constant ({op.name})")
    made.depends.update((id(x), depends) for x in op.outputs)
    if op.is_view:
        made.views.update((id(x), op) for x in op.outputs if x is not op.args[0])  # which an op may give back as it is
    return True


def needed(light: list[Ran], inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Ran]:
    """The light ops that some input depends on."""
    wanted, out = {id(x) for x, _ in inputs}, []
    for op in reversed(light):
        if any(id(x) in wanted for x in op.outputs):
            out.append(op)
            wanted |= {id(x) for x in leaves((op.args, op.kwargs), torch.Tensor)}
    return out[::-1]


def _added(made: Steps, entry: Added) -> None:
    x = made.shadow(entry.x)
    if not x.is_contiguous():
        raise NotRecorded(f"the sum '{entry.name}' is of a view")
    made.steps.append(Step(Op.REDUCE, [made.name(entry.x, x)], (x,), entry=entry))


def _live(made: Steps, op: Ran) -> None:
    if op.name in PRODUCTS:
        product(made, op)
    elif pick(made, op):
        pass
    elif op.name in ("view_as_complex", "view_as_real"):
        made.name(op.outputs[0], made.shadow(op.args[0]))
    elif any(x.is_complex() for x in op.outputs):
        rotate(made, op)
    elif op.name in ("view", "_unsafe_view", "_reshape_alias") or op.is_view:
        made.view(op)
    else:
        lower(made, op)
