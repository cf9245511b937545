"""The block whose activations Korthikanti et al. count (arXiv:2205.05198, section 4.1 and figure 2): GPT's, with dropout, in 16 bits.

It keeps for the backward pass exactly what the paper says, and nothing else: of a norm its input, of a dropout a mask of one byte an
element, of a softmax its output, of a GELU its input, of a product its two inputs. torch's own ops keep a little more (statistics of
norms), so norm and dropout are written out here. Split with colrow's regions, with sequence parallelism by parallel/sequence.py. Only for
meta tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colrow.comm import regions
from colrow.comm.group import Group
from colrow.parallel.sequence import Sequence


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("forward only")


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("forward only")


class Block(nn.Module):
    """x [b, s, h], or the rank's slice of s, to the same. `group.size` ranks share heads and the MLP's width evenly."""

    def __init__(self, h: int, a: int, group: Group, sequence: Sequence | None, selective: bool) -> None:
        super().__init__()
        t = group.size
        self.heads, self.group, self.sequence, self.selective = a // t, group, sequence, selective
        options: dict[str, Any] = {"device": "meta", "dtype": torch.float16}
        self.q, self.k, self.v = (nn.Linear(h, h // t, **options) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(h // t, h, **options),
            nn.Linear(h, 4 * h // t, **options),
            nn.Linear(4 * h // t, h, **options),
        )
        self.weight, self.bias = (nn.Parameter(torch.empty(h, **options)) for _ in range(2))

    def gather(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return regions.copy_to(x, self.group, name) if self.sequence is None else self.sequence.gather(x, name)

    def reduce(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return regions.reduce_from(x, self.group, name) if self.sequence is None else self.sequence.scatter(x, name)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        return _Dropout.apply(scores.softmax(-1)) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gather(_Norm.apply(x, self.weight, self.bias), "attention")
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        context = checkpoint(self.attend, q, k, v, use_reentrant=False) if self.selective else self.attend(q, k, v)
        x = x + _Dropout.apply(self.reduce(self.out(context.transpose(1, 2).flatten(2)), "out"))
        y = self.gather(_Norm.apply(x, self.weight, self.bias), "mlp")
        return x + _Dropout.apply(self.reduce(self.down(F.gelu(self.up(y))), "down"))
