"""How a forward pass is caught: a dispatch mode for ops, hooks for module borders, and a function mode for integers (sizes.py).

Three things make plain meta tensors enough. Host reads (`bool(mask.all())`) are answered from the op that made the value. Ops on constants
are also run on the CPU, so their content is known. Index lists written in the code (`x[..., [-2], :]`) become slices, whose meaning does
not depend on a tensor's content. Attention goes through a function registered with transformers, which runs the model's own eager code and
marks it.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from . import stops
from .inputs import DECODED, TOKENS, Example, examples
from .ints import Expr, Tracked
from .models import keeps_state
from .sizes import IntReader
from .trace import BATCH, LENGTH, SOURCE_LENGTH, AttentionCall, Call, IntUse, Op, Ref, Trace, TraceError, Value, leaves

THROUGH_INTERFACE, EAGER = "colrow_trace", "eager"
SMALL = 1 << 16  # elements of a constant whose content is kept
GIVEN = 1 << 22  # the same for what is made of inputs that are known: whether a picture is all zeros
FOUND = 3
"""Places that `nonzero` finds of a table of flags (which tokens go to an expert): any number above 1, for this axis is never cut."""
_active = threading.local()


class Recorder(TorchDispatchMode):
    """Collects values, ops and calls while a model runs. Every tensor is kept alive, so `id` identifies it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, Any]] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.open: list[int] = []  # indices of the calls that are running
        self.attention: list[AttentionCall] = []
        self.in_attention: int | None = None
        self.int_uses: list[IntUse] = []
        self.known: dict[int, int] = {}  # id(tensor) -> value id
        self.alive: list[torch.Tensor] = []
        self.made_by: dict[int, Op] = {}
        self.memory: dict[int, list[int]] = {}  # storage -> values in it

    def add(self, tensor: torch.Tensor, kind: str, name: str = "", constant: bool = False, data: torch.Tensor | None = None) -> int:
        at = len(self.values)
        self.values.append(
            {"id": at, "kind": kind, "shape": tuple(tensor.shape), "dtype": tensor.dtype, "name": name, "constant": constant, "data": data}
        )
        self.known[id(tensor)] = at
        self.alive.append(tensor)
        self.memory.setdefault(tensor.untyped_storage()._cdata, []).append(at)
        return at

    def value(self, tensor: torch.Tensor) -> int:
        """Id of a tensor; one that no recorded op made is a constant of the model's code."""
        if id(tensor) not in self.known:
            content = tensor if tensor.device.type == "cpu" and tensor.numel() <= SMALL else None
            self.add(tensor, "buffer", constant=True, data=content)
        return self.known[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(leaves((args, kwargs), torch.Tensor))
        inputs = [self.value(t) for t in tensors]
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal"):
            return self._host_read(func, inputs, args)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        constant = all(self.values[i]["constant"] for i in inputs) and not drawn
        ref_args, ref_kwargs = self._refs(args), self._refs(kwargs)
        content = None if drawn else self._on_cpu(func, ref_args, ref_kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as e:  # (a NotImplementedError too) its size depends on numbers; raised where nothing answers it
            result = self._by_numbers(func, ref_args, ref_kwargs)
            if result is None and func._schema.name == "aten::nonzero":
                result, content = self._found(args[0])
            if result is None and isinstance(e, NotImplementedError):
                raise TraceError(f"{self.where()}: what {func._schema.name.split('::')[-1]} gives depends on a tensor's numbers") from e
            if result is None:
                raise
        outputs, mutates, writes = list[int](), None, list[int]()
        results = result if isinstance(result, tuple | list) else (result,)
        contents = content if isinstance(content, tuple | list) else (content,) * len(results)
        for out, data in zip(results, contents, strict=False):
            if not isinstance(out, torch.Tensor):
                outputs.append(-1)
                continue
            if id(out) in self.known:
                mutates = self.known[id(out)]
                writes += [v for v in self.memory[out.untyped_storage()._cdata] if v != mutates]
                if not constant or data is None:
                    self._overwritten(out, constant, data is not None)
            small = data if isinstance(data, torch.Tensor) and data.numel() <= (SMALL if constant else GIVEN) else None
            outputs.append(self.add(out, "result", constant=constant, data=small))
        call = self.open[-1] if self.open else 0
        op = Op(len(self.ops), func, ref_args, ref_kwargs, tuple(outputs), call, self.in_attention, mutates, tuple(writes))
        self.ops.append(op)
        self.made_by.update((o, op) for o in outputs)
        return result

    def _refs(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return Ref(self.value(tree))
        if isinstance(tree, list | tuple):
            return type(tree)(self._refs(x) for x in tree) if type(tree) in (list, tuple) else tuple(self._refs(x) for x in tree)
        if isinstance(tree, dict):
            return {k: self._refs(v) for k, v in tree.items()}
        return int(tree) if isinstance(tree, Tracked) else tree

    def _on_cpu(self, func: Any, args: Any, kwargs: Any, unknown: bool = False) -> Any:
        """The content of an op whose inputs are all known, or None where it cannot run. `unknown`: zeros stand for what is not known."""

        def fill(tree: Any) -> Any:
            if isinstance(tree, Ref):
                value = self.values[tree.id]
                if value["data"] is None and not unknown:
                    raise LookupError
                return value["data"] if value["data"] is not None else torch.zeros(value["shape"], dtype=value["dtype"])
            if isinstance(tree, list | tuple):
                return type(tree)(fill(x) for x in tree)
            if isinstance(tree, dict):
                return {k: fill(v) for k, v in tree.items()}
            return torch.device("cpu") if isinstance(tree, torch.device) else tree

        try:
            return func(*fill(args), **fill(kwargs))
        except (LookupError, RuntimeError, TypeError):  # not known, or no such op on the CPU or for zeros
            return None  # unknown content is no wrong answer: who needs it takes the plain case, which the gate proves, or gives up aloud

    def _by_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The shapes of an op whose result's size depends on numbers that are known: which places of a row are a picture's."""
        masks = [ref.id for ref in leaves((args, kwargs), Ref) if not self.values[ref.id]["dtype"].is_floating_point]
        if not masks or any(self.values[i]["data"] is None for i in masks):
            return None
        found = self._on_cpu(func, args, kwargs, unknown=True)
        return tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, found)

    def _found(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `nonzero` finds where nobody knows: of a row of flags (which experts have a token) all, else FOUND places."""
        if x.dim() == 1:
            n = min(len(x), self._choices(self.value(x)))
            return torch.empty(n, 1, dtype=torch.long, device="meta"), torch.arange(n).unsqueeze(1)
        return torch.empty(FOUND, x.dim(), dtype=torch.long, device="meta"), None

    def _choices(self, value: int) -> int:
        """From how many the `topk` chose by which flags were set: some codes add a flag that is never set."""
        todo, seen = [value], {value}
        for v in todo:
            op = self.made_by.get(v)
            if op is not None and op.name == "topk":
                return int(self.values[op.inputs()[0]]["shape"][op.args[2] if len(op.args) > 2 else -1])
            for i in op.inputs() if op is not None else ():
                if i not in seen:
                    seen.add(i)
                    todo.append(i)
        return sys.maxsize

    def _overwritten(self, tensor: torch.Tensor, constant: bool, known: bool) -> None:
        """Something was written into memory: what lies there is no longer known unless it was, nor constant unless `constant`."""
        for at in self.memory[tensor.untyped_storage()._cdata]:
            self.values[at]["data"] = self.values[at]["data"] if known else None
            self.values[at]["constant"] &= constant

    def content(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers of a tensor, where they are known."""
        found: torch.Tensor | None = self.values[self.value(tensor)]["data"]
        return found

    def _host_read(self, func: Any, inputs: list[int], args: Any) -> Any:
        data = [self.values[i]["data"] for i in inputs]
        if all(d is not None for d in data):
            return func(*data, *args[len(data) :])
        made = self.made_by.get(inputs[0])
        name = "eq" if func._schema.name == "aten::equal" else made.name if made else ""
        if name in ("all", "eq", "_is_all_true"):  # "is the mask all ones?", "are positions consecutive?": the plain case
            return True
        if name in ("any", "ne", "_is_any_true"):
            return False
        raise TraceError(f"{self.where()}: the model's code reads a number of a tensor ({name or 'an input'})")

    def where(self) -> str:
        return (self.calls[self.open[-1]].module if self.open else "") or "model"

    def know(self, tensor: torch.Tensor, content: torch.Tensor) -> None:
        """The content of a tensor that the code writes out."""
        self.values[self.value(tensor)].update(constant=True, data=content)

    def use(self, function: str, tensor: torch.Tensor, dim: int, expr: Expr) -> None:
        self.int_uses.append(IntUse(len(self.ops) - 1, self.open[-1] if self.open else 0, function, self.value(tensor), dim, expr))

    def enter(self, module: str, inputs: dict[str, int]) -> None:
        parent = self.open[-1] if self.open else None
        self.calls.append(Call(len(self.calls), module, parent, inputs, {}, len(self.ops), len(self.ops)))
        self.open.append(len(self.calls) - 1)

    def leave(self, outputs: dict[str, int]) -> None:
        call = self.calls[self.open.pop()]
        call.outputs, call.last = outputs, len(self.ops)


def _named(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested containers with dotted names."""
    if isinstance(tree, torch.Tensor):
        yield prefix or "0", tree
    elif isinstance(tree, list | tuple | dict):
        for key, x in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _named(x, f"{prefix}.{key}" if prefix else str(key))


def _parameter_names(module: torch.nn.Module) -> list[str]:
    """Names of the positional parameters of a module's forward."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """What the traced model calls for attention: the eager function of its own modeling file, with the ops inside marked."""
    r: Recorder = _active.recorder
    eager = sys.modules[type(module).__module__].eager_attention_forward
    first, outer, r.in_attention = len(r.ops), r.in_attention, len(r.attention)
    q, k, v = (r.value(t) for t in (query, key, value))
    window = int(kwargs.get("sliding_window") or 0)
    r.attention.append(AttentionCall(r.calls[r.open[-1]].module, q, k, v, -1, first, first, window))
    result = eager(module, query, key, value, attention_mask, **kwargs)
    at, r.in_attention = r.in_attention, outer
    r.attention[at] = AttentionCall(r.calls[r.open[-1]].module, q, k, v, r.value(result[0]), first, len(r.ops), window)
    return result


AttentionInterface.register(THROUGH_INTERFACE, _attention)
AttentionMaskInterface.register(THROUGH_INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _hook(model: PreTrainedModel, r: Recorder, stack: ExitStack) -> dict[tuple[str, str], int]:
    """Watch the borders of every module and make its integers tracked ones. Returns those integers."""
    attributes: dict[tuple[str, str], int] = {}
    names: dict[type, list[str]] = {}
    for path, module in model.named_modules():

        def before(m: torch.nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            positional = names.setdefault(type(m), _parameter_names(m))
            bound = dict(zip(positional, args, strict=False)) | kwargs
            r.enter(path, {n: r.value(t) for k, x in bound.items() for n, t in _named(x, k)})

        def after(m: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            r.leave({n: r.value(t) for n, t in _named(out)})

        for handle in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        attributes.update(_track(path, module))
    return attributes


def _track(path: str, module: torch.nn.Module) -> dict[tuple[str, str], int]:
    """Give a module tracked ints, and a config of its own with tracked ints (a whole model keeps its config)."""
    found: dict[tuple[str, str], int] = {}
    config = vars(module).get("config")
    if isinstance(config, PreTrainedConfig) and not isinstance(module, PreTrainedModel):
        vars(module)["config"] = config = copy.copy(config)
        owners: list[tuple[str, Any]] = [("", module), ("config.", config)]
    else:
        owners = [("", module)]
    for prefix, owner in owners:
        for name, number in list(vars(owner).items()):
            if type(number) is int and number > 1 and not name.startswith("_"):
                found[path, prefix + name] = number
                vars(owner)[name] = Tracked.of(number, ("attribute", path, prefix + name))
    return found


def record(model: PreTrainedModel, bypasses: bool, example: Example | None = None) -> Trace:
    """Run `model` (on meta; it is used up by this) and return its trace. `example`: what it is given, by default the first that there is.

    Where more than token ids go in, their numbers are known in the trace: where a picture stands decides which ops run.
    """
    r = Recorder()
    parameters: dict[str, int] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    by_value: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in r.known:
            aliases[by_value[r.known[id(p)]]] += (name,)
        else:
            at = parameters[name] = r.add(p, "parameter", name)
            by_value[at], aliases[name] = name, ()
    for name, b in model.named_buffers():
        r.value(b)
        r.values[r.known[id(b)]]["name"] = name
    given = example or next(examples(model, BATCH, LENGTH, SOURCE_LENGTH))
    arguments = {name: t.to("meta") for name, t in given.items()}
    known = not given.keys() <= {TOKENS, DECODED}
    own = keeps_state(model, arguments)
    inputs = {name: r.add(t, "input", name, data=given[name].clone() if known else None) for name, t in arguments.items()}
    with ExitStack() as stack:
        attributes = _hook(model, r, stack)
        stack.enter_context(torch.no_grad())
        _active.recorder = r
        stack.callback(setattr, _active, "recorder", None)
        stack.enter_context(r)
        stack.enter_context(IntReader(r))
        # a state that modules keep themselves is made in their code, by their ints; keys and values are as long as what they are given
        options = {"use_cache": own} if "use_cache" in inspect.signature(model.forward).parameters else {}
        try:
            model(**arguments, **options)
        except Exception as e:
            raise TraceError(str(e) if isinstance(e, TraceError) else f"{r.where()}: {stops.words(e)}", len(r.ops)) from e
    return Trace(
        config=model.config,
        architecture=type(model).__name__,
        values=[Value(**v) for v in r.values],
        ops=r.ops,
        calls=r.calls,
        attention=r.attention,
        parameters=parameters,
        aliases=aliases,
        inputs=inputs,
        outputs=dict(r.calls[0].outputs),
        modules={path: type(m) for path, m in model.named_modules()},
        attributes=attributes,
        int_uses=r.int_uses,
        frozen=frozenset(name for name in parameters if not model.get_parameter(name).requires_grad),
        bypasses=bypasses,
    )
