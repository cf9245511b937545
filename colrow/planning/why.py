"""Plans for people: the reason of one parameter in words, and the whole plan as a plain-text table.

Both read only the plan, so they work for one that comes from a file. Widths stay under 110 columns. Not here: prices (cost.py).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TypeVar

from ..partition import Partition, Ranges
from . import lengths
from .plan import Attention, Edit, Plan, Region, TensorPlan

WIDTH = 110
Entry = TypeVar("Entry", TensorPlan, Attention, Region, Edit)


def explain(plan: Plan, name: str) -> str:
    """Role, ranges of every rank, the way of the cut axis, and where sums are added, of one parameter. UserError for an unknown name."""
    entry = plan.tensor(name)
    shape = " x ".join(map(str, entry.shape))
    lines = [f"{name}  [{shape}]" + (f", the same tensor as {entry.name}" if name != entry.name else "")]
    lines += [f"  also known as {alias}" for alias in entry.aliases if alias != name]
    lines += _wrapped(entry.reason)
    if entry.partition.dim is not None:
        lines.append(f"  cut along dim {entry.partition.dim} of {shape}, as PyTorch stores it:")
        lines += [f"    rank {rank}: {_held(plan, entry, rank)}" for rank in range(plan.ranks)]
    lines += _sums(plan, entry)
    if entry.path:
        lines += ["  the way of the cut axis:", *(f"    {step}" for step in entry.path)]
    return "\n".join(lines)


def table(plan: Plan) -> str:
    """The plan in one screen: repeated layers folded, where communication happens, what stays whole and why."""
    weights = f", in proportion {':'.join(f'{w:g}' for w in plan.weights)}" if plan.weights else ""
    lines = [f"{plan.architecture} on {plan.ranks} rank{'s' * (plan.ranks > 1)}{weights}", ""]
    rows = [("parameter", "shape", "role", "dim", "on each rank")]
    for label, entry in folded((entry.name, entry) for entry in plan.tensors.values()):
        dim = "" if entry.partition.dim is None else str(entry.partition.dim)
        role = entry.role + (" (gradient summed)" if entry.grad == "partial" else "")
        rows.append((label, "x".join(map(str, entry.shape)), role, dim, _sizes(plan, entry)))
        rows.extend((f"  = {alias}", "", "", "", "") for alias in entry.aliases)
    lines += _columns(rows)
    if plan.attention:
        lines += ["", "attention", *_columns([(label, _heads(a)) for label, a in folded((a.module, a) for a in plan.attention)])]
    if plan.regions:
        lines += ["", "between ranks"]
        lines += _columns([(label, _OPERATIONS[r.op], _shape(r)) for label, r in folded((r.name, r) for r in plan.regions)])
    if plan.edits:
        lines += ["", "integers that become local"]
        edits = folded((f"{e.module}.{e.attribute}", e) for e in plan.edits)
        lines += _columns([(label, f"{e.whole} -> {', '.join(map(str, e.values))}") for label, e in edits])
    if plan.notes:
        lines += ["", "notes"]
        for note in plan.notes:
            lines += _wrapped(f"{note.subject}: {note.text}")
    return "\n".join(line.rstrip() for line in lines)


_OPERATIONS = {
    "copy": "f: all-reduce of the gradient",
    "reduce": "g: all-reduce",
    "gather": "gather",
    "slice": "own part, nothing sent",
    "hold": "waits to be added up, nothing sent",
    "mean": "all-reduce of a mean, both ways",
    "row": "all-reduce of a row of a table",
    "once": "counts on the first rank, nothing sent",
}


def _shape(region: Region) -> str:
    return "[" + ", ".join(map(lengths.text, region.shape)) + "]"


def _held(plan: Plan, entry: TensorPlan, rank: int) -> str:
    """A rank's ranges, in heads where the cut follows heads."""
    ranges = entry.partition.pieces[rank]
    text = _ranges(ranges) if ranges else "nothing"
    heads = _of_heads(plan, entry, rank)
    return f"{text}  ({heads})" if heads else text


def _of_heads(plan: Plan, entry: TensorPlan, rank: int) -> str:
    """ "query heads 0-4" where a parameter of an attention module is cut like its query or KV heads."""
    found = next((a for a in plan.attention if entry.name.startswith(f"{a.module}.")), None)
    if found is None or entry.partition.dim is None:
        return ""
    for heads, what in ((found.query, "query heads" if found.query.size != found.kv.size else "heads"), (found.kv, "KV heads")):
        blocks, rest = divmod(entry.partition.size, heads.size)
        if not rest and blocks % found.head_dim == 0 and _in_blocks(entry.partition, heads):
            return f"{what} {_ranges(heads.pieces[rank])} of {heads.size}, {blocks} features each"
    return ""


def _in_blocks(cut: Partition, heads: Partition) -> bool:
    """Whether a rank holds of the dim what it holds of the heads (in each of several fused tensors, say q, k and v)."""
    return all(cut.local_size(r) * heads.size == heads.local_size(r) * cut.size for r in range(cut.ranks))


def _ranges(ranges: Ranges) -> str:
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges)


def _sums(plan: Plan, entry: TensorPlan) -> list[str]:
    """Where partial sums and partial gradients of this parameter are added."""
    module = entry.name.rpartition(".")[0]
    own = [r for r in plan.regions if r.module == module]
    lines = [f"  forward: {_OPERATIONS[r.op]} at {r.name}" for r in own if r.op in ("reduce", "hold", "mean")]
    before = copy_before(plan, entry)
    if before is not None and entry.role in ("column", "vocab", "split"):
        lines.append(f"  backward: the gradient of its input is all-reduced at {before.name}")
    if entry.grad == "partial":
        lines.append("  backward: every rank has a part of its gradient, the parts are summed over all ranks")
    for segment in entry.partition.shared()[:3]:
        ranks = ", ".join(map(str, segment.ranks))
        lines.append(f"  backward: indices {segment.start}-{segment.stop - 1} lie on ranks {ranks}, which sum their gradients")
    return lines


def copy_before(plan: Plan, entry: TensorPlan) -> Region | None:
    """The f on the way into the parameter's module: named by the reason of an f that lists the module, in the nearest common parent."""
    module = entry.name.rpartition(".")[0]
    leaf = module.rpartition(".")[2]
    words = [r for r in plan.regions if r.op == "copy" and re.search(rf"\b{re.escape(leaf)}\b", r.reason)]
    return max(words, key=lambda r: len(_common(r.module, module)), default=None)


def _common(one: str, other: str) -> list[str]:
    out = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        out.append(a)
    return out


def _sizes(plan: Plan, entry: TensorPlan) -> str:
    """Local sizes along the cut dim, in heads where there are heads."""
    cut = entry.partition
    if cut.dim is None:
        return "all of it"
    sizes = [cut.local_size(r) for r in range(plan.ranks)]
    text = " ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]}"
    return text if plan.ranks <= 8 or len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"


def _heads(a: Attention) -> str:
    ranks = range(a.query.ranks)
    query = " ".join(str(a.query.local_size(r)) for r in ranks)
    kv = ", ".join(_ranges(a.kv.pieces[r]) for r in ranks)
    return f"query heads {query} of {a.query.size}; KV heads {kv} of {a.kv.size}"


def folded(entries: Iterable[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """Entries whose names differ in one number only, and whose content is alike, as one with a range of numbers."""
    groups: dict[tuple[str, str], list[tuple[str, Entry]]] = {}
    for name, entry in entries:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), _content(entry)), []).append((name, entry))
    out: list[tuple[str, Entry]] = []
    for (pattern, _), members in groups.items():
        if len(members) == 1 or pattern.count("*") != 1:
            out.extend(members)
            continue
        numbers = [int(re.findall(r"(?<=\.)\d+(?=\.)", name)[0]) for name, _ in members]
        out.append((pattern.replace("*", runs(numbers)), members[0][1]))
    return out


def runs(numbers: list[int]) -> str:
    """0,1,2,5 as "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _content(entry: TensorPlan | Attention | Region | Edit) -> str:
    """What must be alike for two entries to be folded."""
    match entry:
        case TensorPlan():
            return repr((entry.shape, entry.partition, entry.role, entry.grad, entry.aliases))
        case Attention():
            return repr((entry.query, entry.kv, entry.kv_of))
        case Region():
            return repr((entry.op, entry.shape, entry.partition, entry.ranks))
        case Edit():
            return repr((entry.whole, entry.values))
    raise TypeError(type(entry))


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of text in aligned columns; the last one may be cut."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in lines]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
