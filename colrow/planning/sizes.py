"""The integers that a model's code gives to torch functions, seen before they lose their origin; and index lists rewritten as slices.

Where an int fixes the size of a result, the recorder is told: which value, which dim, and the expression the int came from (`ints.py`). One
generator per kind of function says which ints those are. -1 fixes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .ints import Expr, Told, Tracked, attributes, expression

Fixed: TypeAlias = Iterator[tuple[torch.Tensor, int, Expr]]  # (result, dim, the size it was given)


class Listener(Protocol):
    """What the recorder offers (record.py)."""

    def value(self, tensor: torch.Tensor) -> int: ...
    def content(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def know(self, tensor: torch.Tensor, content: torch.Tensor) -> None: ...
    def use(self, function: str, tensor: torch.Tensor, dim: int, expr: Expr) -> None: ...


class IntReader(TorchFunctionMode):
    """Watches torch functions while a model is traced."""

    def __init__(self, recorder: Listener) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and isinstance(args[0], torch.Tensor):
            args = (args[0], _as_slices(args[1]))
        if name == "tolist" and (content := self.recorder.content(args[0])) is not None:
            return content.tolist()
        out = func(*args, **kwargs)
        if name in ("__get__", "size") and isinstance(out, torch.Size):
            return torch.Size([self._size(args[0], d, n) for d, n in enumerate(out)])
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return self._size(args[0], dim % args[0].dim(), out)
        if name in ("tensor", "as_tensor") and isinstance(out, torch.Tensor) and out.device.type == "meta":
            self._literal(func, out, args, kwargs)
        of_source = {"__getitem__": self._slice_bounds, "chunk": self._chunks, "pad": self._padded}.get(name)
        if of_source is not None or name in _SIZES:
            for tensor, dim, expr in (of_source or _SIZES[name])(args, kwargs, out):
                self.recorder.use(name, tensor, dim, expr)
        return out

    def _size(self, tensor: torch.Tensor, dim: int, n: int) -> Tracked:
        """An entry of a shape. The rows of a table are compared with lengths that no trace knows, so a table of which the code asks that
        stays as it is; what was compared with integers of a module, and was equal, must be equal on a rank."""

        def compared(how: str, other: Any) -> None:
            if how in ("eq", "ne"):
                if isinstance(other, Tracked) and int(other) == int(n) and attributes(other.expr):
                    self.recorder.use("a comparison", tensor, dim, other.expr)
            elif isinstance(tensor, torch.nn.Parameter):
                self.recorder.use("a comparison", tensor, dim, ("int", int(n)))

        return Told.about(n, ("size", self.recorder.value(tensor), dim), compared)

    def _literal(self, func: Any, out: torch.Tensor, args: Any, kwargs: Any) -> None:
        """A tensor written out in the code: its content is known, where that of all tensors in it is. With its
        device given by position it stays unknown, which costs coverage at most."""

        def number(entry: Any) -> Any:
            return self.recorder.content(entry) if isinstance(entry, torch.Tensor) else entry

        try:
            self.recorder.know(out, func(*tree_map(number, args), **{**kwargs, "device": "cpu"}))
        except (RuntimeError, TypeError):
            return

    def _chunks(self, args: Any, kwargs: Any, outs: Any) -> Fixed:
        """x.chunk(n, dim) into equal pieces: each is an n-th of what x has."""
        n = args[1] if len(args) > 1 else kwargs["chunks"]
        dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
        if args[0].shape[dim] % n == 0:
            whole = ("size", self.recorder.value(args[0]), dim)
            yield from ((out, dim, ("//", whole, ("int", int(n)))) for out in outs)

    def _padded(self, args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
        """F.pad(x, (left, right, ...)), from the last dim on."""
        pads = args[1] if len(args) > 1 else kwargs["pad"]
        for dim, (left, right) in zip(reversed(range(out.dim())), zip(pads[::2], pads[1::2], strict=True), strict=False):
            if left or right:
                whole = ("size", self.recorder.value(args[0]), dim)
                yield out, dim, ("+", whole, ("+", expression(left), expression(right)))

    def _slice_bounds(self, args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
        """x[..., a:b]: a result shorter than x was cut by ints of the code; its size is the difference of the bounds."""
        source, index = args
        index = index if isinstance(index, tuple) else (index,)
        if not all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in index):
            return
        whole = [("size", self.recorder.value(source), d) for d in range(source.dim())]
        dim_in = dim_out = 0
        for i in index:
            if i is Ellipsis:
                skip = source.dim() - sum(1 for j in index if j is not None and j is not Ellipsis)
                dim_in, dim_out = dim_in + skip, dim_out + skip
            elif i is None:
                dim_out += 1
            elif isinstance(i, int):
                dim_in += 1
            else:
                if i.step in (None, 1) and out.shape[dim_out] != source.shape[dim_in]:
                    start, stop = (_bound(x, default, whole[dim_in]) for x, default in ((i.start, ("int", 0)), (i.stop, whole[dim_in])))
                    yield out, dim_out, ("-", stop, start)
                dim_in, dim_out = dim_in + 1, dim_out + 1


def _bound(bound: int | None, default: Expr, whole: Expr) -> Expr:
    """A bound of a slice; a negative one counts from the end."""
    if bound is None:
        return default
    return expression(bound) if bound >= 0 else ("+", whole, expression(bound))


def _as_slices(index: Any) -> Any:
    """The one list of consecutive ints in an index, as a slice: the same elements, and no tensor of unknown content."""
    if not isinstance(index, tuple):
        return _as_slice(index)
    lists = [i for i in index if isinstance(i, list | torch.Tensor)]
    return tuple(_as_slice(i) for i in index) if len(lists) == 1 else index


def _as_slice(index: Any) -> Any:
    numbers = isinstance(index, list) and bool(index) and all(type(i) is int for i in index)
    if numbers and all(b == a + 1 for a, b in pairwise(index)):
        return slice(index[0], None if index[-1] == -1 else index[-1] + 1)
    return index


def _flat(sizes: Any) -> list[int]:
    """Sizes given one by one or as one list."""
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    return [s for s in sizes if isinstance(s, int)]


def _named(out: torch.Tensor, sizes: list[int]) -> Fixed:
    if len(sizes) == out.dim():
        yield from ((out, d, expression(n)) for d, n in enumerate(sizes) if n != -1)


def _output_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    """x.view(sizes), reshape, expand: the sizes of the result."""
    yield from _named(out, _flat(args[1:]) or _flat((kwargs.get("shape") or kwargs.get("size") or (),)))


def _factory_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    """torch.zeros(sizes)."""
    yield from _named(out, _flat(args) or _flat((kwargs.get("size") or (),)))


def _full_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    """torch.full(sizes, fill)."""
    yield from _factory_sizes(args[:1], kwargs, out)


def _split_sizes(args: Any, kwargs: Any, outs: Any) -> Fixed:
    """x.split(size or sizes, dim): of each piece; the last may be what is left over."""
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    each = sizes if isinstance(sizes, list | tuple) else [sizes] * len(outs)
    yield from ((out, dim % out.dim(), expression(n)) for out, n in zip(outs, each, strict=True) if out.shape[dim] == n)


def _unflatten_sizes(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % args[0].dim()
    sizes = args[2] if len(args) > 2 else kwargs["sizes"]
    yield from ((out, dim + i, expression(n)) for i, n in enumerate(sizes) if n != -1)


def _narrow_size(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    yield out, dim % out.dim(), expression(args[3] if len(args) > 3 else kwargs["length"])


def _repeats(args: Any, kwargs: Any, out: torch.Tensor) -> Fixed:
    """x.repeat(times): where x has one entry, the number of times is the size."""
    times = _flat(args[1:])
    shape = (1,) * (len(times) - args[0].dim()) + tuple(args[0].shape)
    if len(times) == out.dim():
        yield from ((out, d, expression(n)) for d, n in enumerate(times) if shape[d] == 1 and n != 1)


_SIZES: dict[str, Callable[[Any, Any, Any], Fixed]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to", "new_zeros", "new_ones", "new_empty"), _output_sizes),
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), _factory_sizes),
    **dict.fromkeys(("split", "split_with_sizes"), _split_sizes),
    **dict.fromkeys(("repeat", "tile"), _repeats),
    "full": _full_sizes,
    "new_full": lambda args, kwargs, out: _output_sizes(args[:2], kwargs, out),
    "unflatten": _unflatten_sizes,
    "narrow": _narrow_size,
}
