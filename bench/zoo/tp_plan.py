"""colrow's plan beside transformers' own `tp_plan`, weight by weight, and each difference in a sentence.

transformers writes its plans by hand: patterns of module names with a style each (`base_model_tp_plan` of a config class, `_tp_plan` of a
model class). What a style does to a weight is in `STYLES`; a weight that no pattern names is whole there on every rank. Weights of layers
that are alike count once. Not here: whether either plan is right (the gate says so for colrow's).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedConfig

from colrow.planning.models import build
from colrow.planning.plan import Plan, TensorPlan
from colrow.planning.words import fold

STYLES: dict[str, int | None] = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "packed_colwise", "embedding_rowwise"), -2),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "packed_rowwise", "embedding_colwise"), -1),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), None),
}
"""The dim of a weight that a style cuts, counted from the end (None: whole). Styles that are not here say nothing of a weight."""

Difference = dict[str, str]


def compare(config: PreTrainedConfig, plan: Plan) -> dict[str, Any] | None:
    """{"agree": number, "differ": [...]}; None where transformers has no plan for this architecture."""
    with torch.device("meta"):
        model = build(config)
    patterns = dict(model._tp_plan or {})
    if not any(STYLES.get(style) for style in patterns.values()):
        return None
    agree, differ = set[str](), dict[str, Difference]()
    for name, entry in plan.tensors.items():
        style = _style(name, patterns)
        theirs, ours = _theirs(entry, style), entry.partition.dim
        if theirs == ours:
            agree.add(fold(name))
        else:
            words = {"theirs": _words(theirs), "ours": _words(ours), "role": entry.role}
            differ[fold(name)] = {"name": fold(name), "style": style or "not named", **words, "why": entry.reason}
    return {"agree": len(agree - differ.keys()), "differ": list(differ.values())}


def _style(name: str, patterns: dict[str, str]) -> str:
    """The style of a parameter by the pattern that names it, or its module."""
    plain = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return next((s for key in (plain, plain.rpartition(".")[0]) if (s := patterns.get(key, "")) in STYLES), "")


def _theirs(entry: TensorPlan, style: str) -> int | None:
    """The dim that transformers cuts; biases of row-wise layers are whole, others have no dim but the last."""
    dim = STYLES[style] if style else None
    if dim is None:
        return None
    if "bias" in entry.name.rpartition(".")[2] or len(entry.shape) == 1:
        return len(entry.shape) - 1 if dim == -2 else None
    return len(entry.shape) + dim


def _words(dim: int | None) -> str:
    return "whole" if dim is None else f"dim {dim}"


def section(rows: dict[str, dict[str, Any]]) -> str:
    """The page's section: counts, and differences by kind with an example each."""
    found = {name: row["tp_plan"] for name, row in rows.items() if row.get("tp_plan")}
    if not found:
        return ""
    agree, differ = sum(f["agree"] for f in found.values()), sum(len(f["differ"]) for f in found.values())
    same = sum(not _real_differences(f) for f in found.values())
    out = [
        "## Beside transformers' own tp_plan",
        f"transformers has plans for {len(found)} of these architectures. Of their weights (those of equal layers once) **{agree} are cut "
        f"alike and {differ} are not**; {same} architectures differ in nothing, or only in that colrow cuts more.",
    ]
    kinds: dict[str, list[tuple[str, Difference]]] = {}
    for name, each in found.items():
        for d in each["differ"]:
            kinds.setdefault(sentence(d), []).append((name, d))
    lines = ["| transformers | colrow | weights | why | for example |", "|---|---|---|---|---|"]
    for text, members in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        first = members[0][1]
        names = ", ".join(dict.fromkeys(name for name, _ in members[:40]))
        example = f"`{first['name']}` of {names if len(names) < 60 else names[:60].rpartition(',')[0] + ', ...'}"
        lines.append(f"| {first['theirs']} ({first['style']}) | {first['ours']} | {len(members)} | {text} | {example} |")
    return "\n\n".join([*out, "\n".join(lines)])


def _real_differences(found: dict[str, Any]) -> list[Difference]:
    return [d for d in found["differ"] if d["theirs"] != "whole"]


def sentence(d: Difference) -> str:
    """Why the two differ, from what both do."""
    why = _reason(d["why"])
    if d["theirs"] == "whole" and d["role"] == "vocab":
        return "transformers keeps the table on every rank; colrow cuts its rows, for one all-reduce of what is looked up"
    if d["theirs"] == "whole" and d["role"] == "row":
        return "transformers keeps it whole; its input is a slice, and its partial sums are added"
    if d["theirs"] == "whole" and d["style"] == "not named":
        return "transformers' plan does not name it, so it is whole there; its axis can be cut like those of its neighbours"
    if d["theirs"] == "whole":
        return "each rank uses only what belongs to its own heads or features; transformers keeps all of it"
    if d["style"] == "colwise_gather_output" and d["ours"] == "whole":
        return f"transformers gathers its output at once, which saves memory for an all-gather; colrow: {why}"
    return f"colrow: {why}"


def _reason(why: str) -> str:
    """The reason of one weight without its sizes and places, so that those that are alike read alike."""
    text = re.sub(r"(in|by|made in|in which) [\w*]+(\.[\w*]+)+", "there", why)
    return re.sub(r"\b\d+\b", "N", text.partition(": ")[2] or text)
