"""How close is equal: tolerances, and float64 for models that force float32 inside.

Two runs of one model that add the same numbers in another order differ by rounding and by nothing else. How much rounding is allowed is
measured where it can be: the whole model in its own dtype against the whole model in float64. Where it cannot, a fixed bound per dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative to the largest element: below this two results count as equal in any case."""

UNMEASURED = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Relative tolerance where no float64 run says how far the whole model itself is from the exact result."""

ALLOWANCE = 8.0
"""How many times the whole model's own error the split model may differ from it: the maximum of two independent errors over few elements
scatters by about this factor."""

SUSPICION = 64.0
"""Beyond this many times the whole model's own error a difference is called a bug, not rounding."""


def tolerance(dtype: torch.dtype, own_error: float | None) -> float:
    """The relative difference that counts as equal; `own_error` is the whole model's relative error against float64, None if not
    measured."""
    if own_error is None:
        return UNMEASURED[dtype]
    return max(FLOOR[dtype], ALLOWANCE * own_error)


def computing_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """In float64 everything is computed in float64; in other dtypes the model does as it always does."""
    return Float64() if dtype is torch.float64 else nullcontext()


class Float64(TorchFunctionMode):
    """Inside this context whatever asks for float32 gets float64.

    Llama's norms, most softmaxes and the loss cast to float32 whatever the model's dtype. A comparison in float64 would then see
    differences of 1e-7 wherever a value lies on a border between two float32 numbers. Under this mode the whole computation is float64 and
    1e-10 is a fair demand. It holds for one thread, and for Python calls of torch functions; build models outside of it, run them inside.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # Masks are filled with the least number of the model's dtype, which in torch's default dtype is no number
        if func is torch.full and isinstance(kwargs.get("fill_value", args[1] if len(args) > 1 else None), float):
            kwargs.setdefault("dtype", torch.float64)
        if func is torch.Tensor.__rsub__ and isinstance(args[1], float) and not args[0].is_floating_point():  # 1.0 - mask
            args = (args[0].double(), *args[1:])
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def as_written() -> AbstractContextManager[Any]:
    """Inside Float64: what is run within does what it says again. For code that reads files of float32 numbers."""
    return torch._C.DisableTorchFunction()
