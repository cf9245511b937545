"""docs/models.md from the zoo's rows. Text only: nothing is measured here, and nothing is rounded towards the better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .odd import BROKEN

Row = dict[str, Any]

HEADER = "| architecture | cut | attention | real sizes | a layer | tp 2 | tp 3 | tp 8 |"
DEGREES = 3
GROUPS = ("decoder", "encoder-decoder", "encoder", "vision")
EXPLAINED = 0.99  # of the parameters at real sizes: where less is cut, the page says what stays whole
MOST_NOTES = 4
LONGEST = 260  # of a message, in characters

INTRODUCTION = """\
# Every architecture of transformers, split and compared

Made by `make zoo` (`python -m bench.zoo --page docs/models.md`); not edited by hand. Every architecture of which transformers' auto
classes build a language model is in it, and the vision encoders people know best. For each, a tiny config is made from its config class's
own defaults by one set of rules (`bench/zoo/sizes.py`), with sizes that break the usual symmetries: 9 query and 3 KV heads, heads x head
size not the hidden size where the architecture allows it, vocabulary 101, inner size 51. colrow plans it, its applier splits it with ranks
as threads, and the gate's questions are asked of the split and the whole model in float64: logits, cached decoding, loss, every gradient,
two optimizer steps, every collective counted against the prediction. Nothing here knows an architecture by name but `bench/zoo/odd.py`, for
configs whose defaults do not build when they are made small.

* **cut**: share of the parameter elements that are split in the tiny model that was built, at tp 2 (tp 3, tp 8 where they differ). In so
  narrow a model tables of positions weigh much; **real sizes** is the share with the config class's defaults, at tp 4
  (of the first 8 layers where layers differ).
* **attention**: the same share, of what attention (or what stands in its place) holds.
* **a layer**: all-reduces of a layer in training at tp 2: of activations forward + backward + of gradients of parameters that several ranks
  use (copies of KV heads, routers, norms of single heads).
* **tp 2, 3, 8**: largest difference from the whole model, relative to its largest element: logits / cached decoding / gradients. "-": there
  is nothing to compare (an encoder decodes nothing, and a model that reads the whole text again for each token has no steps).
"""


def page(rows: dict[str, Row], groups: dict[str, str], versions: dict[str, str], more: str = "") -> str:
    """`rows` and `groups` by architecture; `more` is added at the end."""
    parts = [INTRODUCTION, summary(rows, versions)]
    for group in GROUPS:
        names = [name for name, its in groups.items() if its == group and name in rows]
        if names:
            measured = [n for n in names if not _failure(rows[n])]
            parts.append(
                f"## {group.capitalize()}s\n\n{HEADER}\n|{'---|' * HEADER.count(' |')}\n" + "\n".join(line(n, rows[n]) for n in measured)
            )
    parts += [failures(rows), broken(rows), reasons(rows), more]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def summary(rows: dict[str, Row], versions: dict[str, str]) -> str:
    """Counts and medians."""
    planned = [r for r in rows.values() if _first(r)]
    equal = [r for r in planned if not _failure(r)]
    shares = {
        "cut, real sizes": [_real(r) for r in planned],
        "cut, tiny models": [_first(r)["coverage"] for r in planned],
        "attention, tiny models": [_first(r)["attention"] for r in planned],
    }
    proven = f"**{len(rows)} architectures: {len(equal)} equal to the whole model at every degree measured**"
    lines = [
        f"{proven}, {len(_failed(rows, False))} that colrow does not prove, {len(_failed(rows, True))} that do not run as a whole in "
        "transformers itself, each with its reason below.",
        "",
        "| share | architectures | median | lowest tenth |",
        "|---|---|---|---|",
    ]
    for name, found in shares.items():
        if known := [x for x in found if x is not None]:
            lines.append(f"| {name} | {len(known)} | {_share(median(known))} | {_share(_tenth(known))} |")
    fewer = sum(len(_degrees(r)) < DEGREES for r in equal)
    states = len({r.get("digest") for r in planned})
    if fewer or states > 1:
        lines += ["", f"Not all of one state: rows come from {states} states of colrow's sources, {fewer} of them from fewer degrees."]
        lines[-1] += " `make zoo` measures again what is stale."
    return "\n".join([*lines, "", "With " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."])


def line(name: str, row: Row) -> str:
    parts = _degrees(row)
    first = parts[0]
    cells = [
        f"[{name}](#{anchor(name)})" if explained(row) else name,
        _over(parts, "coverage"),
        _over(parts, "attention"),
        _share(_real(row)),
        " + ".join(f"{first[key]:.2g}" for key in ("forward", "backward", "parameters")) if "parameters" in first else "-",
        *(_errors(part) for part in parts),
        *["not measured"] * (DEGREES - len(parts)),
    ]
    return "| " + " | ".join(cells) + " |"


def failures(rows: dict[str, Row]) -> str:
    found = _failed(rows, False)
    if not found:
        return ""
    return (
        "## Not proven\n\nRefused by the gate (such a split is never used), without a tiny config that runs, or not measured yet.\n\n"
        + "\n".join(f"* **{name}**: {text}" for name, text in found)
    )


def broken(rows: dict[str, Row]) -> str:
    """Those of which there is no whole to compare with."""
    found = _failed(rows, True)
    if not found:
        return ""
    head = "## Do not run as a whole\n\nOf these, transformers itself has no model that runs, decodes and trains in a tiny size."
    return f"{head}\n\n" + "\n".join(f"* **{name}**: {text}" for name, text in found)


def _failed(rows: dict[str, Row], whole: bool) -> list[tuple[str, str]]:
    """(name, why) of the rows that failed: those of which the whole does not run (odd.BROKEN), or the others."""
    failed = [(name, _one_line(text)) for name, row in rows.items() if (text := _failure(row))]
    return [(name, BROKEN.get(name, text)) for name, text in failed if (name in BROKEN) == whole]


def reasons(rows: dict[str, Row]) -> str:
    """What stays whole and why, of the architectures where it is more than a hundredth of the parameters."""
    out = ["## What stays whole, and why\n\nOf architectures of which less than 99 % is cut at real sizes, in the plan's own words."]
    for name, row in rows.items():
        if explained(row) and not _failure(row):
            notes = _notes(row)
            more = [f"* and {len(notes) - MOST_NOTES} more of this kind"] if len(notes) > MOST_NOTES else []
            out.append(f"### {name}\n\n" + "\n".join([f"* {_readable(n)}" for n in notes[:MOST_NOTES]] + more))
    return "\n\n".join(out) if len(out) > 1 else ""


def explained(row: Row) -> bool:
    real = _real(row)
    return bool(_notes(row)) and ((real is not None and real < EXPLAINED) or (_first(row).get("attention") or 1) < EXPLAINED - 0.09)


def anchor(name: str) -> str:
    return re.sub(r"[^\w-]", "", name.lower())


def _readable(note: str) -> str:
    subject, _, text = note.partition(": ")
    return f"`{subject}` {text}" if "." in subject else f"{subject}: {text}"


def _notes(row: Row) -> list[str]:
    return (row.get("real") or {}).get("notes") or _first(row).get("notes", [])


def _degrees(row: Row) -> list[Row]:
    return [row[key] for key in sorted((k for k in row if re.fullmatch(r"tp\d+", k)), key=lambda k: int(k[2:]))]


def _first(row: Row) -> Row:
    return next(iter(_degrees(row)), {})


def _real(row: Row) -> float | None:
    return (row.get("real") or {}).get("coverage")


def _failure(row: Row) -> str:
    """Why a row is not proven, or ""."""
    wrong = [(part["ranks"], part["wrong"]) for part in _degrees(row) if "wrong" in part]
    if wrong:
        text = wrong[0][1].removesuffix("; try: another number of ranks, and please report this")
        return f"tp {', '.join(str(n) for n, _ in wrong)}: {text}"
    return row.get("stopped", "") or ("" if _first(row) else "no result")


def _over(parts: Sequence[Row], key: str) -> str:
    """One share, or one for each degree where they differ."""
    shares = [_share(part[key]) for part in parts]
    return shares[0] if len(set(shares)) == 1 else ", ".join(shares)


def _share(x: float | None) -> str:
    return "-" if x is None else f"{int(x * 1000) / 1000:.3f}".rstrip("0").rstrip(".") if x < 1 else "1"


def _errors(part: Row) -> str:
    return " / ".join(
        "-" if part.get(k) is None else "0" if part[k] == 0 else f"{part[k]:.0e}".replace("e-0", "e-")
        for k in ("logits", "decoding", "gradients")
    )


def _one_line(text: str) -> str:
    """The first sentence or so of a message."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."


def _tenth(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[len(found) // 10]
