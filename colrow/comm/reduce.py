"""Sum or maximum of one tensor per rank, in rank order, so that every rank computes the same bits.

Used by the transports that add in torch (threads, gloo); shared memory does the same in C. float16 and bfloat16 are added in float32 and
rounded once at the end, so that the sum of n parts has the error of one rounding and not of n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SHORT = (torch.float16, torch.bfloat16)


def reduce_in_order(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """`out` = parts[0] op parts[1] op ..., all of one shape and dtype. `out` may be one of the parts."""
    if op not in ("sum", "max"):
        raise ValueError(f"op must be 'sum' or 'max', got {op!r}")
    if len(parts) == 2:  # one pass; torch adds two 16-bit numbers in float32 and rounds once
        torch.add(*parts, out=out) if op == "sum" else torch.maximum(*parts, out=out)
        return
    total = parts[0].to(torch.float32) if op == "sum" and out.dtype in SHORT else parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total += part
        else:
            torch.maximum(total, part, out=total)
    out.copy_(total)
