"""The proof's report as a page: each item's difference against what is allowed, module by module, in the planner's style."""

from __future__ import annotations

import math

from ..proof.compare import Item
from ..proof.report import Report
from .html import Safe, document, join, tag

FLOOR = 1e-18  # where a difference of zero stands on the logarithmic scale


def page(report: Report) -> str:
    """A self-contained HTML file."""
    items = report.comparison.items
    verdict = "equal" if report.equal else f"different: {report.finding}"
    kinds = [
        tag("section", tag("h2", f"{kind} ({len(report.comparison.of(kind))})"), _kind(report, kind)) for kind in report.comparison.kinds()
    ]
    body = tag(
        "main",
        tag("header", tag("p", "colrow verify", class_="eyebrow"), tag("h1", verdict), tag("p", report.title, class_="lead")),
        tag("div", *_tiles(report), class_="tiles"),
        *(tag("p", note, class_="quiet") for note in report.notes),
        tag("input", class_="search", type="search", placeholder="Search modules and kinds", aria_label="Search"),
        *kinds,
        tag("footer", tag("p", f"{len(items)} comparisons. Differences are relative to the largest element of the whole model's tensor.")),
    )
    return document(f"verify: {verdict}", body)


def _tiles(report: Report) -> list[Safe]:
    out = []
    for kind in report.comparison.kinds():
        of = report.comparison.of(kind)
        good = sum(i.ok for i in of)
        out.append(
            tag(
                "div", tag("b", f"{good} of {len(of)}"), tag("span", f"{kind} as allowed"), class_="tile" if good == len(of) else "tile bad"
            )
        )
    return out


def _kind(report: Report, kind: str) -> Safe:
    head = tag(
        "tr", *(tag("th", t, class_=c) for t, c in (("name", ""), ("difference", "number"), ("allowed", "number"), ("", ""), ("", "")))
    )
    rows = [
        tag(
            "tr",
            tag("td", tag("span", i.name, class_="mono")),
            tag("td", _number(i.difference), class_="number"),
            tag("td", _number(i.tolerance), class_="number"),
            tag("td", _scale(i)),
            tag("td", join(tag("span", i.verdict, class_=f"role {'whole' if i.ok else 'bad'}"), f" {i.detail}")),
        )
        for i in report.comparison.of(kind)
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="parameters proof"), class_="scroll")


def _scale(item: Item) -> Safe:
    """How far the difference reaches on a logarithmic scale, with a line at what is allowed."""
    if not item.tolerance:
        return Safe("")

    def at(value: float) -> float:
        return max(0.0, min(100.0, 100 * (math.log10(max(value, FLOOR)) - math.log10(FLOOR)) / -math.log10(FLOOR)))

    reach = 100.0 if math.isnan(item.difference) else at(item.difference)
    bar = tag("span", class_=f"part {'kc' if item.ok else 'ke'}", style=f"width:{reach:.1f}%")
    return tag("span", bar, tag("span", class_="limit", style=f"left:{at(item.tolerance):.1f}%"), class_="track narrow")


def _number(value: float) -> str:
    return "nan" if math.isnan(value) else "infinite" if math.isinf(value) else f"{value:.1e}" if value else "0"
