"""How a forward pass is caught: a dispatch mode for ops, a function mode for integers and list indices, hooks for module borders.

Three things make plain meta tensors enough. Host reads (`bool(mask.all())`) are answered from the op that made the value. Ops on constants
are also run on the CPU, so their content is known. Index lists written in the code (`x[..., [-2], :]`) become slices, whose meaning does
not depend on a tensor's content. Attention goes through a function registered with transformers, which runs the model's own eager code and
marks it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .ints import Expr, Tracked, expression
from .trace import BATCH, LENGTH, SOURCE_LENGTH, AttentionCall, Call, IntUse, Op, Ref, Trace, TraceError, Value

THROUGH_INTERFACE, EAGER = "colrow_trace", "eager"
SMALL = 1 << 16  # elements of a constant whose content is kept
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
        tensors = list(_tensors((args, kwargs)))
        inputs = [self.value(t) for t in tensors]
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal"):
            return self._host_read(func, inputs, args)
        constant = all(self.values[i]["constant"] for i in inputs) and torch.Tag.nondeterministic_seeded not in func.tags
        ref_args, ref_kwargs = self._refs(args), self._refs(kwargs)
        content = self._on_cpu(func, ref_args, ref_kwargs) if constant else None
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as e:
            raise TraceError(f"{self.where()}: {func} has no shape without numbers") from e
        outputs, mutates = [], None
        results = result if isinstance(result, tuple | list) else (result,)
        contents = content if isinstance(content, tuple | list) else (content,) * len(results)
        for out, data in zip(results, contents, strict=False):
            if not isinstance(out, torch.Tensor):
                outputs.append(-1)
                continue
            if id(out) in self.known:
                mutates = self.known[id(out)]
                if not constant or data is None:
                    self._overwritten(out, constant)
            small = data if isinstance(data, torch.Tensor) and data.numel() <= SMALL else None
            outputs.append(self.add(out, "result", constant=constant, data=small))
        op = Op(len(self.ops), func, ref_args, ref_kwargs, tuple(outputs), self.open[-1] if self.open else 0, self.in_attention, mutates)
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

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The content of an op on constants, or None where an input's content is unknown or the op cannot run."""

        def fill(tree: Any) -> Any:
            if isinstance(tree, Ref):
                data = self.values[tree.id]["data"]
                if data is None:
                    raise LookupError
                return data
            if isinstance(tree, list | tuple):
                return type(tree)(fill(x) for x in tree)
            if isinstance(tree, dict):
                return {k: fill(v) for k, v in tree.items()}
            return torch.device("cpu") if isinstance(tree, torch.device) else tree

        try:
            return func(*fill(args), **fill(kwargs))
        except (LookupError, RuntimeError, NotImplementedError, TypeError, IndexError):
            return None

    def _overwritten(self, tensor: torch.Tensor, constant: bool) -> None:
        """Something unknown was written into memory: what lies there is no longer known, nor constant unless `constant`."""
        for at in self.memory[tensor.untyped_storage()._cdata]:
            self.values[at]["data"] = None
            self.values[at]["constant"] &= constant

    def _host_read(self, func: Any, inputs: list[int], args: Any) -> Any:
        data = [self.values[i]["data"] for i in inputs]
        if all(d is not None for d in data):
            return func(*data, *args[len(data) :])
        made = self.made_by.get(inputs[0])
        name = "eq" if func._schema.name == "aten::equal" else made.name if made else ""
        if name in ("all", "eq"):  # "is the mask all ones?", "are positions consecutive?": the plain case
            return True
        if name in ("any", "ne"):
            return False
        raise TraceError(f"{self.where()}: the model's code reads a number of a tensor ({name or 'an input'})")

    def where(self) -> str:
        return (self.calls[self.open[-1]].module if self.open else "") or "model"

    def enter(self, module: str, inputs: dict[str, int]) -> None:
        parent = self.open[-1] if self.open else None
        self.calls.append(Call(len(self.calls), module, parent, inputs, {}, len(self.ops), len(self.ops)))
        self.open.append(len(self.calls) - 1)

    def leave(self, outputs: dict[str, int]) -> None:
        call = self.calls[self.open.pop()]
        call.outputs, call.last = outputs, len(self.ops)


class IntReader(TorchFunctionMode):
    """Sees the integers that the model's code gives to torch functions, before they lose their origin, and rewrites list indices."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and isinstance(args[0], torch.Tensor):
            args = (args[0], _as_slices(args[1]))
        out = func(*args, **kwargs)
        if name in ("__get__", "size") and isinstance(out, torch.Size | int) and not isinstance(out, bool):
            return self._tracked_sizes(func, name, args, kwargs, out)
        if name in ("tensor", "as_tensor") and isinstance(out, torch.Tensor) and out.device.type == "meta":
            self._literal(func, out, args, kwargs)
        elif name in _SIZES:
            for tensor, dim, number in _SIZES[name](args, kwargs, out):
                self._use(name, tensor, dim, expression(number))
        return out

    def _tracked_sizes(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        tensor = args[0]
        if name == "__get__" and not isinstance(out, torch.Size):
            return out
        at = self.recorder.value(tensor)
        if isinstance(out, torch.Size):
            return torch.Size([Tracked.of(n, ("size", at, d)) for d, n in enumerate(out)])
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return Tracked.of(out, ("size", at, dim % tensor.dim()))

    def _literal(self, func: Any, out: torch.Tensor, args: Any, kwargs: Any) -> None:
        try:
            content = func(*args, **{**kwargs, "device": "cpu"})
        except (RuntimeError, TypeError, NotImplementedError):
            return
        self.recorder.values[self.recorder.value(out)].update(constant=True, data=content)

    def _use(self, function: str, tensor: torch.Tensor, dim: int, expr: Expr) -> None:
        r = self.recorder
        r.int_uses.append(IntUse(len(r.ops) - 1, r.open[-1] if r.open else 0, function, r.value(tensor), dim, expr))


def _as_slices(index: Any) -> Any:
    """Lists of consecutive ints in an index, as slices: the same elements, and no tensor of unknown content."""
    if isinstance(index, tuple):
        return tuple(_as_slices(i) for i in index)
    numbers = isinstance(index, list) and bool(index) and all(type(i) is int for i in index)
    if numbers and all(b == a + 1 for a, b in pairwise(index)):
        return slice(index[0], None if index[-1] == -1 else index[-1] + 1)
    return index


def _flat(sizes: Any) -> list[int]:
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    return [s for s in sizes if isinstance(s, int)]


def _output_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    """view, reshape, expand: the given sizes are those of the result; -1 fixes nothing."""
    sizes = _flat(args[1:]) or _flat((kwargs.get("shape") or kwargs.get("size") or (),))
    if len(sizes) == out.dim():
        yield from ((out, d, n) for d, n in enumerate(sizes) if n != -1)


def _factory_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    sizes = _flat(args) or _flat((kwargs.get("size") or (),))
    if len(sizes) == out.dim():
        yield from ((out, d, n) for d, n in enumerate(sizes))


def _split_sizes(args: Any, kwargs: Any, outs: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    each = sizes if isinstance(sizes, list | tuple) else [sizes] * len(outs)
    for out, n in zip(outs, each, strict=True):
        if out.shape[dim] == n:  # the last piece may be what is left over
            yield out, dim % out.dim(), n


def _unflatten_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % args[0].dim()
    sizes = args[2] if len(args) > 2 else kwargs["sizes"]
    yield from ((out, dim + i, n) for i, n in enumerate(sizes) if n != -1)


def _narrow_size(args: Any, kwargs: Any, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    dim, length = (args[1], args[3]) if len(args) > 3 else (kwargs.get("dim", 0), kwargs.get("length", out.shape[0]))
    yield out, dim % out.dim(), length


def _slice_bounds(args: Any, kwargs: Any, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    """x[..., a:b]: a result that is shorter than x was cut by an int of the code, whichever of the bounds it is."""
    source, index = args
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in index):
        return
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    dim_in = dim_out = 0
    for i in index:
        if i is Ellipsis:
            skip = source.dim() - used
            dim_in, dim_out = dim_in + skip, dim_out + skip
        elif i is None:
            dim_out += 1
        elif isinstance(i, int):
            dim_in += 1
        else:
            if i.step in (None, 1) and out.shape[dim_out] != source.shape[dim_in]:
                start = i.start if i.start is not None else 0
                stop = i.stop if i.stop is not None else Tracked.of(source.shape[dim_in], ("int", source.shape[dim_in]))
                yield out, dim_out, stop - start if stop >= 0 and start >= 0 else out.shape[dim_out]
            dim_in, dim_out = dim_in + 1, dim_out + 1


_SIZES: dict[str, Callable[[Any, Any, Any], Iterator[tuple[torch.Tensor, int, int]]]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _output_sizes),
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), _factory_sizes),
    **dict.fromkeys(("split", "split_with_sizes"), _split_sizes),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), _output_sizes),
    "full": lambda args, kwargs, out: _factory_sizes(args[:1], kwargs, out),
    "unflatten": _unflatten_sizes,
    "narrow": _narrow_size,
    "__getitem__": _slice_bounds,
}


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


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


def _attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
    """What the traced model calls for attention: the eager function of its own modeling file, with the ops inside marked."""
    r: Recorder = _active.recorder
    eager = sys.modules[type(module).__module__].eager_attention_forward
    first, outer, r.in_attention = len(r.ops), r.in_attention, len(r.attention)
    q, k, v = (r.value(t) for t in (query, key, value))
    r.attention.append(AttentionCall(r.calls[r.open[-1]].module, q, k, v, -1, first, first))
    result = eager(module, query, key, value, mask, **kwargs)
    at, r.in_attention = r.in_attention, outer
    r.attention[at] = AttentionCall(r.calls[r.open[-1]].module, q, k, v, r.value(result[0]), first, len(r.ops))
    return result


AttentionInterface.register(THROUGH_INTERFACE, _attention)
AttentionMaskInterface.register(THROUGH_INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the model is called with: token ids, for an encoder-decoder two of them."""
    main = model.main_input_name
    if main != "input_ids":
        raise TraceError(f"the model takes {main}, not token ids")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    if not getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": ids}
    return {"input_ids": torch.zeros(BATCH, SOURCE_LENGTH, dtype=torch.long, device="meta"), "decoder_input_ids": ids}


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
        for name, number in list(vars(module).items()):
            if type(number) is int and number > 1:
                attributes[path, name] = number
                vars(module)[name] = Tracked.of(number, ("attribute", path, name))
    return attributes


def record(model: PreTrainedModel, bypasses: bool) -> Trace:
    """Run `model` (on meta; it is used up by this) and return its trace."""
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
    arguments = _inputs(model)
    inputs = {name: r.add(t, "input", name) for name, t in arguments.items()}
    with ExitStack() as stack:
        attributes = _hook(model, r, stack)
        stack.enter_context(torch.no_grad())
        _active.recorder = r
        stack.callback(setattr, _active, "recorder", None)
        stack.enter_context(r)
        stack.enter_context(IntReader(r))
        model(**arguments, use_cache=False) if "use_cache" in inspect.signature(model.forward).parameters else model(**arguments)
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
        bypasses=bypasses,
    )
