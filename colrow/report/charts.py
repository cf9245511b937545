"""Charts as inline SVG and HTML: stacked bars and lines. Colours are classes that page.css defines for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from .html import Safe, join, short, tag


@dataclass(frozen=True)
class Bar:
    """One bar: a label, its parts as (class, value, what it says when pointed at), and the text at its end."""

    label: str
    parts: tuple[tuple[str, float, str], ...]
    text: str
    marked: bool = False


def bars(rows: Sequence[Bar], limit: float = 0.0, limit_text: str = "") -> Safe:
    """Horizontal stacked bars on one scale; `limit` draws a line across all of them (a device's memory)."""
    longest = max((sum(v for _, v, _ in row.parts) for row in rows), default=0.0)
    scale = max(longest, limit * 1.04) or 1.0
    out = []
    for row in rows:
        pieces = [
            tag("span", class_=f"part {kind}", style=f"width:{100 * value / scale:.3f}%", title=says)
            for kind, value, says in row.parts
            if value
        ]
        line = [tag("span", class_="limit", style=f"left:{100 * limit / scale:.3f}%")] if limit else []
        track = tag("span", *pieces, *line, class_="track")
        label = tag("span", row.label, class_="label")
        out.append(tag("div", label, track, tag("span", row.text, class_="value"), class_="bar marked" if row.marked else "bar"))
    if limit:
        out.append(tag("p", limit_text, class_="limit-text"))
    return tag("div", *out, class_="bars")


def legend(*entries: tuple[str, str]) -> Safe:
    return tag("p", *(join(tag("span", class_=f"key {kind}"), f"{words} ") for kind, words in entries), class_="legend")


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]
    kind: str  # class
    marked: bool = False


def lines(curves: Sequence[Line], x_text: str, y_text: str) -> Safe:
    """Curves on logarithmic axes, each named at its end."""
    width, height, left, right, top, bottom = 640, 330, 64, 66, 16, 44
    xs = [x for c in curves for x, _ in c.points]
    ys = [y for c in curves for _, y in c.points if y > 0]
    x0, x1, y0, y1 = log10(min(xs)), log10(max(xs)), log10(min(ys)), log10(max(ys))
    y0, y1 = y0 - 0.05 * (y1 - y0 + 0.1), y1 + 0.08 * (y1 - y0 + 0.1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - x0) / (x1 - x0 or 1)
        up = (log10(y) - y0) / (y1 - y0 or 1)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts: list[Safe] = []
    for y in (m * 10**e for e in range(-3, 9) for m in (1, 2, 5)):
        if y0 <= log10(y) <= y1:
            _, v = at(1, y)
            parts.append(tag("line", x1=left, x2=width - right, y1=f"{v:.1f}", y2=f"{v:.1f}", class_="grid"))
            parts.append(tag("text", short(y), x=left - 8, y=f"{v + 4:.1f}", class_="tick end"))
    for x in sorted(set(xs)):
        if log10(x) / log10(4) % 1 < 1e-9:  # every second power of two
            u, _ = at(x, 10**y0)
            parts.append(tag("text", short(x), x=f"{u:.1f}", y=height - bottom + 18, class_="tick middle"))
    taken: list[float] = []
    for curve in sorted(curves, key=lambda c: -c.points[-1][1]):
        places = [at(x, y) for x, y in curve.points if y > 0]
        path = "M" + " L".join(f"{u:.1f},{v:.1f}" for u, v in places)
        parts.append(tag("path", d=path, class_=f"curve {curve.kind}{' marked' if curve.marked else ''}"))
        u, v = places[-1]
        v = max(v, taken[-1] + 15) if taken else v
        taken.append(v)
        parts.append(tag("text", curve.label, x=f"{u + 8:.1f}", y=f"{v + 4:.1f}", class_=f"name {curve.kind}"))
    parts.append(tag("text", x_text, x=(left + width - right) / 2, y=height - 6, class_="tick middle"))
    parts.append(tag("text", y_text, x=left - 52, y=11, class_="tick"))
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=f"{y_text} against {x_text}", class_="chart")
