"""The other ways to split one matrix, and what each would move. For `colrow plan MODEL --why NAME`; reads only the plan."""

from __future__ import annotations

from math import prod

from .plan import Plan, TensorPlan


def alternatives(plan: Plan, name: str, tokens: int, dtype_bytes: int = 2) -> list[str]:
    """One sentence for each: cut along the other axis, or not at all. `tokens` go through at once. UserError for an unknown name; nothing
    for what is no matrix or is whole."""
    entry = plan.tensor(name)
    dim = entry.partition.dim
    if dim is None or len(entry.shape) != 2 or entry.role not in ("column", "row"):
        return []
    cut, other = entry.shape[dim], entry.shape[1 - dim]
    size = tokens * dtype_bytes
    out = [_other_axis(plan, entry, cut, other, size, tokens)]
    held = max(prod(entry.partition.local_shape(entry.shape, rank)) for rank in set(plan.like)) * dtype_bytes
    whole = prod(entry.shape) * dtype_bytes
    out.append(f"kept whole: nothing is moved for it, but every rank holds and reads {whole:,} bytes instead of {held:,}")
    return out


def _other_axis(plan: Plan, entry: TensorPlan, cut: int, other: int, size: int, tokens: int) -> str:
    if entry.role == "row":
        return (
            f"cut along its {other} outputs instead, it would need the whole of its input: an all-gather of {size * cut:,} bytes before it "
            f"and one of {size * other:,} after it, instead of one all-reduce of {size * other:,}, for {tokens} tokens"
        )
    rows = [t for t in plan.tensors.values() if t.path == entry.path and t.role == "row" and len(t.shape) == 2]
    before = next((step for step in entry.path if not step.startswith(entry.name.rpartition(".")[0])), "what follows")
    text = f"cut along its {other} inputs instead, its output would be a partial sum: an all-reduce of {size * cut:,} bytes before {before}"
    if rows:
        width = rows[0].shape[1 - (rows[0].partition.dim or 0)]
        text += f", instead of {size * width:,} after {rows[0].name.rpartition('.')[0]}"
    return f"{text}, for {tokens} tokens"
