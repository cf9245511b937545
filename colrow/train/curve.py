"""A loss curve that one can look at: as lines of text for a terminal, and as an HTML file with a picture in it. No dependencies."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

Points = Sequence[tuple[int, float]]  # (step, loss)
LEVELS = " ▁▂▃▄▅▆▇█"


def smoothed(points: Points, part: float = 0.9) -> list[tuple[int, float]]:
    """The running mean in which each step counts 1 - `part`, started without bias."""
    out, mean, weight = [], 0.0, 0.0
    for step, loss in points:
        mean, weight = part * mean + (1 - part) * loss, part * weight + (1 - part)
        out.append((step, mean / weight))
    return out


def terminal(points: Points, width: int = 60, height: int = 8) -> str:
    """The curve as text: `height` lines, the largest and smallest loss at the left, first and last step below."""
    points = [p for p in points if math.isfinite(p[1])]
    if len(points) < 2:
        return ""
    columns = min(width, len(points))
    means = []
    for column in range(columns):
        part = [loss for _, loss in points[column * len(points) // columns : (column + 1) * len(points) // columns]]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    filled = [round((m - low) / ((high - low) or 1) * (height * 8 - 1)) + 1 for m in means]
    lines = []
    for line in reversed(range(height)):
        label = f"{high:8.3f}" if line == height - 1 else f"{low:8.3f}" if line == 0 else " " * 8
        lines.append(f"{label} │" + "".join(LEVELS[min(8, max(0, n - 8 * line))] for n in filled))
    first, last = f"{points[0][0]}", f"{points[-1][0]}"
    return "\n".join([*lines, " " * 9 + "└" + "─" * columns, " " * 10 + first + last.rjust(max(1, columns - len(first)))])


def page(title: str, points: Points, evaluations: Points = (), lines: Sequence[str] = ()) -> str:
    """A page of HTML: each step's loss, their running mean, evaluations as dots, and `lines` of text below."""
    width, height, left, bottom = 860, 360, 60, 40
    finite = [p for p in points if math.isfinite(p[1])]
    every = [*finite, *(p for p in evaluations if math.isfinite(p[1]))]
    if not every:
        return f"<!doctype html><title>{html.escape(title)}</title><p>no steps yet"
    steps, losses = [s for s, _ in every], [loss for _, loss in every]
    low, high, first, last = min(losses), max(losses), min(steps), max(steps)

    def at(point: tuple[int, float]) -> tuple[float, float]:
        x = left + (point[0] - first) / ((last - first) or 1) * (width - left - 20)
        y = 20 + (high - point[1]) / ((high - low) or 1) * (height - bottom - 20)
        return round(x, 1), round(y, 1)

    def path(of: Points, color: str, thickness: float) -> str:
        corners = " ".join(f"{x},{y}" for x, y in map(at, of))
        return f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="{thickness}"/>'

    marks = []
    for n in range(5):
        loss, step = low + (high - low) * n / 4, first + (last - first) * n // 4
        y, x = at((first, loss))[1], at((step, low))[0]
        line = f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        marks += [line, f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{loss:.3f}</text>']
        marks.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{step}</text>')
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="4" fill="#c33"><title>evaluation</title></circle>' for x, y in map(at, evaluations))
    picture = "".join([*marks, path(finite, "#bcd", 1), path(smoothed(finite), "#247", 2), dots])
    words = "".join(f"<p>{html.escape(line)}" for line in lines)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:15px sans-serif;margin:2em;color:#222}text{font-size:12px;fill:#555}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="loss by step">{picture}</svg>'
        f"<p>Loss by step: each step (light), running mean (dark), evaluations (dots).{words}\n"
    )
