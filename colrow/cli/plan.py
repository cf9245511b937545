"""`colrow plan`: the plan, what it costs in memory and collectives, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..api import plan as make_plan
from ..api import the_dtype
from ..checkpoint.model_dir import ModelFiles
from ..errors import UserError
from ..planning import cost
from ..planning.plan import Plan
from .screen import note, say
from .units import nbytes


def show(
    files: ModelFiles, ranks: int, split: Sequence[float], given: Plan | None, why: str | None, json_file: Path | None, dtype: str
) -> None:
    config = files.config()
    plan = given or make_plan(config, ranks, split)
    if json_file is not None:
        try:
            json_file.write_text(plan.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError("the plan cannot be written", f"{json_file}: {error.strerror}", "--json plan.json") from error
        note(f"written: {json_file}")
    if why is not None:
        say(plan.why(why))
        return
    say(f"{plan}\n")
    for line in costs(plan, the_dtype(dtype, config).itemsize):
        say(line)


def costs(plan: Plan, dtype_bytes: int) -> list[str]:
    """Memory of each rank and collectives of a token, in words."""
    parameters, cache = cost.parameter_bytes(plan, dtype_bytes), cost.cache_bytes_per_token(plan, dtype_bytes)
    lines = [f"in memory, at {dtype_bytes} bytes an element"]
    for rank, (held, kept) in enumerate(zip(parameters, cache, strict=True)):
        lines.append(f"  rank {rank}: {nbytes(held)} of parameters, {nbytes(kept)} of KV cache a token")
    if plan.ranks > 1:
        found = cost.predict(plan, 1, 1, "decode", dtype_bytes, whole_logits=False)
        calls, size = sum(p.calls for p in found), sum(p.logical_bytes for p in found)
        lines += ["", f"collectives a token: {calls}, of {nbytes(size)} together, and two small ones to choose the next token"]
    return lines
