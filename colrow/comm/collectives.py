"""The collectives: named, counted, any dim, uneven sizes. The only callers of a transport.

Every function takes the `group` and the `name` of the call site ("model.layers.3.mlp.down_proj.output"), and counts itself in
`group.counters`. Inputs may be non-contiguous and are never changed unless `inplace=True`; results are contiguous. All ranks get the same
bits. In a group of one rank each function returns its input and counts nothing.

These functions move values and know no gradients: a tensor that requires grad is refused while grad mode is on, because the result would
lose its gradient without a word. `regions.py` has the differentiable ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .counters import Tally
from .group import Call, Group


def all_reduce(x: torch.Tensor, group: Group, name: str, op: str = "sum", inplace: bool = False) -> torch.Tensor:
    """Sum or maximum ("sum", "max") of every rank's `x`, all of one shape. float16 and bfloat16 are summed in float32.

    With `inplace` the result is written into `x`, which is returned. bool has no sum here; its "max" is "any".
    """
    _refuse_grad(x, name)
    if op not in ("sum", "max") or (op == "sum" and x.dtype is torch.bool) or x.is_complex():
        raise ValueError(f"all_reduce '{name}': no {op!r} of {x.dtype}; there are 'sum' and 'max', of bool only 'max'")
    if group.size == 1:
        return x
    out = x if inplace and x.is_contiguous() else _private(x)
    call = Call("all_reduce", name, _dtype(x), x.numel(), f"{op} of {_shape(x.shape)}")
    _counted(group, call, out, lambda: group.transport.all_reduce(_raw(out), op, call))
    if inplace and out is not x:
        return x.copy_(out)
    return out


def all_gather(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Every rank's `x` side by side along `dim`, in rank order. Rank r's has `sizes[r]` along it (0 allowed); other dims are equal."""
    _refuse_grad(x, name)
    dim = _check_sizes(x, group, name, dim, sizes, x.shape[dim], sizes[group.rank])
    if group.size == 1:
        return x
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    whole = torch.empty(shape, dtype=x.dtype, device=x.device)
    pieces = list(whole.split(list(sizes), dim))
    direct = all(piece.is_contiguous() for piece in pieces)  # then the transport writes into the result itself
    out = pieces if direct else [torch.empty(piece.shape, dtype=x.dtype, device=x.device) for piece in pieces]
    call = Call("all_gather", name, _dtype(x), whole.numel(), f"dim {dim} of {_shape(shape)} as {list(sizes)}")
    _counted(group, call, whole, lambda: group.transport.all_gather(_raw(x.detach().contiguous()), [_raw(o) for o in out], call))
    return whole if direct else torch.cat(out, dim, out=whole)


def reduce_scatter(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The rank's part of the sum of every rank's `x`, all of one shape: rank r gets `sizes[r]` indices along `dim`, in rank order."""
    _refuse_grad(x, name)
    if x.dtype is torch.bool or x.is_complex():
        raise ValueError(f"reduce_scatter '{name}': there is no sum of {x.dtype}")
    dim = _check_sizes(x, group, name, dim, sizes, x.shape[dim], sum(sizes))
    if group.size == 1:
        return x
    parts = [part.contiguous() for part in x.detach().split(list(sizes), dim)]
    out = torch.empty_like(parts[group.rank])
    call = Call("reduce_scatter", name, _dtype(x), x.numel(), f"dim {dim} of {_shape(x.shape)} as {list(sizes)}")
    _counted(group, call, x, lambda: group.transport.reduce_scatter(parts, out, call))
    return out


def broadcast(x: torch.Tensor, group: Group, name: str, source: int = 0, inplace: bool = False) -> torch.Tensor:
    """Rank `source`'s `x` on every rank. All ranks pass a tensor of the same shape and dtype; with `inplace` it receives the result."""
    _refuse_grad(x, name)
    _check_source(group, name, source)
    if group.size == 1:
        return x
    out = x if inplace and x.is_contiguous() else _private(x)
    call = Call("broadcast", name, _dtype(x), x.numel(), f"rank {source}'s {_shape(x.shape)}")
    _counted(group, call, x, lambda: group.transport.broadcast(_raw(out), source, call))
    if inplace and out is not x:
        return x.copy_(out)
    return out


def gather_objects(value: Any, group: Group, name: str) -> list[Any]:
    """Small picklable values of all ranks, in rank order. Counted as calls of "object"; their bytes are not counted."""
    if group.size == 1:
        return [value]
    return _objects(value, group, Call("object", name))


def broadcast_object(value: Any, group: Group, name: str, source: int = 0) -> Any:
    """Rank `source`'s small picklable value on every rank; what the others pass is not looked at."""
    _check_source(group, name, source)
    if group.size == 1:
        return value
    call = Call("object", name, detail=f"rank {source}'s value")
    return _objects(value if group.rank == source else None, group, call)[source]


def barrier(group: Group, name: str) -> None:
    """Returns when every rank has come here."""
    if group.size > 1:
        _objects(None, group, Call("barrier", name))


def _objects(value: Any, group: Group, call: Call) -> list[Any]:
    out: list[Any] = []

    def move() -> int:
        out.extend(group.transport.gather_objects(value, call))
        return 0

    _counted(group, call, None, move)
    return out


def _counted(group: Group, call: Call, logical: torch.Tensor | None, move: Callable[[], int]) -> None:
    """Runs `move`, which returns the bytes that this rank moved, and books it. What was begun before (background.py) is done first."""
    if group.transport.worker is not None:
        group.transport.worker.settle()
    if group.counters.watch is not None:
        with group.counters.watch(call, logical):
            move()
        return
    waited, start = group.transport.waited, time.perf_counter()
    moved = move()
    seconds, waiting = time.perf_counter() - start, group.transport.waited - waited
    logical_bytes = 0 if logical is None else logical.numel() * logical.element_size()
    group.counters.record(call.op, call.name, Tally(1, logical_bytes, moved, waiting, max(seconds - waiting, 0.0)))


def _private(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that shares nothing with `x`."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _raw(x: torch.Tensor) -> torch.Tensor:
    """bool as bytes, which every transport can move and compare; anything else as it is, without its graph."""
    return x.detach().view(torch.uint8) if x.dtype is torch.bool else x.detach()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _refuse_grad(x: torch.Tensor, name: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"collective '{name}' would cut the gradient of a tensor that requires grad; use comm.regions, or pass x.detach()")


def _check_sizes(x: torch.Tensor, group: Group, name: str, dim: int, sizes: Sequence[int], found: int, expected: int) -> int:
    """`dim` counted from the front. ValueError where `sizes` do not describe `x`."""
    if len(sizes) != group.size or min(sizes) < 0:
        raise ValueError(f"'{name}': sizes must be {group.size} numbers of at least 0, one a rank, got {list(sizes)}")
    if found != expected:
        raise ValueError(
            f"'{name}': rank {group.rank} has {found} along dim {dim} of {tuple(x.shape)}; sizes {list(sizes)} ask for {expected}"
        )
    return dim % x.dim()


def _check_source(group: Group, name: str, source: int) -> None:
    if not 0 <= source < group.size:
        raise ValueError(f"'{name}': source must be a rank of the group, 0 to {group.size - 1}, got {source}")
