"""Norms of a prompt in bfloat16 on a CPU in one pass over memory, where torch makes seven, in float32 (kernels/norm.h).

Which modules are root mean square norms, and of which form, is found by trying: one parameter, and for random tokens and weights, small and
large, the same results, all but a few of them bit for bit and those few off by one rounding (torch adds squares in another order).

Not here: single tokens, other dtypes and devices, gradients, norms over a cut axis (norm.py); the module's own code makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..kernels import norm
from ..kernels.many import LEAST

TRIED = 64  # tokens
SCALES = (1e-3, 1.0, 1e3)
ALIKE = 0.995  # of the results, bit for bit


@torch.inference_mode()
def install(model: nn.Module) -> None:
    """The model's root mean square norms are made in one pass from now on, where they may be."""
    known: dict[Any, norm.Form | None] = {}
    counted = {id(x) for module in model.modules() if "means_over_ranks" in vars(module) for x in module.modules()}  # mean by mean
    for module in model.modules():
        if (
            id(module) in counted
            or "colrow_norm" in vars(module)
            or set(module._parameters) != {"weight"}
            or module._modules
            or module._buffers
        ):
            continue
        weight = module._parameters["weight"]
        if weight is None or weight.dim() != 1 or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
            continue
        facts = type(module), weight.numel(), tuple(_settings(module))
        if facts not in known:
            known[facts] = _form(module, weight)
        if known[facts] is not None:
            module.colrow_norm = known[facts]  # type: ignore[assignment]
            kind: Any = type(module)
            module.__class__ = _class(kind)


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if isinstance(value, str | int | float))


def _form(module: nn.Module, weight: torch.Tensor) -> norm.Form | None:
    numbers = (value for _, value in _settings(module) if isinstance(value, float))
    forms = [norm.Form(eps, *rest) for eps in numbers for rest in ((0.0, True), (0.0, False), (1.0, False))]
    return next((form for form in forms if _same(module, weight.numel(), form)), None)


def _same(module: nn.Module, width: int, form: norm.Form) -> bool:
    draw = torch.Generator().manual_seed(0)
    for scale in (*SCALES, form.eps**0.5):
        x = (scale * torch.randn(1, TRIED, width, generator=draw)).bfloat16()
        weight = torch.randn(width, generator=draw).bfloat16()
        mine = norm.norm(x, weight, form)
        try:
            theirs = functional_call(module, {"weight": weight}, (x,))
        except Exception:  # it is something else, which wants more than tokens
            return False
        if mine is None or not isinstance(theirs, torch.Tensor) or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            return False
        one = mine.float().abs() * 2**-6 + 1e-30  # two roundings, each to 2^-8
        if float((mine == theirs).float().mean()) < ALIKE or bool(((mine.float() - theirs.float()).abs() > one).any()):
            return False
    return True


@functools.cache
def _class(cls: Any) -> Any:
    """The module's class, prompts apart."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        form = vars(self).get("colrow_norm")
        if form and len(args) == 1 and not kwargs and not torch.is_grad_enabled() and args[0].numel() >= LEAST * args[0].shape[-1]:
            made = norm.norm(args[0], self.weight, form)
            if made is not None:
                return made
        return cls.forward(self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        """Pickle finds the module's class by its name, but not this one."""
        return _blank, (cls,), *cls.__reduce_ex__(self, protocol)[2:]

    return type(cls.__name__, (cls,), {"forward": forward, "__reduce_ex__": reduced})


def _blank(cls: Any) -> Any:
    kind = _class(cls)
    return kind.__new__(kind)
