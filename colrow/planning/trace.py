"""Trace: one forward pass of a model as data, recorded on meta tensors (shapes only, no weights).

`trace(config)` builds the transformers model on the meta device, runs it once and returns every aten op it executed, in order, with the
module it ran in. A trace is self-contained: `factors.py` and `rules.py` read how axes flow through it, `replay.py` executes it again with
real numbers. How the ops are caught is in `record.py`. Nothing here knows about ranks or cuts.

Read a trace like a program in single-assignment form: `values` are its variables (parameters, buffers, inputs, results), `ops` its lines.
An in-place op makes a new value; `Op.mutates` says which older value occupies the same memory, so running `func` again on it does the same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .inputs import DECODED, SOUND, TOKENS, Example, beside, examples
from .ints import Expr
from .models import build, compute_experts

Leaf = TypeVar("Leaf")

BATCH, LENGTH, SOURCE_LENGTH = 2, 7, 11
"""Sizes of the traced inputs. Never 1, which would hide an axis; `SOURCE_LENGTH` is an encoder's, where a decoder has `LENGTH`."""
LONGER, SOURCE_LONGER = 263, 269
"""Tried where modules run on short inputs without all of their parameters (what sums up windows of 128 tokens)."""


class TraceError(Exception):
    """The model's forward cannot be followed on meta tensors. The text names the module and the op. `ops`: recorded until then."""

    def __init__(self, text: str, ops: int = 0) -> None:
        super().__init__(text)
        self.ops = ops


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in `Op.args` and `Op.kwargs`: the value with this id."""

    id: int


@dataclass(frozen=True)
class Value:
    """A tensor. `name` is that of a parameter, buffer or model input, else "". `constant`: depends on no parameter and no input, so every
    rank can make the whole of it; `data` is its content on the CPU where it is small and known."""

    id: int
    kind: Literal["parameter", "buffer", "input", "result"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    constant: bool = False
    data: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Op:
    """One executed aten op: `func(*args, **kwargs)` with `Ref` for tensors; `outputs` are its tensor results in order (-1: no tensor).

    `call` is the innermost module call it ran in (index into `Trace.calls`), `attention` the index into `Trace.attention` where it ran
    inside an attention function that went through transformers' AttentionInterface, else None. `mutates` = value written to in place, else
    None; `writes` = the other values in that memory, which hold something new from here on.
    """

    index: int
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    call: int
    attention: int | None = None
    mutates: int | None = None
    writes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Without namespace and overload: "addmm", "_to_copy"."""
        return self.func._schema.name.split("::")[-1]

    def inputs(self) -> list[int]:
        """Value ids of all tensor arguments, in order, with repetitions."""
        return list(self._inputs)

    @cached_property
    def _inputs(self) -> tuple[int, ...]:
        return tuple(ref.id for ref in leaves((self.args, self.kwargs), Ref))


@dataclass
class Call:
    """One run of a module's forward. `inputs` maps the forward's parameter names to values ("cos_sin.0" inside a tuple), `outputs` maps
    "0", "1", ... or a field name ("logits"). Ops `first` to `last` (exclusive) ran inside it, those of inner modules included."""

    index: int
    module: str
    parent: int | None
    inputs: dict[str, int]
    outputs: dict[str, int]
    first: int
    last: int


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function: q [B, H, S, d], k and v [B, KV, S, d], out [B, S, H, d] (value ids), ops `first` to `last`
    (exclusive). `window`: of so many positions each sees itself and those before it; 0: all."""

    module: str
    q: int
    k: int
    v: int
    out: int
    first: int
    last: int
    window: int = 0


@dataclass(frozen=True)
class IntUse:
    """An int given by the model's code that fixes the size of `value` along `dim` (or a bound of a slice that made it)."""

    op: int  # index of the last op recorded when the use was seen
    call: int
    function: str  # "view", "split", ...
    value: int
    dim: int
    expr: Expr


@dataclass(frozen=True)
class Trace:
    config: PreTrainedConfig  # a copy; the caller's is not touched
    architecture: str  # class name of the model
    values: list[Value]
    ops: list[Op]
    calls: list[Call]
    attention: list[AttentionCall]
    parameters: dict[str, int]  # names of named_parameters() -> value
    aliases: dict[str, tuple[str, ...]]  # parameter -> further names of the same tensor
    inputs: dict[str, int]
    outputs: dict[str, int]  # of the model
    modules: dict[str, type]  # path -> class; "" is the model
    attributes: dict[tuple[str, str], int]  # integers of modules
    int_uses: list[IntUse]
    frozen: frozenset[str] = frozenset()  # parameters that the model's code does not train
    left_out: str = ""  # why the model could be followed with its tokens alone
    bypasses: bool = False  # attention does not go through the AttentionInterface (no entry in `attention`)

    @property
    def length(self) -> int:
        """Tokens in a row of the traced inputs; `LENGTH` where there are none."""
        name = next((n for n in (DECODED, TOKENS) if n in self.inputs), None)
        return LENGTH if name is None else self.values[self.inputs[name]].shape[1]

    @property
    def growing(self) -> frozenset[int]:
        """The inputs that decoding makes longer: the tokens (a decoder's where it has its own), and the sound that comes with each."""
        name = next((n for n in (DECODED, TOKENS) if n in self.inputs), None)
        names = [] if name is None else [name, SOUND] if beside(self.config, self.inputs) else [name]
        return frozenset(self.inputs[n] for n in names)

    def dependent(self, sources: Set[int]) -> list[bool]:
        """Of every value, whether it depends on one of `sources`."""
        out = [v.id in sources for v in self.values]
        for op in self.ops:
            if any(out[v] for v in op.inputs()):
                for o in (*op.outputs, *op.writes):
                    out[o] |= o >= 0
        return out

    def module_of(self, op: Op) -> str:
        return self.calls[op.call].module

    def where(self, op: Op) -> str:
        """For messages: "model.layers.0.mlp: aten.mul"."""
        return f"{self.module_of(op) or 'model'}: {op.name}"


def leaves(tree: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """All of this kind in nested tuples, lists and dicts, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from leaves(x, kind)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()), kind)


def empty_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The model of a config on the meta device, in eval mode and float32 (casts to float32 in its code then cost no op)."""
    options = {"attn_implementation": attention, "dtype": torch.float32}
    with torch.device("meta"):
        model = build(config, **options)
    compute_experts(model, "batched_mm")  # static shapes; for tracing only
    return model.eval()


@contextmanager
def collecting_later() -> Iterator[None]:
    """Without Python's search for garbage: what is recorded stays alive, and looking through it again takes a quarter of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@collecting_later()
def trace(config: PreTrainedConfig) -> Trace:
    """Record one forward pass without cache. TraceError where the model's code needs numbers that meta tensors do not have.

    Of the ways to call the model (inputs.py) the first that can be followed is taken, with longer rows where short ones do not reach all.
    """
    found = of_length(config, LENGTH, SOURCE_LENGTH)
    if idle(found) and (getattr(config.get_text_config(), "max_position_embeddings", None) or 0) >= SOURCE_LONGER:
        try:
            longer = of_length(config, LONGER, SOURCE_LONGER)
        except TraceError:
            return found
        return longer if idle(longer) < idle(found) else found
    return found


def idle(trace: Trace) -> frozenset[str]:
    """Parameters that no op reads, though their module runs."""
    read = {v for op in trace.ops for v in op.inputs()}
    run = {call.module for call in trace.calls}
    return frozenset(name for name, at in trace.parameters.items() if at not in read and name.rpartition(".")[0] in run)


def of_length(config: PreTrainedConfig, length: int, source: int) -> Trace:
    """A pass over rows of `length` tokens, of `source` where they are an encoder's before a decoder. TraceError as for `trace`."""
    try:
        return _trace(config, length, source)
    except TraceError as first:
        try:
            others = list(examples(empty_model(config, "eager"), BATCH, length, source))[1:]
        except Exception:  # it cannot even be built
            raise first from None
        furthest = first
        for example in others:
            try:
                found = _trace(config, length, source, example)
            except TraceError as error:
                furthest = max(furthest, error, key=lambda e: e.ops)  # of inputs that are all wrong, the reason of the nearest
                continue
            return found if example.keys() != {TOKENS} else replace(found, left_out=str(furthest))
        raise furthest from None


def _trace(config: PreTrainedConfig, length: int, source: int, example: Example | None = None) -> Trace:
    """`example`: what the model is given, by default the first that there is."""
    from .record import EAGER, THROUGH_INTERFACE, record

    def run(attention: str) -> Trace:
        model = empty_model(config, attention)
        given = example or next(examples(model, BATCH, length, source))
        return record(model, attention == EAGER, given)

    try:
        return run(THROUGH_INTERFACE)
    except Exception:  # a model that refuses a registered attention function, or has no eager one of its own: follow its plain code
        pass
    try:
        return run(EAGER)
    except TraceError:
        raise
    except Exception as e:  # it cannot even be built
        raise TraceError(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
